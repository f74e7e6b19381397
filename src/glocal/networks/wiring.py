"""Which units every layer of a network reads and writes, where units stay apart between layers.

What layers write may meet, unit by unit, as in the sums of a residual network: units that meet are one group. A unit
that is shut wherever its group is read is shut off from all that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.errors import GlocalError
from glocal.networks.calls import Layer, dtype_of, evaluated, layers

INPUTS = 0
"""The network's inputs, among what a part of it is made of: k > 0 is what the k-th layer wrote."""


class Link(NamedTuple):
    """A layer."""

    name: str
    reads: int | None  # the number of a group of hidden units; None: the network's inputs
    writes: int | None  # None: the network's outputs
    units: int  # features or channels of its output
    each: int  # how many of its input features belong to one unit; 0 where it reads inputs
    dims: int  # dimensions behind the features: 0 for a linear layer, 2 for one on images


class Norm(NamedTuple):
    """A BatchNorm that learns a scale and a shift."""

    name: str
    of: int | None  # the group whose units it normalises; None: the network's outputs
    each: int  # how many of its features belong to one unit


class Wiring(NamedTuple):
    groups: tuple[int, ...]  # how many hidden units each has
    links: tuple[Link, ...]
    norms: tuple[Norm, ...]


def wiring(module: nn.Module, shape: Sequence[int], who: str) -> Wiring:
    """That of a network, or an error in the name of who needs its units to stay apart."""
    made = _cut(module, shape)
    for problem in _problems(module, made):
        raise GlocalError(
            f"{who} needs a network of linear and convolutional layers between which units stay apart; {problem}."
        )
    group_of, links, norms = _groups(made), [], []
    for number, cut in enumerate(made.cuts, 1):
        source, dims = min(cut.sources), cut.layer.weight.dim() - 2
        each = cut.layer.weight.shape[1] // made.cuts[source - 1].units if source != INPUTS else 0
        links.append(Link(cut.name, group_of[source], group_of[number], cut.units, each, dims))
    for call in (call for call in made.norms if call.layer.affine):
        source = min(call.sources)
        norms.append(Norm(call.name, group_of[source], call.layer.num_features // made.cuts[source - 1].units))
    units = {link.writes: link.units for link in links if link.writes is not None}
    return Wiring(tuple(units[group] for group in sorted(units)), tuple(links), tuple(norms))


class Cut(NamedTuple):
    """A layer's call with the network cut behind it: what goes on is a fresh tensor in the output's place."""

    name: str
    layer: Layer
    input: Tensor
    sources: set[int]
    fresh: Tensor

    @property
    def units(self) -> int:
        return self.layer.weight.shape[0]


class Normalised(NamedTuple):
    """A BatchNorm's call."""

    name: str
    layer: _BatchNorm
    input: Tensor
    sources: set[int]


class Pass(NamedTuple):
    """A forward pass, cut behind every layer."""

    cuts: list[Cut]
    norms: list[Normalised]
    outputs: Tensor
    sources: set[int]  # of the outputs

    @property
    def calls(self) -> list[Cut | Normalised]:
        return [*self.cuts, *self.norms]


def _cut(module: nn.Module, shape: Sequence[int]) -> Pass:
    """One pass over random numbers with every layer's output replaced by others.

    A BatchNorm is called with constants for its parameters: what still depends on them uses them in another place.
    """
    draw = torch.Generator().manual_seed(0)
    cuts: list[Cut] = []
    norms: list[Normalised] = []
    written: list[Tensor] = []

    def random(*shape: int) -> Tensor:
        written.append(torch.randn(shape, dtype=dtype_of(module), generator=draw).requires_grad_())
        return written[-1]

    def cut(name: str, layer: Layer) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            sources = _depends(args[0], written)
            cuts.append(Cut(name, layer, args[0], sources, random(*output.shape)))
            return cuts[-1].fresh.clone()  # a copy, which what follows may change in place

        return hook

    def note(name: str, norm: _BatchNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            norms.append(Normalised(name, norm, args[0], _depends(args[0], written)))
            learnt.update((p, None) for p in norm.parameters() if p.requires_grad)
            norm.requires_grad_(False)

        return hook

    learnt: dict[nn.Parameter, None] = {}

    def give_back(*_: object) -> None:
        for parameter in learnt:
            parameter.requires_grad_(True)

    x = random(2, *shape)
    with ExitStack() as hooks, torch.enable_grad(), evaluated(module.modules()):
        for name, layer in layers(module).items():
            hooks.enter_context(layer.register_forward_hook(cut(name, layer)))
        for name, norm in module.named_modules():
            if isinstance(norm, _BatchNorm):
                hooks.enter_context(norm.register_forward_pre_hook(note(name, norm)))
                hooks.enter_context(norm.register_forward_hook(give_back, always_call=True))
        outputs = module(x.clone())
    return Pass(cuts, norms, outputs, _depends(outputs, written))


def _problems(module: nn.Module, made: Pass) -> Iterator[str]:
    """All that keeps units from staying apart, each in a few words."""
    if len(made.cuts) < 2:
        yield f"this one has {len(made.cuts)} of them, and no hidden units"
    seen = Counter(call.name for call in made.calls)
    yield from (f"'{name}' of this one is called {times} times" for name, times in seen.items() if times > 1)
    yield from (
        f"'{call.name}' of this one, a BatchNorm, keeps no running statistics"
        for call in made.norms
        if not call.layer.track_running_stats
    )
    yield from _misplaced(module, made)
    for call in made.calls:
        yield from _mixed(call, made)
    yield from _loose_ends(made)


def _misplaced(module: nn.Module, made: Pass) -> Iterator[str]:
    """Parameters that are not in one layer, or in more than that."""
    own = Counter(id(p) for call in made.calls for p in call.layer._parameters.values())
    learnt = {k: p for k, p in module.named_parameters() if p.requires_grad}
    yield from (f"this one also learns '{k}'" for k, p in learnt.items() if id(p) not in own)
    parts = [*(call.input for call in made.calls), made.outputs]
    if any(own[id(p)] > 1 for p in learnt.values()) or any(_depends(part, list(learnt.values())) for part in parts):
        yield "this one uses parameters in more than one place"


def _mixed(call: Cut | Normalised, made: Pass) -> Iterator[str]:
    """Units that a layer or a BatchNorm does not meet one by one."""
    if call.sources == {INPUTS} and isinstance(call, Cut):
        return
    if not call.sources:
        yield f"in this one '{call.name}' depends on no layer before it"
    if INPUTS in call.sources:
        yield f"in this one '{call.name}' depends on the network's inputs, and not as a layer on them alone"
    before = [made.cuts[number - 1] for number in sorted(call.sources)]
    if isinstance(call, Cut) and getattr(call.layer, "groups", 1) > 1:
        yield f"'{call.name}' of this one has groups"
    for cut in before:
        if not _keeps_units_apart(cut, call):
            yield f"what lies between '{cut.name}' and '{call.name}' of this one mixes units"
        if cut.units != before[0].units:
            yield f"in this one units of '{before[0].name}' and of '{cut.name}' meet, and are not equally many"


def _loose_ends(made: Pass) -> Iterator[str]:
    """Outputs that are read, or are not all that comes of layers."""
    if INPUTS in made.sources or not made.sources:
        yield "the outputs of this one depend on more, or less, than its layers"
    group_of = _groups(made)
    read = {group_of[k] for cut in made.cuts for k in cut.sources - {INPUTS}}
    for number, cut in enumerate(made.cuts, 1):
        if group_of[number] is None and None in read:
            yield f"what '{cut.name}' of this one writes is an output, and is read again"
        if group_of[number] is not None and group_of[number] not in read:
            yield f"nothing reads what '{cut.name}' of this one writes"


def _groups(made: Pass) -> list[int | None]:
    """Of what every layer writes, from 1 on, the number of its group; None for outputs, which stand at 0."""
    outputs = 0
    root = list(range(len(made.cuts) + 1))
    met = [call.sources - {INPUTS} for call in made.calls]
    for together in [*met, {outputs, *made.sources}]:
        joined = {root[k] for k in together}
        root = [min(joined) if r in joined else r for r in root]
    numbers = {r: number for number, r in enumerate(sorted(set(root) - {outputs}))}
    return [numbers.get(r) for r in root]


def _depends(part: Tensor, sources: Sequence[Tensor]) -> set[int]:
    """Which of the sources a part of the network depends on."""
    if not part.requires_grad or not sources:
        return set()
    found = torch.autograd.grad(part.sum(), sources, allow_unused=True, retain_graph=True)
    return {number for number, slope in enumerate(found) if slope is not None}


def _keeps_units_apart(before: Cut, call: Cut | Normalised) -> bool:
    """Whether a layer's input features depend on one unit of the layer before it each, in the units' order.

    Units differ in some digit of their binary numbers: for every digit, features whose unit has it must not depend on
    units that have it not, and the other way round.
    """
    axis = _axis(call.layer) if isinstance(call, Cut) else 1
    each, rest = divmod(call.input.shape[axis], before.units)
    if rest:
        return False
    units = torch.arange(before.units)
    place = [1] * before.fresh.dim()
    place[_axis(before.layer)] = before.units
    for digit in range(max(1, (before.units - 1).bit_length())):
        for value in (0, 1):
            chosen = (units >> digit & 1) == value
            features = call.input.index_select(axis, chosen.repeat_interleave(each).nonzero().squeeze(1))
            (slope,) = torch.autograd.grad(features.square().sum(), before.fresh, retain_graph=True)
            if bool((slope * ~chosen.view(place)).any()):
                return False
    return True


def _axis(layer: Layer) -> int:
    """Where a layer's features are, among the axes of its input and of its output."""
    return -1 if isinstance(layer, nn.Linear) else 1
