"""The study of predicted forgetting on small networks: exact on quadratics, and its rows against losses themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from glocal.lens.record import train_traces
from glocal.paper.experiments import get_study
from glocal.paper.studies.common import column, make_challenge, make_cohort, where
from glocal.paper.studies.recursion import MAX_ROUNDING, exactness_gap, regression
from glocal.paper.study import Context, Row

STUDY = get_study("recursion")
CONTEXT = Context(torch.device("cpu"), None, Path("unused"))
BASE: dict[str, Any] = {"challenge": "rotated-digits", "tasks": 3, "epochs": 1, "seeds": [0, 1], "examples": 50}
MLP = {"network": "mlp", "hidden": [5], "lrs": [0.02, 0.3]} | BASE
LINEAR = {"network": "linear", "hidden": [], "lrs": [0.001, 0.01]} | BASE


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return STUDY.measure(MLP, CONTEXT) + STUDY.measure(LINEAR, CONTEXT)


def test_rows_are_complete(rows: list[Row]) -> None:
    assert len({tuple(row) for row in rows}) == 1
    pairs, averages = where(rows, kind="pair"), where(rows, kind="average")
    assert len(pairs) == 8 * 3 and len(averages) == 8 * 2
    terms = sum(column(pairs, name) for name in ("gradient", "quadratic", "remainder"))
    np.testing.assert_allclose(terms, column(pairs, "measured"), rtol=1e-9)
    shares = sum(column(pairs, f"{name}_share") for name in ("gradient", "quadratic", "remainder"))
    np.testing.assert_allclose(shares, 1)


def test_forgetting_is_that_of_the_losses(rows: list[Row]) -> None:
    cohort = make_cohort(MLP, CONTEXT)
    for member, trace in zip(cohort.members, train_traces(cohort, 50), strict=True):
        x, y = trace.tasks[0]
        losses = [float(cross_entropy(functional_call(trace.module, p.params, (x,)), y)) for p in trace.checkpoints]
        own = where(rows, network="mlp", kind="pair", lr=member.lr, seed=member.seed, task=0)
        np.testing.assert_allclose(column(own, "measured"), np.array(losses[2:]) - losses[1], rtol=1e-3, atol=1e-5)


def test_averages_are_those_of_the_pairs_and_the_recursion_adds_up(rows: list[Row]) -> None:
    for row in where(rows, kind="average"):
        run = {name: row[name] for name in ("network", "lr", "seed")}
        pairs = where(rows, kind="pair", learnt=row["learnt"], **run)
        for name in ("measured", "predicted"):
            assert row[name] == pytest.approx(column(pairs, name).sum() / float(row["learnt"]))  # type: ignore[arg-type]
        parts = column([row], "before") + sum(column([row], name) for name in ("gradient", "quadratic", "v"))
        assert row["predicted"] == pytest.approx(float(parts[0]), rel=1e-4, abs=1e-6)


def test_on_quadratic_losses_the_prediction_is_exact(rows: list[Row]) -> None:
    pairs = where(rows, network="linear", kind="pair")
    measured = column(pairs, "measured")
    assert np.abs(measured).max() > 1e-3
    np.testing.assert_allclose(column(pairs, "predicted"), measured, rtol=1e-9, atol=1e-12)
    assert np.abs(column(pairs, "quadratic")).min() > 0
    assert exactness_gap(pairs) < MAX_ROUNDING < exactness_gap([row | {"predicted": 1.0} for row in pairs])


def test_a_regression_has_the_same_inputs_and_unit_vectors_for_classes() -> None:
    challenge = make_challenge(LINEAR, CONTEXT)
    before, after = challenge.task(1, 0).train, regression(challenge).task(1, 0).train
    assert torch.equal(before.x, after.x) and torch.equal(after.y.argmax(1), before.y)
    assert after.y.sum() == len(before.y) and after.y.max() == 1
    (trace, *_) = train_traces(make_cohort(LINEAR, CONTEXT, regression(challenge)), 20)
    exact = trace.double()
    assert {p.dtype for point in exact.checkpoints for p in point.params.values()} == {torch.float64}
    torch.testing.assert_close(exact.value(0, exact.checkpoints[1]).float(), trace.value(0, trace.checkpoints[1]))


def test_the_figure_has_four_panels(rows: list[Row]) -> None:
    figure = Figure(layout="constrained")
    STUDY.draw(rows, figure)
    pairs, exact, shares, average = list[Any](figure.axes)
    for axes, rates in ((pairs, ["0.02", "0.3"]), (exact, ["0.001", "0.01"])):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == rates
        assert [len(points.get_offsets()) for points in axes.collections] == [6, 6]
    assert len(shares.get_legend().get_texts()) == 3
    top = shares.collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(1)
    assert [line.get_linestyle() for line in average.lines[:2]] == ["-", "--"]
    np.testing.assert_array_equal(average.lines[0].get_xdata(), [2, 3])


def test_the_summary_follows_the_rows(rows: list[Row]) -> None:
    near = [row | {"measured": 1.0, "predicted": 1.1 if row["lr"] == 0.02 else 3.0} for row in rows]
    summary = STUDY.summarize(near)
    assert [row["relative error"] for row in where(summary.table, network="mlp")] == pytest.approx([0.1, 2.0])
    assert "agrees" in summary.verdict
    opposite = STUDY.summarize([row | {"predicted": 4.0 if row["lr"] == 0.02 else 1.5} for row in near])
    assert "does not agree" in opposite.verdict
    assert (opposite.table[0]["E(T), predicted"], opposite.table[0]["E(T), measured"]) == (4.0, 1.0)


def test_values_that_are_not_finite_are_drawn(rows: list[Row]) -> None:
    names = ("measured", "predicted", "gradient_share", "quadratic_share", "remainder_share")
    lost = [row | dict.fromkeys(names, np.nan) if row["lr"] in (0.3, 0.01) else row for row in rows]
    assert [row["relative error"] for row in STUDY.summarize(lost).table][1] == np.inf
    STUDY.draw(lost, Figure())
    nothing = [row | dict.fromkeys(names, np.nan) for row in rows]
    STUDY.summarize(nothing)
    STUDY.draw(nothing, Figure())


def test_a_diverged_run_has_rows() -> None:
    found = STUDY.measure(MLP | {"lrs": [1e20], "tasks": 2, "seeds": [0]}, CONTEXT)
    assert len(found) == 2 and not np.isfinite(column(found, "predicted")).any()


def test_pieces_fit_their_cost() -> None:
    for demo in (False, True):
        items = STUDY.work_items(demo)
        for network in ("mlp", "linear"):
            own = [item for item in items if item["network"] == network]
            assert all(bool(item["hidden"]) == (network == "mlp") for item in own)
            runs = sum(len(item["lrs"]) * len(item["seeds"]) for item in own)
            assert f"{runs} runs" in STUDY.cost(demo)
        assert "Hessian products" in STUDY.cost(demo)
