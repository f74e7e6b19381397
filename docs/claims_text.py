"""Text of docs/reproduction.md on the paper's claims: abstract, scoreboard, conclusions, and rows behind them.

Everything is computed from `glocal.paper.claims` and `glocal.paper.scoreboard`.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from agreement_text import numbers
from markup import code, join, table

from glocal.metrics import learning_rate_test, low_minus_high
from glocal.paper.claims import (
    LEVEL,
    TableRow,
    complete_seeds,
    interaction_by_seed,
    low_rates_minimum,
    lr_correlation,
    minimum,
)
from glocal.paper.comparison import Comparison
from glocal.paper.scoreboard import (
    CONTRADICTED,
    REPRODUCED,
    UNSETTLED,
    UNTESTABLE,
    Claim,
)
from glocal.paper.studies.common import MeanInterval, rank_correlation
from glocal.paper.table1 import COLUMNS
from glocal.report.table import ABSENT, format_lr, signed

INTRODUCTION = """The paper says (§6.1) that *local* algorithms, which approximate old losses near their solutions,
forget more at high learning rates, and *global* ones, such as replay, do not. Its Table 1{without}, trained again:"""
SETUP = """Rotated-MNIST has 20 rotations of all digits, learnt for five epochs each by an MLP; `rotated-mnist` takes
the angles of the published runs, which differ between algorithms, *seed angles* the same for all. Split CIFAR-10 has
five tasks of two classes, learnt for 50 epochs each by a ResNet-18. The paper has five seeds.
[Algorithms](algorithms.md) has the equations; `ogd-published` is what the paper's code computes in the row OGD, on
Rotated-MNIST [nearly plain SGD](reproduction/rotated-mnist.md#ogd-and-ogd-gtl), and `ogd-gtl` its OGD-GTL."""
ROTATED, SEED_ANGLES = "rotated-mnist", "rotated-mnist, seed angles"
OGD_PUBLISHED, SGD, OGD_GTL = "ogd-published", "sgd", "ogd-gtl"
SINGLE_IMAGES = ("ewc", OGD_PUBLISHED)
"""Algorithms that end a task with BatchNorm's statistics of single images, as the paper's code does."""
BOARD_NOTES = (
    """*Published*: the same statistic of the published means, whose sign counts. A claim about every algorithm has the
    number of algorithms for it, against it, or not settled (the 95 % interval contains 0);
    [claims by row](reproduction/claims-by-row.md) has their numbers.""",
    """*Reproduced* is about the sign, not the size; "not correlated" and "the same" can be contradicted but never
    reproduced.""",
    "{measured}",
    """*High and low lr*: mean forgetting at the two highest and the two lowest learning rates, compared seed by seed.
    *ρ*: Spearman's rank correlation with the learning rate, for each seed and each algorithm: one that forgets more,
    or less, contradicts "not correlated". A published ρ, without seeds, is settled by permutation of its five rates,
    if it is ±1.""",
    """Brackets: 95 % t-intervals over seeds, not corrected for the number of tests. *Seeds as units*, of the seeds in
    common: would other seeds of these algorithms show the difference? *Algorithms as units*, of all seeds, by exact
    permutation of the classes (p is one-sided: 2.5 %): would other algorithms? *2 + 3*: the numbers of local and global
    algorithms.""",
    """{diverged} On Split CIFAR-10 most seeds were added when the first results were known.""",
)
ROWS_NOTE = """Rows in italics are not in the paper's table and do not count for its claims. *Measured class*: by
Definition 3.1, for split-cifar10 on Split MNIST. *Lowest at*: the learning rate of the lowest mean forgetting, and how
many seeds have their minimum there. *Low rates − others*: the lowest forgetting at rates up to 0.001 minus the lowest
at the others, paired by seed; the claim says that it is below 0. *ρ*: Spearman's rank correlation of
forgetting with the learning rate for each seed, averaged; a published one is against the claim if p < {level:g} by
permutation of the learning rates. It and the minimum count the *seeds* that finished at all learning rates. *Low −
high*, which needs four of the rates: mean forgetting at the two lowest ones minus that at the two highest, paired by
seed. Brackets: 95 % t-intervals over seeds. All published columns are of the published angles."""
DEFINITION = "reproduction/studies.md#locality"
NO_REASON = "**This does not show that locality is the reason.**"
YES, LESS = "yes", "less"
ANSWERS = (YES, LESS, UNSETTLED)
CHOICES = "[other choices of algorithms](#what-a-reader-may-conclude)"
CHOICES_NOTE = """How many points more forgetting rises with the learning rate in local than in global algorithms, by
choices made after the results:"""


class Rise(NamedTuple):
    """How much more forgetting rises with the learning rate in some rows than in others, in points."""

    difference: MeanInterval
    local: list[str]
    other: list[str]

    @property
    def answer(self) -> str:
        return self.difference.phrase(YES, LESS, UNSETTLED)


Rises: TypeAlias = Mapping[str, Rise]  # by column, where two seeds or more can tell


def rises(rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str]) -> dict[str, Rises]:
    """Compare local with global rows, by the paper's classes ("") and by every other choice of algorithms.

    Args:
        rows: the rows of every column.
        reclassified: the algorithms whose measured class is not the paper's.
    """
    rises_by_choice: dict[str, dict[str, Rise]] = {"": {}}
    for column, column_rows in rows.items():
        local, other = (
            [x.algorithm for x in column_rows if x.published and x.locality == kind] for kind in ("local", "global")
        )
        for choice, sides in _choices(local, other, reclassified).items():
            if rise := _rise(column_rows, *sides):
                rises_by_choice.setdefault(choice, {})[column] = rise
    return rises_by_choice


