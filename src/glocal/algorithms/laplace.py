r"""Kronecker-factored online Laplace approximation (§5.2; Ritter et al. 2018): Eq. general-opt-local with whole layers.

    obj_t(θ) = L_t(θ) + (λ/2) (θ − θ_{t−1})ᵀ Λ_{t−1} (θ − θ_{t−1}),   Λ_t = Λ_{t−1} + H_t(θ_t),

the negative logarithm of a Gaussian posterior N(θ_{t−1}, Λ_{t−1}⁻¹) used as the next task's prior. H_t is the
Gauss–Newton matrix, one Kronecker product G ⊗ A a layer: it sees how the parameters of a layer act together, where EWC
sees each of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.hessian_structures import Kronecker, half_quadratic_form, sample_risk
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params, inner


@dataclass(frozen=True)
class Laplace(Algorithm):
    r"""Minimises L_t plus one quadratic for all finished tasks together, so each has an equal share of it:

        \hat L_o(θ) = L_o(θ_o) + (1/(t−1)) (λ/2) (θ − θ_{t−1})ᵀ Λ_{t−1} (θ − θ_{t−1}).

    A sum of Kronecker products is none; sums='nearest' keeps the one nearest to it, sums='each' every task's factors.
    Curvature and centre are taken at the solutions: local.
    """

    name: ClassVar[str] = "laplace"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "the last solution and two Kronecker factors a layer (sums=each: a layer and task)"
    memory_size: ClassVar[str] = "P + Σ in² + out² (sums=each: times T)"

    penalty: float = 1.0
    """λ, the weight of the quadratic."""
    samples: int = 0
    """Examples of a task that its factors are taken on; 0: all."""
    sums: Literal["nearest", "each"] = "nearest"
    """What is kept of Σ_o G_o ⊗ A_o: the nearest Kronecker product, or each."""

    def __post_init__(self) -> None:
        require(self.penalty >= 0, f"laplace needs a penalty of at least 0; {self.penalty} was given.")
        require(self.samples >= 0, f"laplace needs samples of at least 0; {self.samples} was given.")

    @property
    def _structure(self) -> Kronecker:
        return Kronecker(merge=self.sums == "nearest")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {
            "anchor": {k: p.clone() for k, p in params.items()},
            "loss_at_solution": next(iter(params.values())).new_zeros(0),  # L_o(θ_o) of every finished task
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = model.loss(params, batch.x, batch.y)
        if "precision" not in memory:
            return loss
        moved = {k: p - memory["anchor"][k] for k, p in params.items()}
        return loss + self.penalty * half_quadratic_form(self._structure, memory["precision"], moved)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        new = self._structure.at(sample_risk(model, params, data, self.samples))
        if "precision" in memory:
            new = self._structure.add(memory["precision"], new)
        reached = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"anchor": params, "loss_at_solution": reached, "precision": new}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        reached = memory["loss_at_solution"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            moved = {k: p - memory["anchor"][k] for k, p in params.items()}
            quadratic = inner(moved, self._structure.product(memory["precision"], moved)) / 2
            return reached[task] + self.penalty * quadratic / reached.shape[0]

        return value
