r"""An algorithm of one's own: stay near the last solution, whatever it was.

    \hat L_o(θ) = (λ/2) ‖θ − θ_{t−1}‖²   up to a constant

Run it:  glocal run rotated-digits examples/anchor.py:Anchor --lr 0.1 --options strength=0.1
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
    """A quadratic with the identity for a Hessian, centred at the last solution: local."""

    name: ClassVar[str] = "anchor"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar = "local"
    memory_contents: ClassVar[str] = "the last solution"
    memory_size: ClassVar[str] = "P"

    strength: float = 0.01  # a float field is a scalar hyperparameter: runs that differ in it train together
    """λ, how strong the pull is."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"solution": {k: p.clone() for k, p in params.items()}, "finished": torch.zeros(())}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        return model.loss(params, batch.x, batch.y) + memory["finished"] * self._pull(memory, params)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {"solution": params, "finished": torch.ones_like(memory["finished"])}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda params: self._pull(memory, params)

    def _pull(self, memory: Memory, params: Mapping[str, Tensor]) -> Tensor:
        squares = [(params[k] - memory["solution"][k]).square().sum() for k in params]
        return self.strength / 2 * torch.stack(squares).sum()
