r"""The Taylor expansion of a task's loss at its solution, Eq. taylor-p (§4), of order 0, 1 or 2:

    \hat L_o(θ) = L_o(θ_o) + (θ − θ_o)ᵀ ∇L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o).

`taylor` stores H_o in one of the structures of `algorithms.hessian_structures`: full, low-rank (eigenpairs), Kronecker
factors or a diagonal. The first two are of the Hessian or of its outer-product part (ggn), the others of the ggn.
`exact_taylor` uses the exact H_o through Hessian-vector products, for networks of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from glocal.algorithms.hessian_structures import HessianStructure, Matrix, Structure, hessian_structure, require_small
from glocal.errors import GlocalError, first_line, require
from glocal.lens.training_trace import TrainingTrace, require_positive
from glocal.risk import Risk, unfused_ops
from glocal.tree import Params, Tree, from_vector, inner, to_vector

Approximation: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]  # θ ↦ \hat L_o(θ)
HessianProduct: TypeAlias = Callable[[Tree, Params], Params]
"""(a stored H, v) ↦ H v."""


@dataclass(frozen=True)
class Taylor:
    r"""θ ↦ \hat L_o(θ).

    `parts` is a tree of tensors, so that expansions of several runs or tasks can be stacked: value, L_o(θ_o); center,
    θ_o; from order 1 on gradient, ∇L_o(θ_o); in order 2 hessian, H_o as `product` takes it.
    """

    parts: Tree
    product: HessianProduct | None

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        return evaluate(self.parts, self.product, {k: params[k] - c for k, c in self.parts["center"].items()})


def evaluate(parts: Tree, product: HessianProduct | None, delta: Params) -> Tensor:
    r"""Return \hat L_o(θ_o + δ), Eq. taylor-p."""
    value: Tensor = parts["value"]
    if "gradient" not in parts:
        return value.clone()
    if product is None:
        return value + inner(delta, parts["gradient"])
    curvature = product(parts["hessian"], delta)
    return value + inner(delta, {k: gradient + curvature[k] / 2 for k, gradient in parts["gradient"].items()})


def taylor(
    trace: TrainingTrace,
    task: int,
    order: int = 2,
    structure: Structure = "full",
    matrix: Matrix | None = None,
    rank: int = 20,
) -> Taylor:
    """Expand L_o at θ_o on the trace's data.

    Args:
        trace: the training.
        task: o, counted from 0.
        order: 0, 1 or 2.
        structure: how H_o is stored.
        matrix: hessian or ggn; by default the hessian for full and low-rank structures, the ggn for the others.
        rank: the number of eigenpairs of a low-rank H_o.
    """
    require(order in (0, 1, 2), f"order = {order!r} was given; a Taylor expansion has order 0, 1 or 2.")
    require_positive(rank=rank)
    matrix = matrix or ("hessian" if structure in ("full", "low-rank") else "ggn")
    resolved = hessian_structure("a Taylor expansion", structure, matrix, rank)
    return expand(trace.risk(task), order, resolved if order == 2 else None)


def exact_taylor(trace: TrainingTrace, task: int, directions: Tensor | None = None) -> Taylor:
    """Expand L_o at θ_o to second order with the exact H_o.

    Without `directions` every evaluation costs one Hessian-vector product. With directions (k, P), H_o is projected
    onto their span, which costs at most k products now and none later: for points θ with θ − θ_o in the span, the
    expansion is the same.
    """
    risk, hessian = trace.risk(task), trace.hessian(task)
    with torch.no_grad():
        parts: Tree = {"value": risk.value(), "center": risk.params, "gradient": risk.gradient(), "hessian": {}}
        if directions is None:
            return Taylor(parts, lambda _, vector: hessian @ vector)
        _, values, rows = torch.linalg.svd(directions.double(), full_matrices=False)
        tolerance = max(directions.shape) * torch.finfo(directions.dtype).eps * values[0]
        basis = rows[values > tolerance].to(trace.theta(task))
        products = torch.stack([hessian @ row for row in basis])
        parts["hessian"] = {"basis": basis, "matrix": (basis.double() @ products.double().mT).to(basis)}
    return Taylor(parts, _projected_product)


def _projected_product(stored: Tree, vector: Params) -> Params:
    """Return Qᵀ K Q v for orthonormal rows Q."""
    coordinates = stored["basis"] @ to_vector(vector)
    return from_vector((stored["matrix"] @ coordinates) @ stored["basis"], vector)


def expand(risk: Risk, order: int, structure: HessianStructure | None) -> Taylor:
    """Expand a risk at its parameters."""
    with torch.no_grad(), unfused_ops(risk.module):
        parts: Tree = {"value": risk.value(), "center": {k: p.detach().clone() for k, p in risk.params.items()}}
        if order >= 1:
            parts["gradient"] = risk.gradient()
        if structure is not None:
            require_small(structure, dict(risk.params))
            try:
                parts["hessian"] = structure.at(risk)
            except RuntimeError as error:  # for example vmap over recurrent layers
                reason = first_line(error)
                raise GlocalError(f"this Hessian structure does not support the network: {reason}.") from error
    return Taylor(parts, None if structure is None else structure.product)


EXPANSIONS: dict[str, Callable[[TrainingTrace, int], Approximation]] = {
    "order 0": partial(taylor, order=0),
    "order 1": partial(taylor, order=1),
    "order 2": exact_taylor,
    "order 2, low-rank": partial(taylor, structure="low-rank"),
    "order 2, kronecker": partial(taylor, structure="kronecker"),
    "order 2, diagonal": partial(taylor, structure="diagonal"),
}


def expansions(trace: TrainingTrace) -> dict[str, list[Approximation]]:
    """Expand every learned task in all ways that the network supports."""
    supported: dict[str, list[Approximation]] = {}
    for name, make in EXPANSIONS.items():
        try:
            supported[name] = [make(trace, o) for o in range(trace.num_learned)]
        except GlocalError:
            continue  # for example a rank above the number of parameters
    return supported
