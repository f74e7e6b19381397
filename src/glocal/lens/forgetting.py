r"""Forgetting predicted and measured. Eq. forgetting-quadratic says of a task o and a later solution θ_t

    E_o(θ_t) = L_o(θ_t) − L_o(θ_o) ≈ (θ_t − θ_o)ᵀ ∇L_o(θ_o) + ½ (θ_t − θ_o)ᵀ H_o (θ_t − θ_o),

and Eq. eqt:forgetting-rec what the update Δ_t = θ_t − θ_{t−1} adds to the average over t tasks,

    E(t) = (t−1)/t E(t−1) + (1/t) [ Δ_tᵀ Σ_{o<t} ∇L_o(θ_o) + ½ Δ_tᵀ (Σ_{o<t} H_o) Δ_t + vᵀ Δ_t ],

    v = Σ_{o<t} H_o (θ_{t−1} − θ_o).

Both are exact for quadratic losses, for any θ_t. The equation holds for E(t) averaged over t tasks, though the sentence
before it averages over t − 1; then the factors are (t−2)/(t−1) and 1/(t−1), and the bracket is the same.

Matrices are (N, N) over the N learned tasks, [t, o] for task o after task t, both counted from 0, NaN where o > t.
BatchNorm statistics change L_o too, which no expansion in θ describes. This part of the remainder is L_o(θ_t) with the
statistics of θ_t minus L_o(θ_t) with those of θ_o.

`flatness` measures the top eigenvalue and the trace of every H_o and the forgetting that followed: under a quadratic
approximation, the flatter L_o is at θ_o, the larger is the space of updates that forget little (Section 4). The trace
is P times the mean curvature of a random direction, the top eigenvalue the largest curvature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from glocal.curvature.lanczos import lanczos
from glocal.curvature.spectrum import trace as estimate_trace
from glocal.errors import require, require_known
from glocal.lens.training_trace import TrainingTrace, dot, require_positive
from glocal.metrics import OVER, Over


@dataclass(frozen=True)
class Forgetting:
    """The forgetting of every pair, the terms that predict it, and what the update Δ_t adds to each of them."""

    measured: Tensor  # L_o(θ_t) − L_o(θ_o)
    gradient: Tensor  # (θ_t − θ_o)ᵀ ∇L_o(θ_o)
    quadratic: Tensor  # ½ (θ_t − θ_o)ᵀ H_o (θ_t − θ_o)
    added_gradient: Tensor  # Δ_tᵀ ∇L_o(θ_o)
    added_quadratic: Tensor  # ½ Δ_tᵀ H_o Δ_t
    added_v: Tensor  # (θ_{t−1} − θ_o)ᵀ H_o Δ_t
    statistics: Tensor  # the part of `measured` due to BatchNorm statistics

    @property
    def predicted(self) -> Tensor:
        """Eq. forgetting-quadratic."""
        return self.gradient + self.quadratic

    @property
    def remainder(self) -> Tensor:
        """What the second-order prediction misses."""
        return self.measured - self.predicted

    @property
    def error(self) -> Tensor:
        """ξ_o(θ_t) with its sign, for L_o as a function of θ alone: the remainder without the statistics' part."""
        return self.remainder - self.statistics

    @property
    def shares(self) -> dict[str, Tensor]:
        """The share of each term by magnitude; they sum to 1, and are NaN where all terms are 0."""
        terms = torch.stack([self.gradient, self.quadratic, self.remainder]).abs()
        return dict(zip(("gradient", "quadratic", "remainder"), terms / terms.sum(0), strict=True))


@dataclass(frozen=True)
class Recursion:
    """Eq. eqt:forgetting-rec after every task t, each (N,); `predicted` is the sum of the four terms after it."""

    measured: Tensor  # E(t)
    predicted: Tensor  # E(t) by Eq. forgetting-quadratic
    before: Tensor  # E(t−1) times its factor
    gradient: Tensor
    quadratic: Tensor
    v: Tensor


