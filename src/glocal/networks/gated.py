"""Hard attention to the task (Serra et al. 2018): a gate on every hidden unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from glocal.networks.wiring import Link, wiring


class Gated(nn.Module):
    """A network whose layers, but for those that read the inputs, are given h ⊙ a: what they read, times the units'
    gates.

    The gates are made of the embeddings e (tasks × units, one for every group of hidden units), which are learnt with
    the rest. They are applied where units are read: a shut unit gives 0 there whatever its activation function.
    """

    def __init__(self, network: nn.Module, shape: Sequence[int], tasks: int) -> None:
        super().__init__()
        self.network = network
        self.wiring = wiring(network, shape, "hat")
        self.embeddings = nn.ParameterList(nn.Parameter(torch.randn(tasks, units)) for units in self.wiring.groups)

    def forward(self, x: Tensor, *gates: Tensor) -> Tensor:
        """With the gates of one task, a vector for every group of hidden units."""

        def close(link: Link, gate: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
            spread = spread_out(gate, link.each).view(-1, *[1] * link.dims)
            return lambda _, args: (args[0] * spread.to(args[0].dtype), *args[1:])

        with ExitStack() as hooks:
            for link in self.wiring.links:
                if link.reads is not None:
                    layer = self.network.get_submodule(link.name)
                    hooks.enter_context(layer.register_forward_pre_hook(close(link, gates[link.reads])))
            return self.network(x)


def spread_out(units: Tensor, each: int) -> Tensor:
    """A number for every unit, as one for each of the features that belong to it."""
    return units.unsqueeze(-1).expand(-1, each).flatten()
