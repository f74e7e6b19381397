r"""How the Hessians H_o of finished tasks are kept. A form can be made at a solution, added to, and multiplied with:

- diagonal, H ≈ diag(F): P numbers;
- kronecker, H ≈ one G ⊗ A a layer: in² + out² numbers a layer;
- low-rank, H ≈ Uᵀ diag(s) U, the eigenpairs of largest |s|: rank · P numbers more with every task;
- full, H: P² numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.algorithm import Batch
from glocal.algorithms.ewc import task_fisher
from glocal.curvature import kronecker
from glocal.curvature.hessian import hessian, outer_product
from glocal.curvature.lanczos import lanczos
from glocal.curvature.nearest import nearest_kronecker
from glocal.curvature.products import Product, gauss_newton_product, hessian_product
from glocal.curvature.vector import flatten, unflatten
from glocal.errors import GlocalError, require, unknown
from glocal.networks.model import Model
from glocal.tree import Params, Tree, inner, map_tree

Structure: TypeAlias = Literal["diagonal", "kronecker", "low-rank", "full"]
Matrix: TypeAlias = Literal["ggn", "hessian"]
LARGEST_FULL = 6_000
"""Parameters up to which a P × P matrix is made; 6,000 need 144 MB."""


class Form(Protocol):
    """One way to keep the sum of Hessians, as a tree of tensors."""

    def check(self, params: Params) -> None:
        """Raise if the network is too large for it."""
        ...

    def at(self, model: Model, params: Params, data: Batch) -> Tree:
        """H_o at θ_o, on the data."""
        ...

    def add(self, held: Tree, new: Tree) -> Tree:
        """The sum so far and one more."""
        ...

    def product(self, held: Tree, vector: Params) -> Params:
        """(Σ_o H_o) v."""
        ...


@dataclass(frozen=True)
class Diagonal:
    """The diagonal of the Gauss–Newton matrix, that is EWC's exact Fisher."""

    def check(self, params: Params) -> None: ...

    def at(self, model: Model, params: Params, data: Batch) -> Tree:
        return task_fisher(model, params, data, "exact")

    def add(self, held: Tree, new: Tree) -> Tree:
        return map_tree(torch.add, held, new)

    def product(self, held: Tree, vector: Params) -> Params:
        return {k: held[k] * v for k, v in vector.items()}


@dataclass(frozen=True)
class Kronecker:
    """Kronecker factors of the Gauss–Newton matrix; a sum of them as the nearest one, or each (a leading axis o)."""

    merge: bool = True

    def check(self, params: Params) -> None: ...

    def at(self, model: Model, params: Params, data: Batch) -> Tree:
        evaluated = model.eval_mode()
        directions = lambda outputs: model.criterion.output_hessian_sqrt(outputs)  # noqa: E731
        found = kronecker.mean_factors(
            evaluated.module, params, evaluated.buffers, evaluated.prepare(data.x), directions
        )
        found = {kind: parts for kind, parts in found.items() if parts}  # a memory has no empty branches
        return found if self.merge else map_tree(lambda leaf: leaf[None], found)

    def add(self, held: Tree, new: Tree) -> Tree:
        if not self.merge:
            return map_tree(lambda a, b: torch.cat([a, b]), held, new)
        total: Tree = {"diagonal": map_tree(torch.add, held["diagonal"], new["diagonal"])} if "diagonal" in held else {}
        if "kronecker" in held:
            total["kronecker"] = {k: _merged(block, new["kronecker"][k]) for k, block in held["kronecker"].items()}
        return total

    def product(self, held: Tree, vector: Params) -> Params:
        whole = {"kronecker": {}, "diagonal": {}, **held}
        if self.merge:
            return kronecker.multiply(whole, vector)
        return {k: v.sum(0) for k, v in vmap(kronecker.multiply, (0, None))(whole, vector).items()}


