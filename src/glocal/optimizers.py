r"""The optimiser protocol, plain SGD, and the update θ ← θ − lr · d that every optimiser ends with.

An optimiser turns gradients into a descent direction d and keeps its own state:

    init(params) -> state
    update(grads, state, params, hyper) -> d, state

Like optax's `scale_by_*` transformations it does not multiply by the learning rate; `apply_update` does, in place.
`hyper` holds the scalars of a run (lr, momentum, ...) as tensors, one value per run where runs are stacked, so that
runs that differ in them train together.

>>> import torch
>>> params, grads = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -1.0])}
>>> hyper = {"lr": torch.tensor(0.1)}
>>> descent, state = SGD().update(grads, SGD().init(params), params, hyper)
>>> apply_update(params, descent, hyper["lr"])
>>> params["w"]
tensor([0.9500, 2.1000])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from glocal.tree import Params, Tree


class Optimizer(Protocol):
    """A gradient transformation with state."""

    def init(self, params: Params) -> Tree:
        """Return the state before the first step."""
        ...

    def update(self, grads: Params, state: Tree, params: Params, hyper: Params) -> tuple[Params, Tree]:
        """Return the descent direction and the new state. Parameters that are not in `grads` stay as they are."""
        ...


@dataclass(frozen=True)
class SGD:
    """Plain stochastic gradient descent: d = g, without state."""

    def init(self, params: Params) -> Tree:
        return {}

    def update(self, grads: Params, state: Tree, params: Params, hyper: Params) -> tuple[Params, Tree]:
        return grads, state


def apply_update(params: Params, descent: Params, lr: Tensor) -> None:
    """θ ← θ − lr · d in place; `lr` is a scalar, or has one value per run where `params` are stacked."""
    for name, direction in descent.items():
        p = params[name]
        p.addcmul_(direction, lr.view(-1, *[1] * (p.dim() - 1)) if lr.dim() else lr, value=-1)
