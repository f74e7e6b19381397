r"""Forgetting predicted and measured. Eq. forgetting-quadratic says of a task o and a later solution θ_t

    E_o(θ_t) = L_o(θ_t) − L_o(θ_o) ≈ (θ_t − θ_o)ᵀ ∇L_o(θ_o) + ½ (θ_t − θ_o)ᵀ H_o (θ_t − θ_o),

and Eq. eqt:forgetting-rec what the update Δ_t = θ_t − θ_{t−1} adds to the average over t tasks,

    E(t) = (t−1)/t E(t−1) + (1/t) [ Δ_tᵀ Σ_{o<t} ∇L_o(θ_o) + ½ Δ_tᵀ (Σ_{o<t} H_o) Δ_t + vᵀ Δ_t ],

    v = Σ_{o<t} H_o (θ_{t−1} − θ_o).

Both are exact for quadratic losses, wherever the θ_t are. The equation is that of E(t) averaged over t, though the
sentence before it averages over t − 1; then the factors are (t−2)/(t−1) and 1/(t−1), and the bracket is the same.

Matrices are (N, N) over the N learnt tasks, [t, o] for task o after task t, both counted from 0, and NaN where o > t.
The network's other tensors (BatchNorm's statistics) change L_o too, and no expansion in θ sees it: of the remainder
it is a part of its own, L_o(θ_t) with those of θ_t less L_o(θ_t) with those of θ_o.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.errors import unknown
from glocal.lens.trace import TrainingTrace, dot
from glocal.metrics import OVER, Over


class Shares(NamedTuple):
    """How much of forgetting each term makes, by magnitude: they sum to 1, and are NaN where all terms are 0."""

    gradient: Tensor
    quadratic: Tensor
    remainder: Tensor


@dataclass(frozen=True)
class Forgetting:
    """Every pair's forgetting and the terms that predict it; and what the update Δ_t adds to each of them."""

    measured: Tensor  # L_o(θ_t) − L_o(θ_o)
    gradient: Tensor  # (θ_t − θ_o)ᵀ ∇L_o(θ_o)
    quadratic: Tensor  # ½ (θ_t − θ_o)ᵀ H_o (θ_t − θ_o)
    added_gradient: Tensor  # Δ_tᵀ ∇L_o(θ_o)
    added_quadratic: Tensor  # ½ Δ_tᵀ H_o Δ_t
    added_v: Tensor  # (θ_{t−1} − θ_o)ᵀ H_o Δ_t
    statistics: Tensor  # what of `measured` the network's other tensors make

    @property
    def predicted(self) -> Tensor:
        """Eq. forgetting-quadratic."""
        return self.gradient + self.quadratic

    @property
    def remainder(self) -> Tensor:
        """What is beyond the second order."""
        return self.measured - self.predicted

    @property
    def error(self) -> Tensor:
        """ξ_o(θ_t) with its sign, L_o being a function of θ alone: the remainder without the statistics' part."""
        return self.remainder - self.statistics

    @property
    def shares(self) -> Shares:
        terms = torch.stack([self.gradient, self.quadratic, self.remainder]).abs()
        return Shares(*(terms / terms.sum(0)))


@dataclass(frozen=True)
class Recursion:
    """Eq. eqt:forgetting-rec after every task t, each (N,): `predicted` is the sum of the four terms below it."""

    over: Over
    measured: Tensor  # E(t)
    predicted: Tensor  # E(t) by Eq. forgetting-quadratic
    before: Tensor  # E(t−1), with its factor
    gradient: Tensor
    quadratic: Tensor
    v: Tensor


def forgetting(trace: TrainingTrace) -> Forgetting:
    """All pairs: one gradient a task and one Hessian product a pair o < t."""
    n = trace.num_learned
    terms = torch.full((5, n, n), torch.nan, dtype=torch.float64, device=trace.device)
    for o in range(n):
        slope, times, origin = (
            trace.gradient(o),
            trace.hessian(o),
            trace.theta(o),
        )
        moved = bent = torch.zeros_like(origin)  # θ_t − θ_o, and H_o times it
        terms[:, o, o] = 0
        for t in range(o + 1, n):
            update = trace.update(t)
            turned = times @ update
            added = [
                dot(slope, update),
                dot(update, turned) / 2,
                dot(moved, turned),
            ]
            moved, bent = trace.theta(t) - origin, bent + turned
            terms[:, t, o] = torch.stack([dot(slope, moved), dot(moved, bent) / 2, *added])
    gradient, quadratic, *added = terms.cpu()
    return Forgetting(measured(trace), gradient, quadratic, added[0], added[1], added[2], by_statistics(trace))


def measured(trace: TrainingTrace) -> Tensor:
    """L_o(θ_t) − L_o(θ_o) for every pair."""
    n = trace.num_learned
    found = torch.full((n, n), torch.nan, dtype=torch.float64, device=trace.device)
    with torch.no_grad():
        for o in range(n):
            learnt = trace.value(o, trace.solution(o)).double()
            for t in range(o, n):
                found[t, o] = trace.value(o, trace.solution(t)).double() - learnt
    return found.cpu()


def by_statistics(trace: TrainingTrace) -> Tensor:
    """L_o(θ_t) less what it would be with the network's other tensors as they were at θ_o, for every pair."""
    n = trace.num_learned
    found = torch.where(torch.ones(n, n, dtype=torch.bool).tril(), 0.0, torch.nan).double()
    with torch.no_grad():
        for o in range(n):
            then = trace.solution(o).buffers
            for t in range(o + 1, n):
                now = trace.solution(t)
                if any(not torch.equal(now.buffers[k], b) for k, b in then.items() if b.is_floating_point()):
                    found[t, o] = trace.value(o, now) - trace.value(o, now._replace(buffers=then))
    return found


def recursion(pairs: Forgetting, over: Over = "t") -> Recursion:
    """The average over o, term by term, as Eq. eqt:forgetting-rec adds it up."""
    predicted = total(pairs.predicted)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), predicted[:-1]])
    sums = [total(pairs.measured), predicted, before]
    sums += [total(part) for part in (pairs.added_gradient, pairs.added_quadratic, pairs.added_v)]
    count = averaged(len(predicted), over)
    return Recursion(over, *(part / count for part in sums))


def average(pairs: Tensor, over: Over) -> Tensor:
    """E(t) after every task, (N,): over 't', or over 't-1' and undefined (NaN) after the first."""
    return total(pairs) / averaged(len(pairs), over)


def total(pairs: Tensor) -> Tensor:
    """Σ_{o≤t} of a matrix of pairs, after every task t."""
    return torch.where(torch.ones_like(pairs, dtype=torch.bool).tril(), pairs, 0.0).sum(1)


def averaged(tasks: int, over: Over) -> Tensor:
    """How many tasks E(t) is averaged over, after each of them."""
    if over not in OVER:
        raise unknown("average of forgetting over", over, OVER)
    first = 1 if over == "t" else 0
    return torch.arange(first, first + tasks, dtype=torch.float64)
