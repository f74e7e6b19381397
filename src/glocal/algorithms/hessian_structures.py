r"""Structured storage of the Hessians H_o of finished tasks, and the base class of the algorithms that use it.

- diagonal: H ≈ diag(F), P values;
- kronecker: H ≈ G ⊗ A per layer, in² + out² values per layer;
- low-rank: H ≈ Uᵀ diag(s) U with the eigenpairs of largest |s|, rank · P values per task;
- full: H, P² values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal import rng
from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Locality, Memory
from glocal.curvature.diagonal import diagonal
from glocal.curvature.hessian import ggn, hessian
from glocal.curvature.kronecker import kronecker_factors, kronecker_product, nearest_kronecker
from glocal.curvature.lanczos import lanczos
from glocal.curvature.operators import ggn_operator, hessian_operator
from glocal.errors import require, require_known
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.tree import Params, Tree, concatenate, from_vector, inner, map_tree, to_vector

Structure: TypeAlias = Literal["diagonal", "kronecker", "low-rank", "full"]
Matrix: TypeAlias = Literal["ggn", "hessian"]
MAX_FULL_PARAMS = 6_000
"""Largest network for which a P × P matrix is stored; 6,000 parameters take 144 MB."""


class HessianStructure(ABC):
    """One way to store a sum of Hessians, as a tree of tensors."""

    @abstractmethod
    def at(self, risk: Risk) -> Tree:
        """Return H_o of a task's risk."""

    def add(self, total: Tree, new: Tree) -> Tree:
        """Return the sum with one more H_o."""
        return map_tree(torch.add, total, new)

    @abstractmethod
    def product(self, total: Tree, vector: Params) -> Params:
        """Return (Σ_o H_o) v."""


class Diagonal(HessianStructure):
    """The diagonal of the Gauss–Newton matrix, equal to EWC's exact Fisher."""

    def at(self, risk: Risk) -> Tree:
        return diagonal(risk)

    def product(self, total: Tree, vector: Params) -> Params:
        return {k: total[k] * v for k, v in vector.items()}


@dataclass(frozen=True)
class Kronecker(HessianStructure):
    """Kronecker factors of the Gauss–Newton matrix.

    A sum is stored as the nearest Kronecker product or, with merge=False, as all its terms along a leading axis.
    """

    merge: bool = True

    def at(self, risk: Risk) -> Tree:
        factors = {kind: parts for kind, parts in kronecker_factors(risk).items() if parts}  # no empty branches
        return factors if self.merge else map_tree(lambda leaf: leaf[None], factors)

    def add(self, total: Tree, new: Tree) -> Tree:
        if not self.merge:
            return concatenate([total, new])
        result = {k: map_tree(torch.add, total[k], new[k]) for k in total if k == "diagonal"}
        for name, block in total.get("kronecker", {}).items():
            a, g = nearest_kronecker(*((factors["A"], factors["G"]) for factors in (block, new["kronecker"][name])))
            result.setdefault("kronecker", {})[name] = {"A": a, "G": g}
        return result

    def product(self, total: Tree, vector: Params) -> Params:
        if self.merge:
            return kronecker_product(total, vector)
        return {k: v.sum(0) for k, v in vmap(kronecker_product, (0, None))(total, vector).items()}


@dataclass(frozen=True)
class LowRank(HessianStructure):
    """The eigenpairs of largest magnitude of every H_o, by the Lanczos method, concatenated over tasks."""

    matrix: Matrix
    rank: int

    def at(self, risk: Risk) -> Tree:
        operator = ggn_operator(risk) if self.matrix == "ggn" else hessian_operator(risk)
        start = torch.ones_like(to_vector(risk.params))
        top = lanczos(operator, start, min(self.rank, start.shape[0]))
        return {"values": top.values, "vectors": top.vectors}

    def add(self, total: Tree, new: Tree) -> Tree:
        return concatenate([total, new])

    def product(self, total: Tree, vector: Params) -> Params:
        coordinates = total["vectors"] @ to_vector(vector)
        return from_vector((total["values"] * coordinates) @ total["vectors"], vector)


