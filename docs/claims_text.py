"""Text of docs/reproduction.md on the paper's claims: abstract, scoreboard, rows behind it, and impostors.

Everything is computed from `glocal.paper.claims` and `glocal.paper.scoreboard`.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from glocal.metrics import learning_rate_test, low_minus_high
from glocal.paper.claims import (
    TableRow,
    complete_seeds,
    impostors,
    interaction_by_seed,
    lr_correlation,
    minimum,
    table_rows,
)
from glocal.paper.comparison import MAX_Z, Comparison
from glocal.paper.scoreboard import CONTRADICTED, LEVEL, REPRODUCED, UNSETTLED, UNTESTABLE, Claim
from glocal.paper.studies.common import MeanInterval, rank_correlation
from glocal.report.table import ABSENT, format_lr, signed

INTRODUCTION = """The paper calls a continual-learning algorithm *local* if it approximates the losses of old tasks
near their solutions, and *global* otherwise. It says (§6.1) that local algorithms forget more at high learning rates,
which move the parameters far, and that global ones do not. Here its Table 1 is trained again and each claim tested."""
WORDS = """A *row* is one algorithm at all learning rates. A *column* is a benchmark: `split-cifar10`, and
`rotated-mnist` with the rotation angles of the published runs, which differ between algorithms, or with *seed angles*,
drawn from the seed and the same for all. [Algorithms](algorithms.md) has the equations. `ogd-gtl` is the paper's
OGD-GTL; `ogd-published` is what its code computes in the row OGD, which is
[nearly plain SGD](reproduction/rotated-mnist.md#ogd-and-ogd-gtl)."""
NEARLY_SGD, NO_MEMORY, STATED = "ogd-published", "sgd", "ogd-gtl"
"""OGD as published, plain SGD, and the paper's OGD-GTL, which can take the place of OGD as published."""
INDEPENDENT = math.sqrt(2 / math.pi)
"""The mean |z| of independent samples."""
BOARD_NOTE = """A claim about every row has the number of rows for it, against it, or not settled; see
[claims by row](reproduction/claims-by-row.md). Differences are in points, *published* ones bold if they are against the
claim. *Measured classes*: those that the [experiment on Definition 3.1](reproduction/studies.md#locality) finds;
{moved}. *Low − high*: mean forgetting at the two lowest learning rates minus that at the two highest, paired by seed.
*ρ*: Spearman's rank correlation with the learning rate, for each seed. Brackets: 95 % t-intervals over seeds, not
corrected for the number of rows; a row is settled if its interval does not contain 0. *Seeds as units*: would other
seeds of these algorithms show the difference? *Algorithms as units*, by exact permutation of the classes: would other
algorithms? One contrary row contradicts a claim about every row. {diverged} Both columns of Rotated-MNIST share data
and seeds: their tests are not independent."""
ROWS_NOTE = """Rows in italics are not in the paper's table and do not count for its claims. *Lowest at*: the learning
rate of the lowest mean forgetting, and how many seeds have their minimum there. *ρ*: Spearman's rank correlation of
forgetting with the learning rate for each seed, averaged; a published one is against the claim if p < {level:g} by
permutation of the learning rates. It and the minimum count the *seeds* that finished at all learning rates; low − high
needs four of the rates. Brackets: 95 % t-intervals over seeds. All published columns are of the published angles."""


class Rise(NamedTuple):
    """How much more forgetting rises with the learning rate in some rows than in others, in points."""

    difference: MeanInterval
    local: list[str]
    other: list[str]


class Rises(NamedTuple):
    """Rises by column, where seeds can tell."""

    stated: dict[str, Rise]
    """Of the paper's local rows, against its global ones."""
    sure: dict[str, Rise]
    """The same without OGD as published and without rows whose measured class is not the paper's."""
    replaced: dict[str, Rise]
    """The same with OGD-GTL in the place of OGD as published."""
    alike: dict[str, Rise]
    """OGD as published against plain SGD."""

    @property
    def holds(self) -> bool:
        return bool(self.stated) and all(rise.difference.low > 0 for rise in self.stated.values())

    @property
    def survives(self) -> bool:
        return self.holds and bool(self.sure) and all(rise.difference.low > 0 for rise in self.sure.values())


def rises(rows: Mapping[str, Sequence[TableRow]], moved: Sequence[str]) -> Rises:
    """Compare local with global rows; `moved` are the algorithms whose measured class is not the paper's."""
    found = Rises({}, {}, {}, {})
    doubtful = {NEARLY_SGD, *moved}
    for column, own in rows.items():
        values = {row.algorithm: row.values["forgetting"] for row in own}
        local, other = (
            [x.algorithm for x in own if x.published and x.locality == kind] for kind in ("local", "global")
        )
        kept = [[name for name in side if name not in doubtful] for side in (local, other)]
        sides = {"stated": (local, other), "sure": kept}
        if STATED in values and NEARLY_SGD in local:
            sides["replaced"] = [*kept[0], STATED], kept[1]
        if {NEARLY_SGD, NO_MEMORY} <= set(values):
            sides["alike"] = [NEARLY_SGD], [NO_MEMORY]
        for name, (first, second) in sides.items():
            if first and second:
                difference, seeds = interaction_by_seed(*([values[x] for x in side] for side in (first, second)))
                if seeds > 1:
                    getattr(found, name)[column] = Rise(difference, first, second)
        if column not in found.stated:
            found.alike.pop(column, None)
    return found


def abstract(
    claims: Sequence[Claim],
    rows: Mapping[str, Sequence[TableRow]],
    moved: Sequence[str],
    agrees: str,
    experiments: Sequence[str],
) -> str:
    """Say in ten lines what was tested, what holds, and what it depends on.

    Args:
        claims: the scoreboard.
        rows: the rows of every column.
        moved: the algorithms whose measured class is not the paper's.
        agrees: a sentence on how our numbers agree with the published ones.
        experiments: sentences from our own experiments.
    """
    found = rises(rows, moved)
    kinds = Counter(claim.paper.kind for claim in claims)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (REPRODUCED, CONTRADICTED, UNSETTLED, UNTESTABLE))
    parts = [f"Of {len(claims)} tests: {counts}.", agrees]
    if not found.stated:
        parts.append("**No column has two seeds of every row, so nothing can be concluded.**")
    elif not found.holds:
        parts.append(f"**Forgetting does not rise more in local rows**: by {_by_column(found.stated)} points.")
    else:
        parts.append(
            "**With the learning rate, forgetting rises more in the paper's local rows than in its global ones**, by "
            f"{_by_column(found.stated)} points."
        )
        parts.append(_doubts(found, moved))
    split = [claim.paper.kind for claim in claims if claim.column.startswith("split-")]
    if split:
        parts.append(f"On Split CIFAR-10, {split.count(UNTESTABLE)} of {len(split)} tests lack seeds or rows.")
    paragraphs = INTRODUCTION, " ".join(filter(None, [*parts, *experiments]))
    return "\n\n".join(textwrap.fill(" ".join(x.split()), 120, break_on_hyphens=False) for x in paragraphs)


