"""Text on the experiment `retraining`. Every number is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from markup import join

from glocal.paper.studies.common import MeanInterval, names
from glocal.paper.studies.retraining import COLUMN, LEVEL, MARGIN, differences, estimate, verdict_of
from glocal.paper.study import Row
from glocal.report.table import signed

TITLES = {"acc": "ACC", "forgetting": "FGT"}


def note(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    cells = differences_by_name(rows)
    halves = [(cell.high - cell.low) / 2 for cell in cells.values()]
    misses = sum(cell.low > 0 or cell.high < 0 for cell in cells.values())
    angles = join(
        f"{100 * np.nanmedian([row[f'{title}, share of angles'] for row in table]):.0f} % ({title})"
        for title in TITLES.values()
    )
    zero = f"{misses} of {len(cells)} intervals miss 0" if misses else f"All {len(cells)} intervals contain 0"
    within_one = sum(cell.low >= -1 and cell.high <= 1 for cell in cells.values())
    return rf"""
Differences are in points, with {100 * LEVEL:.0f} % intervals. A number is *equivalent* to the published one if its
interval lies within ±{MARGIN:g} points, *different* if it lies outside. Only initialisation, order and memory count as
noise. The angles make {angles} of the variance between the runs of a cell (medians over cells).

The largest difference is {largest_difference(cells)}. The intervals reach {min(halves):.2f} to {max(halves):.2f} points
to either side. {zero}; they share seeds and angles, so they are worth far fewer than {len(cells)} independent ones.

Not registered:

