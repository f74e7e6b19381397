r"""The optimal local algorithms of §4, soft (Eq. general-opt-local) and hard (Theorem 4.1), and the Kronecker-factored
online Laplace approximation (§5.2; Ritter et al. 2018). All are local.

The optimal algorithms expand the loss of every finished task to second order at its solution (Eq. taylor-p),

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

from glocal.algorithms.algorithm import Batch, Bounds, Memory
from glocal.algorithms.hessian_structures import (
    Full,
    HessianStructure,
    Kronecker,
    LowRank,
    Matrix,
    Structure,
    SumOfHessians,
    hessian_structure,
)
from glocal.algorithms.implicit import QuadraticPenalty
from glocal.curvature.lanczos import eigh_or_nan
from glocal.errors import require
from glocal.networks.model import Model
from glocal.risk import MAX_CHUNK_SIZE, Risk
from glocal.tree import Params, Tree, from_vector, inner, to_vector


@dataclass(frozen=True)
class OptimalSoft(QuadraticPenalty):
    r"""Minimise L_t(θ) + λ Σ_o ( \hat L_o(θ) − L_o(θ_o) ); for λ = 1 this is t · \hat L^MT_t of Eq. approxmtloss.

    The printed Eq. general-opt-local divides the sum by t: weighing='stated'.
    """

    name: ClassVar[str] = "optimal-soft"
    family: ClassVar[str] = "quadratic"
    memory_contents: ClassVar[str] = (
        "the last solution, Σ ∇L_o + v, and Σ H_o in the chosen structure (implicit: and eigenbasis)"
    )
    memory_size: ClassVar[str] = (
        "2 P + P (diagonal), P² (full), rank P T (low-rank), Σ (in² + out²) (kronecker); "
        "implicit: P more (diagonal), P + Σ (in² + out²) more (kronecker)"
    )
    at_least: ClassVar[Bounds] = {"penalty": 0, "rank": 1, "samples": 0}

    structure: Structure = "kronecker"
    """Storage of H_o: diagonal, kronecker, low-rank or full."""
    matrix: Matrix = "ggn"
    """Curvature matrix: ggn (outer-product part, positive semi-definite) or hessian (full and low-rank only)."""
    rank: int = 20
    """Number of eigenpairs per task for structure=low-rank."""
    gradient: bool = True
    """Include the term Σ ∇L_o(θ_o)."""
    recentred: bool = True
    """Include the term v, which accounts for the change of the expansion point from θ_o to θ_{t−1}."""
    weighing: Literal["joint", "stated"] = "joint"
    """Weight of an old task: joint: equal to the new one; stated: 1/t, as the equation is printed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hessian_structure(self.name, self.structure, self.matrix, self.rank)
        message = f"optimal-soft: implicit steps need structure=diagonal or kronecker; '{self.structure}' was given."
        require(not self.implicit or self.structure in ("diagonal", "kronecker"), message)

    def _structure(self, params: Mapping[str, Tensor]) -> HessianStructure:
        return hessian_structure(self.name, self.structure, self.matrix, self.rank)

    def _expansion(self, memory: Memory, delta: Params, quadratic: Tensor) -> Tensor:
        return memory["constant"] + inner(delta, memory["linear"]) + quadratic

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return super().init(model, params, example) | {
            "linear": {k: torch.zeros_like(p) for k, p in params.items()},
            "constant": next(iter(params.values())).new_zeros(()),  # Σ_o \hat L_o(θ_{t−1}) − L_o(θ_o)
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = model.loss(params, batch.x, batch.y)
        if "hessian" not in memory:
            return loss
        return loss + self._weight(memory) * self._first_order_expansion(memory, params)

    def _weight(self, memory: Memory) -> float | Tensor:
        tasks = memory["loss_at_solution"].shape[0] + 1
        return self.penalty / tasks if self.weighing == "stated" else self.penalty

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        linear, constant = memory["linear"], memory["constant"]
        if "hessian" in memory:
            delta = {k: p - memory["anchor"][k] for k, p in params.items()}
            product = self._structure(params).product(memory["hessian"], delta)
            constant = self._expansion(memory, delta, inner(delta, product) / 2)
            linear = {k: b + product[k] for k, b in linear.items()} if self.recentred else linear
        if self.gradient:
            evaluated, risk = model.eval_mode(), Risk.from_model(model, params, data.x, data.y)
            gradient = risk.mean_over_chunks(MAX_CHUNK_SIZE, lambda part: evaluated.grad(params, part.x, part.y))
            linear = {k: b + gradient[k] for k, b in linear.items()}
        return super().consolidate(model, params, memory, data) | {"constant": constant, "linear": linear}


@dataclass(frozen=True)
class Laplace(QuadraticPenalty):
    r"""Minimise L_t plus one quadratic for all finished tasks, of which each task is assigned an equal share:

        \hat L_o(θ) = L_o(θ_o) + (1/(t−1)) (λ/2) (θ − θ_{t−1})ᵀ Λ_{t−1} (θ − θ_{t−1}),   Λ_t = Λ_{t−1} + H_t(θ_t).

    With λ = 1 and n examples per task, over which L_t and H_t average, n times the quadratic is, up to a constant, the
    negative log-density of the Gaussian posterior N(θ_{t−1}, (n Λ_{t−1})⁻¹), the prior of the next task. H_t is the
    Gauss–Newton matrix with one product G ⊗ A per layer; unlike EWC it includes interactions between the parameters of
    a layer. Their sum is not such a product: sums='nearest' stores the nearest one, sums='each' all factors.
    """

    name: ClassVar[str] = "laplace"
    family: ClassVar[str] = "quadratic"
    memory_contents: ClassVar[str] = (
        "the last solution and two Kronecker factors per layer (sums=each: and task; implicit: and eigenbasis)"
    )
    memory_size: ClassVar[str] = "P + Σ (in² + out²); sums=each: P + T Σ (in² + out²); implicit: 2 P + 2 Σ (in² + out²)"
    at_least: ClassVar[Bounds] = {"penalty": 0, "samples": 0}

    samples: int = 0
    """Number of examples per task for the Kronecker factors; 0: all."""
    sums: Literal["nearest", "each"] = "nearest"
    """Storage of Σ_o G_o ⊗ A_o: nearest (the nearest Kronecker product) or each (all terms)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        message = "laplace: implicit steps need one Kronecker product per layer, sums=nearest; 'each' was given."
        require(not self.implicit or self.sums == "nearest", message)

    def _structure(self, params: Mapping[str, Tensor]) -> HessianStructure:
        return Kronecker(merge=self.sums == "nearest")

    def _expansion(self, memory: Memory, delta: Params, quadratic: Tensor) -> Tensor:
        return self.penalty * quadratic

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = model.loss(params, batch.x, batch.y)
        return loss + self._first_order_expansion(memory, params) if "hessian" in memory else loss


MAX_AUTO_FULL_PARAMS = 2_000
"""Largest network for which structure='auto' stores the full Hessian."""


@dataclass(frozen=True)
class OptimalHard(SumOfHessians):
    r"""Minimise L_t in the null space of the finished tasks' average Hessian, where to second order

        \hat L_o(θ) = L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o) = L_o(θ_o).

    Gradients are projected orthogonally to the eigenvectors of Σ H_o whose |eigenvalue| exceeds `threshold` times the
    largest. As with OGD, momentum keeps steps in the null space; weight decay, Adam and kept momentum do not.
    """

    name: ClassVar[str] = "optimal-hard"
    family: ClassVar[str] = "constraint"
    memory_contents: ClassVar[str] = "Σ H_o and its eigenvectors above the threshold"
    memory_size: ClassVar[str] = "2 P² (full) or 2 rank P T (low-rank)"
    at_least: ClassVar[Bounds] = {"rank": 1, "samples": 0}

    threshold: float = 1e-3
    """Curvature, relative to the largest eigenvalue, up to which a direction counts as flat."""
    structure: Literal["auto", "full", "low-rank"] = "auto"
    """Storage of H_o: full (exact), low-rank (top eigenpairs), or auto: full up to 2,000 parameters."""
    matrix: Matrix = "hessian"
    """Curvature matrix: the hessian, or its outer-product part, the ggn."""
    rank: int = 20
    """Number of eigenpairs per task for structure=low-rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = 0 <= self.threshold < 1
        require(allowed, f"optimal-hard.threshold = {self.threshold} was given; it must be at least 0 and below 1.")

    def _structure(self, params: Mapping[str, Tensor]) -> HessianStructure:
        small = sum(p.numel() for p in params.values()) <= MAX_AUTO_FULL_PARAMS
        full = self.structure == "full" or (self.structure == "auto" and small)
        return Full(self.matrix) if full else LowRank(self.matrix, self.rank)

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        if "curved" not in memory:
            return grads
        g, curved = to_vector(grads), memory["curved"]
        return from_vector(g - (curved @ g) @ curved, grads)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        memory = super().consolidate(model, params, memory, data)
        return memory | {"curved": self._curved(memory["hessian"])}

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
