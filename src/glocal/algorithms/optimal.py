r"""The optimal local algorithm, soft (§4, Eq. general-opt-local): follow all old quadratics at once.

The quadratic Taylor expansion of every finished task at its own solution (Eq. taylor-p),

    \hat L_o(θ) = L_o(θ_o) + (θ − θ_o)ᵀ ∇L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o),

summed over o < t, is one quadratic in Δ = θ − θ_{t−1}:

    Σ_o \hat L_o(θ) = const + Δᵀ ( Σ_o ∇L_o(θ_o) + v ) + ½ Δᵀ ( Σ_o H_o ) Δ,   v = Σ_o H_o (θ_{t−1} − θ_o),

and when task t ends the linear term is carried on without the old solutions: b ← b + H_{<t} Δ_t + ∇L_t(θ_t).

The optimal local algorithm, hard (Theorem 1, Eq. multi-tasks-obj-2): move only where the past is flat.

    min_Δ L_t(θ_{t−1} + Δ)   such that   Δᵀ \bar H_{<t} Δ = 0,   \bar H_{<t} = (1/t) Σ_{o<t} H_o(θ_o).

With every θ_o a minimum the average Hessian is positive semi-definite, and the constraint keeps Δ in its null space:
every step's gradient is projected onto it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.hessian_structures import (
    Full,
    HessianStructure,
    LowRank,
    Matrix,
    Structure,
    half_quadratic_form,
    hessian_structure,
    sample_risk,
    task_gradient,
)
from glocal.curvature.lanczos import eigh_or_nan
from glocal.errors import require, unknown
from glocal.networks.model import Model
from glocal.tree import Params, Tree, from_vector, inner, to_vector


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
    memory_contents: ClassVar[str] = "the last solution, Σ ∇L_o + v and Σ H_o, structured"
    memory_size: ClassVar[str] = "2 P + P (diagonal), P² (full), rank P T (low-rank), Σ in² + out² (kronecker)"

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
            "loss_at_solution": nothing,  # L_o(θ_o) of every finished task
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = model.loss(params, batch.x, batch.y)
        finished = memory["loss_at_solution"].shape[0]
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
        reached = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"anchor": params, "slope": slope, "level": level, "loss_at_solution": reached, "hessian": hessian}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        reached = memory["loss_at_solution"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            moved = {k: p - memory["anchor"][k] for k, p in params.items()}
            quadratic = inner(moved, self._structure.product(memory["hessian"], moved)) / 2
            return reached[task] + (memory["level"] + inner(moved, memory["slope"]) + quadratic) / reached.shape[0]

        return value


SMALL = 2_000
"""Parameters up to which structure='auto' takes the full Hessian."""


@dataclass(frozen=True)
class OptimalHard(Algorithm):
    r"""Minimises L_t in the null space of the average Hessian of the finished tasks: there, to second order,

        \hat L_o(θ) = L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o) = L_o(θ_o).

    Eigenvectors of Σ H_o whose |eigenvalue| is above `threshold` times the largest one are what may not be moved along.
    The memory holds the sum of the H_o: as a function \hat L_o has an equal share of it, around the last solution.
    Hessians are taken at θ_o: local.
    """

    name: ClassVar[str] = "optimal-hard"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "Σ H_o and the eigenvectors that are not flat"
    memory_size: ClassVar[str] = "2 P² (full) or 2 rank P T (low-rank)"

    threshold: float = 1e-3
    """Relative to the largest eigenvalue, the curvature up to which a direction counts as flat."""
    structure: Literal["auto", "full", "low-rank"] = "auto"
    """full: the whole Hessian, exact; low-rank: its top eigenpairs; auto: full for small networks."""
    matrix: Matrix = "hessian"
    """Whose curvature: the hessian, or its outer-product part, the ggn."""
    rank: int = 20
    """Eigenpairs a task adds where the structure is low-rank."""
    samples: int = 2000
    """Examples of a task that H_o is taken on; 0: all."""

    def __post_init__(self) -> None:
        require(
            0 <= self.threshold < 1, f"optimal-hard needs a threshold from 0 to below 1; {self.threshold} was given."
        )
        require(self.rank >= 1, f"optimal-hard needs a rank of at least 1; {self.rank} was given.")
        require(self.samples >= 0, f"optimal-hard needs samples of at least 0; {self.samples} was given.")
        for field, allowed in (("structure", ["auto", "full", "low-rank"]), ("matrix", ["hessian", "ggn"])):
            if getattr(self, field) not in allowed:
                raise unknown(f"{field} of optimal-hard:", getattr(self, field), allowed)

    def _structure(self, params: Mapping[str, Tensor]) -> HessianStructure:
        small = sum(p.numel() for p in params.values()) <= SMALL
        full = self.structure == "full" or (self.structure == "auto" and small)
        return Full(self.matrix) if full else LowRank(self.matrix, self.rank)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        self._structure(params).check(params)
        return {"loss_at_solution": next(iter(params.values())).new_zeros(0)}  # L_o(θ_o) of every finished task

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        if "steep" not in memory:
            return grads
        g, steep = to_vector(grads), memory["steep"]
        return from_vector(g - (steep @ g) @ steep, grads)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        kept = self._structure(params)
        total = kept.at(sample_risk(model, params, data, self.samples))
        if "hessian" in memory:
            total = kept.add(memory["hessian"], total)
        reached = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"loss_at_solution": reached, "hessian": total, "steep": self._steep(total), "anchor": params}

    def _steep(self, total: Tree) -> Tensor:
        """Orthonormal rows that span the directions of curvature; rows of zeros for flat ones."""
        if "full" in total:
            values, vectors = eigh_or_nan(total["full"])
            return vectors.mT * self._above(values.abs()).unsqueeze(-1)
        # Σ_o Uᵀ|s|U = WᵀW has the eigenvalues of the small W Wᵀ; with |s| no two tasks' curvatures cancel.
        w = total["values"].abs().sqrt().unsqueeze(-1) * total["vectors"]
        values, vectors = eigh_or_nan((w @ w.mT).double())
        solid = self._above(values) & (values > values.amax() * 1e-12)
        lengths = torch.where(solid, values, 1).sqrt()
        return ((vectors / lengths * solid).mT.to(w.dtype)) @ w

    def _above(self, sizes: Tensor) -> Tensor:
        return (sizes > self.threshold * sizes.amax()) & (sizes > 0)

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        reached = memory["loss_at_solution"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            moved = {k: p - memory["anchor"][k] for k, p in params.items()}
            bent = self._structure(params).product(memory["hessian"], moved)
            return reached[task] + inner(moved, bent) / 2 / reached.shape[0]

        return value
