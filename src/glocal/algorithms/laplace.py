r"""Kronecker-factored online Laplace approximation (§5.2, Eq. general-opt-local; Ritter et al. 2018). Local.

    obj_t(θ) = L_t(θ) + (λ/2) (θ − θ_{t−1})ᵀ Λ_{t−1} (θ − θ_{t−1}),   Λ_t = Λ_{t−1} + H_t(θ_t),

where the penalty is the negative log-density of the Gaussian posterior N(θ_{t−1}, Λ_{t−1}⁻¹), the prior of the next
task. H_t is the Gauss–Newton matrix with one Kronecker product G ⊗ A per layer; unlike EWC it includes interactions
between the parameters of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Locality, Memory, require_at_least
from glocal.algorithms.hessian_structures import Kronecker, half_quadratic_form, sample_risk
from glocal.networks.model import Model
from glocal.tree import Params, inner


@dataclass(frozen=True)
class Laplace(Algorithm):
    r"""Minimise L_t plus one quadratic for all finished tasks, of which each task is assigned an equal share:

        \hat L_o(θ) = L_o(θ_o) + (1/(t−1)) (λ/2) (θ − θ_{t−1})ᵀ Λ_{t−1} (θ − θ_{t−1}).

    A sum of Kronecker products is not a Kronecker product: sums='nearest' stores the nearest one, sums='each' the
    factors of every task. Curvature and anchor are computed at the solutions: local.
    """

    name: ClassVar[str] = "laplace"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "the last solution and two Kronecker factors per layer (sums=each: and task)"
    memory_size: ClassVar[str] = "P + Σ in² + out² (sums=each: times T)"

    penalty: float = 1.0
    """λ, the weight of the quadratic penalty."""
    samples: int = 0
    """Number of examples per task for the Kronecker factors; 0: all."""
    sums: Literal["nearest", "each"] = "nearest"
    """Storage of Σ_o G_o ⊗ A_o: nearest (the nearest Kronecker product) or each (all terms)."""

    def __post_init__(self) -> None:
        require_at_least(self, penalty=0, samples=0)

    @property
    def _structure(self) -> Kronecker:
        return Kronecker(merge=self.sums == "nearest")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {
            "anchor": {k: p.clone() for k, p in params.items()},
            "loss_at_solution": next(iter(params.values())).new_zeros(0),  # L_o(θ_o) of the finished tasks
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = model.loss(params, batch.x, batch.y)
        if "precision" not in memory:
            return loss
        delta = {k: p - memory["anchor"][k] for k, p in params.items()}
        return loss + self.penalty * half_quadratic_form(self._structure, memory["precision"], delta)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        precision = self._structure.at(sample_risk(model, params, data, self.samples))
        if "precision" in memory:
            precision = self._structure.add(memory["precision"], precision)
        losses = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"anchor": params, "loss_at_solution": losses, "precision": precision}

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        losses = memory["loss_at_solution"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            delta = {k: p - memory["anchor"][k] for k, p in params.items()}
            quadratic = inner(delta, self._structure.product(memory["precision"], delta)) / 2
            return losses[task] + self.penalty * quadratic / losses.shape[0]

        return value
