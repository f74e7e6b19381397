"""Text of docs/reproduction.md on the paper's claims: abstract, scoreboard, conclusions, and rows behind them.

Everything is computed from `glocal.paper.claims` and `glocal.paper.scoreboard`.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from agreement_text import numbers
from markup import code, join, table

from glocal.metrics import learning_rate_test, low_minus_high
from glocal.paper.claims import (
    LEVEL,
    TableRow,
    complete_seeds,
    interaction_by_seed,
    lr_correlation,
    minimum,
)
from glocal.paper.comparison import Comparison
from glocal.paper.scoreboard import (
    CONTRADICTED,
    FEW_SEEDS,
    REPRODUCED,
    UNSETTLED,
    UNTESTABLE,
    Claim,
)
from glocal.paper.studies.common import MeanInterval, rank_correlation
from glocal.report.table import ABSENT, format_lr, signed

INTRODUCTION = """The paper says (§6.1) that *local* continual-learning algorithms, which approximate old losses near
their solutions, forget more at high learning rates, and *global* ones, such as replay, do not. Its Table 1, trained
again:"""
SETUP = """Rotated-MNIST has 20 rotations of all digits, learnt for five epochs each by an MLP; `rotated-mnist` takes
the angles of the published runs, which differ between algorithms, *seed angles* the same for all. Split CIFAR-10 has
five tasks of two classes, learnt for 50 epochs each by a ResNet-18. The paper has five seeds.
[Algorithms](algorithms.md) has the equations; `ogd-published` is what the paper's code computes in the row OGD,
[nearly plain SGD](reproduction/rotated-mnist.md#ogd-and-ogd-gtl), and `ogd-gtl` its OGD-GTL."""
OGD_PUBLISHED, SGD, OGD_GTL = "ogd-published", "sgd", "ogd-gtl"
BOARD_NOTES = (
    """*Published*: the same statistic of the published means. A claim about every algorithm has the number of
    algorithms for it, against it, or not settled (the 95 % interval contains 0; of published correlations, p ≥ {level}
    by permutation); [claims by row](reproduction/claims-by-row.md) has their numbers.""",
    """*Reproduced* is about the sign, not the size; "not correlated" can be contradicted but never reproduced.""",
    "{measured}",
    """*High and low lr*: mean forgetting at the two highest and the two lowest learning rates, compared seed by seed.
    *ρ*: Spearman's rank correlation with the learning rate, for each seed.""",
    """Brackets: 95 % t-intervals over seeds, not corrected for the number of tests. *Seeds as units*, of the seeds in
    common: would other seeds of these algorithms show the difference? *Algorithms as units*, of all seeds, by exact
    permutation of the classes: would other algorithms? *2 + 3*: the numbers of local and global algorithms.""",
    """{diverged} Both versions of Rotated-MNIST share data and seeds: their tests are not independent.""",
)
ROWS_NOTE = """Rows in italics are not in the paper's table and do not count for its claims. *Lowest at*: the learning
rate of the lowest mean forgetting, and how many seeds have their minimum there. *ρ*: Spearman's rank correlation of
forgetting with the learning rate for each seed, averaged; a published one is against the claim if p < {level:g} by
permutation of the learning rates. It and the minimum count the *seeds* that finished at all learning rates. *Low −
high*, which needs four of the rates: mean forgetting at the two lowest ones minus that at the two highest, paired by
seed. Brackets: 95 % t-intervals over seeds. All published columns are of the published angles."""
DEFINITION = "reproduction/studies.md#locality"
NO_REASON = "**This does not show that locality is the reason**"


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
        """Whether forgetting rises more in the paper's local rows.

        "yes", "in some" columns, "no" (it rises less) or "not settled".
        """
        answers = {_answer(rise) for rise in self.paper.values()}
        if len(answers) == 1:
            return answers.pop()
        return "in some" if "yes" in answers else "not settled"

    @property
    def survives(self) -> bool:
        """Whether the answer is yes, also without the doubtful rows in every column."""
        kept = self.without_doubtful
        return self.answer == "yes" and kept.keys() == self.paper.keys() and _count(kept) == len(kept)


def _answer(rise: Rise) -> str:
    return rise.difference.phrase("yes", "no", "not settled")


def _count(found: Mapping[str, Rise]) -> int:
    """Count the columns in which forgetting rises more."""
    return sum(_answer(rise) == "yes" for rise in found.values())


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
    claims: Sequence[Claim], rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str], agrees: str
) -> str:
    """Say what was tested, what holds, and what it depends on.

    Args:
        claims: the scoreboard.
        rows: the rows of every column.
        reclassified: the algorithms whose measured class is not the paper's.
        agrees: a sentence on how our numbers agree with the published ones.
    """
    kinds = Counter(claim.paper.kind for claim in claims)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (REPRODUCED, CONTRADICTED, UNSETTLED, UNTESTABLE))
    tests = f"**Of {len(claims)} tests of its claims**: {counts}."
    if reclassified:
        kept = [claim for claim in claims if claim.paper.kind == claim.measured.kind == REPRODUCED]
        tests += f" With {_moved(rows, reclassified)}, as measured, {len(kept)} stay reproduced"
        tests += "." if any(claim.paper != claim.measured for claim in kept) else ", none about classes."
    split = [claim.paper for claim in claims if claim.column.startswith("split-")]
    if split:
        holds = sum(outcome.kind == REPRODUCED for outcome in split)
        few = sum(outcome.reason == FEW_SEEDS for outcome in split)
        tests += f" On Split CIFAR-10 {holds} of {len(split)} are reproduced"
        tests += f", and {few} lack seeds." if few else "."
    parts = [agrees, tests, _main_result(rises(rows, reclassified), reclassified)]
    return "\n".join([f"{_fill(INTRODUCTION)}\n", *(_fill(f"- {text}", "  ") for text in parts)])