def _choices(local: list[str], other: list[str], reclassified: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Return which algorithms to compare, by what is different from the paper's choice."""

    def without(*algorithms: str) -> tuple[list[str], list[str]]:
        first, second = ([name for name in side if name not in algorithms] for side in (local, other))
        return first, second

    choices = {"": (local, other)}
    if OGD_PUBLISHED in local:
        sides = without(OGD_PUBLISHED)
        choices |= {f"without {code([OGD_PUBLISHED])}": sides}
        choices |= {f"{code([OGD_GTL])} for {code([OGD_PUBLISHED])}": ([*sides[0], OGD_GTL], other)}
        choices |= {f"without {code(SINGLE_IMAGES)}": without(*SINGLE_IMAGES)}
    if reclassified:
        sides, names = without(*reclassified), code(reclassified)
        choices |= {f"without {names}": sides}
        choices |= {f"without {code([OGD_PUBLISHED, *reclassified])}": without(OGD_PUBLISHED, *reclassified)}
        newcomers = ([name for name in side if name in reclassified] for side in (other, local))
        choices |= {f"{names} in the other class": tuple([*a, *b] for a, b in zip(sides, newcomers, strict=True))}
    return choices


def _rise(rows: Sequence[TableRow], local: list[str], other: list[str]) -> Rise | None:
    """Return None if there are no such rows, or fewer than two seeds that all of them have."""
    values = {row.algorithm: row.values["forgetting"] for row in rows}
    if not (local and other) or not {*local, *other} <= values.keys():
        return None
    difference, seeds = interaction_by_seed(*([values[name] for name in side] for side in (local, other)))
    return Rise(difference, local, other) if seeds > 1 else None


def abstract(
    claims: Sequence[Claim], rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str], agreement: str
) -> str:
    """Say what was tested, what holds, and what it depends on. Columns that the paper does not have count apart.

    Args:
        claims: the scoreboard.
        rows: the rows of every column.
        reclassified: the algorithms whose measured class is not the paper's.
        agreement: a sentence on how our numbers agree with the published ones.
    """
    absent = [name for name in COLUMNS if name not in rows]
    omission = f" without {join(absent)}" if absent else ""
    paper_claims = [claim for claim in claims if claim.column in COLUMNS]
    kinds = Counter(claim.paper.kind for claim in paper_claims)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (REPRODUCED, CONTRADICTED, UNSETTLED, UNTESTABLE))
    tests = f"**Of {len(paper_claims)} tests of its claims**: {counts}"
    if split := [claim.paper.kind for claim in paper_claims if claim.column.startswith("split-")]:
        tests += f" (Split CIFAR-10: {split.count(REPRODUCED)} of {len(split)} reproduced)"
    if reclassified:
        reproduced = [claim for claim in paper_claims if claim.measured.kind == REPRODUCED]
        stay = sum(claim.paper.kind == REPRODUCED for claim in reproduced)
        about_classes = sum(claim.paper.kind == REPRODUCED and claim.paper != claim.measured for claim in reproduced)
        tests += f". With {_changed_classes(rows, reclassified)}, as measured, {stay} stay reproduced, {about_classes} "
        tests += f"about the classes{f'; {new} more only then' if (new := len(reproduced) - stay) else ''}"
    tests += "."
    parts = [agreement, tests, _main_result(rises(rows, reclassified))]
    introduction = INTRODUCTION.format(without=omission)
    return "\n".join([f"{_fill(introduction)}\n", *(_fill(f"- {text}", "  ") for text in parts)])


