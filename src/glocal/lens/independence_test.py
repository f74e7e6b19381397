r"""Whether numbers V[s, d, k] depend on s: s a solution, d a draw of all known chance, k a repetition of both.

    V[s, d, k] = μ + α_s + β_d + γ_sd + ε_sdk,   variances σ_α², σ_β², σ_γ², σ_ε²,

estimated from the mean squares of a two-way analysis of variance. Of V's variance, s alone explains

    η² = σ_α² / (σ_α² + σ_β² + σ_γ² + σ_ε²),

and s is involved in the part σ_α² + σ_γ² of it: the first and the total Sobol' index of s. Both are 0 where V does not
depend on s, whatever the draws do to it.

What V tells of s in nats, I(V; s), is estimated by nearest neighbours (Ross, 2014), without assuming a distribution: of
the N numbers of one repetition, n of every s, let ρ be the distance to the k-th nearest of the same s and m how many of
all lie nearer,

    I = ψ(N) + ψ(k) − ⟨ψ(n) + ψ(m)⟩,

ψ the digamma function, and the mean over all numbers and repetitions. Where numbers are the same, c of the s and m of
all, ρ is 0 and they count by how often they occur, log N c / (n m). V cannot tell more than log S: which of the S it
was. Of few numbers the estimate is rough, and a small one is no evidence of dependence: that is the test's.

The test. If V does not depend on s, then all V[·, d, ·] of one draw are the same number, or come in no order:
exchanging them within every draw changes nothing but the share of their sum of squares that lies between the s. The
p-value is that of the share found among those of random exchanges: exact, without assuming a distribution, and 1 where
there is nothing to exchange.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.errors import require

ROUNDING = 64
"""Differences of up to so many units of rounding of the largest number are none."""
PERMUTATIONS = 999
NEAREST = 3
"""k, where there are so many others of one s."""


class Dependence(NamedTuple):
    """For each of P sets of numbers; and one p-value for all of them together."""

    explained: Tensor  # η², by s alone
    involved: Tensor  # by s and by what it makes of the draws
    information: Tensor  # I(V; s) in nats
    p_values: Tensor
    p_value: float


def measure_dependence(values: Tensor, generator: torch.Generator) -> Dependence:
    """How values (S, D, K, P) depend on their first index. All of them are to be finite."""
    s, d, k, _ = values.shape
    given = f"{s}, {d} and {k} were given"
    require(s >= 3 and d >= 2 and k >= 2, f"a test takes at least 3 solutions, 2 draws and 2 repetitions; {given}.")
    nothing = (ROUNDING * torch.finfo(values.dtype).eps * values.double().abs().amax((0, 1, 2))).square()
    values = values.double()
    alpha, beta, gamma, epsilon = _components(values)
    total = alpha + beta + gamma + epsilon
    explained = _ratio(alpha, total, nothing)
    found = _between(values, nothing)
    pool = values.movedim(2, 1).flatten(0, 1)  # (S K, D, P)
    shares = [found]  # the order that was found is one of them
    for _ in range(PERMUTATIONS):
        order = torch.rand(s * k, d, generator=generator).argsort(0).unsqueeze(-1)
        exchanged = pool.gather(0, order.expand_as(pool)).unflatten(0, (s, k)).movedim(1, 2)
        shares.append(_between(exchanged, nothing))
    everything = torch.stack(shares)
    return Dependence(
        explained,
        _ratio(alpha + gamma, total, nothing),
        _information(values, nothing.sqrt()),
        _as_large(everything, found),
        float(_as_large(everything.mean(-1), found.mean(-1))),
    )


def _components(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """σ_α², σ_β², σ_γ², σ_ε², 0 where their estimate is negative."""
    s, d, k, _ = values.shape
    cell, row, column, mean = values.mean(2), values.mean((1, 2)), values.mean((0, 2)), values.mean((0, 1, 2))
    of_s = d * k * (row - mean).square().sum(0) / (s - 1)
    of_d = s * k * (column - mean).square().sum(0) / (d - 1)
    of_both = k * (cell - row.unsqueeze(1) - column + mean).square().sum((0, 1)) / ((s - 1) * (d - 1))
    epsilon = (values - cell.unsqueeze(2)).square().sum((0, 1, 2)) / (s * d * (k - 1))
    # In the mean they are D K σ_α² + K σ_γ² + σ_ε², S K σ_β² + K σ_γ² + σ_ε², K σ_γ² + σ_ε² and σ_ε².
    differences = (of_s - of_both) / (d * k), (of_d - of_both) / (s * k), (of_both - epsilon) / k
    alpha, beta, gamma = (difference.clamp(min=0) for difference in differences)
    return alpha, beta, gamma, epsilon


def _information(values: Tensor, nothing: Tensor) -> Tensor:
    """I(V; s) of each set. Repetitions of a draw are near each other whatever s does: each is estimated alone."""
    each = [[_told(v, least) for v, least in zip(sets.unbind(-1), nothing, strict=True)] for sets in values.unbind(2)]
    return torch.stack([torch.stack(row) for row in each]).mean(0).clamp(0, math.log(len(values)))


def _told(v: Tensor, nothing: Tensor) -> Tensor:
    """What one of the numbers v (S, n) tells of its row."""
    n, count = v.shape[1], v.numel()
    k = min(NEAREST, n - 1)
    v = v - v.mean()
    everyone = v.flatten().sort().values

    def within(reach: Tensor) -> Tensor:
        ends = torch.searchsorted(everyone, v + reach, right=True) - torch.searchsorted(everyone, v - reach)
        return ends.double()

    apart = (v.unsqueeze(2) - v.unsqueeze(1)).abs()
    radius = apart.sort(-1).values[..., k]
    alike = (apart <= nothing).sum(-1) * count / (n * within(nothing.expand_as(v)))
    nearer = _digamma(count) + _digamma(k) - _digamma(n) - within(radius * (1 - 1e-9)).digamma()
    return torch.where(radius <= nothing, alike.log(), nearer).mean()


def _digamma(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.float64).digamma()


def _between(values: Tensor, nothing: Tensor) -> Tensor:
    """The share of the variance within the draws that lies between the s."""
    centred = values - values.mean((0, 2), keepdim=True)
    return _ratio(centred.mean(2).square().mean((0, 1)), centred.square().mean((0, 1, 2)), nothing)


def _ratio(part: Tensor, whole: Tensor, nothing: Tensor) -> Tensor:
    """part / whole, 0 where the whole is nothing but rounding."""
    solid = whole > nothing
    return torch.where(solid, part / torch.where(solid, whole, 1), 0)


def _as_large(all_of_them: Tensor, one: Tensor) -> Tensor:
    return (all_of_them >= one - 1e-9).double().mean(0)
