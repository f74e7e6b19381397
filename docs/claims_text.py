"""Text of docs/reproduction.md on the paper's claims: abstract, scoreboard, rows behind it, and impostors.

Everything is computed from `glocal.paper.claims` and `glocal.paper.scoreboard`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from glocal.metrics import learning_rate_test
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
from glocal.paper.studies.common import MeanInterval
from glocal.paper.table1 import COLUMNS, ICARL_ALGORITHMS
from glocal.report.table import ABSENT, format_lr, signed

ABSTRACT = """The paper calls continual-learning algorithms *local* if they approximate the losses of old tasks near the
old solutions, and *global* otherwise. It claims (§6.1) that local algorithms forget more at high learning rates, which
move the parameters far, and that global ones show no such relation. This page repeats its Table 1 and tests each claim.
A *row* is one algorithm at all learning rates. A *column* is a benchmark: `split-cifar10`, and `rotated-mnist` with the
rotation angles of the published runs, which differ between algorithms, or with *seed angles*, drawn from the seed and
the same for all. Algorithms ([equations](algorithms.md)): `sgd` plain SGD, `er` replay, `agem` averaged GEM, `si`
synaptic intelligence, `ewc` elastic weight consolidation, `laplace` a Kronecker-factored penalty, `icarl` iCaRL
(`icarl-random`: with random exemplars), `ogd-gtl` orthogonal gradient descent, `ogd-published` the same as the
published code computes it, nearly plain SGD, and `optimal-soft` the paper's optimal local objective.

{conclusion}
{findings}"""
NEARLY_SGD, NO_MEMORY, STATED = "ogd-published", "sgd", "ogd-gtl"
"""OGD as published, plain SGD, and the paper's OGD-GTL, which can take the place of OGD as published."""
INDEPENDENT = math.sqrt(2 / math.pi)
"""The mean |z| of independent samples."""
BOARD_NOTE = """*Published*: the same statistic of the published means; bold if they are themselves against the claim
(for ρ: if p < {level:g} by permutation of the learning rates).
*Measured classes*: those that the experiment on Definition 3.1 finds
([locality](reproduction/studies.md#locality)), instead of the paper's;
{moved}. *Low − high*: mean forgetting at the two lowest learning rates minus that at the two highest, paired by seed.
*ρ*: Spearman's rank correlation with the learning rate for each seed, averaged. Brackets: 95 % t-intervals over seeds,
not corrected for the number of rows. *Seeds as units*: would other seeds of these algorithms show the difference?
*Algorithms as units*, by exact permutation of the classes: would other algorithms? One contrary row contradicts an
every-row claim. {diverged} The tests are not independent: both columns of Rotated-MNIST have the same data and seeds.
On `ogd-published`, see [OGD and OGD-GTL](reproduction/rotated-mnist.md#ogd-and-ogd-gtl)."""
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
    rise = [claim for claim in claims if claim.claim.startswith("Forgetting rises more with the lr in local")]
    if moved:
        changed = sum(claim.paper.kind != claim.measured.kind for claim in claims)
        differences = join(f"{x.measured.ours} ({x.column})" for x in rise)
        findings.append(
            f"Tested by experiment, the paper's Definition 3.1 puts {_code(moved)} in the other class than the paper "
            f"does. With these *measured classes* {changed} of the {len(claims)} verdicts change, and forgetting rises "
            f"by {differences} points more in local rows than in global ones."
        )
    if counted := rising(rows):
        verdicts = Counter(claim.paper.kind for claim in claims if "not correlated" in claim.claim)
        testable = verdicts.total() - verdicts[UNTESTABLE]
        against = f"contradicted in {verdicts[CONTRADICTED]} of {testable} columns that can be tested"
        contradicted = (
            f"; that it is not correlated with them in global rows is {against}" if verdicts[CONTRADICTED] else ""
        )
        findings.append(f"{counted}{contradicted}.")
    units = [claim.paper.kind for claim in claims if "algorithms as units" in claim.claim]
    split = [claim.paper.kind for claim in claims if claim.column.startswith("split-")]
    findings.append(
        "Tests with algorithms as units, which ask whether other algorithms would differ too: shown "
        f"in {units.count(REPRODUCED)} of {len(units)} columns; {units.count(UNTESTABLE)} have too few rows for an "
        "answer."
        + (f" On Split CIFAR-10, {split.count(UNTESTABLE)} of {len(split)} tests lack seeds or rows." if split else "")
    )
    findings.append(numbers(tables))
    return ABSTRACT.format(conclusion=conclusion(rows, moved), findings="\n".join(f"- {text}" for text in findings))


