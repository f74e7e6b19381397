"""The study of predicted forgetting on small networks: exact on quadratics, and its rows against losses themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from glocal.paper import get_study
from glocal.paper.studies.common import column, make_challenge, record_item
from glocal.paper.studies.forgetting import MAX_ROUNDING, exactness_gap, regression
from glocal.paper.study import Context

STUDY = get_study("recursion")
CONTEXT = Context(torch.device("cpu"), None, Path("unused"))
BASE: dict[str, Any] = {"challenge": "rotated-digits", "tasks": 3, "epochs": 1, "seeds": [0, 1], "examples": 50}
MLP = {"network": "mlp", "hidden": [5], "lrs": [0.02, 0.3]} | BASE
LINEAR = {"network": "linear", "hidden": [], "lrs": [0.001, 0.01]} | BASE


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    return pl.DataFrame(STUDY.measure(MLP, CONTEXT) + STUDY.measure(LINEAR, CONTEXT), infer_schema_length=None)


def test_rows_are_complete(rows: pl.DataFrame) -> None:
    assert rows.columns == STUDY.columns.split()
    pairs, averages = rows.filter(kind="pair"), rows.filter(kind="average")
    assert len(pairs) == 8 * 3 and len(averages) == 8 * 2
    terms = sum(column(pairs, name) for name in ("gradient", "quadratic", "remainder"))
    np.testing.assert_allclose(terms, column(pairs, "measured"), rtol=1e-9)
    shares = sum(column(pairs, f"{name}_share") for name in ("gradient", "quadratic", "remainder"))
    np.testing.assert_allclose(shares, 1)


def test_forgetting_is_that_of_the_losses(rows: pl.DataFrame) -> None:
    for member, run in record_item(MLP | {"examples": 50}, CONTEXT):
        trace = run.trace
        x, y = trace.tasks[0]
        losses = [float(cross_entropy(functional_call(trace.module, p.params, (x,)), y)) for p in trace.checkpoints]
        own = rows.filter(network="mlp", kind="pair", lr=member.lr, seed=member.seed, task=0)
        np.testing.assert_allclose(column(own, "measured"), np.array(losses[2:]) - losses[1], rtol=1e-3, atol=1e-5)


def test_averages_are_those_of_the_pairs_and_the_recursion_adds_up(rows: pl.DataFrame) -> None:
    for row in rows.filter(kind="average").to_dicts():
        run = {name: row[name] for name in ("network", "lr", "seed")}
        pairs = rows.filter(kind="pair", learnt=row["learnt"], **run)
        for name in ("measured", "predicted"):
            assert row[name] == pytest.approx(column(pairs, name).sum() / row["learnt"])
        parts = sum(row[name] for name in ("before", "gradient", "quadratic", "v"))
        assert row["predicted"] == pytest.approx(parts, rel=1e-4, abs=1e-6)


def test_on_quadratic_losses_the_prediction_is_exact(rows: pl.DataFrame) -> None:
    pairs = rows.filter(network="linear", kind="pair")
    measured = column(pairs, "measured")
    assert np.abs(measured).max() > 1e-3
    np.testing.assert_allclose(column(pairs, "predicted"), measured, rtol=1e-9, atol=1e-12)
    assert np.abs(column(pairs, "quadratic")).min() > 0
    assert exactness_gap(pairs) < MAX_ROUNDING < exactness_gap(pairs.with_columns(predicted=pl.lit(1.0)))


def test_a_regression_has_the_same_inputs_and_unit_vectors_for_classes() -> None:
    challenge = make_challenge(LINEAR, CONTEXT)
    before, after = challenge.task(1, 0).train, regression(challenge).task(1, 0).train
    assert torch.equal(before.x, after.x) and torch.equal(after.y.argmax(1), before.y)
    assert after.y.sum() == len(before.y) and after.y.max() == 1
    ((_, run), *_) = record_item(LINEAR | {"examples": 20}, CONTEXT, challenge=regression(challenge))
    trace, exact = run.trace, run.trace.double()
    assert {p.dtype for point in exact.checkpoints for p in point.params.values()} == {torch.float64}
    torch.testing.assert_close(exact.value(0, exact.checkpoints[1]).float(), trace.value(0, trace.checkpoints[1]))


def test_the_figure_has_three_panels(rows: pl.DataFrame) -> None:
    figure = Figure(layout="constrained")
    STUDY.draw(rows, figure)
    pairs, exact, average, *bars = list[Any](figure.axes)
    for axes, bar, rates in ((pairs, bars[0], ["0.02", "0.3"]), (exact, bars[1], ["0.001", "0.01"])):
        assert [text.get_text() for text in bar.get_yticklabels()] == rates
        assert len(axes.collections[0].get_offsets()) == 12
    assert [line.get_linestyle() for line in average.lines[:2]] == ["-", "--"]
    np.testing.assert_array_equal(average.lines[0].get_xdata(), [2, 3])


def test_the_summary_follows_the_rows(rows: pl.DataFrame) -> None:
    low = pl.col("lr") == 0.02
    near = rows.with_columns(measured=pl.lit(1.0), predicted=pl.when(low).then(1.1).otherwise(3.0))
    summary = STUDY.summarize(near)
    assert [row["relative error"] for row in summary.table[:2]] == pytest.approx([0.1, 2.0])
    assert "agrees" in summary.verdict and "predicts E(T) = 1.1 where 1 is measured" in summary.verdict
    opposite = STUDY.summarize(near.with_columns(predicted=pl.when(low).then(4.0).otherwise(1.5)))
    assert "does not agree" in opposite.verdict
    assert (opposite.table[0]["E(T), predicted"], opposite.table[0]["E(T), measured"]) == (4.0, 1.0)


def test_values_that_are_not_finite_are_drawn(rows: pl.DataFrame) -> None:
    names = ("measured", "predicted", "gradient_share", "quadratic_share", "remainder_share")
    diverged = pl.col("lr").is_in([0.3, 0.01])
    lost = rows.with_columns(pl.when(diverged).then(np.nan).otherwise(pl.col(name)).alias(name) for name in names)
    assert [row["relative error"] for row in STUDY.summarize(lost).table][1] == np.inf
    STUDY.draw(lost, Figure())
    nothing = rows.with_columns(pl.lit(np.nan).alias(name) for name in names)
    STUDY.summarize(nothing)
    STUDY.draw(nothing, Figure())


def test_a_diverged_run_has_rows() -> None:
    found = STUDY.measure(MLP | {"lrs": [1e20], "tasks": 2, "seeds": [0]}, CONTEXT)
    assert len(found) == 2 and not np.isfinite([float(row["predicted"] or 0) for row in found]).any()


def test_the_linear_network_has_no_hidden_layers() -> None:
    for demo in (False, True):
        items = STUDY.work_items(demo)
        assert {item["network"] for item in items} == {"mlp", "linear"}
        assert all(bool(item["hidden"]) == (item["network"] == "mlp") for item in items)
