"""The study of OGD-GTL: closed forms, restricted classes, runs shared with Table 1; figure and sentences by rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure

from glocal.challenges import make
from glocal.metrics import summary
from glocal.paper import get_study, table1
from glocal.paper.studies.theorems import CLOSED, GTL_DEMO, VARIANTS, relative_to_sgd, restrict_classes
from glocal.paper.study import Context, Row
from glocal.store.store import load

STUDY = get_study("ogd-gtl")
SMALL = GTL_DEMO | {"tasks": 2, "epochs": 1, "lrs": (0.1,), "seeds": (11,)}


def test_the_equal_split_in_closed_form(tmp_path: Path) -> None:
    rows = STUDY.measure(CLOSED, Context(torch.device("cpu"), None, tmp_path))
    assert len(rows) == len(CLOSED["classes"]) * len(CLOSED["confidences"])
    assert {tuple(row) for row in rows} == {tuple(STUDY.columns.split())}
    for row in rows:
        k, p = int(row["classes"] or 0), float(row["confidence"] or 0)
        probabilities = np.full(k, (1 - p) / (k - 1))
        probabilities[0] = p
        matrix = np.diag(probabilities) - np.outer(probabilities, probabilities)
        others = np.abs(matrix).ravel()[1:]
        assert row["dominance"] == pytest.approx(matrix[0, 0] / others.max())
        assert row["of_trace"] == pytest.approx(matrix[0, 0] / np.trace(matrix))
        assert row["of_squares"] == pytest.approx(matrix[0, 0] ** 2 / (matrix**2).sum())


def test_restricted_tasks_are_those_images_of_the_first_classes() -> None:
    whole = make("rotated-digits", 2)
    few = restrict_classes(whole, 3)
    assert restrict_classes(whole, 10) is whole
    for seed in (1, 2):
        task, original = few.task(1, seed, torch.device("cpu")), whole.task(1, seed)
        assert task.classes == (0, 1, 2)
        for part, all_of_it in ((task.train, original.train), (task.test, original.test)):
            assert torch.equal(part.y, all_of_it.y[all_of_it.y < 3])
            assert torch.equal(part.x, all_of_it.x[all_of_it.y < 3])
    assert few.outputs == 3 and few.options != whole.options


def test_entries_of_two_classes_are_all_equal(tmp_path: Path) -> None:
    """With K = 2 no training changes that, as the appendix says; with more it does."""
    context = Context(torch.device("cpu"), None, tmp_path)
    two, five = (STUDY.measure({"part": "entries", "classes": k, **SMALL}, context) for k in (2, 5))
    assert two[0]["dominance"] == pytest.approx(1)
    assert two[0]["of_trace"] == two[0]["of_total_trace"] == pytest.approx(0.5)
    assert float(five[0]["dominance"] or 0) > 1.1
    assert float(five[0]["of_total_trace"] or 0) < 0.5
    assert str(two[0]["forgetting"]) == "nan"


def test_runs_of_all_classes_are_those_of_table_1(tmp_path: Path) -> None:
    part = table1.DEMO.select(["ogd-gtl"], lrs=(0.1,), seeds=(11,), tasks=2, epochs=1)
    (run,) = table1.train([part], store=tmp_path, device="cpu")
    item = {"part": "forgetting", "classes": 10, "algorithm": "ogd-gtl", **SMALL, "slots": 500}
    (row,) = STUDY.measure(item, Context(torch.device("cpu"), None, tmp_path))
    assert len(load(tmp_path)) == 1
    assert row["forgetting"] == pytest.approx(100 * summary(run)["forgetting"])
    assert row["acc"] == pytest.approx(100 * summary(run)["acc"])
    (few,) = STUDY.measure(item | {"classes": 3}, Context(torch.device("cpu"), None, tmp_path))
    assert len(load(tmp_path)) == 2
    assert few.keys() == row.keys()


def made_up(label: float, dominance: float, diverged: bool = False) -> pl.DataFrame:
    """Plain SGD forgets 20, full OGD 10, and OGD-GTL `label` more than it; every seed more than the one before."""
    lost = dict(zip(VARIANTS, (20.0, 10.0, 10.0 + label, 19.0, 18.0), strict=True))
    none: Row = dict.fromkeys(("confidence", "dominance", "of_trace", "of_squares", "of_total_trace"), np.nan)
    runs: list[Row] = [
        {
            "part": "forgetting",
            "classes": 10,
            "algorithm": a,
            "locality": "global" if a == "sgd" else "local",
            "lr": lr,
            "seed": seed,
            "acc": 80.0,
            "learning_accuracy": 90.0,
            "forgetting": np.nan if diverged and (a, lr) == ("ogd-ave", 0.1) else x + seed,
            **none,
        }
        for a, x in lost.items()
        for lr in (0.01, 0.1)
        for seed in (1, 2, 3)
    ]
    entry: Row = {"part": "entries", "classes": 10, "algorithm": "sgd", "locality": "global", "lr": 0.1, "seed": 1}
    entry |= {"acc": np.nan, "forgetting": np.nan, "learning_accuracy": np.nan, "confidence": 0.9}
    entry |= {"dominance": dominance, "of_trace": 0.4, "of_squares": 0.3, "of_total_trace": 0.42}
    closed = entry | {"part": "equal split", "algorithm": "", "locality": "", "lr": np.nan, "seed": -1}
    return pl.DataFrame([closed, closed | {"classes": 100}, entry, *runs], infer_schema_length=None)


def test_the_summary_follows_the_rows() -> None:
    worse, better = (STUDY.summarize(made_up(x, d)) for x, d in ((4.0, 1.2), (-4.0, 8.0)))
    assert "forgets more at K = 10" in worse.verdict and "forgets less at K = 10" in better.verdict
    (line,) = worse.table
    assert (line["forgetting, ogd"], line["forgetting, ogd-gtl"]) == pytest.approx((12.0, 16.0))
    assert (line["entry / next"], line["% of the trace"]) == pytest.approx((1.2, 42.0))
    assert "neither more nor less" in STUDY.summarize(_noisy(made_up(0.1, 2.0))).verdict
    assert "diverged" not in worse.verdict
    assert "3 of 30 runs diverged" in STUDY.summarize(made_up(4.0, 1.2, diverged=True)).verdict


def _noisy(rows: pl.DataFrame) -> pl.DataFrame:
    """OGD-GTL forgets more with one seed and less with another."""
    noisy = pl.col("seed").replace_strict({1: 15.0, 2: 5.0, 3: 10.0}, default=0.0)
    own = pl.col("algorithm") == "ogd-gtl"
    return rows.with_columns(forgetting=pl.when(own).then(noisy).otherwise(pl.col("forgetting")))


def test_forgetting_beside_that_of_sgd() -> None:
    runs = made_up(4.0, 1.2).filter(part="forgetting")
    apart = {row["algorithm"]: row["forgetting"] for row in relative_to_sgd(runs).to_dicts()}
    assert apart == pytest.approx({"sgd": 0, "ogd": -10, "ogd-gtl": -6, "ogd-ave": -1, "ogd-published": -2})


@pytest.mark.parametrize("diverged", [False, True])
def test_figure_has_the_entries_and_a_panel_for_each_number_of_classes(diverged: bool) -> None:
    figure = Figure()
    rows = made_up(4.0, 1.2, diverged)
    two = rows.filter(part="forgetting").with_columns(classes=pl.lit(2, pl.Int64))
    STUDY.draw(pl.concat([rows, two]), figure)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    titles = [axes.get_title() for axes in shown]
    assert titles[3:] == ["$K = 2$ (sgd: 22.0 to 22.0)", "$K = 10$ (sgd: 22.0 to 22.0)"]
    assert len(shown[0].lines) == 1 and len(shown[0].collections) == 1
    assert [len(axes.lines) for axes in shown[3:]] == [5, 5]
