r"""The optimal local algorithm, soft (§4, Eq. general-opt-local): follow all old quadratics at once.

The quadratic Taylor expansion of every finished task at its own solution (Eq. taylor-p),

    \hat L_o(θ) = L_o(θ_o) + (θ − θ_o)ᵀ ∇L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o),

summed over o < t, is one quadratic in Δ = θ − θ_{t−1}:

    Σ_o \hat L_o(θ) = const + Δᵀ ( Σ_o ∇L_o(θ_o) + v ) + ½ Δᵀ ( Σ_o H_o ) Δ,   v = Σ_o H_o (θ_{t−1} − θ_o),

and when task t ends the linear term is carried on without the old solutions: b ← b + H_{<t} Δ_t + ∇L_t(θ_t).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.hessian_structures import (
    HessianStructure,
    Matrix,
    Structure,
    half_quadratic_form,
    hessian_structure,
    sample_risk,
    task_gradient,
)
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params, inner


@dataclass(frozen=True)
class OptimalSoft(Algorithm):
    r"""Minimises L_t(θ) + λ Σ_o ( \hat L_o(θ) − L_o(θ_o) ): with λ = 1 that is t · \hat L^MT_t of Eq. approxmtloss.

    The memory holds the sum of the quadratics and not each of them, so each finished task has an equal share of it.
    Eq. general-opt-local as printed divides the sum by t and so weighs the past less: that is weighing='stated'.
    Gradients and Hessians are taken at θ_o: local.
    """

    name: ClassVar[str] = "optimal-soft"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "local"
    remembers: ClassVar[str] = "the last solution, Σ ∇L_o + v and Σ H_o, structured"
    grows: ClassVar[str] = "2 P + P (diagonal), P² (full), rank P T (low-rank), Σ in² + out² (kronecker)"

    penalty: float = 1.0
    """λ, the weight of the past."""
    structure: Structure = "kronecker"
    """How H_o is kept: diagonal, kronecker, low-rank or full."""
    matrix: Matrix = "ggn"
    """Whose curvature: ggn (the outer-product part, never negative) or hessian (full and low-rank only)."""
    rank: int = 20
    """Eigenpairs a task adds where the structure is low-rank."""
    samples: int = 2000
    """Examples of a task that H_o is taken on; 0: all."""
    gradient: bool = True
    """Whether to keep the term Σ ∇L_o(θ_o)."""
    recentred: bool = True
    """Whether to keep the term v, which moves the centres from the θ_o to θ_{t−1}."""
    weighing: Literal["joint", "stated"] = "joint"
    """joint: an old task counts as much as the new one; stated: 1/t of that, as the equation is printed."""

    def __post_init__(self) -> None:
        require(self.penalty >= 0, f"optimal-soft needs a penalty of at least 0; {self.penalty} was given.")
        require(self.rank >= 1, f"optimal-soft needs a rank of at least 1; {self.rank} was given.")
        require(self.samples >= 0, f"optimal-soft needs samples of at least 0; {self.samples} was given.")
        hessian_structure(self.name, self.structure, self.matrix, self.rank)

    @property
    def _structure(self) -> HessianStructure:
        return hessian_structure(self.name, self.structure, self.matrix, self.rank)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        self._structure.check(params)
        nothing = next(iter(params.values())).new_zeros(0)
        return {
            "anchor": {k: p.clone() for k, p in params.items()},
            "slope": {k: torch.zeros_like(p) for k, p in params.items()},
            "level": nothing.sum(),  # Σ_o \hat L_o(θ_{t−1}) − L_o(θ_o)
            "reached": nothing,  # L_o(θ_o) of every finished task
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = model.loss(params, batch.x, batch.y)
        finished = memory["reached"].shape[0]
        if not finished:
            return loss
        moved = {k: p - memory["anchor"][k] for k, p in params.items()}
        quadratic = half_quadratic_form(self._structure, memory["hessian"], moved)
        weight = self.penalty / (finished + 1) if self.weighing == "stated" else self.penalty
        return loss + weight * (memory["level"] + inner(moved, memory["slope"]) + quadratic)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        hessian = self._structure.at(sample_risk(model, params, data, self.samples))
        slope, level = memory["slope"], memory["level"]
        if "hessian" in memory:
            moved = {k: p - memory["anchor"][k] for k, p in params.items()}
            bent = self._structure.product(memory["hessian"], moved)
            level = level + inner(moved, slope) + inner(moved, bent) / 2
            slope = {k: s + bent[k] for k, s in slope.items()} if self.recentred else slope
            hessian = self._structure.add(memory["hessian"], hessian)
        if self.gradient:
            new = task_gradient(model, params, data)
            slope = {k: s + new[k] for k, s in slope.items()}
        reached = torch.cat([memory["reached"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"anchor": params, "slope": slope, "level": level, "reached": reached, "hessian": hessian}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        reached = memory["reached"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            moved = {k: p - memory["anchor"][k] for k, p in params.items()}
            quadratic = inner(moved, self._structure.product(memory["hessian"], moved)) / 2
            return reached[task] + (memory["level"] + inner(moved, memory["slope"]) + quadratic) / reached.shape[0]

        return value
