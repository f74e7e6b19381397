r"""Theorem 4.1 (prop:1) and its premises. If every θ_o is a local minimum of L_o, third powers of the distances between
solutions are negligible, and nothing was forgotten before, E(1) = … = E(t−1) = 0, then (Eq. forgetting-lowerbound)

    E(t) = ½ Δ_tᵀ \bar H_{<t} Δ_t ≥ 0,   \bar H_{<t} = (1/t) Σ_{o<t} H_o,

and E(t) = 0 exactly if \bar H_{<t} Δ_t = 0, since \bar H is positive semi-definite at minima. This is E(t) averaged
over t tasks; averaged over t − 1, as in the base case of the proof, both have 1/(t−1) instead of 1/t.

Proof idea: at minima every E_o(θ_τ) = ½ (θ_τ − θ_o)ᵀ H_o (θ_τ − θ_o) ≥ 0, so a zero average has only zero terms, and
H_o (θ_{t−1} − θ_o) = 0 for all o: then v = 0 in Eq. eqt:forgetting-rec. If something was forgotten before, the right
side is no bound: an update back to the old solution has E(t) = 0 and a positive quadratic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from glocal.curvature.spectrum import quadrature
from glocal.lens.forgetting import average, measured_forgetting, task_counts
from glocal.lens.trace import TrainingTrace, dot, require_positive
from glocal.metrics import Over


@dataclass(frozen=True)
class Premises:
    """How far the theorem's assumptions hold, each (N,). The minimal eigenvalue should be at least 0, the others 0."""

    max_forgetting: Tensor  # max_{τ<t} |E(τ)|
    max_gradient: Tensor  # max_{o<t} ‖∇L_o(θ_o)‖
    min_eigenvalue: Tensor  # min_{o<t} of the smallest eigenvalue of H_o
    max_distance_cubed: Tensor  # max_{i,k≤t} ‖θ_i − θ_k‖³


@dataclass(frozen=True)
class Theorem1:
    r"""Both sides of the theorem after every task t, each (N,)."""

    over: Over
    measured: Tensor  # E(t)
    quadratic: Tensor  # ½ Δ_tᵀ \bar H Δ_t
    condition: Tensor  # ‖\bar H Δ_t‖
    relative: Tensor  # ‖Σ_o H_o Δ_t‖ / (Σ_o ‖H_o‖ ‖Δ_t‖), from 0 to 1 up to the precision of ‖H_o‖
    premises: Premises


def theorem1(trace: TrainingTrace, over: Over = "t", steps: int = 30, seed: int = 0) -> Theorem1:
    """Measure both sides and the premises.

    Args:
        trace: the training.
        over: whether E(t) is averaged over 't' or 't-1' tasks.
        steps: Lanczos steps per task for the extreme eigenvalues, beside one Hessian-vector product per pair o < t.
        seed: of the start vector.
    """
    n, count = trace.num_learned, task_counts(trace.num_learned, over)
    require_positive(steps=steps)
    forgotten = average(measured_forgetting(trace), over)
    start = trace.random_start(seed)
    products = [torch.zeros_like(start) for _ in range(n)]  # Σ_{o<t} H_o Δ_t
    gradients, lowest, norms = [], [], []
    for o in range(n):
        hessian = trace.hessian(o)
        nodes, _ = quadrature(hessian, start, steps)
        gradients.append(trace.gradient(o).double().norm())
        lowest.append(nodes[0])
        norms.append(nodes.abs().max())
        for t in range(o + 1, n):
            products[t] += hessian @ trace.update(t)
    updates = [trace.update(t) for t in range(n)]
    quadratic = torch.stack([dot(a, b) for a, b in zip(updates, products, strict=True)]).cpu()
    product_norms = torch.stack([part.double().norm() for part in products]).cpu()
    lengths = torch.stack([part.double().norm() for part in updates]).cpu()
    past = pad(forgotten[1:].abs(), (1, 0))  # E(1) = 0 by both definitions
    premises = Premises(
        _before(past.cummax(0).values),
        _before(torch.stack(gradients).cpu().cummax(0).values),
        _before(torch.stack(lowest).cpu().cummin(0).values),
        _max_distance_cubed(trace),
    )
    norm_sums = pad(torch.stack(norms).cpu().cumsum(0)[:-1], (1, 0))
    relative = product_norms / (norm_sums * lengths)
    return Theorem1(over, forgotten, quadratic / 2 / count, product_norms / count, relative, premises)


def _before(values: Tensor) -> Tensor:
    """Return the values before each task; NaN before the first."""
    return pad(values[:-1], (1, 0), value=torch.nan)


def _max_distance_cubed(trace: TrainingTrace) -> Tensor:
    thetas = [trace.theta(t) for t in range(trace.num_learned)]
    farthest = torch.zeros(len(thetas), dtype=torch.float64)
    for t in range(1, len(thetas)):
        distances = torch.stack([(thetas[t] - theta).double().norm() for theta in thetas[:t]])
        farthest[t] = torch.maximum(farthest[t - 1], distances.max().cpu())
    return farthest**3