@dataclass(frozen=True)
class Full(HessianStructure):
    """The dense matrix, for small networks."""

    matrix: Matrix

    def at(self, risk: Risk) -> Tree:
        return {"full": ggn(risk) if self.matrix == "ggn" else hessian(risk)}

    def product(self, total: Tree, vector: Params) -> Params:
        return from_vector(total["full"] @ to_vector(vector), vector)


@cache
def hessian_structure(user: str, structure: str, matrix: str, rank: int) -> HessianStructure:
    """Return the structure with this name; `user` is the algorithm named in errors."""
    structures: dict[str, Any] = {
        "diagonal": Diagonal(),
        "kronecker": Kronecker(),
        "low-rank": LowRank(matrix, rank),  # type: ignore[arg-type]
        "full": Full(matrix),  # type: ignore[arg-type]
    }
    require_known(f"structure of {user}:", structure, structures)
    require_known(f"matrix of {user}:", matrix, ("ggn", "hessian"))
    message = f"{user}: structure={structure} needs matrix=ggn; matrix=hessian requires structure=full or low-rank."
    require(matrix == "ggn" or structure in ("full", "low-rank"), message)
    return structures[structure]


def require_small(structure: HessianStructure, params: Params) -> None:
    """Raise an error if the network is too large for a full Hessian."""
    size = sum(p.numel() for p in params.values())
    require(
        size <= MAX_FULL_PARAMS or not isinstance(structure, Full),
        f"a full Hessian of {size:,} parameters has {size**2:,} entries; up to {MAX_FULL_PARAMS:,} parameters are "
        "allowed. Choose structure=low-rank.",
    )


@dataclass(frozen=True)
class SumOfHessians(Algorithm):
    r"""Base class: store Σ_o H_o in one structure, and expand the finished tasks' losses around the last solution.

    Only the sum is stored, so each finished task is assigned an equal share of its quadratic. Hessians are computed at
    the solutions: local.
    """

    locality: ClassVar[Locality] = "local"

    samples: int = 2000
    """Number of examples per task for H_o; 0: all."""

    def _structure(self, params: Mapping[str, Tensor]) -> HessianStructure:
        """Return the structure in which Σ_o H_o is stored."""
        raise NotImplementedError

    def _expansion(self, memory: Memory, delta: Params, quadratic: Tensor) -> Tensor:
        """Return Σ_o \\hat L_o − L_o(θ_o) at θ_{t−1} + Δ, given ½ Δᵀ (Σ_o H_o) Δ."""
        return quadratic

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        require_small(self._structure(params), params)
        return {
            "anchor": {k: p.clone() for k, p in params.items()},
            "loss_at_solution": next(iter(params.values())).new_zeros(0),  # L_o(θ_o) of the finished tasks
        }

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        structure = self._structure(params)
        x, y = data.x, data.y
        if 0 < self.samples < y.shape[0]:
            indices = rng.choose(rng.fold_in(data.key, "examples"), y.shape[0], self.samples)
            x, y = x[indices], y[indices]
        hessian = structure.at(Risk.from_model(model, params, x, y))
        if "hessian" in memory:
            hessian = structure.add(memory["hessian"], hessian)
        losses = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        return {"anchor": params, "loss_at_solution": losses, "hessian": hessian}

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        losses = memory["loss_at_solution"]

        def value(params: Mapping[str, Tensor]) -> Tensor:
            delta = {k: p - memory["anchor"][k] for k, p in params.items()}
            quadratic = inner(delta, self._structure(params).product(memory["hessian"], delta)) / 2
            return losses[task] + self._expansion(memory, delta, quadratic) / losses.shape[0]

        return value

    def _first_order_expansion(self, memory: Memory, params: Params) -> Tensor:
        """Return the expansion with a gradient that reuses the product; its Hessian is wrong."""
        delta = {k: p - memory["anchor"][k] for k, p in params.items()}
        constant = {k: d.detach() for k, d in delta.items()}
        product = self._structure(params).product(memory["hessian"], constant)
        return self._expansion(memory, delta, inner(delta, product) - inner(constant, product) / 2)
