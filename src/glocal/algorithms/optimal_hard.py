r"""The optimal local algorithm, hard (Theorem 1, Eq. multi-tasks-obj-2): move only where the past is flat.

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
from glocal.algorithms.hessian_structures import Full, HessianStructure, LowRank, Matrix, sample_risk
from glocal.curvature.lanczos import eigh_or_nan
from glocal.errors import require, unknown
from glocal.networks.model import Model
from glocal.tree import Params, Tree, from_vector, inner, to_vector

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
    remembers: ClassVar[str] = "Σ H_o and the eigenvectors that are not flat"
    grows: ClassVar[str] = "2 P² (full) or 2 rank P T (low-rank)"

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
        return {"reached": next(iter(params.values())).new_zeros(0)}  # L_o(θ_o) of every finished task

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
        reached = torch.cat([memory["reached"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"reached": reached, "hessian": total, "steep": self._steep(total), "anchor": params}

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
        reached = memory["reached"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            moved = {k: p - memory["anchor"][k] for k, p in params.items()}
            bent = self._structure(params).product(memory["hessian"], moved)
            return reached[task] + inner(moved, bent) / 2 / reached.shape[0]

        return value
