"""Rehearse an optimiser on a small problem, before any run: what it computes with, and what it does to gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glocal import tree
from glocal.errors import GlocalError, first_line, require
from glocal.optimizers import Optimizer, step_scalars
from glocal.tree import Params, Tree

PARAMS: Params = {"weight": torch.tensor([[0.5, -1.0], [2.0, 0.25]]), "bias": torch.tensor([1.0, -0.5])}
GRADS: Params = {"weight": torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "bias": torch.tensor([-1.0, 4.0])}
SCALE = 8.0
"""A factor of the gradients, large enough that what Adam adds to a denominator does not count."""


class _Recorded(dict[str, Tensor]):
    """Scalars that remember which of them were read."""

    def __init__(self, values: Params) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def rehearse_optimizer(optimizer: Optimizer) -> None:
    """Raise an error if a user's optimiser does not do what the engine expects of its methods.

    It must read every scalar in `hyper`: as an attribute, a scalar would be that of one run for a whole cohort, and
    weight decay or clipping that is set but not read would have no effect.
    """
    name, hyper = type(optimizer).__name__, _Recorded(_scalars(optimizer))
    params, grads = _copy(PARAMS), _copy(GRADS)
    try:
        state = optimizer.init(_copy(PARAMS), hyper)
        descent, new = optimizer.update(grads, _copy(state), params, hyper)
        without_bias = {k: g for k, g in GRADS.items() if k != "bias"}
        partial, partial_state = optimizer.update(_copy(without_bias), _copy(state), _copy(PARAMS), hyper)
    except GlocalError:
        raise
    except Exception as error:
        raise GlocalError(f"{name} fails on a small problem: {type(error).__name__}: {first_line(error)}") from error
    for method, result, expected in (("update", descent, GRADS), ("update", partial, without_bias)):
        require(
            _shapes(result) == _shapes(expected),
            f"{name}.{method} must return one direction for every gradient, in its shape: "
            f"{_shapes(expected)}; it returned {_shapes(result)}.",
        )
    for result in (new, partial_state):
        require(
            _shapes(result) == _shapes(state),
            f"{name}.update must return a state like that of init, also for parameters without a gradient: "
            f"{_shapes(state)}; it returned {_shapes(result)}. Write: state | {{...}}.",
        )
    for what, now, before in (("parameters", params, PARAMS), ("gradients", grads, GRADS)):
        same = all(now[k].equal(before[k]) for k in before)
        require(same, f"{name}.update changes the {what} in place: compute new tensors and return the direction.")
    unread = ", ".join(k for k in hyper if k not in hyper.read)
    require(
        not unread,
        f"{name} does not read {unread} from `hyper`. In init and update write hyper['NAME'] instead of self.NAME, for "
        "the runs of a cohort may differ in it; `clip_gradients` and `add_weight_decay` of glocal.optimizers read "
        "clip and weight_decay.",
    )


def depends_on_scale(optimizer: Optimizer) -> bool:
    """Return whether larger gradients give a larger first step."""
    plain, scaled = _first_step(optimizer, GRADS), _first_step(optimizer, {k: SCALE * g for k, g in GRADS.items()})
    return not all(torch.allclose(plain[k], scaled[k], rtol=1e-3) for k in plain)


def keeps_frozen_weights(optimizer: Optimizer) -> bool:
    """Return whether parameters whose gradient is 0 stay as they are in a first step."""
    return not any(d.any() for d in _first_step(optimizer, {k: 0 * g for k, g in GRADS.items()}).values())


def _first_step(optimizer: Optimizer, grads: Params) -> Params:
    optimizer = replace(optimizer, clip=0.0)
    hyper = _scalars(optimizer)
    return optimizer.update(_copy(grads), optimizer.init(_copy(PARAMS), hyper), _copy(PARAMS), hyper)[0]


def _scalars(optimizer: Optimizer) -> Params:
    return {k: torch.tensor(v[0]) for k, v in step_scalars([optimizer]).items()}


def _copy(parts: Tree) -> Any:
    return tree.map_tree(torch.clone, parts)


def _shapes(parts: Any) -> Any:
    """Return the shapes of a tree of tensors, or the type of what is none."""
    if isinstance(parts, dict):
        return {k: _shapes(v) for k, v in parts.items()}
    return list(parts.shape) if isinstance(parts, Tensor) else type(parts).__name__
