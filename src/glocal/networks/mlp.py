"""The paper's network for digits: a ReLU MLP 784-100-100-10 with 89,610 parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class Linear(nn.Linear):
    """z = x Wᵀ + b, as a product and then a sum.

    The fused `addmm` of `nn.Linear` adds the bias inside the blocks of the product, and its batched form does not, so
    the two round differently; over a thousand steps this becomes visible. Unfused, a run alone and the same run in a
    cohort agree bit by bit on a CPU (with `MKL_CBWR=AUTO,STRICT`, which `import glocal` sets).
    """

    def forward(self, x: Tensor) -> Tensor:
        z = self.weight @ x.mT  # in this order the gradient of a stacked weight is contiguous
        return z.mT if self.bias is None else (z + self.bias.unsqueeze(-1)).mT


class MLP(nn.Module):
    """A fully connected ReLU network with Xavier-uniform weights and zero biases."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (100, 100)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(a, b) for a, b in pairwise([inputs, *hidden, outputs]))
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)

    def unit_groups(self) -> dict[str, tuple[str | None, str | None]]:
        """Declare which units each layer reads and writes (see `glocal.networks.hat`)."""
        groups = [None, *(f"hidden{i}" for i in range(len(self.layers) - 1)), None]
        return {f"layers.{i}": ends for i, ends in enumerate(pairwise(groups))}


def mlp(input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (100, 100)) -> MLP:
    """Make an MLP for inputs of this shape, which are flattened."""
    return MLP(math.prod(input_shape), outputs, hidden)