def _doubts(found: Rises, moved: Sequence[str]) -> str:
    """Say whether the rise in local rows survives without the doubtful ones."""
    if found.survives:
        without = _code([NEARLY_SGD, *moved])
        return f"**It also does without the doubtful rows**, {without}: by {_by_column(found.sure)} points."
    reasons = []
    if found.alike and not any(rise.difference.low > 0 for rise in found.alike.values()):
        local = dict.fromkeys(name for rise in found.stated.values() for name in rise.local)
        reasons.append(f"of the {len(local)} local rows, `{NEARLY_SGD}` forgets as plain SGD does")
    if moved:
        reasons.append(f"by the paper's Definition 3.1, measured, {_code(moved)} changes its class")
    if found.sure:
        reasons.append(f"without these rows the difference is {_settled(found.sure)}")
    return f"**This does not show that locality is the reason**: {'; '.join(reasons)}." if reasons else ""


def conclusions(
    claims: Sequence[Claim],
    tables: Mapping[str, Comparison],
    rows: Mapping[str, Sequence[TableRow]],
    moved: Sequence[str],
) -> str:
    """Return a list of what follows from the scoreboard and from the comparison with published numbers."""
    found, texts = rises(rows, moved), [numbers(tables)]
    if found.stated:
        texts.append(_rows_behind(found, moved))
    if moved:
        changed = sum(claim.paper.kind != claim.measured.kind for claim in claims)
        differences = join(
            f"{x.measured.ours} ({x.column})"
            for x in claims
            if x.claim.startswith("Forgetting rises more with the lr in")
        )
        texts.append(
            f"**The classes matter.** With the *measured classes* {changed} of the {len(claims)} verdicts change, and "
            f"forgetting rises by {differences} points more in local rows than in global ones."
        )
    if counted := rising(rows):
        texts.append(f"**Global rows.** {counted}.")
    units = [claim.paper.kind for claim in claims if "algorithms as units" in claim.claim]
    texts.append(
        "**Other algorithms.** That other algorithms of these classes would differ too is shown in "
        f"{units.count(REPRODUCED)} of {len(units)} columns; {units.count(UNTESTABLE)} have too few rows."
    )
    return "\n".join(f"- {text}" for text in texts)


