"""Verdicts on the paper's claims about Table 1 (§6.1), from the statistics of `claims`.

Each claim is tested with the paper's classes and with those that the experiment on Definition 3.1 finds. Verdicts are
about signs, not about sizes. A claim about every local or every global algorithm is *contradicted* by one whose 95 %
interval excludes it, else *not testable* if one has fewer than two seeds, *not settled* if an interval leaves it open,
and *reproduced* if all support it. That there is no difference or no correlation can be contradicted but never
reproduced: an interval that contains 0 leaves it open. Of published means, which have no seeds, the sign counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TypeAlias

import numpy as np

from glocal.metrics import LearningRateTest, learning_rate_test, low_minus_high
from glocal.paper.claims import (
    LEVEL,
    LOW_LR,
    TableRow,
    Values,
    complete_seeds,
    interaction_by_seed,
    low_rates_minimum,
    lr_correlation,
    permutation_test,
)
from glocal.paper.studies.common import MeanInterval, rank_correlation
from glocal.paper.table1 import ICARL_ALGORITHMS
from glocal.report.summary import format_range
from glocal.report.table import ABSENT, format_lr, signed

REPRODUCED, CONTRADICTED, UNSETTLED, UNTESTABLE = "reproduced", "contradicted", "not settled", "not testable"
FEW_SEEDS = "too few seeds"
"""Why a claim is not testable."""
UNKNOWN = f"with {FEW_SEEDS}"
CHANGES = {"negative": "more", "positive": "less", UNSETTLED: UNSETTLED}
"""What a row forgets at high learning rates, by the sign of low − high."""
COUNTED = ("for", "against", "more", "less", UNSETTLED, UNKNOWN)
"""What a row can be counted as: for or against a claim, by what it forgets at high learning rates, or neither."""


@dataclass(frozen=True)
class Outcome:
    """What the published means and our runs say of a claim, as text, what it is based on, and the verdict."""

    published: str
    ours: str
    n: str
    kind: str
    """The verdict without its reason."""
    reason: str = ""
    by_row: bool = True
    """Whether the texts count rows, those for the claim and those against it; else they hold the statistic."""

    @property
    def verdict(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


Rows: TypeAlias = Sequence[TableRow]
Test: TypeAlias = Callable[[Rows, Rows], Outcome]  # of the local and the global rows
Marks: TypeAlias = Mapping[str, tuple[int, bool | None]]  # seeds, and whether the row supports the claim


@dataclass(frozen=True)
class Claim:
    """One line of the scoreboard: the outcome with the paper's classes and with the measured ones."""

    claim: str
    column: str
    paper: Outcome
    measured: Outcome


def scoreboard(column: str, rows: Rows, measured: Mapping[str, str]) -> list[Claim]:
    """Test every claim on one column.

    Args:
        column: its name on the scoreboard.
        rows: all rows of the column. Only those with published numbers count, and iCaRL's two for its claims.
        measured: the class of each algorithm by experiment, as `claims.measured_locality` returns it.
    """
    paper_rows = [row for row in rows if row.published]
    claims = []
    for text, test in CLAIMS.items():
        paper_outcome, measured_outcome = (
            _run(test, *([row for row in paper_rows if classes[row.algorithm] == kind] for kind in ("local", "global")))
            for classes in ({row.algorithm: row.locality for row in paper_rows}, measured)
        )
        claims.append(Claim(text, column, paper_outcome, measured_outcome))
    icarl = [row for name in ICARL_ALGORITHMS for row in rows if row.algorithm == name]
    if len(icarl) == len(ICARL_ALGORITHMS):
        outcomes = {text: test(icarl[:1], icarl[1:]) for text, test in ICARL_CLAIMS.items()}
        claims += [Claim(text, column, outcome, outcome) for text, outcome in outcomes.items()]
    return claims


def _run(test: Test, local: Rows, other: Rows) -> Outcome:
    if local and other:
        return test(local, other)
    return Outcome(ABSENT, ABSENT, ABSENT, UNTESTABLE, "a class has no algorithms")


