"""Hard attention to the task (Serra et al. 2018): a gate on every hidden unit.

A unit is a feature of a linear layer or a channel of a convolution. Units that are added up, as in a residual network,
form one group and share their gates. A network declares its groups in a method `unit_groups`, which maps every layer
and BatchNorm, in the order of the forward pass, to the group that it reads and the group that it writes; None stands
for the network's inputs and outputs:

>>> class Residual(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.stem, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
...         self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
...
...     def forward(self, x):
...         x = self.norm(self.stem(x)).relu()
...         return self.head(x + self.inner(x))
...
...     def unit_groups(self):
...         return {"stem": (None, "a"), "norm": ("a", "a"), "inner": ("a", "a"), "head": ("a", None)}
>>> GatedNetwork(Residual(), (8,), tasks=2).group_sizes
(6,)

An `nn.Sequential` of layers needs no declaration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.errors import GlocalError, require
from glocal.networks.layer_calls import LAYER_TYPES, dtype_of, named_layers
from glocal.tree import Params

UnitGroups: TypeAlias = Mapping[str, tuple[str | None, str | None]]
HOW_TO_DECLARE = (
    "give the network a method unit_groups() that returns {layer name: (group it reads, group it writes)} for every "
    "linear layer, convolution and BatchNorm in the order of the forward pass, with None for the network's inputs and "
    "outputs. Layers whose outputs are added up write the same group."
)


class GatedLayer(NamedTuple):
    """A layer or BatchNorm, with the numbers of the groups it reads and writes."""

    name: str
    reads: int | None  # None: the network's inputs
    writes: int | None  # None: the network's outputs
    features_per_unit: int  # input features of one unit
    is_norm: bool
    kernel: tuple[int, ...]  # one 1 per dimension of a convolution's kernel

    def per_feature(self, units: Tensor) -> Tensor:
        """Repeat one value per unit for each of the unit's input features."""
        return units.unsqueeze(-1).expand(-1, self.features_per_unit).flatten()