def _rows_behind(found: Rises, moved: Sequence[str]) -> str:
    """Say on which rows the comparison of local and global ones rests, and what is left without the doubtful ones."""
    local = list(dict.fromkeys(name for rise in found.stated.values() for name in rise.local))
    text = (
        f"**Few rows.** The paper's table has {len(local)} local row{'s' if len(local) > 1 else ''} here, "
        f"{_code(local)}; rows of our own count for no test."
    )
    if found.alike:
        words = sorted(
            {x.difference.phrase("more than", "less than", "about as much as") for x in found.alike.values()}
        )
        text += (
            f" `{NEARLY_SGD}` rises {' or '.join(words)} plain SGD: the difference is {_by_column(found.alike)} points."
        )
    if found.replaced:
        without = f" and without {_code(moved)}" if moved else ""
        text += f" With `{STATED}` in its place{without}, local minus global rows is {_settled(found.replaced)}."
    return text


def _by_column(found: Mapping[str, Rise]) -> str:
    return join(f"{rise.difference} ({column})" for column, rise in found.items())


def _settled(found: Mapping[str, Rise]) -> str:
    words = "agrees", "the opposite", "not settled"
    return join(f"{rise.difference} ({column}: {rise.difference.phrase(*words)})" for column, rise in found.items())


def numbers(tables: Mapping[str, Comparison]) -> str:
    """Say how strict the comparison with published numbers is, and which rows differ from theirs."""
    passed, compared = map(sum, zip(*(passes(made)[1] for made in tables.values()), strict=True))
    away = join(f"{_mean_z(made):.2f} ({column})" for column, made in tables.items())
    far = [f"`{row}` ({column})" for column, made in tables.items() for row in far_rows(made)]
    return (
        f"**Agreement.** The rule of {MAX_Z:g} standard errors can fail: against the wrong row's published numbers, "
        f"{passed} of {compared} pass. On average our numbers are {away} standard errors away; independent samples "
        f"would be {INDEPENDENT:.1f}. Averaged over learning rates, "
        f"{f'{join(far)} differ' if far else 'no row differs'} by more than {MAX_Z:g}."
    )


def agreeing(tables: Mapping[str, Comparison]) -> tuple[int, int]:
    """Count our numbers within `MAX_Z` standard errors of the published ones, and all that are compared."""
    passed, compared = zip(*(passes(made)[0] for made in tables.values()), strict=True)
    return sum(passed), sum(compared)


def rising(rows: Mapping[str, Sequence[TableRow]]) -> str:
    """Count the rows of either class whose forgetting is settled to rise, in columns where rows have two seeds."""
    parts: dict[str, list[str]] = {}
    for column, own in rows.items():
        counts = []
        for kind in ("local", "global"):
            tests = [
                learning_rate_test(x.values["forgetting"], kind) for x in own if x.published and x.locality == kind
            ]
            signs = [test.sign for test in tests if test is not None and test.seeds > 1]
            counts += [f"{signs.count('negative')} of {len(signs)} {kind} rows"] if signs else []
        if len(counts) == 2:
            parts.setdefault(join(counts), []).append(column)
    told = "; ".join(f"in {counts} ({' and '.join(columns)})" for counts, columns in parts.items())
    return f"Forgetting rises from low to high learning rates {told}" if told else ""


def board(claims: Sequence[Claim], rows: Mapping[str, Sequence[TableRow]], moved: Sequence[str]) -> str:
    """Lay out the scoreboard, each claim with its columns below each other."""
    order = list(dict.fromkeys(claim.claim for claim in claims))
    lines: list[dict[str, str]] = []
    last = ""
    for claim in sorted(claims, key=lambda claim: order.index(claim.claim)):
        paper, measured = claim.paper, claim.measured
        other = measured.verdict if measured.by_row else f"{measured.ours}, {measured.verdict}"
        line = {"claim": "" if claim.claim == last else claim.claim, "column": claim.column}
        last = claim.claim
        line |= {"published": paper.published, "ours": paper.ours}
        line |= {"n": paper.n, "verdict": f"**{paper.verdict}**"}
        lines.append(line | {"with measured classes": "same" if measured == paper else other})
    counted = [row for own in rows.values() for row in own if row.published]
    diverged = sum(row.diverged for row in counted)
    note = BOARD_NOTE.format(
        moved=f"they differ from the paper's for {', '.join(f'`{name}`' for name in moved)}"
        if moved
        else "they are the paper's",
        diverged=f"{diverged} runs of these rows diverged and are left out."
        if diverged
        else "No run of them diverged.",
    )
    return f"{_table(lines)}\n\n{note}"


