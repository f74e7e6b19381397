r"""The second-order expansion of a task's loss at its solution, Eq. taylor-p, with its whole Hessian H_o: for networks
of any size, because H_o is known by its products alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glocal.errors import require
from glocal.lens.approximation import Approximation
from glocal.lens.trace import TrainingTrace
from glocal.tree import to_vector


def whole(trace: TrainingTrace, task: int) -> Approximation:
    r"""θ ↦ \hat L_o(θ), one product every time."""
    level, origin, slope = _first_order(trace, task)
    times = trace.hessian(task)

    def value(params: Mapping[str, Tensor]) -> Tensor:
        moved = to_vector(params) - origin
        return level + (slope + (times @ moved) / 2) @ moved

    return value


def within(trace: TrainingTrace, task: int, directions: Tensor) -> Approximation:
    r"""The same where θ − θ_o = Dᵀ c for some coordinates c, D being independent directions (k, P):

        \hat L_o(θ) = L_o(θ_o) + (θ − θ_o)ᵀ ∇L_o(θ_o) + ½ cᵀ (D H_o Dᵀ) c.

    It takes k products, made now, and none to evaluate. Elsewhere θ − θ_o counts as what of it lies in their span.
    """
    rank = int(torch.linalg.matrix_rank(directions.double()))
    independent = f"directions are independent; {len(directions)} of rank {rank} were given."
    require(0 < len(directions) == rank, independent)
    level, origin, slope = _first_order(trace, task)
    times = trace.hessian(task)
    bent = torch.stack([times @ d for d in directions])
    curvature = (directions.double() @ bent.double().mT).to(origin)
    back = torch.linalg.pinv(directions.double()).to(origin)

    def value(params: Mapping[str, Tensor]) -> Tensor:
        moved = to_vector(params) - origin
        along = moved @ back
        return level + moved @ slope + along @ curvature @ along / 2

    return value


def _first_order(trace: TrainingTrace, task: int) -> tuple[Tensor, Tensor, Tensor]:
    """L_o(θ_o), θ_o and ∇L_o(θ_o)."""
    with torch.no_grad():
        level = trace.value(task, trace.solution(task))
    return level, trace.theta(task), trace.gradient(task)
