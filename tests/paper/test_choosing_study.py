"""The study of selection: choices, optimism and reversals of rows with known answers."""

from __future__ import annotations

import polars as pl
import pytest
from matplotlib.figure import Figure

from glocal.paper import get_study
from glocal.paper.studies.choosing import PROTOCOLS, lost, ranking, reversals, scores
from glocal.selection import choose

STUDY = get_study("choosing")


def rows(cost: float) -> pl.DataFrame:
    """er is 10 points better than sgd at 0.1; the first tasks favour its rate 0.01, which is `cost` points worse."""
    table = []
    for seed in range(4):
        for algorithm, locality, best in (("sgd", "global", 70.0), ("er", "global", 80.0), ("ewc", "local", 60.0)):
            for lr in (0.01, 0.1):
                low = lr == 0.01
                test = best - (cost if low else 0) + 0.1 * seed * (1 if low else -1)
                early = 90.0 if low == (algorithm == "er") else 80.0
                own = dict.fromkeys(PROTOCOLS, test) | dict.fromkeys(("first_task", "first_three"), early)
                table.append({"algorithm": algorithm, "locality": locality, "lr": lr, "seed": seed} | own)
    return pl.DataFrame(table)


def test_choices_and_optimism() -> None:
    own = rows(15).filter(algorithm="er")
    assert [choose(scores(own, name)) for name in PROTOCOLS] == [0.01, 0.01, 0.1, 0.1, 0.1]
    assert lost(own, "first_three") == pytest.approx({seed: 15 - 0.2 * seed for seed in range(4)})
    assert set(lost(own, "all_validation").values()) == {0}


@pytest.mark.parametrize(("cost", "reversed_"), [(15, ["sgd and er"]), (25, ["sgd and er", "er and ewc"]), (5, [])])
def test_reversals_refute_the_hypothesis(cost: float, reversed_: list[str]) -> None:
    table = rows(cost)
    assert reversals(table, "first_three") == reversed_ and reversals(table, "all_validation") == []
    verdict = STUDY.summarize(table).verdict
    assert ("is not refuted" in verdict) is (not reversed_)
    tau = (3 - 2 * len(reversed_)) / 3
    assert ranking(table, "first_three").startswith(f"{tau:.2f} ")
    STUDY.draw(table, Figure())


def test_a_diverged_rate_is_not_chosen() -> None:
    lost_run = (pl.col("algorithm") == "er") & (pl.col("lr") == 0.1) & (pl.col("seed") == 0)
    table = rows(15).with_columns(pl.when(~lost_run).then(pl.col(name)).alias(name) for name in PROTOCOLS)
    own = table.filter(algorithm="er")
    assert {choose(scores(own, name)) for name in PROTOCOLS} == {0.01}
    assert "1 of 24 runs diverged" in STUDY.summarize(table).verdict
