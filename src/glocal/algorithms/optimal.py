r"""The optimal local algorithms of §4, soft (Eq. general-opt-local) and hard (Theorem 4.1). Both are local.

Both expand the loss of every finished task to second order at its solution (Eq. taylor-p),

    \hat L_o(θ) = L_o(θ_o) + (θ − θ_o)ᵀ ∇L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o),

*Soft* penalises the sum over o < t, which is one quadratic in Δ = θ − θ_{t−1}:

    Σ_o \hat L_o(θ) = const + Δᵀ ( Σ_o ∇L_o(θ_o) + v ) + ½ Δᵀ ( Σ_o H_o ) Δ,   v = Σ_o H_o (θ_{t−1} − θ_o),

so the linear term is updated without the old solutions after task t: b ← b + H_{<t} Δ_t + ∇L_t(θ_t).

*Hard* constrains the update (Eq. multi-tasks-obj-2):

    min_Δ L_t(θ_{t−1} + Δ)   such that   Δᵀ \bar H_{<t} Δ = 0,   \bar H_{<t} = (1/t) Σ_{o<t} H_o(θ_o).

If every θ_o is a minimum, the average Hessian is positive semi-definite and the constraint restricts Δ to its null
space; every gradient is projected onto it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Locality, Memory, require_at_least
from glocal.algorithms.hessian_structures import (
    Full,
    HessianStructure,
    LowRank,
    Matrix,
    Structure,
    half_quadratic_form,
    hessian_structure,
    require_small,
    sample_risk,
    task_gradient,
)
from glocal.curvature.lanczos import eigh_or_nan
from glocal.errors import require, unknown
from glocal.networks.model import Model
from glocal.tree import Params, Tree, from_vector, inner, to_vector


@dataclass(frozen=True)
class OptimalSoft(Algorithm):
    r"""Minimise L_t(θ) + λ Σ_o ( \hat L_o(θ) − L_o(θ_o) ); for λ = 1 this is t · \hat L^MT_t of Eq. approxmtloss.

    Only the sum of the quadratics is stored, and each finished task is assigned an equal share of it. The printed
    Eq. general-opt-local divides the sum by t: weighing='stated'. Gradients and Hessians are computed at θ_o: local.
    """

    name: ClassVar[str] = "optimal-soft"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "the last solution, Σ ∇L_o + v, and Σ H_o in the chosen structure"
    memory_size: ClassVar[str] = "2 P + P (diagonal), P² (full), rank P T (low-rank), Σ in² + out² (kronecker)"

    penalty: float = 1.0
    """λ, the weight of the finished tasks' losses."""
    structure: Structure = "kronecker"
    """Storage of H_o: diagonal, kronecker, low-rank or full."""
    matrix: Matrix = "ggn"
    """Curvature matrix: ggn (outer-product part, positive semi-definite) or hessian (full and low-rank only)."""
    rank: int = 20
    """Number of eigenpairs per task for structure=low-rank."""
    samples: int = 2000
    """Number of examples per task for H_o; 0: all."""
    gradient: bool = True
    """Include the term Σ ∇L_o(θ_o)."""
    recentred: bool = True
    """Include the term v, which accounts for the change of the expansion point from θ_o to θ_{t−1}."""
    weighing: Literal["joint", "stated"] = "joint"
    """Weight of an old task: joint: equal to the new one; stated: 1/t, as the equation is printed."""

    def __post_init__(self) -> None:
        require_at_least(self, penalty=0, rank=1, samples=0)
        hessian_structure(self.name, self.structure, self.matrix, self.rank)

    @property
    def _structure(self) -> HessianStructure:
        return hessian_structure(self.name, self.structure, self.matrix, self.rank)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        require_small(self._structure, params)
        empty = next(iter(params.values())).new_zeros(0)
        return {
            "anchor": {k: p.clone() for k, p in params.items()},
            "linear": {k: torch.zeros_like(p) for k, p in params.items()},
            "constant": empty.sum(),  # Σ_o \hat L_o(θ_{t−1}) − L_o(θ_o)
            "loss_at_solution": empty,  # L_o(θ_o) of the finished tasks
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = model.loss(params, batch.x, batch.y)
        finished = memory["loss_at_solution"].shape[0]
        if not finished:
            return loss
        delta = {k: p - memory["anchor"][k] for k, p in params.items()}
        quadratic = half_quadratic_form(self._structure, memory["hessian"], delta)
        weight = self.penalty / (finished + 1) if self.weighing == "stated" else self.penalty
        return loss + weight * (memory["constant"] + inner(delta, memory["linear"]) + quadratic)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        hessian = self._structure.at(sample_risk(model, params, data, self.samples))
        linear, constant = memory["linear"], memory["constant"]
        if "hessian" in memory:
            delta = {k: p - memory["anchor"][k] for k, p in params.items()}
            product = self._structure.product(memory["hessian"], delta)
            constant = constant + inner(delta, linear) + inner(delta, product) / 2
            linear = {k: b + product[k] for k, b in linear.items()} if self.recentred else linear
            hessian = self._structure.add(memory["hessian"], hessian)
        if self.gradient:
            gradient = task_gradient(model, params, data)
            linear = {k: b + gradient[k] for k, b in linear.items()}
        losses = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        terms = {"constant": constant, "linear": linear, "hessian": hessian}
        return {"anchor": params, "loss_at_solution": losses, **terms}

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        losses = memory["loss_at_solution"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            delta = {k: p - memory["anchor"][k] for k, p in params.items()}
            quadratic = inner(delta, self._structure.product(memory["hessian"], delta)) / 2
            return losses[task] + (memory["constant"] + inner(delta, memory["linear"]) + quadratic) / losses.shape[0]

        return value


MAX_AUTO_FULL_PARAMS = 2_000
"""Largest network for which structure='auto' stores the full Hessian."""


@dataclass(frozen=True)
class OptimalHard(Algorithm):
    r"""Minimise L_t in the null space of the finished tasks' average Hessian, where to second order

        \hat L_o(θ) = L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o) = L_o(θ_o).

    Gradients are projected orthogonally to the eigenvectors of Σ H_o whose |eigenvalue| exceeds `threshold` times the
    largest. Only the sum of the H_o is stored, and each \hat L_o is assigned an equal share of its quadratic around the
    last solution. Hessians are computed at θ_o: local.
    """

    name: ClassVar[str] = "optimal-hard"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "Σ H_o and its eigenvectors above the threshold"
    memory_size: ClassVar[str] = "2 P² (full) or 2 rank P T (low-rank)"

    threshold: float = 1e-3
    """Curvature, relative to the largest eigenvalue, up to which a direction counts as flat."""
    structure: Literal["auto", "full", "low-rank"] = "auto"
    """Storage of H_o: full (exact), low-rank (top eigenpairs), or auto: full up to 2,000 parameters."""
    matrix: Matrix = "hessian"
    """Curvature matrix: the hessian, or its outer-product part, the ggn."""
    rank: int = 20
    """Number of eigenpairs per task for structure=low-rank."""
    samples: int = 2000
    """Number of examples per task for H_o; 0: all."""

    def __post_init__(self) -> None:
        require(
            0 <= self.threshold < 1, f"optimal-hard needs a threshold from 0 to below 1; {self.threshold} was given."
        )
        require_at_least(self, rank=1, samples=0)
        for field, allowed in (("structure", ["auto", "full", "low-rank"]), ("matrix", ["hessian", "ggn"])):
            if getattr(self, field) not in allowed:
                raise unknown(f"{field} of optimal-hard:", getattr(self, field), allowed)

    def _structure(self, params: Mapping[str, Tensor]) -> HessianStructure:
        small = sum(p.numel() for p in params.values()) <= MAX_AUTO_FULL_PARAMS
        full = self.structure == "full" or (self.structure == "auto" and small)
        return Full(self.matrix) if full else LowRank(self.matrix, self.rank)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        require_small(self._structure(params), params)
        return {"loss_at_solution": next(iter(params.values())).new_zeros(0)}  # L_o(θ_o) of the finished tasks

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        if "curved" not in memory:
            return grads
        g, curved = to_vector(grads), memory["curved"]
        return from_vector(g - (curved @ g) @ curved, grads)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        structure = self._structure(params)
        total = structure.at(sample_risk(model, params, data, self.samples))
        if "hessian" in memory:
            total = structure.add(memory["hessian"], total)
        losses = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"loss_at_solution": losses, "hessian": total, "curved": self._curved(total), "anchor": params}

    def _curved(self, total: Tree) -> Tensor:
        """Return an orthonormal basis of the directions that are not flat, with zero rows for flat ones."""
        if "full" in total:
            values, vectors = eigh_or_nan(total["full"])
            return vectors.mT * self._above_threshold(values.abs()).unsqueeze(-1)
        # Σ_o Uᵀ|s|U = WᵀW has the eigenvalues of the small W Wᵀ; with |s|, curvatures of different tasks cannot cancel.
        w = total["values"].abs().sqrt().unsqueeze(-1) * total["vectors"]
        values, vectors = eigh_or_nan((w @ w.mT).double())
        selected = self._above_threshold(values) & (values > values.amax() * 1e-12)
        lengths = torch.where(selected, values, 1).sqrt()
        return ((vectors / lengths * selected).mT.to(w.dtype)) @ w

    def _above_threshold(self, magnitudes: Tensor) -> Tensor:
        return (magnitudes > self.threshold * magnitudes.amax()) & (magnitudes > 0)

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        losses = memory["loss_at_solution"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            delta = {k: p - memory["anchor"][k] for k, p in params.items()}
            product = self._structure(params).product(memory["hessian"], delta)
            return losses[task] + inner(delta, product) / 2 / losses.shape[0]

        return value
