"""Text of docs/reproduction.md on the paper's claims: abstract, scoreboard, rows behind it, and impostors.

Everything is computed from `glocal.paper.claims` and `glocal.paper.scoreboard`.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from glocal.metrics import learning_rate_test, low_minus_high
from glocal.paper.claims import (
    LEVEL,
    TableRow,
    complete_seeds,
    impostors,
    interaction_by_seed,
    lr_correlation,
    minimum,
    table_rows,
)
from glocal.paper.comparison import MAX_Z, Comparison
from glocal.paper.scoreboard import (
    CONTRADICTED,
    FEW_SEEDS,
    REPRODUCED,
    RISES_MORE,
    SAME_BY_ALGORITHM,
    UNSETTLED,
    UNTESTABLE,
    Claim,
)
from glocal.paper.studies.common import MeanInterval, rank_correlation
from glocal.report.table import ABSENT, format_lr, signed

INTRODUCTION = """The paper calls a continual-learning algorithm *local* if it approximates the losses of old tasks
near their solutions, and *global* otherwise. It says (§6.1) that local algorithms forget more at high learning rates,
which move the parameters far, and that global ones do not. Here two of the three benchmarks of its Table 1 are trained
again and each claim is tested."""
SETUP = """Rotated-MNIST has 20 rotations of all digits, learnt for five epochs each by an MLP; `rotated-mnist` takes
the angles of the published runs, which differ between algorithms, *seed angles* the same for all. Split CIFAR-10 has
five tasks of two classes, learnt for 50 epochs each by a ResNet-18. The paper has five seeds.
[Algorithms](algorithms.md) has the equations; `ogd-published` is what the paper's code computes in the row OGD,
[nearly plain SGD](reproduction/rotated-mnist.md#ogd-and-ogd-gtl), and `ogd-gtl` its OGD-GTL."""
OGD_PUBLISHED, SGD, OGD_GTL = "ogd-published", "sgd", "ogd-gtl"
INDEPENDENT = math.sqrt(2 / math.pi)
"""The mean |z| of independent samples."""
BOARD_NOTE = """*Published*: the same statistic of the published means. A claim about every algorithm has the number of
algorithms for it, against it, or not settled (the 95 % interval contains 0; of published correlations, p ≥ {level:g} by
permutation); [claims by row](reproduction/claims-by-row.md) has their numbers. *Reproduced* is about the sign, not the
size; that there is no correlation can only be contradicted.
*Measured classes*: those that the [experiment on Definition 3.1](reproduction/studies.md#locality) finds; {differ}.
*Low − high*: mean forgetting at the two lowest learning rates minus that at the two highest, paired by seed. *ρ*:
Spearman's rank correlation with the learning rate, for each seed. Brackets: 95 % t-intervals over seeds, not corrected
for the number of tests. *Seeds as units*, of the seeds in common: would other seeds of these algorithms show the
difference? *Algorithms as units*, of all seeds, by exact permutation of the classes: would other algorithms?
{diverged} Both columns of Rotated-MNIST share data and seeds: their tests are not independent."""
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


@dataclass(frozen=True)
class Rises:
    """Rises by column, where two seeds or more can tell."""

    paper: dict[str, Rise]
    """Of the paper's local rows, against its global ones."""
    without_doubtful: dict[str, Rise]
    """The same without OGD as published and without the reclassified rows."""
    with_ogd_gtl: dict[str, Rise]
    """The same with OGD-GTL in the place of OGD as published."""
    ogd_against_sgd: dict[str, Rise]
    """OGD as published against plain SGD, in the columns of `paper`."""

    @property
    def answer(self) -> str:
        """Whether forgetting rises more in the paper's local rows: "yes", "no" (it rises less) or "not settled"."""
        return _answer(self.paper.values())

    @property
    def survives(self) -> bool:
        """Whether the answer is yes, also without the doubtful rows in every column."""
        kept = self.without_doubtful
        return self.answer == "yes" and kept.keys() == self.paper.keys() and _answer(kept.values()) == "yes"


def _answer(found: Iterable[Rise]) -> str:
    answers = {rise.difference.phrase("yes", "no", "not settled") for rise in found}
    return answers.pop() if len(answers) == 1 else "not settled"


def rises(rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str]) -> Rises:
    """Compare local with global rows; `reclassified` are the algorithms whose measured class is not the paper's."""
    paper, without, replaced, ogd = {}, {}, {}, {}
    for column, own in rows.items():
        local, other = (
            [x.algorithm for x in own if x.published and x.locality == kind] for kind in ("local", "global")
        )
        sure = [[name for name in side if name not in (OGD_PUBLISHED, *reclassified)] for side in (local, other)]
        paper[column] = _rise(own, local, other)
        without[column] = _rise(own, *sure)
        replaced[column] = _rise(own, [*sure[0], OGD_GTL], sure[1]) if OGD_PUBLISHED in local else None
        ogd[column] = _rise(own, [OGD_PUBLISHED], [SGD]) if paper[column] else None
    known = ({column: rise for column, rise in part.items() if rise} for part in (paper, without, replaced, ogd))
    return Rises(*known)


