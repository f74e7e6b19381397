"""Text on how our numbers agree with the published ones: cell by cell, by row, and beside those of impostors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean, stdev
from typing import Any, NamedTuple

from markup import join, table
from scipy import stats

from glocal.paper.claims import TableRow, complete_seeds, impostors, table_rows
from glocal.paper.comparison import MAX_Z, Comparison, Difference
from glocal.report.table import signed


def numbers(tables: Mapping[str, Comparison]) -> str:
    """Say how strict the comparison with published numbers is, and which rows differ from theirs."""
    counts = [
        f"{other_rows[0]} of {other_rows[1]} ({column})"
        for column, comparison in tables.items()
        for _, other_rows in [passes(comparison)]
    ]
    rows_by_divisor = {}
    for divisor in DIVISORS:
        comparisons = {column: with_divisor(divisor, comparison) for column, comparison in tables.items()}
        rows = [
            f"`{row}` ({column})" for column, comparison in comparisons.items() for row in differing_rows(comparison)
        ]
        rows_by_divisor[divisor] = join(rows) if rows else "none"
    cases = ", ".join(f"{rows} if the published ± divides by {divisor}" for divisor, rows in rows_by_divisor.items())
    return (
        "**The numbers.** The paper does not say by what its ± divides. Compared with another algorithm's published "
        f"numbers, {join(counts)} are within {MAX_Z:g} standard errors too. Rows that are further away, averaged over "
        "learning rates: "
        f"{rows_by_divisor['n'] if len(set(rows_by_divisor.values())) == 1 else cases}."
    )


DIVISORS = "n − 1", "n"
"""What the sum of squares of a published deviation may have been divided by; the paper does not say."""


def with_divisor(divisor: str, comparison: Comparison) -> Comparison:
    """Return a comparison, which takes published deviations as divided by n, as if they were divided by this."""
    if divisor == "n":
        return comparison

    def rescale(cell: Difference) -> Difference:
        if (old := cell.published) is None:
            return cell
        return replace(cell, published=replace(old, std=old.std * math.sqrt((old.seeds - 1) / old.seeds)))

    rows = tuple(
        replace(row, acc=rescale(row.acc), forgetting={over: rescale(cell) for over, cell in row.forgetting.items()})
        for row in comparison.rows
    )
    return replace(comparison, rows=rows)


def degrees_of_freedom(cell: Difference) -> float:
    """Return those of Welch's t-test."""
    parts = [(x.variance / x.seeds, x.seeds - 1) for x in (cell.ours, cell.published) if x and x.seeds > 1]
    return sum(part for part, _ in parts) ** 2 / sum(part**2 / degrees for part, degrees in parts)


def outside_by_chance(comparison: Comparison) -> float:
    """Return how many numbers would be expected beyond `MAX_Z` standard errors if both sides had the same means."""
    cells = [cell for cell in cells_by_name(comparison).values() if cell.z is not None]
    return float(sum(2 * stats.t.sf(MAX_Z, degrees_of_freedom(cell)) for cell in cells))


def passes(comparison: Comparison) -> tuple[tuple[int, int], tuple[int, int]]:
    """Count (passed, compared) of our rows against their own published numbers, and against other rows'."""
    counts = impostors(comparison)
    same_row = [pair for (ours, theirs), pair in counts.items() if ours == theirs]
    other_rows = [pair for (ours, theirs), pair in counts.items() if ours != theirs]
    first, second = ((sum(p for p, _ in part), sum(n for _, n in part)) for part in (same_row, other_rows))
    return first, second