def _minimum_at_low_rates(local: Rows, other: Rows) -> Outcome:
    means = [row.published["forgetting"] for row in local]
    published = [min(by_lr, key=by_lr.__getitem__) <= LOW_LR for by_lr in means]
    return _outcome_by_row(published, _marks(local, "forgetting", low_rates_minimum, -1))


def _no_correlation(local: Rows, other: Rows) -> Outcome:
    """A published correlation is against the claim if the exact permutation test of no correlation rejects it."""
    marks = _marks(other, "forgetting", lr_correlation, None)
    published = [False if _are_correlated(row.published["forgetting"]) else None for row in other]
    return _outcome_by_row(published, marks)


def _distance_grows(local: Rows, other: Rows) -> Outcome:
    """No distances were published."""
    rows = sorted((*local, *other), key=lambda row: row.algorithm)
    return _outcome_by_row([], _marks(rows, "distance", lr_correlation, 1))


def _are_correlated(means: Mapping[float, float]) -> bool:
    """Equal means have no correlation."""
    lrs, values = (np.array(list(part)) for part in (means, means.values()))
    observed = rank_correlation(lrs, values)
    correlations = np.abs([rank_correlation(lrs, np.array(order)) for order in permutations(values)])
    return bool(np.isfinite(observed) and np.mean(correlations >= abs(observed) - 1e-9) < LEVEL)


def _marks(rows: Rows, statistic: str, test: Callable[[Values], MeanInterval], claimed: int | None) -> Marks:
    """Mark every row by the sign of a test: for the claim if it is the claimed one; None: every sign is against it."""
    signs = {row.algorithm: (row.values[statistic], _sign(test(row.values[statistic]))) for row in rows}
    return {name: (len(complete_seeds(x)), sign == claimed if sign else None) for name, (x, sign) in signs.items()}


def _forgets_more(local: Rows, other: Rows) -> Outcome:
    published = [low_minus_high(row.published["forgetting"]) < 0 for row in local]
    return _outcome_by_row(published, _low_minus_high_marks(local, {"negative": True, "positive": False}))


def _both_signs(local: Rows, other: Rows) -> Outcome:
    """One row of each kind is enough; rows of one kind alone contradict it if all are settled."""
    outcome = _outcome_by_row([], _low_minus_high_marks(other, {}))
    tests = [_test(row) for row in other]
    changes = [CHANGES[test.sign] for test in tests]
    published = [low_minus_high(row.published["forgetting"]) for row in other]
    published_text = _count(["more" if x < 0 else "less" for x in published])
    our_text = _count([change if test.seeds > 1 else UNKNOWN for change, test in zip(changes, tests, strict=True)])
    outcome = replace(outcome, published=published_text, ours=our_text)
    if {"more", "less"} <= set(changes):
        return replace(outcome, kind=REPRODUCED, reason="")
    return outcome if UNSETTLED in changes else replace(outcome, kind=CONTRADICTED, reason="")


def _random_is_flat(herding: Rows, random: Rows) -> Outcome:
    outcome = _outcome_by_row([], _low_minus_high_marks(random, {"negative": False, "positive": False}))
    (test,) = map(_test, random)
    return replace(outcome, ours=str(MeanInterval(test.difference, test.lower, test.upper)))


def _low_minus_high_marks(rows: Rows, holds: Mapping[str, bool]) -> Marks:
    """Return the marks by the sign of low − high; None for a sign that `holds` lacks."""
    tests = {row.algorithm: _test(row) for row in rows}
    return {name: (x.seeds, holds.get(x.sign)) for name, x in tests.items()}


def _interaction(statistic: str, sign: int) -> Test:
    """Return the test, with seeds as units, that the first rows' change minus the other rows' has this sign."""

    def test(local: Rows, other: Rows) -> Outcome:
        interval, seeds = interaction_by_seed(*([row.values[statistic] for row in side] for side in (local, other)))
        published = ABSENT
        if all(row.published for row in (*local, *other)):
            changes = [[-low_minus_high(row.published[statistic]) for row in side] for side in (local, other)]
            difference = float(np.mean(changes[0]) - np.mean(changes[1]))
            published = signed(difference)
        kind = {1: REPRODUCED, -1: CONTRADICTED, 0: UNSETTLED}[sign * _sign(interval)]
        kind, reason = (kind, "") if seeds > 1 else (UNTESTABLE, FEW_SEEDS)
        return Outcome(published, str(interval), _size([seeds], local, other), kind, reason, by_row=False)

    return test


