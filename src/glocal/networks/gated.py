"""Hard attention to the task (Serra et al. 2018): a gate on every hidden unit of a chain of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from glocal.networks.chain import Link, chain


class Gated(nn.Module):
    """A network whose layers, from the second on, are given h ⊙ a: what they were given, times the units' gates.

    The gates are made of the embeddings e (tasks × units, one for every hidden layer), which are learnt with the rest.
    They are applied where the next layer begins: a shut unit gives 0 there whatever its activation function.
    """

    def __init__(self, network: nn.Module, shape: Sequence[int], tasks: int) -> None:
        super().__init__()
        self.network = network
        self.links = chain(network, shape, "hat")
        self.embeddings = nn.ParameterList(nn.Parameter(torch.randn(tasks, link.units)) for link in self.links[:-1])

    def forward(self, x: Tensor, *gates: Tensor) -> Tensor:
        """With the gates of one task, a vector for every hidden layer."""

        def close(link: Link, gate: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
            spread = spread_out(gate, link)
            return lambda _, args: (args[0] * spread.view(-1, *[1] * link.dims), *args[1:])

        with ExitStack() as hooks:
            for link, gate in zip(self.links[1:], gates, strict=True):
                layer = self.network.get_submodule(link.name)
                hooks.enter_context(layer.register_forward_pre_hook(close(link, gate)))
            return self.network(x)


def spread_out(units: Tensor, link: Link) -> Tensor:
    """A number for every unit of the layer before a link, as one for every input feature of the link itself."""
    return units.unsqueeze(-1).expand(-1, link.each).flatten()
