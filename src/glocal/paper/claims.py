r"""The paper's claims about Table 1 (§6.1), each as one statistic of our runs and of the published means.

Forgetting is in points, averaged over T−1 tasks. Diverged runs are left out and counted. Only rows of the paper's
table count for its claims. The statistics:

* minimum: for each seed the lowest forgetting at rates up to `LOW_LR` minus the lowest at the others; mean over seeds
  with a t-interval.
* rank correlation: Spearman's ρ of forgetting and learning rate for each seed; mean over seeds with a t-interval.
* low − high: `metrics.learning_rate_test`.
* interaction: (high − low) averaged over the local rows minus that averaged over the global rows. With seeds as units:
  one value per seed that all rows have, and a t-interval over seeds; it says whether other seeds would give the same
  sign for *these* algorithms. With algorithms as units: an exact permutation test, over all ways to call as many rows
  local; it says whether other algorithms would. The smallest p-value that n rows of which k are local can reach is
  1 / (n choose k), so few rows cannot settle it.

Intervals have a level of 95 %, and a permutation test settles a sign at half of 5 %, so that both are two-sided.
Neither is corrected for the number of rows. `scoreboard` makes verdicts of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import polars as pl

from glocal.metrics import low_minus_high_by_seed
from glocal.paper.comparison import Comparison, Difference
from glocal.paper.studies.common import MeanInterval, rank_correlation
from glocal.report.summary import View
from glocal.report.table import signed

Values: TypeAlias = Mapping[float, Mapping[int, float]]  # values[lr][seed]
LOW_LR = 1e-3
"""The lower end of the learning rates, in the paper's words: 10⁻⁴ and 10⁻³."""

LEVEL = 0.05
"""Of permutation tests."""
IMPOSTORS = ("sgd", "ogd-gtl")
"""Rows of ours without published numbers that other rows' published numbers are compared with too."""


@dataclass(frozen=True)
class TableRow:
    """One algorithm: our values and the published means, by statistic ('acc', 'forgetting', 'distance')."""

    algorithm: str
    locality: str
    values: Mapping[str, Values]
    published: Mapping[str, Mapping[float, float]]
    """Empty for rows that the paper's table does not have."""
    diverged: int


class Minimum(NamedTuple):
    """The learning rate of the lowest mean, and how many of the seeds that have all rates have their minimum there."""

    lr: float
    seeds_there: int
    seeds: int


class Permutation(NamedTuple):
    """An exact permutation test: how many of the assignments have a difference at least as high, or as low."""

    difference: float
    as_high: int
    as_low: int
    assignments: int

    def __str__(self) -> str:
        as_far = self.as_high if self.difference >= 0 else self.as_low
        return f"{signed(self.difference)}, p = {as_far}/{self.assignments}"

    def phrase(self, above: str, below: str, unclear: str, too_few: str) -> str:
        """Return the phrase for a difference shown to be above 0, below 0, or neither, or that no difference could."""
        max_count = LEVEL / 2 * self.assignments
        if max_count < 1:
            return too_few
        return above if self.as_high <= max_count else below if self.as_low <= max_count else unclear


def table_rows(comparison: Comparison) -> list[TableRow]:
    """Collect the values of each algorithm of one challenge."""
    names, view = ("acc", "forgetting", "distance"), View(comparison.over)
    rows = []
    for algorithm in dict.fromkeys(row.algorithm for row in comparison.rows):
        cells = sorted((row for row in comparison.rows if row.algorithm == algorithm), key=lambda row: row.lr)
        by_seed = {cell.lr: cell.by_seed(view) for cell in cells}
        values = {n: {lr: {s: x[n] for s, x in runs.items()} for lr, runs in by_seed.items()} for n in names}
        estimates = {
            "acc": {cell.lr: cell.acc.published for cell in cells},
            "forgetting": {cell.lr: cell.forgetting[comparison.over].published for cell in cells},
        }
        published = {
            n: {lr: x.mean for lr, x in by_lr.items() if x} for n, by_lr in estimates.items() if all(by_lr.values())
        }
        diverged = sum(cell.diverged for cell in cells)
        rows.append(TableRow(algorithm, cells[0].locality, values, published, diverged))
    return rows


def measured_locality(table: pl.DataFrame, challenge: str) -> dict[str, str]:
    """Return the class that the study 'locality' finds for each algorithm, on its challenge of the same kind."""
    kind = challenge.partition("-")[0]
    rows = table.filter(pl.col("challenge").str.starts_with(f"{kind}-"))
    return dict(rows.select("algorithm", "found").unique().iter_rows())


