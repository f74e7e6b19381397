"""The study of retraining: intervals that hold what they promise, and verdicts of rows with known answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from glocal.paper import get_study
from glocal.paper.studies.common import MeanInterval
from glocal.paper.studies.retraining import COLUMN, LEVEL, SEQUENCES, differences, estimate, share_of_angles, verdict_of

STUDY = get_study("retraining")


def rows(value: Callable[[int, int], float], algorithm: str = "er", lr: float = 0.01) -> pl.DataFrame:
    """One cell, with a value for every sequence of angles and seed."""
    common = {"challenge": COLUMN.challenge, "algorithm": algorithm, "locality": "global", "lr": lr}
    return pl.DataFrame(
        {**common, "seed": seed, "sequence": sequence, "acc": value(i, seed), "forgetting": value(i, seed)}
        for i, sequence in enumerate(SEQUENCES)
        for seed in range(10)
    )


def test_a_true_difference_of_zero_is_covered_as_often_as_stated() -> None:
    """The published mean of one run per sequence is drawn from the same distributions, which differ in their spread."""
    cell, draw = COLUMN.published_cell(COLUMN.row("er"), 0.01), np.random.default_rng(0)
    assert cell is not None
    centres, spreads, covered, trials = np.array([60, 70, 80, 75, 65]), np.array([0.5, 1, 2, 1, 0.2]), 0, 400
    for _ in range(trials):
        ours, published = centres[:, None] + spreads[:, None] * draw.normal(size=(5, 10)), draw.normal(centres, spreads)
        found = differences(rows(lambda i, seed, ours=ours: ours[i, seed]), "acc")["er", 0.01]  # type: ignore[misc]
        covered += found.low <= published.mean() - cell["acc_mean"] <= found.high
    assert abs(covered - LEVEL * trials) < 4 * np.sqrt(trials * LEVEL * (1 - LEVEL))


def test_differences_from_the_published_cell() -> None:
    cell = COLUMN.published_cell(COLUMN.row("er"), 0.01)
    assert cell is not None
    table = rows(lambda i, seed: cell["acc_mean"] + 1 + 0.1 * (seed - 4.5))
    found = differences(table, "acc")["er", 0.01]
    assert found.mean == pytest.approx(1) and found.low < 1 < found.high and verdict_of(found) == "equivalent"
    elsewhere = table.with_columns(challenge=pl.lit("rotated-digits"))
    assert np.isnan(differences(elsewhere, "acc")["er", 0.01].mean)
    assert "no published numbers" in STUDY.summarize(elsewhere).verdict
    STUDY.draw(table, Figure())


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-2, 2, "equivalent"),
        (-2.1, 1, "undecided"),
        (1, 2.5, "undecided"),
        (2.1, 3, "different"),
        (-9, -3, "different"),
    ],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert verdict_of(MeanInterval((low + high) / 2, low, high)) == verdict


def test_diverged_runs_are_left_out_and_counted() -> None:
    table = rows(lambda i, seed: np.nan if seed == 0 and i == 0 else 50.0 + i + 0.1 * seed)
    assert estimate(table, "acc").mean == pytest.approx(np.mean([50.5, 51.45, 52.45, 53.45, 54.45]))
    assert "1 of 50 runs diverged" in STUDY.summarize(table).verdict


def test_share_of_angles() -> None:
    """Of values without noise everything is owed to the angles, and of noise alone almost nothing."""
    draw = np.random.default_rng(2).normal(size=(5, 10))
    assert share_of_angles(rows(lambda i, seed: float(i)), "acc") == 1
    assert share_of_angles(rows(lambda i, seed: draw[i, seed]), "acc") < 0.2
