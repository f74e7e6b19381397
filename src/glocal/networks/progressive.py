r"""Progressive networks (Rusu et al. 2016): a column for every task, which hears all columns before it.

    z_i^t = W_i^t h_{i−1}^t + b_i^t + U_i^t [h_{i−1}^1, …, h_{i−1}^{t−1}]

for every layer i but the first, which sees the input itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.networks.layer_calls import Layer, eval_mode, layer_calls
from glocal.networks.mlp import Linear
from glocal.networks.model import MakeNetwork

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class ProgressiveNetwork(nn.Module):
    """As many copies of a network as there are tasks, each with an initialisation of its own.

    A lateral connection ends in every linear and convolutional layer that is called once, the first one excepted; it
    is linear, or a 1×1 convolution, without a bias.
    """

    def __init__(self, make: MakeNetwork, shape: Sequence[int], outputs: int, tasks: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(make(shape, outputs) for _ in range(tasks))
        made = layer_calls(self.columns[0], shape)
        times = Counter(call.name for call in made)
        joined = [call for call in made[1:] if times[call.name] == 1]
        self.joined = [call.name for call in joined]
        self.laterals = nn.ModuleList(
            nn.ModuleList(lateral(call.layer, column) for call in joined) for column in range(1, tasks)
        )

    def forward(self, x: Tensor, column: int) -> Tensor:
        """The outputs of one column. Those before it are constants: no gradient enters them, no statistic changes."""
        heard: list[list[Tensor]] = [[] for _ in self.joined]
        earlier = self.columns[:column]
        with torch.no_grad(), eval_mode(earlier.modules()):
            for number in range(column):
                self._run(number, x, heard)
        return self._run(column, x, heard)

    def _run(self, number: int, x: Tensor, heard: list[list[Tensor]]) -> Tensor:
        """One column, given what the joined layers of all columns before it were given; its own inputs are added."""

        def join(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
            def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                before = list(heard[layer])
                heard[layer].append(args[0])
                return output + self.laterals[number - 1][layer](before) if before else output  # type: ignore[index]

            return hook

        column = self.columns[number]
        with ExitStack() as hooks:
            for layer, name in enumerate(self.joined):
                hooks.enter_context(column.get_submodule(name).register_forward_hook(join(layer)))
            return column(x)


def lateral(layer: Layer, columns: int) -> nn.Module:
    """The connection from the inputs of `columns` layers like this one to this one's output."""
    return LateralLinear(layer, columns) if isinstance(layer, nn.Linear) else LateralConvolution(layer, columns)


class LateralLinear(nn.Module):
    def __init__(self, layer: nn.Linear, columns: int) -> None:
        super().__init__()
        self.weigh = Linear(columns * layer.in_features, layer.out_features, bias=False)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.weigh(torch.cat(list(inputs), -1))


class LateralConvolution(nn.Module):
    """A 1×1 convolution at the centres of another one's windows, so that both have the same positions."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, columns: int) -> None:
        super().__init__()
        dims = len(layer.kernel_size)
        channels = columns * layer.in_channels
        self.weigh = CONVOLUTIONS[dims](channels, layer.out_channels, 1, layer.stride, bias=False)  # type: ignore[arg-type]
        self.dims = dims
        self.margins = [m for dim in reversed(range(dims)) for m in margins(layer, dim)]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        x = torch.cat(list(inputs), -1 - self.dims)
        return self.weigh(functional.pad(x, self.margins) if any(self.margins) else x)


def margins(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, dim: int) -> tuple[int, int]:
    """What to add on both sides of a dimension (or, if negative, to cut off) to begin and end at windows' centres."""
    if layer.padding == "same":
        return 0, 0
    padding = 0 if isinstance(layer.padding, str) else layer.padding[dim]
    reach = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
    return padding - math.floor(reach / 2), padding - math.ceil(reach / 2)
