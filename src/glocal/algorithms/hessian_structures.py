r"""Structured storage of the Hessians H_o of finished tasks: compute at a solution, add, multiply with a vector.

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
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal import rng
from glocal.algorithms.algorithm import Batch
from glocal.curvature.diagonal import diagonal
from glocal.curvature.hessian import ggn, hessian
from glocal.curvature.kronecker import kronecker_factors, kronecker_product, nearest_kronecker
from glocal.curvature.lanczos import lanczos
from glocal.curvature.operators import ggn_operator, hessian_operator
from glocal.errors import GlocalError, require, require_known, unknown
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.tree import Params, Tree, from_vector, inner, map_tree, to_vector

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
            return map_tree(lambda a, b: torch.cat([a, b]), total, new)
        result: Tree = {}
        if "diagonal" in total:
            result["diagonal"] = map_tree(torch.add, total["diagonal"], new["diagonal"])
        if "kronecker" in total:
            result["kronecker"] = {k: _merge(block, new["kronecker"][k]) for k, block in total["kronecker"].items()}
        return result

    def product(self, total: Tree, vector: Params) -> Params:
        factors = {"kronecker": {}, "diagonal": {}, **total}
        if self.merge:
            return kronecker_product(factors, vector)
        return {k: v.sum(0) for k, v in vmap(kronecker_product, (0, None))(factors, vector).items()}


def _merge(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    left, right = nearest_kronecker((a["A"], a["G"]), (b["A"], b["G"]))
    return {"A": left, "G": right}


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
        return map_tree(lambda a, b: torch.cat([a, b]), total, new)

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
    if matrix not in ("ggn", "hessian"):
        raise unknown(f"matrix of {user}:", matrix, ["ggn", "hessian"])
    if matrix == "hessian" and structure in ("diagonal", "kronecker"):
        raise GlocalError(
            f"{user}: structure={structure} needs matrix=ggn; matrix=hessian requires structure=full or low-rank."
        )
    return structures[structure]


def require_small(structure: HessianStructure, params: Params) -> None:
    """Raise an error if the network is too large for a full Hessian."""
    size = sum(p.numel() for p in params.values())
    require(
        size <= MAX_FULL_PARAMS or not isinstance(structure, Full),
        f"a full Hessian of {size:,} parameters has {size**2:,} entries; up to {MAX_FULL_PARAMS:,} parameters are "
        "allowed. Choose structure=low-rank.",
    )


def half_quadratic_form(structure: HessianStructure, total: Tree, delta: Params) -> Tensor:
    """Return ½ Δᵀ (Σ_o H_o) Δ with a gradient that reuses the product; its Hessian is wrong."""
    constant = {k: d.detach() for k, d in delta.items()}
    product = structure.product(total, constant)
    return inner(delta, product) - inner(constant, product) / 2


def task_gradient(model: Model, params: Params, data: Batch, chunk: int = 2000) -> Params:
    """Return ∇L_o(θ_o) over all data of a task, in chunks."""
    evaluated = model.eval_mode()
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for x, y in zip(data.x.split(chunk), data.y.split(chunk), strict=True):
        part = evaluated.grad(params, x, y)
        total = {k: t + part[k] * (y.shape[0] / data.y.shape[0]) for k, t in total.items()}
    return total


def sample_risk(model: Model, params: Params, data: Batch, count: int) -> Risk:
    """Return the risk on `count` random examples of a task; 0 means all of them."""
    x, y = data.x, data.y
    if 0 < count < y.shape[0]:
        chosen = rng.choose(rng.fold_in(data.key, "examples"), y.shape[0], count)
        x, y = x[chosen], y[chosen]
    return Risk.from_model(model, params, x, y)