def agreement(comparison: Comparison) -> str:
    """How many published numbers ours agree with, beside how many of another row's, and the matrix of both."""
    counts, (same_row, other_rows) = impostors(comparison), passes(comparison)
    outliers = [name for name, cell in cells_by_name(comparison).items() if cell.differs]
    impostor_pairs = [pair for pair, (passed, n) in counts.items() if passed == n > 0 and pair[0] != pair[1]]
    text = (
        f"Of {same_row[1]} published numbers that have a counterpart here, accuracies and forgetting, {same_row[0]} "
        f"are within {MAX_Z:g} standard errors of ours{f' (not {join(outliers)})' if outliers else ''}. The same rule "
        f"lets {other_rows[0]} of {other_rows[1]} numbers pass if our rows are compared with the published numbers of "
        "other rows"
    )
    if impostor_pairs:
        pairs = join(f"ours of `{a}` from the published `{b}`" for a, b in impostor_pairs)
        text += f", and cannot tell {pairs}: {'it passes' if len(impostor_pairs) == 1 else 'they pass'} in every cell"
    elif other_rows[1]:
        text += "; no row passes for another in every cell"
    names, published = (list(dict.fromkeys(pair[i] for pair in counts)) for i in (0, 1))
    lines = [
        {"ours": f"`{a}`"} | {f"published `{b}`": f"{counts[a, b][0]} / {counts[a, b][1]}" for b in published}
        for a in names
    ]
    cells = [cell for cell in cells_by_name(comparison).values() if cell.z is not None]
    degrees = [degrees_of_freedom(cell) for cell in cells]
    chance_mean = mean(stats.t.expect(abs, (x,)) for x in degrees)
    text += f". The mean |Δ| is {mean(abs(cell.z) for cell in cells):.2f}; samples of the same means would be "
    text += f"{chance_mean:.2f} apart, and {outside_by_chance(comparison):.0f} of them outside."
    other_divisor = passes(with_divisor(DIVISORS[0], comparison))[0]
    text += f" This takes the published ± as divided by n; if it is divided by n − 1, {other_divisor[0]} pass."
    return f"{text} Numbers that pass, of those compared:\n\n{table(lines)}\n\n{row_differences_table(comparison)}"


class RowDifference(NamedTuple):
    """Ours minus published of one row, averaged over learning rates, and its standard error."""

    mean: float
    error: float

    @property
    def z(self) -> float:
        return self.mean / self.error


def row_differences(comparison: Comparison) -> dict[str, tuple[RowDifference, RowDifference]]:
    """Return ACC and FGT of every published row.

    The standard error is made of our means over learning rates, seed by seed, and of the published deviations, whose
    learning rates are taken as independent. So are ours, where fewer than two seeds finished at all rates.
    """
    differences_by_row = {}
    for row in table_rows(comparison):
        row_cells = [cell for cell in comparison.rows if cell.algorithm == row.algorithm and cell.acc.z is not None]
        if not row_cells:
            continue
        parts = {
            "acc": [cell.acc for cell in row_cells],
            "forgetting": [cell.forgetting[comparison.over] for cell in row_cells],
        }
        differences = []
        for name, cells in parts.items():
            error = math.sqrt(sum(x.standard_error**2 for x in cells)) / len(cells)
            if len(means := list(row_means(row, name).values())) > 1:
                theirs = math.sqrt(sum(x.published.variance / x.published.seeds for x in cells)) / len(cells)
                error = math.hypot(stdev(means) / math.sqrt(len(means)), theirs)
            differences.append(RowDifference(mean(x.difference for x in cells), error))
        differences_by_row[row.algorithm] = tuple(differences)
    return differences_by_row


def row_means(row: TableRow, statistic: str) -> dict[int, float]:
    """Return the mean over learning rates of every seed that finished at all of them."""
    values = row.values[statistic]
    return {seed: mean(seed_values[seed] for seed_values in values.values()) for seed in complete_seeds(values)}


def differing_rows(comparison: Comparison) -> list[str]:
    """Return the rows whose mean ACC or FGT is further than `MAX_Z` standard errors from the published one."""
    return [
        name for name, differences in row_differences(comparison).items() if any(abs(x.z) > MAX_Z for x in differences)
    ]


def row_differences_table(comparison: Comparison) -> str:
    """Lay out ours minus published of every row, averaged over learning rates."""
    lines = []
    for name, differences in row_differences(comparison).items():
        line = {"algorithm": f"`{name}`"}
        for title, x in zip(("ACC", "FGT"), differences, strict=True):
            z = signed(x.z, ".1f")
            line |= {f"{title}: ours − published": f"{signed(x.mean)} ± {x.error:.2f}"}
            line |= {f"{title}: z": f"**{z}**" if abs(x.z) > MAX_Z else z}
        lines.append(line)
    return (
        "Rows, averaged over learning rates: the difference ± its standard error in points, and z, their ratio; bold "
        f"if |z| > {MAX_Z:g}. Our part of the error is over the means of the seeds that finished at all rates; the "
        "published part, and ours with fewer than two such seeds, takes the rates as independent.\n\n"
        f"{table(lines)}"
    )


def cells_by_name(comparison: Comparison) -> dict[str, Any]:
    """Every accuracy and forgetting, by what it is."""
    return {
        f"{quantity} of `{row.algorithm}` at {row.lr:g}": cell
        for row in comparison.rows
        for quantity, cell in (("the accuracy", row.acc), ("the forgetting", row.forgetting[comparison.over]))
    }