class GatedNetwork(nn.Module):
    """A network in which every layer reads h ⊙ a, its input times the units' gates.

    The gates of a group are computed from its embeddings e (tasks × units), which are parameters. They are applied
    where units are read, so a closed unit is 0 there whatever its activation function.
    """

    def __init__(self, network: nn.Module, shape: Sequence[int], tasks: int) -> None:
        super().__init__()
        self.network = network
        self.group_sizes, self.layers = _gated_layers(network)
        name = type(network).__name__
        require(
            _closed_units_have_no_effect(self, shape),
            f"hat needs a network whose outputs do not depend on closed units, but those of {name} do: its unit groups "
            "are not as declared, or something between its layers mixes units, as a softmax or LayerNorm does.",
        )
        self.embeddings = nn.ParameterList(nn.Parameter(torch.randn(tasks, units)) for units in self.group_sizes)

    def forward(self, x: Tensor, *gates: Tensor) -> Tensor:
        """Call the network with the gates of one task, one vector per group."""

        def close(factor: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return args[0] * factor.to(args[0].dtype), *args[1:]

        with ExitStack() as hooks:
            for layer in self.layers:
                if layer.reads is not None and not layer.is_norm:
                    module = self.network.get_submodule(layer.name)
                    factor = layer.per_feature(gates[layer.reads]).view(-1, *layer.kernel)
                    hooks.enter_context(module.register_forward_pre_hook(partial(close, factor)))
            return self.network(x)

    def free(self, used: Sequence[Tensor], begun: bool) -> Params:
        """Return how free each parameter is to change, in [0, 1].

        1 − min(a_i, a_j) for a weight between units i and j, and 1 − a_i for a bias or a BatchNorm parameter.

        Args:
            used: How much finished tasks use the units, one vector per group.
            begun: Whether a task is finished. Inputs are used by every task, outputs once a task is finished.
        """
        inputs, outputs = used[0].new_ones(1), used[0].new_full((1,), float(begun))
        free: Params = {}
        for layer in self.layers:
            after = outputs if layer.writes is None else used[layer.writes]
            if layer.is_norm:
                weight = bias = 1 - (after if layer.writes is None else layer.per_feature(after))
            else:
                before = inputs if layer.reads is None else layer.per_feature(used[layer.reads])
                weight, bias = 1 - torch.minimum(after.unsqueeze(1), before), 1 - after
                weight = weight.view(*weight.shape, *layer.kernel)
            free |= {f"network.{layer.name}.weight": weight, f"network.{layer.name}.bias": bias}
        return free


def _gated_layers(network: nn.Module) -> tuple[tuple[int, ...], tuple[GatedLayer, ...]]:
    """Return the number of units of every group, and the layers."""
    declared, modules = _unit_groups(network), dict(network.named_modules())
    name = type(network).__name__
    for parameter, p in network.named_parameters():
        layer, _, kind = parameter.rpartition(".")
        missing = p.requires_grad and (layer not in declared or kind not in ("weight", "bias"))
        require(not missing, f"hat has no unit group for the parameter '{parameter}' of {name}; {HOW_TO_DECLARE}")
    sizes: dict[str, int] = {}
    for layer, (_, writes) in declared.items():
        module: Any = modules.get(layer)
        supported = isinstance(module, (*LAYER_TYPES, _BatchNorm))
        require(supported, f"unit_groups of {name}: '{layer}' is not a linear layer, a convolution or a BatchNorm.")
        grouped = getattr(module, "groups", 1) > 1
        require(not grouped, f"hat cannot gate '{layer}' of {name}: it is a grouped convolution.")
        tracked = getattr(module, "track_running_stats", True)
        require(tracked, f"hat needs running statistics in '{layer}' of {name}; set track_running_stats=True.")
        if writes is not None and not isinstance(module, _BatchNorm):
            units = sizes.setdefault(writes, module.weight.shape[0])
            same = units == module.weight.shape[0]
            require(same, f"unit_groups of {name}: '{layer}' does not write {units} units, as group '{writes}' has.")
    require(bool(sizes), f"hat needs a network with hidden units, but {name} has none.")
    read = {reads for layer, (reads, _) in declared.items() if reads and not isinstance(modules[layer], _BatchNorm)}
    require(
        read == set(sizes),
        f"unit_groups of {name}: only read: {sorted(read - set(sizes))}, only written: {sorted(set(sizes) - read)}; "
        "every group must be written by a layer and read by another one. Correct the name or add the layer.",
    )
    numbers: dict[str | None, int] = {group: number for number, group in enumerate(sizes)}
    layers = []
    for layer, (reads, writes) in declared.items():
        module, is_norm = modules[layer], isinstance(modules[layer], _BatchNorm)
        features = module.num_features if is_norm else module.weight.shape[1]
        per_unit = 0 if reads is None else features // sizes[reads]
        kernel = () if is_norm else (1,) * (module.weight.dim() - 2)
        layers.append(GatedLayer(layer, numbers.get(reads), numbers.get(writes), per_unit, is_norm, kernel))
    return tuple(sizes.values()), tuple(layers)


def _unit_groups(network: nn.Module) -> UnitGroups:
    """Return the groups that a network declares, or those of an `nn.Sequential`."""
    if hasattr(network, "unit_groups"):
        return network.unit_groups()  # type: ignore[operator]
    if not isinstance(network, nn.Sequential):
        raise GlocalError(f"hat needs to know which units {type(network).__name__} adds up; {HOW_TO_DECLARE}")
    *_, last = named_layers(network) or [None]
    groups: dict[str, tuple[str | None, str | None]] = {}
    group: str | None = None
    for name, module in network.named_modules():
        if isinstance(module, LAYER_TYPES):
            before, group = group, None if name == last else name
            groups[name] = before, group
        elif isinstance(module, _BatchNorm):
            groups[name] = group, group
    return groups


@torch.no_grad()
def _closed_units_have_no_effect(gated: GatedNetwork, shape: Sequence[int]) -> bool:
    """Check by one experiment that outputs through gates of 0 and 1 do not depend on the parameters left free."""
    trial, generator = copy.deepcopy(gated).eval(), torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype_of(trial), generator=generator)

    params = {k: p for k, p in trial.named_parameters() if p.requires_grad}
    for p in params.values():
        p.add_(random(*p.shape) * p[0].numel() ** -0.5)
    x, gates = random(4, *shape), [(random(units) > 0).to(dtype_of(trial)) for units in trial.group_sizes]
    before = trial(x, *gates)
    for k, free in trial.free(gates, begun=True).items():
        if k in params:
            params[k].add_(free * random(*params[k].shape) * params[k][0].numel() ** -0.5)
    change = (trial(x, *gates) - before).abs().max()
    return not bool(change > 1e-3 * before.abs().max())