def _interaction_by_algorithm(local: Rows, other: Rows) -> Outcome:
    """The p-value is the share of assignments with a difference at least as high."""
    local_names, rows = {row.algorithm for row in local}, (*local, *other)
    tests = {row.algorithm: _test(row) for row in rows}
    means = {row.algorithm: -low_minus_high(row.published["forgetting"]) for row in rows}
    published_test = permutation_test(means, local_names)
    our_test = permutation_test({name: -x.difference for name, x in tests.items()}, local_names)
    kind = our_test.phrase(REPRODUCED, CONTRADICTED, UNSETTLED, UNTESTABLE)
    reason = f"p ≥ 1/{our_test.assignments}" if kind == UNTESTABLE else ""
    n = _size([x.seeds for x in tests.values()], local, other)
    return Outcome(str(published_test), str(our_test), n, kind, reason, by_row=False)


CLAIMS: dict[str, Test] = {
    f"Each local algorithm forgets least at lr ≤ {format_lr(LOW_LR)}": _minimum_at_low_rates,
    "Forgetting of global algorithms is not correlated with the lr (ρ)": _no_correlation,
    "Each local algorithm forgets more at high than at low lr": _forgets_more,
    "Of the global algorithms, some forget more at high lr and some less": _both_signs,
    "Forgetting rises more with the lr in local than in global algorithms (seeds as units)": _interaction(
        "forgetting", 1
    ),
    "The same (algorithms as units)": _interaction_by_algorithm,
    "Accuracy rises less with the lr in local than in global algorithms (seeds as units)": _interaction("acc", -1),
    "The distance from θ_0 grows with the lr (ρ)": _distance_grows,
}
"""The paper's claims on local and global rows."""
ICARL_CLAIMS: dict[str, Test] = {
    "Forgetting rises more with the lr with iCaRL's herding than with random exemplars": _interaction("forgetting", 1),
    "With random exemplars low and high rates forget the same": _random_is_flat,
}
"""Its claims on iCaRL with herding, and with random exemplars."""


def _test(row: TableRow) -> LearningRateTest:
    test = learning_rate_test(row.values["forgetting"], row.locality)
    assert test is not None  # columns of Table 1 have five learning rates
    return test


def _outcome_by_row(published: Sequence[bool | None], marks: Marks) -> Outcome:
    """Make the outcome of a claim that must hold in each row; None is not settled."""
    against = [name for name, (seeds, mark) in marks.items() if seeds > 1 and mark is False]
    undecided = [name for name, (_, mark) in marks.items() if mark is None]
    if against:
        verdict = CONTRADICTED, _names(against)
    elif any(seeds < 2 for seeds, _ in marks.values()):
        verdict = UNTESTABLE, FEW_SEEDS
    else:
        verdict = (UNSETTLED, _names(undecided)) if undecided else (REPRODUCED, "")
    words = {True: "for", False: "against", None: UNSETTLED}
    our_text = _count([words[mark] if seeds > 1 else UNKNOWN for seeds, mark in marks.values()])
    n = format_range((seeds for seeds, _ in marks.values()), "seed")
    return Outcome(_count([words[x] for x in published]), our_text, n, *verdict)


def _count(words: Sequence[str]) -> str:
    """Count words in the order of `COUNTED`, such as "2 for, 1 against"."""
    return ", ".join(f"{words.count(word)} {word}" for word in COUNTED if word in words) or ABSENT


def _size(seeds: Sequence[int], local: Rows, other: Rows) -> str:
    return f"{format_range(seeds, 'seed')}, {len(local)} + {len(other)}"


def _sign(x: MeanInterval) -> int:
    """The sign of the interval, 0 if it contains 0 or is unknown."""
    return 1 if x.low > 0 else -1 if x.high < 0 else 0


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
