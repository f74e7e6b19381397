"""Rehearse an optimiser on a small problem, before any run: what it computes with, and what it does to gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glocal import tree
from glocal.engine.state import check_memory
from glocal.errors import GlocalError, first_line, require
from glocal.optimizers import Adam, Optimizer, is_built_in, step_scalars
from glocal.tree import Params, Tree

PARAMS: Params = {"weight": torch.tensor([[0.5, -1.0], [2.0, 0.25]]), "bias": torch.tensor([1.0, -0.5])}
GRADS: Params = {"weight": torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "bias": torch.tensor([-1.0, 4.0])}
PARTLY_FROZEN: Params = {"weight": torch.tensor([[1.0, -2.0], [0.0, 0.0]]), "bias": torch.tensor([0.0, 4.0])}
SCALE = 8.0
"""A factor of the gradients, large enough that what is added to a denominator does not count."""


class _Recorded(dict[str, Tensor]):
    """Scalars that remember which of them were read."""

    def __init__(self, values: Params) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def rehearse_optimizer(optimizer: Optimizer) -> None:
    """Raise an error if a user's optimiser does not do what the engine expects of its methods.

    As an attribute, a scalar would be that of one run for a whole cohort; weight decay and clipping that are set but
    not read would have no effect.
    """
    name, hyper = type(optimizer).__name__, _Recorded(_scalars(optimizer))
    require(type(optimizer).update is not Optimizer.update, f"{name} has no update(self, grads, state, params, hyper).")
    without_bias = {k: g for k, g in GRADS.items() if k != "bias"}
    params, grads = _copy(PARAMS), _copy(GRADS)
    try:
        state = optimizer.init(_copy(PARAMS), hyper)
        check_memory(state, f"{name}.init", "state")
        descent, new = optimizer.update(grads, _copy(state), params, hyper)
        partial, partial_state = optimizer.update(_copy(without_bias), _copy(state), _copy(PARAMS), hyper)
    except GlocalError:
        raise
    except Exception as error:
        raise GlocalError(f"{name} fails on a small problem: {type(error).__name__}: {first_line(error)}") from error
    for result, expected in ((descent, GRADS), (partial, without_bias)):
        require(
            _kinds(result) == _kinds(expected),
            f"{name}.update must return one direction for every gradient, like it: "
            f"{_kinds(expected)}; it returned {_kinds(result)}.",
        )
    for result in (new, partial_state):
        require(
            _kinds(result) == _kinds(state),
            f"{name}.update must return a state like that of init, also for parameters without a gradient: "
            f"{_kinds(state)}; it returned {_kinds(result)}. Write: state | {{...}}.",
        )
    for what, now, before in (("parameters", params, PARAMS), ("gradients", grads, GRADS)):
        same = all(now[k].equal(before[k]) for k in before)
        require(same, f"{name}.update changes the {what} in place: compute new tensors and return the direction.")
    for option in ("clip", "weight_decay"):
        used = option not in hyper or option in hyper.read
        require(
            used, f"{name} does not use {option}: call `clip_gradients` and `add_weight_decay` of glocal.optimizers."
        )
    read = ", ".join(option for option in hyper if _reads_attribute(optimizer, option, (descent, new)))
    hint = "in init and update write hyper['NAME'], for the runs of a cohort may differ in it"
    require(not read, f"{name} reads {read} from self: {hint}.")


def _reads_attribute(optimizer: Optimizer, option: str, expected: tuple[Params, Tree]) -> bool:
    """Return whether a first step changes if the attribute, but not the scalar in `hyper`, is not a number."""
    changed = copy.copy(optimizer)
    object.__setattr__(changed, option, math.nan)
    hyper = _scalars(optimizer)
    try:
        result = changed.update(_copy(GRADS), changed.init(_copy(PARAMS), hyper), _copy(PARAMS), hyper)
    except Exception:
        return True
    leaves = [[*tree.flatten(part).values()] for part in (*expected, *result)]
    pairs = zip([*leaves[0], *leaves[1]], [*leaves[2], *leaves[3]], strict=True)
    return not all(torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def depends_on_scale(optimizer: Optimizer) -> bool:
    """Return whether larger gradients give larger steps."""
    if is_built_in(optimizer) or isinstance(optimizer, Adam):
        return not isinstance(optimizer, Adam)
    plain, scaled = _second_step(optimizer, GRADS), _second_step(optimizer, {k: SCALE * g for k, g in GRADS.items()})
    moves = any(d.any() for d in plain.values())
    return not moves or not all(torch.allclose(plain[k], scaled[k], rtol=1e-3) for k in plain)


def keeps_frozen_weights(optimizer: Optimizer) -> bool:
    """Return whether weights whose gradient is 0 stay as they are, whatever the gradients of others are."""
    steps = _second_step(optimizer, PARTLY_FROZEN)
    return not any(steps[k][g == 0].any() for k, g in PARTLY_FROZEN.items())


def _second_step(optimizer: Optimizer, grads: Params) -> Params:
    """Return the direction of a second step with the same gradients, without clipping and weight decay."""
    optimizer = replace(optimizer, clip=0.0, weight_decay=0.0)
    hyper = _scalars(optimizer)
    _, state = optimizer.update(_copy(grads), optimizer.init(_copy(PARAMS), hyper), _copy(PARAMS), hyper)
    return optimizer.update(_copy(grads), state, _copy(PARAMS), hyper)[0]


def _scalars(optimizer: Optimizer) -> Params:
    return {k: torch.tensor(v[0]) for k, v in step_scalars([optimizer]).items()}


def _copy(parts: Tree) -> Any:
    return tree.map_tree(torch.clone, parts)


def _kinds(parts: Any) -> Any:
    """Return the shapes and types of a tree of tensors, or the type of what is none."""
    if isinstance(parts, Mapping):
        return {k: _kinds(v) for k, v in parts.items()}
    if isinstance(parts, Tensor):
        return f"{tuple(parts.shape)} {str(parts.dtype).removeprefix('torch.')}"
    return type(parts).__name__