def _main_result(rises_by_choice: Mapping[str, Rises]) -> str:
    """Say whether forgetting rises more in the paper's local rows, and with how many other choices of algorithms."""
    paper = rises_by_choice[""]
    if not paper:
        return "**No benchmark has two seeds of every algorithm, so nothing can be concluded.**"
    columns = {answer: {k: x for k, x in paper.items() if x.answer == answer} for answer in ANSWERS}
    result = "; ".join(
        f"{answer}: {_by_column(column_rises)}" for answer, column_rises in columns.items() if column_rises
    )
    question = "Does forgetting rise more with the learning rate in the paper's local algorithms?"
    text = f"**{question}** {result[0].upper()}{result[1:]} points."
    answers = [
        rise.answer for choice, column_rises in rises_by_choice.items() if choice for rise in column_rises.values()
    ]
    if not answers:
        return text
    counts = ", ".join(f"{answer} {answers.count(answer)} times" for answer in ANSWERS if answer in answers)
    return f"{text} By {CHOICES}: {counts}.{'' if set(answers) == {YES} else f' {NO_REASON}'}"


def _changed_classes(rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str]) -> str:
    """Say which class these algorithms have by measurement: the one that is not the paper's."""
    paper = {row.algorithm: row.locality for column_rows in rows.values() for row in column_rows}
    other = {"local": "global", "global": "local"}
    return join(f"`{name}` as {other[paper[name]]}" for name in reclassified)


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, subsequent_indent=indent)


def _doubts(rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str]) -> str:
    """Say what else than locality differs between the classes, and lay out the rises by choices of algorithms."""
    rises_by_choice = rises(rows, reclassified)
    reasons, paper = [], rises_by_choice[""]
    if ROTATED in paper and SEED_ANGLES in paper:
        with_angles, equal = (paper[column].difference.mean for column in (ROTATED, SEED_ANGLES))
        reasons.append(
            f"the published angles (with equal ones the difference is {signed(equal)} instead of {signed(with_angles)})"
        )
    ogd_rises = {column: _rise(column_rows, [OGD_PUBLISHED], [SGD]) for column, column_rows in rows.items()}
    if rotated_rises := {column: rise for column, rise in ogd_rises.items() if rise and column.startswith("rotated-")}:
        reasons.append(f"`{OGD_PUBLISHED}` minus plain SGD is {_by_column(rotated_rises)}")
    if reclassified:
        reasons.append(f"{code(reclassified)} changes class by Definition 3.1, measured after one task")
    if any(column.startswith("split-") for column in rises_by_choice[""]):
        reasons.append(
            f"on Split CIFAR-10 {code(SINGLE_IMAGES)}, but no global algorithm, end tasks with "
            "[BatchNorm statistics of single images](reproduction/split-cifar10.md)"
        )
    return f"**Is locality the reason?** More differs: {'; '.join(reasons)}." if reasons else ""


def choices_table(rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str]) -> str:
    """Lay out how much more forgetting rises in local rows, by which algorithms are compared; "" if none can be."""
    rises_by_choice = rises(rows, reclassified)
    if not rises_by_choice[""]:
        return ""
    lines = []
    for choice, column_rises in rises_by_choice.items():
        cells = {
            column: str(column_rises[column].difference) if column in column_rises else ABSENT
            for column in rises_by_choice[""]
        }
        lines.append({"local − global": choice or "the paper's choice"} | cells)
    return f"{CHOICES_NOTE}\n\n{table(lines)}"


def conclusions(
    claims: Sequence[Claim],
    tables: Mapping[str, Comparison],
    rows: Mapping[str, Sequence[TableRow]],
    reclassified: Sequence[str],
) -> str:
    """Return a list of what follows from the scoreboard and from the comparison with published numbers."""
    texts = [numbers(tables)]
    if counts := rise_counts(rows):
        texts.append(f"**By class.** {counts}.")
    if doubts := _doubts(rows, reclassified):
        texts.append(doubts)
    if reclassified:
        paper_claims, variants = (
            [claim for claim in claims if (claim.column in COLUMNS) is side] for side in (True, False)
        )
        changes = sum(claim.paper.kind != claim.measured.kind for claim in paper_claims)
        sentence = (
            f"**The classes matter.** With {_changed_classes(rows, reclassified)}, {changes} of the "
            f"{len(paper_claims)} verdicts change"
        )
        if variants:
            kind = {(claim.column, claim.claim): claim.paper.kind for claim in paper_claims}
            changes = sum(x.paper.kind != kind.get((x.column.split(",")[0], x.claim)) for x in variants)
            sentence += (
                f"; with [seed angles](reproduction/claims-by-row.md#with-seed-angles), {changes} of {len(variants)}"
            )
        texts.append(f"{sentence}.")
    listing = "\n".join(f"- {text}" for text in texts)
    return f"{listing}\n\n{choices_table(rows, reclassified)}".strip()


