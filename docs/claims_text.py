"""Text of docs/reproduction.md on the paper's claims: abstract, scoreboard, rows behind it, and impostors.

Everything is computed from `glocal.paper.claims` and `glocal.paper.scoreboard`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from glocal.metrics import learning_rate_test
from glocal.paper.claims import TableRow, complete_seeds, impostors, lr_correlation, minimum
from glocal.paper.comparison import MAX_Z, Comparison
from glocal.paper.scoreboard import CONTRADICTED, REPRODUCED, UNSETTLED, UNTESTABLE, Claim
from glocal.paper.studies.common import MeanInterval
from glocal.report.table import ABSENT, format_lr

ABSTRACT = """The paper calls continual-learning algorithms *local* if they approximate the losses of old tasks near the
old solutions, and *global* otherwise. It claims (§6.1) that local algorithms forget more at high learning rates, which
move the parameters far, and that global ones show no such relation. This page repeats its Table 1 on Rotated-MNIST,
with the published angles and with angles drawn from the seed, and on Split CIFAR-10, and tests each claim.

{findings}"""
BOARD_NOTE = """*Published*: the same statistic of the published means; bold if they are themselves against the claim.
*Measured classes*: those that the experiment on Definition 3.1 finds
([locality](reproduction/studies.md#locality)), instead of the paper's;
{moved}. *Low − high*: mean forgetting at the two lowest learning rates minus that at the two highest, paired by seed.
*ρ*: Spearman's rank correlation with the learning rate for each seed, averaged. Brackets: 95 % t-intervals over seeds,
not corrected for the number of rows. The difference between local and global rows is tested with seeds as units, which
says whether other seeds of these algorithms would show it, and with algorithms as units, by an exact permutation of the
classes, which says whether other algorithms would. A claim on every row is contradicted by one. {diverged} The tests
are not independent: both columns of Rotated-MNIST have the same data and seeds. The row `ogd-published` is nearly plain
SGD: see [OGD and OGD-GTL](reproduction/rotated-mnist.md#ogd-and-ogd-gtl)."""
ROWS_NOTE = """Rows in italics are not in the paper's table and do not count for its claims. *Lowest at*: the learning
rate of the lowest mean forgetting, and how many seeds have their minimum there. It and ρ count the *seeds* that
finished at all learning rates; low − high needs four of the rates."""


def abstract(
    claims: Sequence[Claim],
    tables: Mapping[str, Comparison],
    rows: Mapping[str, Sequence[TableRow]],
    moved: Sequence[str],
) -> str:
    """Say what was tested, how much of it holds, and what the conclusions depend on.

    Args:
        claims: the scoreboard.
        tables: the columns that can be compared with published numbers.
        rows: the rows of every column.
        moved: the algorithms whose measured class is not the paper's.
    """
    kinds = Counter(claim.paper.kind for claim in claims)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (REPRODUCED, CONTRADICTED, UNSETTLED, UNTESTABLE))
    findings = [f"{len(claims)} tests, with the paper's classes: {counts}."]
    if moved:
        changed = sum(claim.paper.kind != claim.measured.kind for claim in claims)
        others = join(f"`{name}`" for name in moved)
        findings.append(
            f"Tested by experiment, the paper's Definition 3.1 puts {others} in the other class than the paper does. "
            f"With these measured classes, {changed} of the {len(claims)} verdicts change."
        )
    findings += filter(None, (rising(name, own) for name, own in rows.items()))
    rise = [claim for claim in claims if claim.claim.startswith("Forgetting rises more with the lr in local")]
    differences = "; ".join(f"{x.paper.ours} on {x.column} (measured classes: {x.measured.ours})" for x in rise)
    findings.append(
        "By how many points forgetting rises more in local rows than in global ones, from low to high rates: "
        f"{differences}."
    )
    units = [claim.paper.kind for claim in claims if "algorithms as units" in claim.claim]
    findings.append(
        f"Would other algorithms of these classes show it too? {units.count(REPRODUCED)} of {len(units)} columns say "
        f"so; {units.count(UNTESTABLE)} have too few algorithms for any answer."
    )
    split = [claim.paper.kind for claim in claims if claim.column.startswith("split-")]
    findings.append(f"On Split CIFAR-10, {split.count(UNTESTABLE)} of {len(split)} tests lack seeds or algorithms.")
    pairs = [passes(made) for made in tables.values()]
    right, wrong = ([sum(pair[i][j] for pair in pairs) for j in (0, 1)] for i in (0, 1))
    findings.append(
        f"{right[0]} of {right[1]} of our numbers are within {MAX_Z:g} standard errors of the published ones. As a "
        f"check of this test: of comparisons with another row's published numbers, {wrong[0]} of {wrong[1]} pass too."
    )
    return ABSTRACT.format(findings="\n".join(f"- {text}" for text in findings))


def rising(column: str, rows: Sequence[TableRow]) -> str:
    """Count the rows of either class whose forgetting is settled to rise; "" if a class has no row with two seeds."""
    parts = []
    for kind in ("local", "global"):
        tests = [learning_rate_test(x.values["forgetting"], kind) for x in rows if x.published and x.locality == kind]
        signs = [test.sign for test in tests if test is not None and test.seeds > 1]
        if not signs:
            return ""
        parts.append(f"{signs.count('negative')} of {len(signs)} {kind} rows")
    return f"On {column}, forgetting rises from low to high learning rates in {join(parts)}."


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
        moved=f"they differ for {', '.join(f'`{name}`' for name in moved)}" if moved else "they are the same",
        diverged=f"{diverged} runs of these rows diverged and are left out."
        if diverged
        else "No run of them diverged.",
    )
    return f"{_table(lines)}\n\n{note}"


def details(rows: Mapping[str, Sequence[TableRow]], measured: Mapping[str, Mapping[str, str]]) -> str:
    """Lay out the statistics of each row, in one table per column."""
    parts = []
    for column, own in rows.items():
        lines = []
        for row in own:
            forgetting, name = row.values["forgetting"], f"`{row.algorithm}`"
            lowest, rho = minimum(forgetting), lr_correlation(forgetting)
            test = learning_rate_test(forgetting, row.locality)
            line = {"algorithm": name if row.published else f"*{name}*", "paper's class": row.locality}
            line |= {"measured class": measured[column].get(row.algorithm, ABSENT)}
            line |= {"lowest at": format_lr(lowest.lr) if lowest.seeds else ABSENT}
            line |= {"seeds there": f"{lowest.seeds_there} of {lowest.seeds}" if lowest.seeds else ABSENT}
            line |= {"ρ": str(rho)}
            line |= {
                "low − high": ABSENT if test is None else str(MeanInterval(test.difference, test.lower, test.upper))
            }
            lines.append(line | {"seeds": str(len(complete_seeds(forgetting))), "diverged": str(row.diverged)})
        parts.append(f"**{column}**\n\n{_table(lines)}")
    return "\n\n".join([*parts, ROWS_NOTE])


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
    units = {where: cell.z for where, cell in compared(made).items() if cell.z is not None}
    apart = [where for where, z in units.items() if abs(z) > MAX_Z]
    away = mean(abs(z) for z in units.values())
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
    names = list(dict.fromkeys(ours for ours, _ in counts))
    lines = [
        {"ours": f"`{a}`"} | {f"published `{b}`": f"{counts[a, b][0]} / {counts[a, b][1]}" for b in names}
        for a in names
    ]
    expected = f"independent samples would be {math.sqrt(2 / math.pi):.1f} apart"
    text += f". The mean |Δ| is {away:.2f}; {expected}."
    return f"{text} Numbers that pass, of those compared:\n\n{_table(lines)}"


def compared(made: Comparison) -> dict[str, Any]:
    """Every accuracy and forgetting, by what it is."""
    return {
        f"{what} of `{row.algorithm}` at {row.lr:g}": cell
        for row in made.rows
        for what, cell in (("the accuracy", row.acc), ("the forgetting", row.forgetting[made.over]))
    }


def join(parts: Iterable[str]) -> str:
    """Return "a, b and c"."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
