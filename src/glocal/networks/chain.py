"""Networks that are a chain of layers: each layer's input is the one before it, unit by unit, and nothing else.

There, a unit that is shut off after its layer is shut off for all that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.errors import GlocalError
from glocal.networks.calls import LAYERS, Layer, dtype_of, evaluated, layers


class Link(NamedTuple):
    """A layer of a chain."""

    name: str
    units: int  # features or channels of its output
    each: int  # how many of its input features belong to one unit of the layer before it; 0: it is the first
    dims: int  # dimensions behind the features: 0 for a linear layer, 2 for one on images


class Cut(NamedTuple):
    """A layer's call with the network cut behind it: what goes on is a fresh tensor in the output's place."""

    name: str
    layer: Layer
    input: Tensor
    fresh: Tensor


def chain(module: nn.Module, shape: Sequence[int], who: str) -> tuple[Link, ...]:
    """The layers of a network in their order, or an error in the name of who needs them to be a chain."""
    x, cuts, outputs = _cut(module, shape)
    for problem in _problems(module, x, cuts, outputs):
        raise GlocalError(f"{who} needs a network that is a chain of linear and convolutional layers; {problem}.")
    return tuple(_link(cut, before) for before, cut in zip([None, *cuts], cuts, strict=False))


def _problems(module: nn.Module, x: Tensor, cuts: Sequence[Cut], outputs: Tensor) -> Iterator[str]:
    """All that keeps a network from being a chain, each in a few words."""
    yield from (f"'{k}' of this one is a BatchNorm" for k, m in module.named_modules() if isinstance(m, _BatchNorm))
    if len(cuts) < 2:
        yield f"this one has {len(cuts)} of them, and no hidden units"
    seen = Counter(cut.name for cut in cuts)
    yield from (f"'{name}' of this one is called {times} times" for name, times in seen.items() if times > 1)
    own = Counter(id(p) for cut in cuts for p in cut.layer._parameters.values())
    learnt = {k: p for k, p in module.named_parameters() if p.requires_grad}
    yield from (f"this one also learns '{k}'" for k, p in learnt.items() if id(p) not in own)
    parts = {**{f"'{cut.name}'": cut.input for cut in cuts}, "its output": outputs}
    for number, (name, part) in enumerate(parts.items()):
        if _depends(part, list(learnt.values())) or any(own[id(p)] > 1 for p in learnt.values()):
            yield "this one uses parameters in more than one place"
        if _depends(part, [x, *(cut.fresh for cut in cuts)]) != {number}:
            yield f"in this one {name} depends on more, or less, than the layer before it"
    for before, cut in pairwise(cuts):
        if getattr(cut.layer, "groups", 1) > 1:
            yield f"'{cut.name}' of this one has groups"
        if not _keeps_units_apart(before, cut):
            yield f"what lies between '{before.name}' and '{cut.name}' of this one mixes units"


def _link(cut: Cut, before: Cut | None) -> Link:
    units, dims = cut.layer.weight.shape[0], cut.layer.weight.dim() - 2
    return Link(
        cut.name, units, 0 if before is None else cut.layer.weight.shape[1] // before.layer.weight.shape[0], dims
    )


def _cut(module: nn.Module, shape: Sequence[int]) -> tuple[Tensor, list[Cut], Tensor]:
    """One pass over random numbers with every layer's output replaced by others: input, layers, output."""
    draw = torch.Generator().manual_seed(0)
    cuts: list[Cut] = []

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype_of(module), generator=draw).requires_grad_()

    def cut(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            assert isinstance(layer, LAYERS)
            cuts.append(Cut(name, layer, args[0], random(*output.shape)))
            return cuts[-1].fresh.clone()  # a copy, which what follows may change in place

        return hook

    x = random(2, *shape)
    with ExitStack() as hooks, torch.enable_grad(), evaluated(module.modules()):
        for name, layer in layers(module).items():
            hooks.enter_context(layer.register_forward_hook(cut(name)))
        return x, cuts, module(x.clone())


def _depends(part: Tensor, sources: Sequence[Tensor]) -> set[int]:
    """Which of the sources a part of the network depends on."""
    if not part.requires_grad or not sources:
        return set()
    found = torch.autograd.grad(part.sum(), sources, allow_unused=True, retain_graph=True)
    return {number for number, slope in enumerate(found) if slope is not None}


def _keeps_units_apart(before: Cut, cut: Cut) -> bool:
    """Whether a layer's input features depend on one unit of the layer before it each, in the units' order.

    Units differ in some digit of their binary numbers: for every digit, features whose unit has it must not depend on
    units that have it not, and the other way round.
    """
    count, axis = before.layer.weight.shape[0], _axis(cut.layer)
    each, rest = divmod(cut.input.shape[axis], count)
    if rest:
        return False
    units = torch.arange(count)
    place = [1] * before.fresh.dim()
    place[_axis(before.layer)] = count
    for digit in range(max(1, (count - 1).bit_length())):
        for value in (0, 1):
            chosen = (units >> digit & 1) == value
            features = cut.input.index_select(axis, chosen.repeat_interleave(each).nonzero().squeeze(1))
            (slope,) = torch.autograd.grad(features.square().sum(), before.fresh, retain_graph=True)
            if bool((slope * ~chosen.view(place)).any()):
                return False
    return True


def _axis(layer: Layer) -> int:
    """Where a layer's features are, among the axes of its input and of its output."""
    return -1 if isinstance(layer, nn.Linear) else 1
