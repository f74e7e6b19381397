r"""Theorem 1 (prop:1) beside what it assumes. If every θ_o is a local minimum of L_o, the solutions are so near to each
other that cubes of their distances do not count, and nothing was forgotten before, E(1) = … = E(t−1) = 0, then
(Eq. forgetting-lowerbound)

    E(t) = ½ Δ_tᵀ \bar H_{<t} Δ_t ≥ 0,   \bar H_{<t} = (1/t) Σ_{o<t} H_o,

and E(t) = 0 exactly where \bar H_{<t} Δ_t = 0, for \bar H is positive semi-definite at minima. This is E(t) averaged
over t tasks; averaged over t − 1, as in the base case of the proof, 1/(t−1) stands for 1/t in both.

Why it holds: at minima every E_o(θ_τ) = ½ (θ_τ − θ_o)ᵀ H_o (θ_τ − θ_o) ≥ 0, so a zero average has only zero terms, and
H_o (θ_{t−1} − θ_o) = 0 for all o: then v = 0 in Eq. eqt:forgetting-rec. Where something was forgotten before, the right
side is no bound: an update that leads back has E(t) = 0 and a positive quadratic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.curvature.spectrum import quadrature
from glocal.lens.forgetting import average, averaged, measured
from glocal.lens.trace import TrainingTrace, dot, require_positive
from glocal.metrics import Over


@dataclass(frozen=True)
class Premises:
    """How far the theorem's assumptions hold, each (N,): all of `forgotten`, `slope` and `reach` should be 0, and
    `lowest` not below it."""

    forgotten: Tensor  # max_{τ<t} |E(τ)|
    slope: Tensor  # max_{o<t} ‖∇L_o(θ_o)‖
    lowest: Tensor  # min_{o<t} of the smallest eigenvalue of H_o
    reach: Tensor  # max_{i,k≤t} ‖θ_i − θ_k‖³


@dataclass(frozen=True)
class Theorem1:
    r"""After every task t, each (N,); of the first task there is nothing to say but E = 0."""

    over: Over
    measured: Tensor  # E(t)
    quadratic: Tensor  # ½ Δ_tᵀ \bar H Δ_t
    condition: Tensor  # ‖\bar H Δ_t‖
    relative: Tensor  # ‖Σ_o H_o Δ_t‖ / (Σ_o ‖H_o‖ ‖Δ_t‖), from 0 to 1 up to the precision of ‖H_o‖
    premises: Premises


def theorem1(trace: TrainingTrace, over: Over = "t", steps: int = 30, seed: int = 0) -> Theorem1:
    """Both sides and the premises: one Hessian product a pair o < t, and `steps` a task for its extreme eigenvalues."""
    n, count = trace.num_learned, averaged(trace.num_learned, over)
    require_positive(steps=steps)
    forgotten = average(measured(trace), over)
    begin = trace.random_start(seed)
    turned = [torch.zeros_like(begin) for _ in range(n)]  # Σ_{o<t} H_o Δ_t
    slopes, lowest, norms = [], [], []
    for o in range(n):
        times = trace.hessian(o)
        nodes, _ = quadrature(times, begin, steps)
        slopes.append(trace.gradient(o).double().norm())
        lowest.append(nodes[0])
        norms.append(nodes.abs().max())
        for t in range(o + 1, n):
            turned[t] += times @ trace.update(t)
    updates = [trace.update(t) for t in range(n)]
    bent = torch.stack([dot(a, b) for a, b in zip(updates, turned, strict=True)]).cpu()
    pushed = torch.stack([part.double().norm() for part in turned]).cpu()
    lengths = torch.stack([part.double().norm() for part in updates]).cpu()
    before = torch.nn.functional.pad(forgotten[1:].abs(), (1, 0))  # E(1) = 0, by both definitions
    premises = Premises(
        _earlier(before.cummax(0).values),
        _earlier(torch.stack(slopes).cpu().cummax(0).values),
        _earlier(torch.stack(lowest).cpu().cummin(0).values),
        _reach(trace),
    )
    largest = torch.nn.functional.pad(torch.stack(norms).cpu().cumsum(0)[:-1], (1, 0))
    return Theorem1(over, forgotten, bent / 2 / count, pushed / count, pushed / (largest * lengths), premises)


def _earlier(values: Tensor) -> Tensor:
    """What held before each task; NaN before the first."""
    return torch.nn.functional.pad(values[:-1], (1, 0), value=torch.nan)


def _reach(trace: TrainingTrace) -> Tensor:
    points = [trace.theta(t) for t in range(trace.num_learned)]
    farthest = torch.zeros(len(points), dtype=torch.float64)
    for t in range(1, len(points)):
        apart = torch.stack([(points[t] - p).double().norm() for p in points[:t]]).max().cpu()
        farthest[t] = torch.maximum(farthest[t - 1], apart)
    return farthest**3
