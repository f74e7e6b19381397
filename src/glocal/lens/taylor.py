r"""The Taylor expansion of a task's loss at its solution, Eq. taylor-p (§4), of order 0, 1 or 2:

    \hat L_o(θ) = L_o(θ_o) + (θ − θ_o)ᵀ ∇L_o(θ_o) + ½ (θ − θ_o)ᵀ H_o (θ − θ_o).

H_o has the structures of `algorithms.hessian_structures`: full, the top eigenpairs by Lanczos's method,
Kronecker factors, a diagonal. The first two are of the Hessian or of its outer-product part, the ggn; the others are of
the ggn, and so is a full one on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.algorithms.hessian_structures import HessianStructure, Matrix, Structure, hessian_structure
from glocal.errors import GlocalError, require
from glocal.lens.trace import TrainingTrace
from glocal.risk import Risk, unfused_ops
from glocal.tree import Params, Tree, inner

ORDERS = (0, 1, 2)


@dataclass(frozen=True)
class Taylor:
    """θ ↦ \\hat L_o(θ). `parts` is a tree of tensors, so that expansions of many runs or tasks can be stacked:

    level, L_o(θ_o); centre, θ_o; from the first order on slope, ∇L_o(θ_o); in the second hessian, H_o in its form.
    """

    parts: Tree
    form: HessianStructure | None

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        return value(self.parts, self.form, params)


def taylor(
    trace: TrainingTrace,
    task: int,
    order: int = 2,
    structure: Structure = "full",
    matrix: Matrix | None = None,
    rank: int = 20,
) -> Taylor:
    """The expansion of L_o at θ_o on the trace's data. `matrix` is the hessian for full and low-rank structures and
    the ggn for the others, if not said; `rank` is the number of eigenpairs of a low-rank one."""
    kept = chosen(order, structure, matrix, rank)
    return expand(trace.risk(task), order, kept)


def chosen(order: int, structure: Structure, matrix: Matrix | None = None, rank: int = 20) -> HessianStructure | None:
    """The form of H_o, where the order asks for one."""
    require(order in ORDERS, f"a Taylor expansion of order {order!r} was asked for; allowed: 0, 1, 2.")
    require(rank >= 1, f"a low-rank Hessian has a rank of at least 1; {rank} was given.")
    matrix = matrix or ("hessian" if structure in ("full", "low-rank") else "ggn")
    found = hessian_structure("a Taylor expansion", structure, matrix, rank)
    return found if order == 2 else None


def expand(risk: Risk, order: int, kept: HessianStructure | None) -> Taylor:
    """Expand a risk at its parameters."""
    with torch.no_grad(), unfused_ops(risk.module):
        parts: Tree = {"level": risk.value(), "centre": {k: p.detach().clone() for k, p in risk.params.items()}}
        if order >= 1:
            parts["slope"] = risk.gradient()
        if kept is not None:
            kept.check(dict(risk.params))
            try:
                parts["hessian"] = kept.at(risk)
            except RuntimeError as error:  # of torch: samples of recurrent layers cannot be mapped, for one
                reason = str(error).strip().splitlines()[0]
                raise GlocalError(f"the Hessian of this network is not made in this form: {reason}.") from error
    return Taylor(parts, kept)


def value(parts: Tree, kept: HessianStructure | None, params: Mapping[str, Tensor]) -> Tensor:
    """Eq. taylor-p from its parts, as far as they go."""
    return after(parts, kept, {k: params[k] - centre for k, centre in parts["centre"].items()})


def after(parts: Tree, kept: HessianStructure | None, moved: Params) -> Tensor:
    """The same at θ = θ_o + `moved`."""
    level: Tensor = parts["level"]
    if "slope" not in parts:
        return level.clone()
    if kept is None:
        return level + inner(moved, parts["slope"])
    bent = kept.product(parts["hessian"], moved)
    return level + inner(moved, {k: slope + bent[k] / 2 for k, slope in parts["slope"].items()})
