r"""Test whether values V[s, d, k] depend on s: s a solution, d a draw of the memory's random numbers, k a repetition.

**Variance components and Sobol indices.** The components of

    V[s, d, k] = μ + α_s + β_d + γ_sd + ε_sdk,   variances σ_α², σ_β², σ_γ², σ_ε²,

are estimated by a two-way analysis of variance. With σ² = σ_α² + σ_β² + σ_γ² + σ_ε², the first-order Sobol index of s
is σ_α² / σ² and its total index (σ_α² + σ_γ²) / σ². Both are 0 if V does not depend on s.

**Mutual information.** I(V; s) in nats is estimated by nearest neighbours (Ross, 2014), without assuming a
distribution. Each repetition has N values, n for every s. For each value let ρ be the distance to its k-th nearest
neighbour of the same s, and m the number of values of all s within a distance below ρ:

    I = ψ(N) + ψ(k) − ⟨ψ(n) + ψ(m)⟩,   ψ the digamma function.

If ρ = 0, with c equal values of the same s and m of all s, the term is log(N c / (n m)) instead. The estimate is
clamped to [0, log S]. It is imprecise for few values: evidence of dependence is the p-value, not the information.

**Within-draw permutation test.** If V does not depend on s, the values V[·, d, ·] of a draw are exchangeable. The
statistic is the share of the variance within draws that lies between solutions; the p-value is the share of
random permutations within draws, the identity included, with a statistic at least as large. It is exact, and 1 if all
values of every draw are equal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.errors import require

ROUNDING_ULPS = 64
"""Differences of at most this many units in the last place of the largest value count as 0."""
PERMUTATIONS = 999
NUM_NEIGHBORS = 3
"""k of the mutual information; less if there are fewer values of one s."""


class Dependence(NamedTuple):
    """Dependence on s of each of P sets of values, (P,), and one p-value for all of them."""

    first_order_index: Tensor
    total_index: Tensor
    information: Tensor  # I(V; s) in nats
    p_values: Tensor
    p_value: float


def measure_dependence(values: Tensor, generator: torch.Generator) -> Dependence:
    """Measure how finite values (S, D, K, P) depend on their first index."""
    s, d, k, _ = values.shape
    enough = s >= 3 and d >= 2 and k >= 2
    require(enough, f"the test needs at least 3 solutions, 2 draws and 2 repetitions; got {s}, {d} and {k}.")
    rounding = ROUNDING_ULPS * torch.finfo(values.dtype).eps * values.double().abs().amax((0, 1, 2))
    min_variance = rounding.square()
    values = values.double()
    alpha, beta, gamma, epsilon = _variance_components(values)
    total = alpha + beta + gamma + epsilon
    observed = _share_between(values, min_variance)
    pool = values.movedim(2, 1).flatten(0, 1)  # (S K, D, P)
    statistics = [observed]  # the identity is one of the permutations
    for _ in range(PERMUTATIONS):
        order = torch.rand(s * k, d, generator=generator).argsort(0).unsqueeze(-1)
        permuted = pool.gather(0, order.expand_as(pool)).unflatten(0, (s, k)).movedim(1, 2)
        statistics.append(_share_between(permuted, min_variance))
    distribution = torch.stack(statistics)
    return Dependence(
        _ratio(alpha, total, min_variance),
        _ratio(alpha + gamma, total, min_variance),
        _information(values, min_variance.sqrt()),
        _p_value(distribution, observed),
        float(_p_value(distribution.mean(-1), observed.mean(-1))),
    )


def _variance_components(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Estimate σ_α², σ_β², σ_γ², σ_ε²; negative estimates become 0."""
    s, d, k, _ = values.shape
    cell, row, column, mean = values.mean(2), values.mean((1, 2)), values.mean((0, 2)), values.mean((0, 1, 2))
    ms_s = d * k * (row - mean).square().sum(0) / (s - 1)
    ms_d = s * k * (column - mean).square().sum(0) / (d - 1)
    ms_sd = k * (cell - row.unsqueeze(1) - column + mean).square().sum((0, 1)) / ((s - 1) * (d - 1))
    epsilon = (values - cell.unsqueeze(2)).square().sum((0, 1, 2)) / (s * d * (k - 1))
    # The expected mean squares: D K σ_α² + K σ_γ² + σ_ε², S K σ_β² + K σ_γ² + σ_ε², K σ_γ² + σ_ε² and σ_ε².
    differences = (ms_s - ms_sd) / (d * k), (ms_d - ms_sd) / (s * k), (ms_sd - epsilon) / k
    alpha, beta, gamma = (difference.clamp(min=0) for difference in differences)
    return alpha, beta, gamma, epsilon


def _information(values: Tensor, rounding: Tensor) -> Tensor:
    """Return I(V; s) of each set, (P,), as the mean over repetitions.

    Repetitions are not pooled: those of one draw are near each other whether or not V depends on s.
    """
    estimates = [
        torch.stack([_mutual_information(v, r) for v, r in zip(sets.unbind(-1), rounding, strict=True)])
        for sets in values.unbind(2)
    ]
    return torch.stack(estimates).mean(0).clamp(0, math.log(len(values)))


def _mutual_information(v: Tensor, rounding: Tensor) -> Tensor:
    """Estimate I(V; s) from values (S, n) of one repetition."""
    n, count = v.shape[1], v.numel()
    k = min(NUM_NEIGHBORS, n - 1)
    v = v - v.mean()
    ordered = v.flatten().sort().values

    def count_within(radius: Tensor) -> Tensor:
        ends = torch.searchsorted(ordered, v + radius, right=True) - torch.searchsorted(ordered, v - radius)
        return ends.double()

    distances = (v.unsqueeze(2) - v.unsqueeze(1)).abs()
    radius = distances.sort(-1).values[..., k]
    ties = (distances <= rounding).sum(-1) * count / (n * count_within(rounding.expand_as(v)))
    neighbors = _digamma(count) + _digamma(k) - _digamma(n) - count_within(radius * (1 - 1e-9)).digamma()
    return torch.where(radius <= rounding, ties.log(), neighbors).mean()


def _digamma(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.float64).digamma()


def _share_between(values: Tensor, min_variance: Tensor) -> Tensor:
    """Return the share of the variance within draws that lies between solutions."""
    centred = values - values.mean((0, 2), keepdim=True)
    return _ratio(centred.mean(2).square().mean((0, 1)), centred.square().mean((0, 1, 2)), min_variance)


def _ratio(part: Tensor, total: Tensor, min_total: Tensor) -> Tensor:
    """Return part / total, or 0 where the total is only rounding error."""
    valid = total > min_total
    return torch.where(valid, part / torch.where(valid, total, 1), 0)


def _p_value(distribution: Tensor, observed: Tensor) -> Tensor:
    return (distribution >= observed - 1e-9).double().mean(0)