def _by_column(column_rises: Mapping[str, Rise]) -> str:
    return join(f"{rise.difference} ({column})" for column, rise in column_rises.items())


def rise_counts(rows: Mapping[str, Sequence[TableRow]]) -> str:
    """Count the rows of either class whose forgetting is shown to rise, and name those that are not settled."""
    parts: dict[str, list[str]] = {}
    for column, column_rows in rows.items():
        counts, unsettled = [], []
        for kind in ("local", "global"):
            tests = {
                x.algorithm: learning_rate_test(x.values["forgetting"], kind)
                for x in column_rows
                if x.published and x.locality == kind
            }
            signs = {name: test.sign for name, test in tests.items() if test is not None and test.seeds > 1}
            counts += [f"{list(signs.values()).count('negative')} of {len(signs)} {kind}"] if signs else []
            unsettled += [name for name, sign in signs.items() if sign == UNSETTLED]
        if len(counts) == 2:
            open_ones = f", {code(unsettled)} not settled" if unsettled else ""
            parts.setdefault(f"{join(counts)} algorithms{open_ones}", []).append(column)
    listing = "; ".join(f"in {counts} ({' and '.join(columns)})" for counts, columns in parts.items())
    return f"Forgetting is shown to rise from low to high learning rates {listing}" if listing else ""


def board(
    claims: Sequence[Claim],
    rows: Mapping[str, Sequence[TableRow]],
    reclassified: Sequence[str],
    notes: bool = True,
) -> str:
    """Lay out the scoreboard, each claim with its columns below each other, and with notes on how to read it."""
    order = list(dict.fromkeys(claim.claim for claim in claims))
    header = f"with {_changed_classes(rows, reclassified)}" if reclassified else "with measured classes"
    agreement = "; of the others it agrees with the paper" if reclassified else ", which is what the paper says"
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
        lines.append(line | {header: "same" if measured == paper else other})
    if not notes:
        return table(lines)
    published_rows = [row for column_rows in rows.values() for row in column_rows if row.published]
    diverged = sum(row.diverged for row in published_rows)
    values = {
        "level": f"{LEVEL:g}",
        "measured": f"*{header[0].upper()}{header[1:]}*: what the [experiment on Definition 3.1]({DEFINITION}) finds"
        f", for Split CIFAR-10 on Split MNIST{agreement}.",
        "diverged": f"{diverged} runs of these tests diverged and are left out."
        if diverged
        else "No run of these tests diverged.",
    }
    return "\n".join([f"{table(lines)}\n", *(_fill(f"- {note.format(**values)}", "  ") for note in BOARD_NOTES)])


def details(rows: Mapping[str, Sequence[TableRow]], classes: Mapping[str, Mapping[str, str]]) -> str:
    """Lay out the statistics of each row, ours and of the published means, in one table per column."""
    parts = []
    for column, column_rows in rows.items():
        lines = []
        for row in column_rows:
            forgetting, means = row.values["forgetting"], row.published.get("forgetting", {})
            lowest, test = minimum(forgetting), learning_rate_test(forgetting, row.locality)
            theirs = [ABSENT] * 3
            if means:
                lrs, values = (np.array(list(part)) for part in (means, means.values()))
                theirs = [format_lr(min(means, key=means.__getitem__)), signed(rank_correlation(lrs, values))]
                theirs.append(signed(low_minus_high(means)))
            lowest_rate = f"{format_lr(lowest.lr)} ({lowest.seeds_there} of {lowest.seeds})" if lowest.seeds else ABSENT
            difference = ABSENT if test is None else str(MeanInterval(test.difference, test.lower, test.upper))
            line_low = {"low rates − others": str(low_rates_minimum(forgetting))}
            ours = [lowest_rate, str(lr_correlation(forgetting)), difference]
            line = {"algorithm": f"`{row.algorithm}`" if row.published else f"*`{row.algorithm}`*"}
            line |= {"paper's class": row.locality, "measured class": classes[column].get(row.algorithm, ABSENT)}
            for name, x, published in zip(("lowest at", "ρ", "low − high"), ours, theirs, strict=True):
                line |= {name: x, f"{name}, published": published} | (line_low if name == "lowest at" else {})
            line |= {"ρ of the distance": str(lr_correlation(row.values["distance"]))}
            lines.append(line | {"seeds": str(len(complete_seeds(forgetting))), "diverged": str(row.diverged)})
        parts.append(f"**{column}**\n\n{table(lines)}")
    return "\n\n".join([*parts, ROWS_NOTE.format(level=LEVEL)])
