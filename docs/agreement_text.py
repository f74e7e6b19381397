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
    passed = [
        f"{others[0]} of {others[1]} ({column})" for column, made in tables.items() for _, others in [passes(made)]
    ]
    far = {}
    for divisor in DIVISORS:
        made_so = {column: divided_by(divisor, made) for column, made in tables.items()}
        rows = [f"`{row}` ({column})" for column, made in made_so.items() for row in far_rows(made)]
        far[divisor] = join(rows) if rows else "none"
    which = ", ".join(f"{rows} if the published ± divides by {divisor}" for divisor, rows in far.items())
    return (
        f"**The numbers.** Compared with another algorithm's published numbers, {join(passed)} are within {MAX_Z:g} "
        f"standard errors too. Rows that are further away, averaged over learning rates: "
        f"{far['n'] if len(set(far.values())) == 1 else which}."
    )


DIVISORS = "n − 1", "n"
"""What the sum of squares of a published deviation may have been divided by; the paper does not say."""


def divided_by(divisor: str, made: Comparison) -> Comparison:
    """Return a comparison, which takes published deviations as divided by n, as if they were divided by this."""
    if divisor == "n":
        return made

    def rescale(cell: Difference) -> Difference:
        if (old := cell.published) is None:
            return cell
        return replace(cell, published=replace(old, std=old.std * math.sqrt((old.seeds - 1) / old.seeds)))

    rows = tuple(
        replace(row, acc=rescale(row.acc), forgetting={over: rescale(cell) for over, cell in row.forgetting.items()})
        for row in made.rows
    )
    return replace(made, rows=rows)


def degrees_of_freedom(cell: Difference) -> float:
    """Return those of Welch's t-test."""
    parts = [(x.variance / x.seeds, x.seeds - 1) for x in (cell.ours, cell.published) if x and x.seeds > 1]
    return sum(part for part, _ in parts) ** 2 / sum(part**2 / free for part, free in parts)


def outside_by_chance(made: Comparison) -> float:
    """Return how many numbers would be expected beyond `MAX_Z` standard errors if both sides had the same means."""
    known = [cell for cell in compared(made).values() if cell.z is not None]
    return float(sum(2 * stats.t.sf(MAX_Z, degrees_of_freedom(cell)) for cell in known))


def passes(made: Comparison) -> tuple[tuple[int, int], tuple[int, int]]:
    """Count (passed, compared) of our rows against their own published numbers, and against other rows'."""
    counts = impostors(made)
    own = [pair for (ours, theirs), pair in counts.items() if ours == theirs]
    others = [pair for (ours, theirs), pair in counts.items() if ours != theirs]
    first, second = ((sum(p for p, _ in part), sum(n for _, n in part)) for part in (own, others))
    return first, second


def agreement(made: Comparison) -> str:
    """How many published numbers ours agree with, beside how many of another row's, and the matrix of both."""
    counts, (own, others) = impostors(made), passes(made)
    apart = [where for where, cell in compared(made).items() if cell.differs]
    alike = [pair for pair, (passed, n) in counts.items() if passed == n > 0 and pair[0] != pair[1]]
    text = (
        f"Of {own[1]} published numbers that have a counterpart here, accuracies and forgetting, {own[0]} are within "
        f"{MAX_Z:g} standard errors of ours{f' (not {join(apart)})' if apart else ''}. The same rule lets {others[0]} "
        f"of {others[1]} numbers pass if our rows are compared with the published numbers of other rows"
    )
    if alike:
        pairs = join(f"ours of `{a}` from the published `{b}`" for a, b in alike)
        text += f", and cannot tell {pairs}: {'it passes' if len(alike) == 1 else 'they pass'} in every cell"
    elif others[1]:
        text += "; no row passes for another in every cell"
    names, published = (list(dict.fromkeys(pair[i] for pair in counts)) for i in (0, 1))
    lines = [
        {"ours": f"`{a}`"} | {f"published `{b}`": f"{counts[a, b][0]} / {counts[a, b][1]}" for b in published}
        for a in names
    ]
    known = [cell for cell in compared(made).values() if cell.z is not None]
    free = [degrees_of_freedom(cell) for cell in known]
    by_chance = mean(stats.t.expect(abs, (x,)) for x in free)
    text += f". The mean |Δ| is {mean(abs(cell.z) for cell in known):.2f}; samples of the same means would be "
    text += f"{by_chance:.2f} apart, and {outside_by_chance(made):.0f} of them outside."
    other = passes(divided_by(DIVISORS[0], made))[0]
    text += f" This takes the published ± as divided by n; if it is divided by n − 1, {other[0]} pass."
    return f"{text} Numbers that pass, of those compared:\n\n{table(lines)}\n\n{by_row(made)}"


