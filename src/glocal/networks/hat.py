"""Hard attention to the task (Serra et al. 2018): a gate on every hidden unit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from glocal.errors import require
from glocal.networks.layer_calls import dtype_of
from glocal.networks.unit_groups import Link, wiring
from glocal.tree import Params


class GatedNetwork(nn.Module):
    """A network whose layers, but for those that read the inputs, are given h ⊙ a: what they read, times the units'
    gates.

    The gates are made of the embeddings e (tasks × units, one for every group of hidden units), which are learnt with
    the rest. They are applied where units are read: a shut unit gives 0 there whatever its activation function.
    """

    def __init__(self, network: nn.Module, shape: Sequence[int], tasks: int) -> None:
        super().__init__()
        self.network = network
        self.wiring = wiring(network, shape, "hat")
        require(
            shut_off(self, shape),
            "hat needs a network that shut units are of no consequence to; the outputs of this one change with weights "
            "that lead to or from them, though slopes do not tell: some layer makes more of its weights than products, "
            "or what lies between layers compares units.",
        )
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

    def free(self, used: Sequence[Tensor], begun: bool) -> Params:
        """1 − min(a_i, a_j) for a weight between units that are used so much, and 1 − a_i for what is one unit's own:
        how free each is to move. Inputs are used by every task, and once one has `begun`, outputs are."""
        pixels, outputs = used[0].new_ones(1), used[0].new_full((1,), float(begun))
        free = {}
        for link in self.wiring.links:
            below = pixels if link.reads is None else spread_out(used[link.reads], link.each)
            above = outputs if link.writes is None else used[link.writes]
            weight = 1 - torch.minimum(above.unsqueeze(1), below)
            free[f"network.{link.name}.weight"] = weight.view(*weight.shape, *[1] * link.dims)
            free[f"network.{link.name}.bias"] = 1 - above
        for norm in self.wiring.norms:
            own = 1 - (outputs if norm.of is None else spread_out(used[norm.of], norm.each))
            free |= {f"network.{norm.name}.weight": own, f"network.{norm.name}.bias": own}
        return free


def spread_out(units: Tensor, each: int) -> Tensor:
    """A number for every unit, as one for each of the features that belong to it."""
    return units.unsqueeze(-1).expand(-1, each).flatten()


@torch.no_grad()
def shut_off(gated: GatedNetwork, shape: Sequence[int]) -> bool:
    """Whether outputs through gates of 0 and 1 stay the same when all that these leave free is changed: tried once."""
    tried, draw = copy.deepcopy(gated).eval(), torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype_of(tried), generator=draw)

    learnt = {k: p for k, p in tried.named_parameters() if p.requires_grad}
    for p in learnt.values():
        p.add_(random(*p.shape) * p[0].numel() ** -0.5)
    x, gates = random(4, *shape), [(random(units) > 0).to(dtype_of(tried)) for units in tried.wiring.groups]
    before = tried(x, *gates)
    for k, free in tried.free(gates, begun=True).items():
        if k in learnt:
            learnt[k].add_(free * random(*learnt[k].shape) * learnt[k][0].numel() ** -0.5)
    off = (tried(x, *gates) - before).abs().max()
    return not bool(off > 1e-3 * before.abs().max())
