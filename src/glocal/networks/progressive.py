r"""Progressive networks (Rusu et al. 2016): one column per task, with lateral connections from all earlier columns.

    z_i^t = W_i^t h_{i−1}^t + b_i^t + U_i^t [h_{i−1}^1, …, h_{i−1}^{t−1}]

for every layer i but the first, which reads only the input.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.networks.layer_calls import Layer, eval_mode, hooked, layer_calls
from glocal.networks.mlp import Linear
from glocal.networks.model import MakeNetwork


class ProgressiveNetwork(nn.Module):
    """One copy of a network per task, each with its own initialization.

    Every linear and convolutional layer that is called once, except the first, has lateral connections.
    """

    def __init__(self, make: MakeNetwork, shape: Sequence[int], outputs: int, tasks: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(make(shape, outputs) for _ in range(tasks))
        calls = layer_calls(self.columns[0], shape)
        times = Counter(call.name for call in calls)
        connected = [call for call in calls[1:] if times[call.name] == 1]
        self.connected = [call.name for call in connected]
        self.laterals = nn.ModuleList(
            nn.ModuleList(Lateral(call.layer, column) for call in connected) for column in range(1, tasks)
        )

    def forward(self, x: Tensor, column: int) -> Tensor:
        """Return the outputs of one column. The columns before it are constant: no gradients, no new statistics."""
        inputs: list[list[Tensor]] = [[] for _ in self.connected]
        earlier = self.columns[:column]
        with torch.no_grad(), eval_mode(earlier.modules()):
            for number in range(column):
                self._run(number, x, inputs)
        return self._run(column, x, inputs)

    def _run(self, number: int, x: Tensor, inputs: list[list[Tensor]]) -> Tensor:
        """Run one column. `inputs` holds the connected layers' inputs in all earlier columns; its own are appended."""

        def connect(layer: int, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            earlier = list(inputs[layer])
            inputs[layer].append(args[0])
            return output + self.laterals[number - 1][layer](earlier) if earlier else output  # type: ignore[index]

        column = self.columns[number]
        layers = enumerate(map(column.get_submodule, self.connected))
        with hooked(layer.register_forward_hook(partial(connect, index)) for index, layer in layers):
            return column(x)


class Lateral(nn.Module):
    """The connection from the inputs of a layer in earlier columns to its output: the same kind of layer, without bias.

    A convolution is 1 × 1, at the centres of the layer's windows, so that both have the same positions.
    """

    def __init__(self, layer: Layer, columns: int) -> None:
        super().__init__()
        self.padding: list[int] = []
        if isinstance(layer, nn.Linear):
            self.dims = 0
            self.weigh: nn.Module = Linear(columns * layer.in_features, layer.out_features, bias=False)
        else:
            self.dims = len(layer.kernel_size)
            self.padding = [p for dim in reversed(range(self.dims)) for p in _padding_to_centres(layer, dim)]
            kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dims - 1]
            self.weigh = kind(columns * layer.in_channels, layer.out_channels, 1, layer.stride, bias=False)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        x = torch.cat(inputs, -1 - self.dims)
        return self.weigh(functional.pad(x, self.padding) if any(self.padding) else x)


def _padding_to_centres(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, dim: int) -> tuple[int, int]:
    """Return the padding (if negative, cropping) of a dimension that starts and ends it at the windows' centres."""
    if layer.padding == "same":
        return 0, 0
    padding = 0 if isinstance(layer.padding, str) else layer.padding[dim]
    span = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
    return padding - math.floor(span / 2), padding - math.ceil(span / 2)