def conclusion(rows: Mapping[str, Sequence[TableRow]], moved: Sequence[str]) -> str:
    """Say whether local rows forget more at high rates, and whether that survives without the doubtful rows."""
    every, sure, stated, alike = {}, {}, {}, {}
    doubtful = {NEARLY_SGD, *moved}
    for column, own in rows.items():
        values = {row.algorithm: row.values["forgetting"] for row in own}
        sides = [[x.algorithm for x in own if x.published and x.locality == kind] for kind in ("local", "global")]
        kept = [[name for name in side if name not in doubtful] for side in sides]
        replaced = [[*kept[0], STATED] if STATED in values and NEARLY_SGD in sides[0] else [], kept[1]]
        for found, (local, other) in ((every, sides), (sure, kept), (stated, replaced)):
            if local and other:
                difference, seeds = interaction_by_seed(*([values[name] for name in part] for part in (local, other)))
                if seeds > 1:
                    found[column] = difference, local, other
        if column in every and {NEARLY_SGD, NO_MEMORY} <= set(values):
            alike[column] = interaction_by_seed([values[NEARLY_SGD]], [values[NO_MEMORY]])[0]
    if not every:
        return "No column has two seeds of every row, so nothing can be concluded.\n"
    holds, survives = (all(x.low > 0 for x, *_ in found.values()) for found in (every, sure))
    answer = "yes between the paper's rows, but it depends on the rows that are counted"
    answer = "no" if not holds else "yes, also without the doubtful rows" if sure and survives else answer
    local = list(dict.fromkeys(name for _, names, _ in every.values() for name in names))
    parts = join(f"{x} points ({column})" for column, (x, *_) in every.items())
    told = (
        f"it rises more in the local rows than in the global ones, by {parts}."
        if holds
        else f"it rises by {parts} more in local rows than in global ones."
    )
    answer = f"{answer[0].upper()}{answer[1:]}"
    text = f"**Does forgetting rise more in local rows? {answer}.** From low to high learning rates, {told}"
    columns = [COLUMNS[name] for name in rows if name in COLUMNS]
    unpublished = dict.fromkeys(row.algorithm for column in columns for row in column.all_rows if not row.published)
    unpublished.pop(ICARL_ALGORITHMS[1], None)  # which the paper's figure has
    text += (
        f" This rests on {len(local)} local row{'s' if len(local) > 1 else ''}, {_code(local)}; the tests use the "
        f"paper's rows{f', without {_code(unpublished)}' if unpublished else ''}.\n"
    )
    if alike:
        words = {x.phrase("more than", "less than", "about as much as") for x in alike.values()}
        parts = join(f"{x} ({column})" for column, x in alike.items())
        text += (
            f"\n- `{NEARLY_SGD}` rises {' or '.join(sorted(words))} plain SGD (`{NO_MEMORY}`), which remembers "
            f"nothing: the difference is {parts} points."
        )
    if sure:
        _, kept_local, kept_other = next(iter(sure.values()))
        parts = join(
            f"{x} ({column}: {x.phrase('agrees', 'the opposite', 'not settled')})" for column, (x, *_) in sure.items()
        )
        reason = f" and without {_code(moved)}, which Definition 3.1 puts in the other class," if moved else ""
        text += f"\n- Without `{NEARLY_SGD}`{reason} {_code(kept_local)} minus {_code(kept_other)} is {parts}."
    if stated:
        parts = join(
            f"{x} ({column}: {x.phrase('agrees', 'the opposite', 'not settled')})" for column, (x, *_) in stated.items()
        )
        text += f" With `{STATED}`, the paper's OGD-GTL, beside {_code(kept_local)} it is {parts}."
    return text


def numbers(tables: Mapping[str, Comparison]) -> str:
    """Say how many of our numbers are near the published ones, how many should be, and which rows are not."""
    pairs = [passes(made) for made in tables.values()]
    right, wrong = ([sum(pair[i][j] for pair in pairs) for j in (0, 1)] for i in (0, 1))
    away = join(f"{_mean_z(made):.2f} ({column})" for column, made in tables.items())
    far = [f"`{row}` ({column})" for column, made in tables.items() for row in far_rows(made)]
    return (
        f"{right[0]} of {right[1]} of our numbers are within {MAX_Z:g} standard errors of the published ones, on "
        f"average {away} of them away, where independent samples would be {INDEPENDENT:.1f} away. Against the wrong "
        f"row's published numbers, {wrong[0]} of {wrong[1]} pass. Averaged over learning rates, "
        f"{f'{join(far)} differ' if far else 'no row differs'} by more than {MAX_Z:g} standard errors."
    )


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
        level=LEVEL,
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