def complete_seeds(values: Values) -> list[int]:
    """Return the seeds that finished at every learning rate."""
    return sorted(set.intersection(*(set(by_seed) for by_seed in values.values())))


def minimum(values: Values) -> Minimum:
    """Find the learning rate of the lowest mean over seeds; NaN if no seed finished at every learning rate."""
    lrs, seeds = sorted(values), complete_seeds(values)
    if not seeds:
        return Minimum(math.nan, 0, 0)
    x = np.array([[values[lr][seed] for seed in seeds] for lr in lrs])
    lowest, by_seed = int(x.mean(1).argmin()), x.argmin(0)
    return Minimum(lrs[lowest], int((by_seed == lowest).sum()), len(seeds))


def low_rates_minimum(values: Values) -> MeanInterval:
    """Compute the lowest value up to `LOW_LR` minus the lowest at the other rates, by seed; mean with a t-interval.

    It is below 0 if the minimum is at a low rate.
    """
    seeds = complete_seeds(values)
    low, other = ([by_seed for lr, by_seed in values.items() if (lr <= LOW_LR) is side] for side in (True, False))
    lowest = [[min(by_seed[seed] for by_seed in side) for seed in seeds] for side in (low, other)]
    return MeanInterval.of(np.array(lowest[0]) - np.array(lowest[1]))


def lr_correlation(values: Values) -> MeanInterval:
    """Compute Spearman's ρ of values and learning rates for each seed; its mean over seeds with a t-interval.

    The interval is cut at ±1; NaN without two seeds, and for seeds whose values are all equal.
    """
    lrs = np.array(sorted(values))
    rho = [rank_correlation(lrs, np.array([values[lr][seed] for lr in lrs])) for seed in complete_seeds(values)]
    mean, *interval = MeanInterval.of(np.array(rho))
    return MeanInterval(mean, *(float(np.clip(bound, -1, 1)) for bound in interval))


def interaction_by_seed(local: Sequence[Values], other: Sequence[Values]) -> tuple[MeanInterval, int]:
    """Compute (high − low) of the first rows minus that of the others; paired by seed, with the number of seeds."""
    sides = [[low_minus_high_by_seed(values) for values in side] for side in (local, other)]
    seeds = set.intersection(*(set(by_seed) for side in sides for by_seed in side))
    first, second = (
        np.array([np.mean([-by_seed[seed] for by_seed in side]) for seed in sorted(seeds)]) for side in sides
    )
    return MeanInterval.of(first - second), len(seeds)


def permutation_test(changes: Mapping[str, float], local: set[str]) -> Permutation:
    """Compare mean(local) − mean(others) with that of every other choice of as many rows."""
    names = sorted(changes)

    def difference(members: Iterable[str]) -> float:
        members = set(members)
        sides = [[changes[n] for n in names if (n in members) is side] for side in (True, False)]
        return float(np.mean(sides[0]) - np.mean(sides[1]))

    observed = difference(local)
    differences = np.array([difference(members) for members in combinations(names, len(local))])
    rounding = 1e-9 * max(map(abs, changes.values()))
    as_high, as_low = int((differences >= observed - rounding).sum()), int((differences <= observed + rounding).sum())
    return Permutation(observed, as_high, as_low, len(differences))


def impostors(comparison: Comparison) -> dict[tuple[str, str], tuple[int, int]]:
    """Compare our rows, and `IMPOSTORS`, with each published row by the rule |Δ| ≤ 2 standard errors, cell by cell.

    Returns:
        (numbers that pass, numbers compared) for (our row, the row of ours that the published one belongs to):
        accuracy and forgetting at each learning rate. The rule discriminates if only equal names pass everywhere.
    """
    names = dict.fromkeys(row.algorithm for row in comparison.rows if row.acc.published is not None)
    cells = {(row.algorithm, row.lr): row for row in comparison.rows if row.algorithm in (*names, *IMPOSTORS)}
    counts = {}
    for algorithm in dict.fromkeys((*names, *(name for name, _ in cells))):
        for published_algorithm in names:
            lrs = [lr for name, lr in cells if name == algorithm and (published_algorithm, lr) in cells]
            pairs = [(cells[algorithm, lr], cells[published_algorithm, lr]) for lr in lrs]
            differences = [Difference(a.acc.ours, b.acc.published) for a, b in pairs]
            over = comparison.over
            differences += [Difference(a.forgetting[over].ours, b.forgetting[over].published) for a, b in pairs]
            tests = [x for x in differences if x.z is not None]
            counts[algorithm, published_algorithm] = sum(not x.differs for x in tests), len(tests)
    return counts