def _main_result(found: Rises, reclassified: Sequence[str]) -> str:
    """Say whether forgetting rises more in local rows, and whether it does without the doubtful ones."""
    some = f"{_count(found.paper)} of {len(found.paper)} benchmarks"
    headlines = {
        "yes": "Forgetting rises more with the learning rate in the paper's local algorithms",
        "in some": f"In {some} forgetting rises more with the learning rate in the paper's local algorithms",
        "no": "Forgetting rises less with the learning rate in the paper's local algorithms",
        "not settled": "Whether forgetting rises more with the learning rate in the paper's local algorithms is open",
    }
    if not found.paper:
        return "**No benchmark has two seeds of every algorithm, so nothing can be concluded.**"
    text = f"**{headlines[found.answer]}**: {_by_column(found.paper)} points."
    if not _count(found.paper):
        return text
    if not found.without_doubtful:
        return f"{text} {NO_REASON}."
    doubtful = join([f"`{OGD_PUBLISHED}`, which is nearly plain SGD,", *map("`{}`".format, reclassified)])
    rest = f"ithout {doubtful} it is {_in_order(found.without_doubtful, found.paper)} (chosen after the results)."
    return f"{text} {'W' if found.survives else f'{NO_REASON}: w'}{rest}"


def _moved(rows: Mapping[str, Sequence[TableRow]], reclassified: Sequence[str]) -> str:
    """Say which class these algorithms have by measurement: the one that is not the paper's."""
    paper = {row.algorithm: row.locality for own in rows.values() for row in own}
    other = {"local": "global", "global": "local"}
    return join(f"`{name}` as {other[paper[name]]}" for name in reclassified)


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, subsequent_indent=indent)


def _doubts(found: Rises, reclassified: Sequence[str]) -> str:
    """Say why a rise in local rows that does not survive without the doubtful ones shows nothing about locality."""
    if not _count(found.paper) or found.survives:
        return ""
    reasons, doubtful = [], code([OGD_PUBLISHED, *reclassified])
    if found.ogd_against_sgd:
        reasons.append(f"`{OGD_PUBLISHED}` minus plain SGD is {_by_column(found.ogd_against_sgd)}")
    if reclassified:
        reasons.append(f"{code(reclassified)} changes class by Definition 3.1, measured after one task")
    if found.without_doubtful:
        kept = found.without_doubtful
        reasons.append(f"without {doubtful} it holds in {_count(kept)} of {len(kept)} benchmarks (above)")
    if found.with_ogd_gtl:
        other = f"with `{OGD_GTL}` for `{OGD_PUBLISHED}` it would be {_by_column(found.with_ogd_gtl)}"
        reasons.append(f"{other}, both chosen after the results")
    return f"**Is locality the reason?** It is not shown: {'; '.join(reasons)}."


def conclusions(
    claims: Sequence[Claim],
    tables: Mapping[str, Comparison],
    rows: Mapping[str, Sequence[TableRow]],
    reclassified: Sequence[str],
) -> str:
    """Return a list of what follows from the scoreboard and from the comparison with published numbers."""
    texts = [numbers(tables)]
    if counted := rising(rows):
        texts.append(f"**By class.** {counted}.")
    if doubts := _doubts(rises(rows, reclassified), reclassified):
        texts.append(doubts)
    if reclassified:
        changed = sum(claim.paper.kind != claim.measured.kind for claim in claims)
        moved = _moved(rows, reclassified)
        texts.append(f"**The classes matter.** With {moved}, {changed} of the {len(claims)} verdicts change.")
    return "\n".join(f"- {text}" for text in texts)


def _by_column(found: Mapping[str, Rise]) -> str:
    return join(f"{rise.difference} ({column})" for column, rise in found.items())


def _in_order(found: Mapping[str, Rise], stated: Mapping[str, Rise]) -> str:
    """Leave out the columns' names if they are those stated before."""
    return join(str(rise.difference) for rise in found.values()) if list(found) == list(stated) else _by_column(found)


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
    changed = f"with {_moved(rows, reclassified)}" if reclassified else "with measured classes"
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
        lines.append(line | {changed: "same" if measured == paper else other})
    counted = [row for own in rows.values() for row in own if row.published]
    diverged = sum(row.diverged for row in counted)
    values = {
        "level": f"{LEVEL:g}",
        "measured": f"*{changed[0].upper()}{changed[1:]}*: what the [experiment on Definition 3.1]({DEFINITION}) finds"
        f"{agreement}.",
        "diverged": f"{diverged} runs of these tests diverged and are left out."
        if diverged
        else "No run of these tests diverged.",
    }
    return "\n".join([f"{table(lines)}\n", *(_fill(f"- {note.format(**values)}", "  ") for note in BOARD_NOTES)])


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
        parts.append(f"**{column}**\n\n{table(lines)}")
    return "\n\n".join([*parts, ROWS_NOTE.format(level=LEVEL)])
