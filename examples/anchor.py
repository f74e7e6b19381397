r"""Write your own algorithm: penalise the distance to the previous solution, the simplest quadratic approximation.

    \hat L_o(θ) = (λ/2) ‖θ − θ_{t−1}‖²   up to a constant

Train it on five tasks of rotated digits (a few seconds on a CPU):

    glocal run rotated-digits examples/anchor.py:Anchor --lr 0.1 --options strength=0.1

Compare it with built-in algorithms, at several strengths:

    glocal sweep rotated-digits --algorithms examples/anchor.py:Anchor ewc er --options Anchor.strength=0.01,0.1

Test by experiment whether its approximation is local:

    glocal locality examples/anchor.py:Anchor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.algorithms import Algorithm, Batch, Memory
from glocal.networks import Model
from glocal.tree import Params


@dataclass(frozen=True)
class Anchor(Algorithm):
    """Quadratic penalty centred at the previous solution, with the identity as its Hessian: a local approximation."""

    name: ClassVar[str] = "anchor"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar = "local"
    memory_contents: ClassVar[str] = "the previous solution"
    memory_size: ClassVar[str] = "P"

    # Float fields are hyperparameters of single runs: runs that differ only in them are trained in one batch.
    strength: float = 0.01
    """Strength λ of the penalty."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        """Start with an inactive penalty: `active` is 0 until the first task is finished."""
        return {"solution": {name: p.clone() for name, p in params.items()}, "active": torch.zeros(())}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        """Return the loss on the mini-batch plus the penalty."""
        return model.loss(params, batch.x, batch.y) + memory["active"] * self._penalty(params, memory)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        """After a task, move the centre of the penalty to its solution."""
        return {"solution": params, "active": torch.ones_like(memory["active"])}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        r"""Return \hat L_o as a function of the parameters; the lens compares it with the true loss of task o."""
        return lambda params: self._penalty(params, memory)

    def _penalty(self, params: Mapping[str, Tensor], memory: Memory) -> Tensor:
        squares = [(params[name] - memory["solution"][name]).square().sum() for name in params]
        return self.strength / 2 * torch.stack(squares).sum()