- With a margin of 1 point instead of {MARGIN:g}, {within_one} of {len(cells)} numbers would be equivalent.
- {_sensitivity(rows)}
- {_after_learning(rows)}
- {_impostors(rows)}"""


def line(rows: pl.DataFrame) -> str:
    """Return the outcome for the first page."""
    cells = differences_by_name(rows)
    kinds = Counter(map(verdict_of, cells.values()))
    answer = "Not shown for all of them" if kinds["undecided"] else "Yes"
    return (
        "**Are our numbers of Table 1 on Rotated-MNIST the paper's, if only initialisation and order count as noise?** "
        f"{'No' if kinds['different'] else answer}: {counts(rows)}, if published runs vary as ours do. "
        f"The largest difference is {largest_difference(cells)} ({100 * LEVEL:.0f} % interval)."
    )


def counts(rows: pl.DataFrame) -> str:
    """Count the verdicts on ours minus the published numbers."""
    cells = differences_by_name(rows)
    kinds = Counter(map(verdict_of, cells.values()))
    other_counts = "".join(f", {kinds[kind]} {kind}" for kind in ("different", "undecided") if kinds[kind])
    return f"{kinds['equivalent']} of {len(cells)} numbers are equivalent within ±{MARGIN:g} points{other_counts}"


def equivalence_counts(rows: pl.DataFrame) -> tuple[int, int]:
    """Count the numbers that are equivalent to the published ones, and all that are compared."""
    return _count(rows, "equivalent"), len(differences_by_name(rows))


def differences_by_name(rows: pl.DataFrame, ratio: float = 1.0) -> dict[str, MeanInterval]:
    """Return ours minus the published numbers, by what they are, where there are intervals."""
    return {
        f"{title} of `{name}` at {lr:g}": cell
        for measure, title in TITLES.items()
        for (name, lr), cell in differences(rows, measure, ratio).items()
        if np.isfinite(cell.low)
    }


def largest_difference(cells: Mapping[str, MeanInterval]) -> str:
    name = max(cells, key=lambda name: abs(cells[name].mean))
    return f"{cells[name]} points, {name}"


def _count(rows: pl.DataFrame, verdict: str, ratio: float = 1.0) -> int:
    return sum(verdict_of(cell) == verdict for cell in differences_by_name(rows, ratio).values())


def _sensitivity(rows: pl.DataFrame) -> str:
    """Say how much more the published runs may vary, and what their standard deviations tell about it."""
    count, low, high = _count(rows, "equivalent"), 1.0, 100.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _count(rows, "equivalent", middle) == count else (low, middle)
    variances = {divisor: max(published_variance(rows, divisor), 0.0) for divisor in (4, 5)}
    ratios = join(f"{value:.1f} times ours if they divide by {divisor}" for divisor, value in variances.items())
    equivalent, different = (
        join(f"{_count(rows, verdict, value)}" for value in variances.values())
        for verdict in ("equivalent", "different")
    )
    return (
        f"The intervals assume that published runs vary as ours do. The {count} stay equivalent as long as the "
        f"deviation of published runs is at most {low**0.5:.2f} times ours. From the published deviations over the "
        f"five sequences, the variance within a sequence is {ratios}; the paper does not say by which. These are "
        f"rough: five runs tell little of a variance. With them {equivalent} numbers are equivalent and {different} "
        "different, the others undecided."
    )


def published_variance(rows: pl.DataFrame, divisor: int) -> float:
    """Return the variance of published runs within a sequence over that of ours, pooled over all cells.

    A published deviation is over one run per sequence, so it has the spread of the sequences, which ours tell, and the
    variance within one. `divisor` is what its sum of squares was divided by.
    """
    excess, scale = 0.0, 0.0
    for measure in TITLES:
        for cell_rows in rows.partition_by("algorithm", "lr"):
            cell = COLUMN.published_cell(COLUMN.row(cell_rows["algorithm"][0]), cell_rows["lr"][0])
            if cell is None:
                continue
            parts = [part[measure].to_numpy() for part in cell_rows.partition_by("sequence")]
            within, seeds = np.mean([part.var(ddof=1) for part in parts]), len(parts[0])
            means, degrees = np.array([part.mean() for part in parts]), len(parts) - 1
            between = ((means - means.mean()) ** 2).sum() - degrees * within / seeds
            excess += divisor * cell[f"{measure}_std"] ** 2 - between
            scale += degrees * within
    return excess / scale


def _after_learning(rows: pl.DataFrame) -> str:
    """Compare accuracies right after learning, which tell over how many tasks the published forgetting averages."""
    tasks, gaps = COLUMN.tasks, {"T − 1": [], "T": []}
    for cell_rows in rows.partition_by("algorithm", "lr"):
        cell = COLUMN.published_cell(COLUMN.row(cell_rows["algorithm"][0]), cell_rows["lr"][0])
        if cell is None:
            continue
        share = (tasks - 1) / tasks
        ours = estimate(cell_rows, "acc").mean + share * estimate(cell_rows, "forgetting").mean
        gaps["T − 1"].append(ours - cell["acc_mean"] - share * cell["forgetting_mean"])
        gaps["T"].append(ours - cell["acc_mean"] - cell["forgetting_mean"])
    if not gaps["T"]:
        return "Nothing was published to compare accuracies right after learning with."
    ranges = join(f"by {signed(min(x))} to {signed(max(x))} points if FGT averages over {k}" for k, x in gaps.items())
    nearer = min(gaps, key=lambda name: max(map(abs, gaps[name])))
    return (
        "ACC and FGT together tell the accuracy right after learning. Ours differs from the published one "
        f"{ranges} tasks. {nearer} is nearer; the paper's formula has T."
    )


def _impostors(rows: pl.DataFrame) -> str:
    """Compare our numbers with other rows' published ones."""
    passes: Counter[str] = Counter()
    comparisons = 0
    for measure in TITLES:
        for (name, lr), interval in differences(rows, measure).items():
            cells = {other: COLUMN.published_cell(COLUMN.row(other), lr) for other in names(rows)}
            values = {other: cell[f"{measure}_mean"] for other, cell in cells.items() if cell}
            for other, value in values.items():
                if other != name:
                    comparisons += 1
                    shifted = MeanInterval(*(x + values[name] - value for x in interval))
                    pair = " and ".join(f"`{x}`" for x in sorted((name, other)))
                    passes[pair] += verdict_of(shifted) == "equivalent"
    pairs = [f"{count} of {pair}" for pair, count in passes.most_common() if count]
    return (
        f"A check, not registered: with another algorithm's published number at the same rate, {passes.total()} of "
        f"{comparisons} comparisons pass{f' ({join(pairs)})' if pairs else ''}."
    )
