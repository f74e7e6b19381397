r"""Elastic weight consolidation, online (§5.2): a diagonal quadratic at the last solution, Eq. general-opt-local.

    obj_t(θ) = L_t(θ) + (λ/2) Σ_i F_i (θ_i − θ_{t−1,i})²,   F = γ F + F_{t−1} after every task,

F_o the diagonal of the Fisher matrix of task o at its solution θ_o. At a minimum of obj the gradients of the old losses
cancel and one anchor, the last solution, carries the sum of all old quadratics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.curvature.diagonal import diagonal
from glocal.errors import require, unknown
from glocal.losses import Loss
from glocal.networks.model import Model, prepare
from glocal.tree import Params, total

Fisher = Literal["exact", "sampled", "empirical", "published"]


def _exact(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """The expectation over the network's own labels, in closed form: the Gauss–Newton matrix."""
    return loss.hessian_root(outputs)


def _sampled(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """The same expectation from one label drawn for every input."""
    return loss.score(outputs, loss.draw(outputs, random)).unsqueeze(1)


def _empirical(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """Squared gradients at the data's labels, which vanish where the network fits them."""
    return loss.score(outputs, y).unsqueeze(1)


def _published(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """What the paper's numbers were measured with: the empirical one, each sample weighted by p(y|x)."""
    return (loss.likelihood(outputs, y).sqrt().unsqueeze(-1) * loss.score(outputs, y)).unsqueeze(1)


FISHERS = {"exact": _exact, "sampled": _sampled, "empirical": _empirical, "published": _published}


def task_fisher(model: Model, params: Params, data: Batch, variant: str, chunk: int = 500) -> Params:
    """F at θ over a task's data, a bounded number of examples at a time."""
    evaluated = model.evaluating()
    fisher = {k: torch.zeros_like(p) for k, p in params.items()}
    for x, y, random in zip(data.x.split(chunk), data.y.split(chunk), data.random.split(chunk), strict=True):
        directions = partial(_directions, variant, model.criterion, y, random)
        part = diagonal(evaluated.module, params, evaluated.buffers, prepare(x), directions)
        fisher = {k: fisher[k] + part[k] * (y.shape[0] / data.y.shape[0]) for k in fisher}
    return fisher


def _directions(variant: str, loss: Loss, y: Tensor, random: Tensor, outputs: Tensor) -> Tensor:
    return FISHERS[variant](loss, outputs, y, random)


@dataclass(frozen=True)
class EWC(Algorithm):
    r"""Minimises L_t plus one diagonal quadratic for all finished tasks together, so each has an equal share of it:

        \hat L_o(θ) = L_o(θ_o) + (1/(t−1)) (λ/2) Σ_i F_i (θ_i − θ_{t−1,i})².

    F and its centre are taken at the solutions: local. The paper's λ (0.7 on rotated digits) goes with no ½ and the
    'published' Fisher: `penalty=1.4, fisher='published'`.
    """

    name: ClassVar[str] = "ewc"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "local"
    remembers: ClassVar[str] = "2 numbers a parameter, whatever the number of tasks"

    penalty: float = 1.4
    """λ, the weight of the quadratic."""
    decay: float = 1.0
    """γ, how much of the older tasks' F is kept when a task is added."""
    fisher: Fisher = "exact"
    """Which F: exact, sampled, empirical or published."""

    def __post_init__(self) -> None:
        if self.fisher not in FISHERS:
            raise unknown("fisher variant", self.fisher, FISHERS)
        require(self.penalty >= 0, f"ewc needs a penalty of at least 0; {self.penalty} was given.")
        require(self.decay >= 0, f"ewc needs a decay of at least 0; {self.decay} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {
            "anchor": {k: p.clone() for k, p in params.items()},
            "fisher": {k: torch.zeros_like(p) for k, p in params.items()},
            "reached": next(iter(params.values())).new_zeros(0),  # L_o(θ_o) of every finished task
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        return model.loss(params, batch.x, batch.y) + self._quadratic(memory, params)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        new = task_fisher(model, params, data, self.fisher)
        return {
            "anchor": params,
            "fisher": {k: self.decay * memory["fisher"][k] + new[k] for k in new},
            "reached": torch.cat([memory["reached"], model.evaluating().mean_loss(params, data.x, data.y)[None]]),
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        reached = memory["reached"]
        return lambda params: reached[task] + self._quadratic(memory, params) / reached.shape[0]

    def _quadratic(self, memory: Memory, params: Mapping[str, Tensor]) -> Tensor:
        fisher, anchor = memory["fisher"], memory["anchor"]
        return self.penalty / 2 * total(fisher[k] * (params[k] - anchor[k]).square() for k in fisher)
