"""Text on how our numbers agree with the published ones: cell by cell, by row, and beside those of impostors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, variance
from typing import Any, NamedTuple

from markup import join, table
from scipy import stats

from glocal.paper.claims import TableRow, complete_seeds, impostors, table_rows
from glocal.paper.comparison import MAX_Z, Comparison, Difference, Estimate
from glocal.report.table import signed


def numbers(tables: Mapping[str, Comparison]) -> str:
    """Say how strict the comparison with published numbers is, and which rows differ from theirs."""
    counts = [
        f"{other_rows[0]} of {other_rows[1]} ({column})"
        for column, comparison in tables.items()
        for _, other_rows in [passes(comparison)]
    ]
    tests = []
    for divisor in DIVISORS:
        differences = {
            f"{measure} of `{row}` ({column})": x
            for column, comparison in tables.items()
            for row, pair in row_differences(with_divisor(divisor, comparison)).items()
            for measure, x in zip(MEASURES, pair, strict=True)
        }
        outside = [name for name, x in differences.items() if abs(x.z) > MAX_Z]
        chance = sum(2 * stats.t.sf(MAX_Z, x.degrees) for x in differences.values())
        names = f" ({join(outside)})" if outside else ""
        tests.append(f"{len(outside)} of {len(differences)}{names} if by {divisor}, by chance {chance:.1f}")
    return (
        "**The numbers.** The paper does not say by what its ± divides. Of each row's ACC and FGT, averaged over "
        f"learning rates, these are further away than {MAX_Z:g} standard errors: {'; '.join(tests)}. Compared with "
        f"another algorithm's published numbers, {join(counts)} are within {MAX_Z:g} standard errors too."
    )


DIVISORS = "n − 1", "n"
"""What the sum of squares of a published deviation may have been divided by; the paper does not say."""
MEASURES = "ACC", "FGT"


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
    return _welch([_squared_error(x) for x in (cell.ours, cell.published) if x and x.seeds > 1])


def _squared_error(sample: Estimate, cells: int = 1) -> tuple[float, int]:
    """Return the squared standard error of a mean, or its part of that of the mean of several, and its degrees."""
    return sample.variance / sample.seeds / cells**2, sample.seeds - 1


def _welch(squares: Sequence[tuple[float, int]]) -> float:
    """Return Welch's degrees of freedom of a sum of means, of their squared errors and degrees."""
    return sum(x for x, _ in squares) ** 2 / sum(x**2 / degrees for x, degrees in squares)


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
    """Ours minus published of one row, averaged over learning rates, its standard error and degrees of freedom."""

    mean: float
    error: float
    degrees: float

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
            squares = [_squared_error(x.published, len(cells)) for x in cells if x.published.seeds > 1]
            error = math.sqrt(sum(x.standard_error**2 for x in cells)) / len(cells)
            if len(means := list(row_means(row, name).values())) > 1:
                squares.append((variance(means) / len(means), len(means) - 1))
                error = math.sqrt(sum(square for square, _ in squares))
            else:
                squares += [_squared_error(x.ours, len(cells)) for x in cells if x.ours.seeds > 1]
            differences.append(RowDifference(mean(x.difference for x in cells), error, _welch(squares)))
        differences_by_row[row.algorithm] = tuple(differences)
    return differences_by_row


def row_means(row: TableRow, statistic: str) -> dict[int, float]:
    """Return the mean over learning rates of every seed that finished at all of them."""
    values = row.values[statistic]
    return {seed: mean(seed_values[seed] for seed_values in values.values()) for seed in complete_seeds(values)}


def row_differences_table(comparison: Comparison) -> str:
    """Lay out ours minus published of every row, averaged over learning rates."""
    lines = []
    for name, differences in row_differences(comparison).items():
        line = {"algorithm": f"`{name}`"}
        for title, x in zip(MEASURES, differences, strict=True):
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
