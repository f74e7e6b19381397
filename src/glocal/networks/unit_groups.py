"""Which units every layer of a network reads and writes, where units stay apart between layers.

What layers write may meet, unit by unit, as in the sums of a residual network: units that meet are one group. A unit
that is shut wherever its group is read is shut off from all that follows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.errors import GlocalError, require
from glocal.networks.layer_calls import Layer, dtype_of, eval_mode, named_layers

OWN = ("weight", "bias")
"""What a layer may learn."""
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
    """A BatchNorm."""

    name: str
    of: int | None  # the group whose units it normalises; None: the network's outputs
    each: int  # how many of its features belong to one unit


class Wiring(NamedTuple):
    groups: tuple[int, ...]  # how many hidden units each has
    links: tuple[Link, ...]
    norms: tuple[Norm, ...]


def wiring(module: nn.Module, shape: Sequence[int], who: str) -> Wiring:
    """That of a network, or an error in the name of who needs its units to stay apart."""
    made = _cut(copy.deepcopy(module), shape)
    for problem in _problems(made):
        raise GlocalError(
            f"{who} needs a network of linear and convolutional layers between which units stay apart; {problem}."
        )
    group_of, links, norms = _groups(made), [], []
    for number, cut in enumerate(made.cuts, 1):
        source, dims = min(cut.sources), cut.layer.weight.dim() - 2
        each = cut.layer.weight.shape[1] // made.cuts[source - 1].units if source != INPUTS else 0
        links.append(Link(cut.name, group_of[source], group_of[number], cut.units, each, dims))
    for call in made.norms:
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

    learnt: dict[str, nn.Parameter]
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

    def random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        written.append(torch.randn(shape, dtype=dtype, generator=draw).requires_grad_())
        return written[-1]

    def given(name: str, args: tuple[Tensor, ...]) -> Tensor:
        require(bool(args), f"'{name}' of this network is called with a keyword; call it with its input alone.")
        with torch.enable_grad():
            return args[0].clone()  # as it is now: what follows may change it in place

    def cut(name: str, layer: Layer) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = given(name, args)
            cuts.append(Cut(name, layer, x, _depends(x, written), random(output.shape, output.dtype)))
            return cuts[-1].fresh.clone()

        return hook

    def note(name: str, norm: _BatchNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = given(name, args)
            norms.append(Normalised(name, norm, x, _depends(x, written)))
            norm.requires_grad_(False)

        return hook

    def give_back(*_: object) -> None:
        for parameter in learnt.values():
            parameter.requires_grad_(True)

    learnt = {k: p for k, p in module.named_parameters() if p.requires_grad}
    x = random((2, *shape), dtype_of(module))
    with ExitStack() as hooks, torch.enable_grad(), eval_mode(module.modules()):
        for name, layer in named_layers(module).items():
            hooks.enter_context(layer.register_forward_hook(cut(name, layer)))
        for name, norm in module.named_modules():
            if isinstance(norm, _BatchNorm):
                hooks.enter_context(norm.register_forward_pre_hook(note(name, norm)))
                hooks.enter_context(norm.register_forward_hook(give_back))
        outputs = module(x.clone())
    return Pass(learnt, cuts, norms, outputs, _depends(outputs, written))


def _problems(made: Pass) -> Iterator[str]:
    """All that keeps units from staying apart, each in a few words."""
    if not any(group is not None for group in _groups(made)):
        yield "this one has no hidden units"
    seen = Counter(call.name for call in made.calls)
    yield from (f"'{name}' of this one is called {times} times" for name, times in seen.items() if times > 1)
    yield from (
        f"'{call.name}' of this one, a BatchNorm, keeps no running statistics"
        for call in made.norms
        if not call.layer.track_running_stats
    )
    yield from _misplaced(made)
    for call in made.calls:
        yield from _mixed(call, made)
    yield from _loose_ends(made)


def _misplaced(made: Pass) -> Iterator[str]:
    """Parameters that are not in one layer, or in more than that."""
    own = {f"{call.name}.{k}": p for call in made.calls for k, p in call.layer.named_parameters() if k in OWN}
    yield from (f"this one also learns '{k}'" for k in made.learnt if k not in own)
    shared = Counter(id(p) for p in own.values())
    learnt, parts = list(made.learnt.values()), [*(call.input for call in made.calls), made.outputs]
    if any(shared[id(p)] > 1 for p in learnt) or any(_depends(part, learnt) for part in parts):
        yield "this one uses parameters in more than one place"


def _mixed(call: Cut | Normalised, made: Pass) -> Iterator[str]:
    """Units that a layer or a BatchNorm does not meet one by one."""
    if call.sources == {INPUTS} and isinstance(call, Cut):
        return
    if not call.sources:
        yield f"in this one '{call.name}' depends on no layer before it"
        return
    if INPUTS in call.sources:
        beside = "before any layer" if isinstance(call, Normalised) else "beside other layers"
        yield f"in this one '{call.name}' depends on the network's inputs, {beside}"
        return
    before = [made.cuts[number - 1] for number in sorted(call.sources)]
    if isinstance(call, Cut) and getattr(call.layer, "groups", 1) > 1:
        yield f"'{call.name}' of this one has groups"
    for cut in before:
        if cut.units != before[0].units:
            yield f"in this one units of '{before[0].name}' and of '{cut.name}' meet, and are not equally many"
            return
    for name in _mixing(before, call):
        yield f"what lies between '{name}' and '{call.name}' of this one mixes units, or changes their number"


def _loose_ends(made: Pass) -> Iterator[str]:
    """Outputs that are read, or are not all that comes of layers."""
    if INPUTS in made.sources or not made.sources:
        yield "the outputs of this one depend on more, or less, than its layers"
    group_of = _groups(made)
    read = {group_of[k]: cut.name for cut in made.cuts for k in cut.sources - {INPUTS}}
    if None in read:
        yield f"'{read[None]}' of this one reads what is also an output"
    for number, cut in enumerate(made.cuts, 1):
        if group_of[number] is not None and group_of[number] not in read:
            yield f"nothing reads what '{cut.name}' of this one writes"


def _groups(made: Pass) -> list[int | None]:
    """Of what every layer writes, from 1 on, the number of its group; None for outputs, which stand at 0."""
    outputs = 0
    root = list(range(len(made.cuts) + 1))
    for together in [*(cut.sources - {INPUTS} for cut in made.cuts), {outputs, *made.sources}]:
        joined = {root[k] for k in together}
        root = [min(joined) if r in joined else r for r in root]
    numbers = {r: number for number, r in enumerate(sorted(set(root) - {outputs}))}
    return [numbers.get(r) for r in root]


def _depends(part: Tensor, sources: Sequence[Tensor]) -> set[int]:
    """Which of the sources a part of the network depends on."""
    if not part.requires_grad or not sources:
        return set()
    with torch.enable_grad():
        found = torch.autograd.grad(part.sum(), sources, allow_unused=True, retain_graph=True)
    return {number for number, slope in enumerate(found) if slope is not None}


def _mixing(before: Sequence[Cut], call: Cut | Normalised) -> Iterator[str]:
    """The layers whose units the input features of a call do not depend on one by one, in the units' order.

    With a weight for every unit, Σ w_u f_u² over the features has a slope at unit u that is w_u times what it is
    without weights; and something else where features of others depend on the unit too.
    """
    axis = _axis(call.layer) if isinstance(call, Cut) else 1
    each, rest = divmod(call.input.shape[axis], before[0].units)
    if rest:
        yield before[0].name
        return
    weights = (torch.rand(before[0].units, generator=torch.Generator().manual_seed(0)) + 0.5).to(call.input.dtype)

    def slopes(units: Tensor) -> tuple[Tensor, ...]:
        weighed = _along(axis, call.input, units.repeat_interleave(each)) * call.input.square()
        return torch.autograd.grad(weighed.sum(), [cut.fresh for cut in before], retain_graph=True)

    for cut, plain, found in zip(before, slopes(torch.ones_like(weights)), slopes(weights), strict=True):
        expected = plain * _along(_axis(cut.layer), plain, weights.to(plain.dtype))
        if not bool((found - expected).abs().max() <= 1e-3 * expected.abs().max()):
            yield cut.name


def _along(axis: int, like: Tensor, numbers: Tensor) -> Tensor:
    """Numbers along one of a tensor's axes."""
    place = [1] * like.dim()
    place[axis] = -1
    return numbers.view(place)


def _axis(layer: Layer) -> int:
    """Where a layer's features are, among the axes of its input and of its output."""
    return -1 if isinstance(layer, nn.Linear) else 1