def _rise(rows: Sequence[TableRow], local: list[str], other: list[str]) -> Rise | None:
    """Return None if there are no such rows, or fewer than two seeds that all of them have."""
    values = {row.algorithm: row.values["forgetting"] for row in rows}
    if not (local and other) or not {*local, *other} <= values.keys():
        return None
    difference, seeds = interaction_by_seed(*([values[name] for name in side] for side in (local, other)))
    return Rise(difference, local, other) if seeds > 1 else None


def abstract(
    claims: Sequence[Claim],
    rows: Mapping[str, Sequence[TableRow]],
    reclassified: Sequence[str],
    agrees: str,
    experiments: Sequence[str],
) -> str:
    """Say in ten lines what was tested, what holds, and what it depends on.

    Args:
        claims: the scoreboard.
        rows: the rows of every column.
        reclassified: the algorithms whose measured class is not the paper's.
        agrees: a sentence on how our numbers agree with the published ones.
        experiments: sentences from our own experiments.
    """
    found = rises(rows, reclassified)
    kinds = Counter(claim.paper.kind for claim in claims)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (REPRODUCED, CONTRADICTED, UNSETTLED, UNTESTABLE))
    tests = f"**Of {len(claims)} tests of its claims**: {counts}."
    if reclassified:
        kept = sum(claim.paper.kind == claim.measured.kind == REPRODUCED for claim in claims)
        tests += f" With the classes that an experiment on its Definition 3.1 finds, {kept} stay reproduced."
    split = [claim.paper for claim in claims if claim.column.startswith("split-")]
    if few := sum(outcome.reason == FEW_SEEDS for outcome in split):
        tests += f" On Split CIFAR-10, {few} of {len(split)} lack seeds."
    headlines = {
        "yes": "With the learning rate, forgetting rises more in the paper's local algorithms than in its global ones",
        "no": "With the learning rate, forgetting rises less in the paper's local algorithms than in its global ones",
        "not settled": "Whether forgetting rises more with the learning rate in the paper's local algorithms is open",
    }
    if found.paper:
        main = f"**{headlines[found.answer]}**: the difference is {_by_column(found.paper)} points."
    else:
        main = "**No benchmark has two seeds of every algorithm, so nothing can be concluded.**"
    parts = [agrees, tests, main, _doubts(found, reclassified), " ".join(experiments)]
    return "\n".join([f"{_fill(INTRODUCTION)}\n", *(_fill(f"- {text}", "  ") for text in parts if text)])


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, subsequent_indent=indent)


def _doubts(found: Rises, reclassified: Sequence[str]) -> str:
    """Say whether a rise in local rows survives without the doubtful ones."""
    if found.answer != "yes":
        return ""
    doubtful = _code([OGD_PUBLISHED, *reclassified])
    if found.survives:
        return f"**So it does without {doubtful}**, which are doubtful: by {_by_column(found.without_doubtful)} points."
    reasons = []
    if found.ogd_against_sgd:
        reasons.append(f"`{OGD_PUBLISHED}` minus plain SGD is {_by_column(found.ogd_against_sgd)}")
    if reclassified:
        reasons.append(f"{_code(reclassified)} changes class by Definition 3.1, measured after one task")
    text = "**This does not show that locality is the reason**"
    text += f": {'; '.join(reasons)}." if reasons else "."
    compared = [*_minus(found.without_doubtful), *_minus(found.with_ogd_gtl)]
    return f"{text} Without {doubtful}, chosen after the results: {'; '.join(compared)}." if compared else text


def _minus(found: Mapping[str, Rise]) -> list[str]:
    """Return a text for each pair of sides that columns have."""
    by_sides: dict[str, dict[str, Rise]] = {}
    for column, rise in found.items():
        by_sides.setdefault(f"{_code(rise.local)} minus {_code(rise.other)}", {})[column] = rise
    return [f"{sides} is {_settled(own)}" for sides, own in by_sides.items()]