@torch.no_grad()
def forgetting(trace: TrainingTrace) -> Forgetting:
    """Measure all pairs: one gradient per task and one Hessian-vector product per pair o < t."""
    n = trace.num_learned
    terms = torch.full((6, n, n), torch.nan, dtype=torch.float64, device=trace.device)
    for o in range(n):
        gradient, hessian, theta = trace.gradient(o), trace.hessian(o), trace.theta(o)
        delta = product = torch.zeros_like(theta)  # θ_t − θ_o, and H_o times it
        terms[:, o, o] = 0
        for t in range(o + 1, n):
            update = trace.update(t)
            update_product = hessian @ update
            added = [dot(gradient, update), dot(update, update_product) / 2, dot(delta, update_product)]
            delta, product = trace.theta(t) - theta, product + update_product
            effect = _statistics_effect(trace, o, t)
            terms[:, t, o] = torch.stack([dot(gradient, delta), dot(delta, product) / 2, *added, effect])
    return Forgetting(measured_forgetting(trace), *terms.cpu())


@torch.no_grad()
def measured_forgetting(trace: TrainingTrace) -> Tensor:
    """Return E_o(θ_t) = L_o(θ_t) − L_o(θ_o) of every pair, (N, N)."""
    n = trace.num_learned
    pairs = torch.full((n, n), torch.nan, dtype=torch.float64, device=trace.device)
    for o in range(n):
        learned = trace.value(o, trace.solution(o)).double()
        for t in range(o, n):
            pairs[t, o] = trace.value(o, trace.solution(t)).double() - learned
    return pairs.cpu()


def _statistics_effect(trace: TrainingTrace, o: int, t: int) -> Tensor:
    """Return L_o(θ_t) minus its value with the BatchNorm statistics of θ_o."""
    later, buffers = trace.solution(t), trace.solution(o).buffers
    if all(torch.equal(later.buffers[k], b) for k, b in buffers.items() if b.is_floating_point()):
        return torch.zeros((), dtype=torch.float64, device=trace.device)
    return (trace.value(o, later) - trace.value(o, later._replace(buffers=buffers))).double()


def recursion(pairs: Forgetting, over: Over = "t") -> Recursion:
    """Return E(t) term by term, Eq. eqt:forgetting-rec."""
    before = pad(pairs.predicted.tril().sum(1)[:-1], (1, 0)) / task_counts(len(pairs.measured), over)
    added = (average(part, over) for part in (pairs.added_gradient, pairs.added_quadratic, pairs.added_v))
    return Recursion(average(pairs.measured, over), average(pairs.predicted, over), before, *added)


def average(pairs: Tensor, over: Over) -> Tensor:
    """Return E(t) after every task, (N,): averaged over t tasks, or over t − 1 and NaN after the first."""
    return pairs.tril().sum(1) / task_counts(len(pairs), over)


def task_counts(tasks: int, over: Over) -> Tensor:
    """Return how many tasks E(t) is averaged over, after every task."""
    require_known("average of forgetting over", over, OVER)
    first = 1 if over == "t" else 0
    return torch.arange(first, first + tasks, dtype=torch.float64)


@dataclass(frozen=True)
class Flatness:
    """Curvature and forgetting of every learned task o, each (N,); forgetting and distance of the last one are NaN."""

    top: Tensor
    top_error: Tensor  # ‖H v − λ v‖ with a bound on rounding: some eigenvalue is within this distance
    trace: Tensor
    trace_error: Tensor  # its standard error
    after_next: Tensor  # E_o(θ_{o+1})
    at_end: Tensor  # E_o(θ_N)
    moved: Tensor  # ‖θ_N − θ_o‖


def flatness(trace: TrainingTrace, steps: int = 30, probes: int = 20, seed: int = 0) -> Flatness:
    """Measure every task with `steps` products for the top eigenvalue and 1.5 `probes` for the trace (Hutch++)."""
    require_positive(steps=steps)
    require(probes >= 4 and probes % 2 == 0, f"probes = {probes} was given; it must be even and at least 4.")
    n, start, signs = trace.num_learned, trace.random_start(seed), trace.random_probes(probes, seed)
    curvature = []
    for o in range(n):
        hessian = trace.hessian(o)
        top = lanczos(hessian, start, 1, steps, largest="algebraic")
        total = estimate_trace(hessian, signs, trace.hvp_batch_size)
        curvature.append(torch.stack([top.values[0].double(), top.residuals[0].double(), *total]))
    pairs = measured_forgetting(trace)
    nan = torch.full((1,), torch.nan, dtype=torch.float64)
    end = trace.theta(n - 1)
    moved = torch.stack([(end - trace.theta(o)).double().norm() for o in range(n)]).cpu()
    followed = [torch.cat([part, nan]) for part in (pairs.diagonal(-1), pairs[-1, :-1], moved[:-1])]
    return Flatness(*torch.stack(curvature, 1).cpu(), *followed)