class RowDifference(NamedTuple):
    """Ours minus published of one row, averaged over learning rates, and its standard error."""

    mean: float
    error: float

    @property
    def z(self) -> float:
        return self.mean / self.error


def row_differences(made: Comparison) -> dict[str, tuple[RowDifference, RowDifference]]:
    """Return ACC and FGT of every published row.

    The standard error is made of our means over learning rates, seed by seed, and of the published deviations, whose
    learning rates are taken as independent. So are ours, where fewer than two seeds finished at all rates.
    """
    found = {}
    for row in table_rows(made):
        own = [cell for cell in made.rows if cell.algorithm == row.algorithm and cell.acc.z is not None]
        if not own:
            continue
        parts = {"acc": [cell.acc for cell in own], "forgetting": [cell.forgetting[made.over] for cell in own]}
        differences = []
        for name, cells in parts.items():
            error = math.sqrt(sum(x.standard_error**2 for x in cells)) / len(cells)
            if len(means := list(row_means(row, name).values())) > 1:
                theirs = math.sqrt(sum(x.published.variance / x.published.seeds for x in cells)) / len(cells)
                error = math.hypot(stdev(means) / math.sqrt(len(means)), theirs)
            differences.append(RowDifference(mean(x.difference for x in cells), error))
        found[row.algorithm] = tuple(differences)
    return found


def row_means(row: TableRow, statistic: str) -> dict[int, float]:
    """Return the mean over learning rates of every seed that finished at all of them."""
    values = row.values[statistic]
    return {seed: mean(own[seed] for own in values.values()) for seed in complete_seeds(values)}


def far_rows(made: Comparison) -> list[str]:
    """Return the rows whose mean ACC or FGT is further than `MAX_Z` standard errors from the published one."""
    return [name for name, both in row_differences(made).items() if any(abs(x.z) > MAX_Z for x in both)]


def by_row(made: Comparison) -> str:
    """Lay out ours minus published of every row, averaged over learning rates."""
    lines = []
    for name, both in row_differences(made).items():
        line = {"algorithm": f"`{name}`"}
        for what, x in zip(("ACC", "FGT"), both, strict=True):
            z = signed(x.z, 1)
            line |= {f"{what}: ours − published": f"{signed(x.mean)} ± {x.error:.2f}"}
            line |= {f"{what}: z": f"**{z}**" if abs(x.z) > MAX_Z else z}
        lines.append(line)
    return (
        "Rows, averaged over learning rates: the difference ± its standard error in points, and z, their ratio; bold "
        f"if |z| > {MAX_Z:g}. Our part of the error is over the means of the seeds that finished at all rates; the "
        "published part, and ours with fewer than two such seeds, takes the rates as independent.\n\n"
        f"{table(lines)}"
    )


def compared(made: Comparison) -> dict[str, Any]:
    """Every accuracy and forgetting, by what it is."""
    return {
        f"{what} of `{row.algorithm}` at {row.lr:g}": cell
        for row in made.rows
        for what, cell in (("the accuracy", row.acc), ("the forgetting", row.forgetting[made.over]))
    }