def details(rows: Mapping[str, Sequence[TableRow]], measured: Mapping[str, Mapping[str, str]]) -> str:
    """Lay out the statistics of each row, ours and of the published means, in one table per column."""
    parts = []
    for column, own in rows.items():
        lines = []
        for row in own:
            forgetting, means = row.values["forgetting"], row.published.get("forgetting", {})
            lowest, test = minimum(forgetting), learning_rate_test(forgetting, row.locality)
            theirs = [ABSENT] * 3
            if means:
                lrs, values = (np.array(list(part)) for part in (means, means.values()))
                theirs = [format_lr(min(means, key=means.__getitem__)), signed(rank_correlation(lrs, values))]
                theirs.append(signed(low_minus_high(means)))
            at = f"{format_lr(lowest.lr)} ({lowest.seeds_there} of {lowest.seeds})" if lowest.seeds else ABSENT
            difference = ABSENT if test is None else str(MeanInterval(test.difference, test.lower, test.upper))
            ours = [at, str(lr_correlation(forgetting)), difference]
            line = {"algorithm": f"`{row.algorithm}`" if row.published else f"*`{row.algorithm}`*"}
            line |= {"paper's class": row.locality, "measured class": measured[column].get(row.algorithm, ABSENT)}
            for name, x, published in zip(("lowest at", "ρ", "low − high"), ours, theirs, strict=True):
                line |= {name: x, f"{name}, published": published}
            line |= {"ρ of the distance": str(lr_correlation(row.values["distance"]))}
            lines.append(line | {"seeds": str(len(complete_seeds(forgetting))), "diverged": str(row.diverged)})
        parts.append(f"**{column}**\n\n{_table(lines)}")
    return "\n\n".join([*parts, ROWS_NOTE.format(level=LEVEL)])


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
    alike = [pair for pair, (passed, n) in counts.items() if passed == n and pair[0] != pair[1]]
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
    text += f". The mean |Δ| is {_mean_z(made):.2f}; independent samples would be {INDEPENDENT:.1f} apart."
    return f"{text} Numbers that pass, of those compared:\n\n{_table(lines)}\n\n{by_row(made)}"


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
    learning rates are taken as independent. Where one seed of ours finished at all rates, the published variance stands
    in for ours.
    """
    found = {}
    for row in table_rows(made):
        own = [cell for cell in made.rows if cell.algorithm == row.algorithm and cell.acc.z is not None]
        if not own:
            continue
        parts = {"acc": [cell.acc for cell in own], "forgetting": [cell.forgetting[made.over] for cell in own]}
        differences = []
        for name, cells in parts.items():
            theirs = math.sqrt(sum(x.published.variance / x.published.seeds for x in cells)) / len(cells)
            ours = math.sqrt(sum(x.published.variance for x in cells)) / len(cells)
            if len(means := list(row_means(row, name).values())) > 1:
                ours = stdev(means) / math.sqrt(len(means))
            differences.append(RowDifference(mean(x.difference for x in cells), math.hypot(ours, theirs)))
        found[row.algorithm] = tuple(differences)
    return found


def row_means(row: TableRow, statistic: str) -> dict[int, float]:
    """Return the mean over learning rates of every seed that finished at all of them."""
    values = row.values[statistic]
    return {seed: mean(own[seed] for own in values.values()) for seed in complete_seeds(values)}


def _mean_z(made: Comparison) -> float:
    return mean(abs(cell.z) for cell in compared(made).values() if cell.z is not None)


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
        f"if |z| > {MAX_Z:g}. Our part of the error is over the means of the seeds that finished at all rates, or, of "
        "one such seed, made of the published deviations; the published part takes the rates as independent.\n\n"
        f"{_table(lines)}"
    )


def compared(made: Comparison) -> dict[str, Any]:
    """Every accuracy and forgetting, by what it is."""
    return {
        f"{what} of `{row.algorithm}` at {row.lr:g}": cell
        for row in made.rows
        for what, cell in (("the accuracy", row.acc), ("the forgetting", row.forgetting[made.over]))
    }


def _code(names: Iterable[str]) -> str:
    return join(f"`{name}`" for name in names)


def join(parts: Iterable[str]) -> str:
    """Return "a, b and c"."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