def conclusions(
    claims: Sequence[Claim],
    tables: Mapping[str, Comparison],
    rows: Mapping[str, Sequence[TableRow]],
    reclassified: Sequence[str],
) -> str:
    """Return a list of what follows from the scoreboard and from the comparison with published numbers."""
    texts = [numbers(tables)]
    if counted := rising(rows):
        texts.append(f"**Both classes.** {counted}.")
    if reclassified:
        changed = sum(claim.paper.kind != claim.measured.kind for claim in claims)
        rise = [x for x in claims if x.claim == RISES_MORE and x.measured.kind != UNTESTABLE]
        differences = join(f"{x.measured.ours} ({x.column})" for x in rise) if rise else "unknown numbers of"
        texts.append(
            f"**The classes matter.** With the *measured classes*, {changed} of the {len(claims)} verdicts change, and "
            f"forgetting rises by {differences} points more in local than in global algorithms."
        )
    units = [claim.paper.kind for claim in claims if claim.claim == SAME_BY_ALGORITHM]
    texts.append(
        f"**Other algorithms.** That others of these classes would differ too is shown in {units.count(REPRODUCED)} of "
        f"{len(units)} benchmarks; {units.count(UNTESTABLE)} have too few algorithms for it."
    )
    return "\n".join(f"- {text}" for text in texts)


def _by_column(found: Mapping[str, Rise]) -> str:
    return join(f"{rise.difference} ({column})" for column, rise in found.items())


def _settled(found: Mapping[str, Rise]) -> str:
    words = "agrees", "the opposite", "not settled"
    return join(f"{rise.difference} ({column}: {rise.difference.phrase(*words)})" for column, rise in found.items())


def numbers(tables: Mapping[str, Comparison]) -> str:
    """Say how strict the comparison with published numbers is, and which rows differ from theirs."""
    right, total = agreeing(tables)
    passed, compared = map(sum, zip(*(passes(made)[1] for made in tables.values()), strict=True))
    away = join(f"{_mean_z(made):.2f} ({column})" for column, made in tables.items())
    far = [f"`{row}` ({column})" for column, made in tables.items() for row in far_rows(made)]
    return (
        f"**The numbers.** {right} of {total} are within {MAX_Z:g} standard errors of the published ones, but of "
        f"another algorithm's published numbers {passed} of {compared} are too. On average ours are {away} standard "
        f"errors away; {INDEPENDENT:.1f} is expected of independent samples. Averaged over learning rates, "
        f"{f'{join(far)} differ' if far else 'no algorithm differs'} by more than {MAX_Z:g}."
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
            counts += [f"{signs.count('negative')} of {len(signs)} {kind}"] if signs else []
        if len(counts) == 2:
            parts.setdefault(f"{join(counts)} algorithms", []).append(column)
    told = "; ".join(f"in {counts} ({' and '.join(columns)})" for counts, columns in parts.items())
    return f"Forgetting rises from low to high learning rates {told}" if told else ""


def board(claims: Sequence[Claim], rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str]) -> str:
    """Lay out the scoreboard, each claim with its columns below each other."""
    order = list(dict.fromkeys(claim.claim for claim in claims))
    lines: list[dict[str, str]] = []
    last = ""
    for claim in sorted(claims, key=lambda claim: order.index(claim.claim)):
        paper, measured = claim.paper, claim.measured
        plain = measured.by_row or measured.kind == UNTESTABLE
        other = measured.verdict if plain else f"{measured.ours}, {measured.verdict}"
        line = {"claim": "" if claim.claim == last else claim.claim, "benchmark": claim.column}
        last = claim.claim
        line |= {"published": paper.published, "ours": paper.ours}
        line |= {"n": paper.n, "verdict": f"**{paper.verdict}**"}
        lines.append(line | {"with measured classes": "same" if measured == paper else other})
    counted = [row for own in rows.values() for row in own if row.published]
    diverged = sum(row.diverged for row in counted)
    note = BOARD_NOTE.format(
        level=LEVEL,
        differ=f"they differ from the paper's for {', '.join(f'`{name}`' for name in reclassified)}"
        if reclassified
        else "they are the paper's",
        diverged=f"{diverged} runs of these tests diverged and are left out."
        if diverged
        else "No run of these tests diverged.",
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
        f"if |z| > {MAX_Z:g}. Our part of the error is over the means of the seeds that finished at all rates; the "
        "published part, and ours with fewer than two such seeds, takes the rates as independent.\n\n"
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