def _merged(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    left, right = nearest_kronecker((a["A"], a["G"]), (b["A"], b["G"]))
    return {"A": left, "G": right}


@dataclass(frozen=True)
class LowRank:
    """The eigenpairs of largest magnitude of each H_o, by Lanczos's method, one task's after the other's."""

    matrix: Matrix
    rank: int

    def check(self, params: Params) -> None: ...

    def at(self, model: Model, params: Params, data: Batch) -> Tree:
        product = task_product(model, params, data, self.matrix)
        start = torch.ones_like(flatten(params))
        matvec = lambda v: flatten(product(unflatten(v, params)))  # noqa: E731
        found = lanczos(matvec, start, min(self.rank, start.shape[0]))
        return {"values": found.values, "vectors": found.vectors}

    def add(self, held: Tree, new: Tree) -> Tree:
        return map_tree(lambda a, b: torch.cat([a, b]), held, new)

    def product(self, held: Tree, vector: Params) -> Params:
        along = held["vectors"] @ flatten(vector)
        return unflatten((held["values"] * along) @ held["vectors"], vector)


@dataclass(frozen=True)
class Full:
    """The whole matrix, for small networks."""

    matrix: Matrix

    def check(self, params: Params) -> None:
        size = sum(p.numel() for p in params.values())
        require(
            size <= LARGEST_FULL,
            f"a full Hessian of {size:,} parameters has {size**2:,} entries; up to {LARGEST_FULL:,} parameters are "
            "allowed. Choose structure=low-rank.",
        )

    def at(self, model: Model, params: Params, data: Batch) -> Tree:
        evaluated = model.eval_mode()
        network = (evaluated.module, params, evaluated.buffers, evaluated.prepare(data.x))
        if self.matrix == "ggn":
            return {"full": outer_product(*network, model.criterion)}
        return {"full": hessian(*network, data.y, model.criterion)}

    def add(self, held: Tree, new: Tree) -> Tree:
        return map_tree(torch.add, held, new)

    def product(self, held: Tree, vector: Params) -> Params:
        return unflatten(held["full"] @ flatten(vector), vector)


@cache
def form(whose: str, structure: str, matrix: str, rank: int) -> Form:
    """The form by its name; `whose` algorithm asks, for the error's sake."""
    forms: dict[str, Any] = {
        "diagonal": Diagonal(),
        "kronecker": Kronecker(),
        "low-rank": LowRank(matrix, rank),  # type: ignore[arg-type]
        "full": Full(matrix),  # type: ignore[arg-type]
    }
    if structure not in forms:
        raise unknown(f"structure of {whose}:", structure, forms)
    if matrix not in ("ggn", "hessian"):
        raise unknown(f"matrix of {whose}:", matrix, ["ggn", "hessian"])
    if matrix == "hessian" and structure in ("diagonal", "kronecker"):
        raise GlocalError(
            f"{whose} keeps a {structure} structure of the ggn alone; matrix=hessian goes with full or low-rank."
        )
    return forms[structure]


def half_square(kept: Form, held: Tree, moved: Params) -> Tensor:
    """½ Δᵀ (Σ_o H_o) Δ. Its gradient, the product with Δ, is made once and not by differentiating it."""
    still = {k: d.detach() for k, d in moved.items()}
    bent = kept.product(held, still)
    return inner(moved, bent) - inner(still, bent) / 2


def task_product(model: Model, params: Params, data: Batch, matrix: Matrix) -> Product:
    """v ↦ H_o v on a task's data."""
    evaluated = model.eval_mode()
    module, buffers, x = evaluated.module, evaluated.buffers, evaluated.prepare(data.x)
    if matrix == "ggn":
        return gauss_newton_product(module, params, buffers, x, model.criterion)
    return hessian_product(module, params, buffers, x, data.y, model.criterion, alike=True)


def task_gradient(model: Model, params: Params, data: Batch, chunk: int = 2000) -> Params:
    """∇L_o(θ_o) over all the task's data, a bounded number of examples at a time."""
    evaluated = model.eval_mode()
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for x, y in zip(data.x.split(chunk), data.y.split(chunk), strict=True):
        part = evaluated.grad(params, x, y)
        total = {k: t + part[k] * (y.shape[0] / data.y.shape[0]) for k, t in total.items()}
    return total


def sample(data: Batch, count: int) -> Batch:
    """`count` of the task's examples, drawn at random without replacement; all of them if it is 0 or larger."""
    if not 0 < count < data.y.shape[0]:
        return data
    chosen = data.random.topk(count).indices
    return data._replace(x=data.x[chosen], y=data.y[chosen], random=data.random[chosen])
