"""The paper's network for digits: 784-100-100-10, 89,610 parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from glocal.networks.linear import Linear


class MLP(nn.Module):
    """Fully connected ReLU network; Xavier-uniform weights, zero biases."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (100, 100)) -> None:
        super().__init__()
        widths = [inputs, *hidden, outputs]
        self.layers = nn.ModuleList(Linear(a, b) for a, b in pairwise(widths))
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def mlp(input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (100, 100)) -> MLP:
    return MLP(math.prod(input_shape), outputs, hidden)
