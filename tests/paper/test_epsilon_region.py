"""The study of ε-regions on a small network: borders are where the error is ε, and breaks where it was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from glocal.paper import get_study
from glocal.paper.studies.common import column, record_item
from glocal.paper.studies.locality import EPSILONS, SHOWN_EPSILON
from glocal.paper.study import Context
from glocal.tree import from_vector, to_vector

STUDY = get_study("epsilon-region")
CONTEXT = Context(torch.device("cpu"), None, Path("unused"))
ITEM: dict[str, Any] = {"challenge": "rotated-digits", "tasks": 2, "epochs": 2, "hidden": [4], "seeds": [0]}
ITEM |= {"lrs": [0.02, 0.3], "examples": 40, "measured_tasks": [0], "principal": 1, "random": 2}


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    return pl.DataFrame(STUDY.measure(ITEM, CONTEXT), infer_schema_length=None)


def test_rows_are_complete(rows: pl.DataFrame) -> None:
    assert rows.columns == STUDY.columns.split()
    rays = rows.filter(pl.col("direction") != "trajectory", kind="radius")
    assert len(rays) == 2 * 3 * len(EPSILONS) * 5  # rates, orders, and both senses of the eigenvector among directions
    assert len(rows.filter(direction="trajectory")) == len(rows.filter(kind="break")) == 2 * len(EPSILONS)
    moments = rows.filter(kind="moment", lr=0.3)
    # After the first task, after each epoch of the second, and after it.
    assert moments["learnt"].to_list() == [1, 1.5, 2, 2] and moments["step"].to_list() == [64, 96, 128, 128]
    assert moments["smallest"][0] == pytest.approx(0, abs=1e-6)


def test_radii_end_where_the_error_is_epsilon_and_moments_have_the_error_of_the_expansion(
    rows: pl.DataFrame,
) -> None:
    for member, run in record_item(ITEM | {"examples": 40}, CONTEXT):
        trace = run.trace
        points = [to_vector(point.params).double() for point in trace.checkpoints]
        like = {k: p.double() for k, p in trace.checkpoints[0].params.items()}
        x, y = trace.tasks[0].x.double(), trace.tasks[0].y
        module = trace.module.double()

        def loss(theta: torch.Tensor, like: Any = like, x: Any = x, y: Any = y, module: Any = module) -> torch.Tensor:
            return cross_entropy(functional_call(module, from_vector(theta, like), (x,)), y)

        gradient_at = grad(loss)
        level, gradient, update = loss(points[1]), gradient_at(points[1]), points[2] - points[1]
        hvp = grad(lambda t, gradient_at=gradient_at, v=update: gradient_at(t) @ v)(points[1])
        unit = update / update.norm()
        own = rows.filter(kind="radius", lr=member.lr, direction="update", epsilon=SHOWN_EPSILON)
        for order, curve in ((0, 0.0), (1, 0.0), (2, float(update @ hvp) / 2 / float(update @ update))):
            r = own.filter(order=order)["radius"].item()
            expected = level + (r * gradient @ unit if order else 0.0) + r * r * curve
            assert abs(float(expected - loss(points[1] + r * unit))) == pytest.approx(SHOWN_EPSILON, rel=0.05)
        smallest = rows.filter(kind="moment", lr=member.lr, step=128)["smallest"][0]
        error = abs(float(level + update @ gradient + update @ hvp / 2 - loss(points[2])))
        assert smallest == pytest.approx(error, rel=1e-2, abs=1e-5)


def test_a_break_is_the_first_moment_with_an_error_of_epsilon(rows: pl.DataFrame) -> None:
    for row in rows.filter(kind="break").to_dicts():
        moments = rows.filter(kind="moment", lr=row["lr"]).to_dicts()
        out = [m for m in moments if m["smallest"] >= row["epsilon"]]
        assert row["learnt"] == (out[0]["learnt"] if out else np.inf)
        assert row["step"] == (out[0]["step"] if out else None)
    assert rows.filter(kind="break")["learnt"].n_unique() > 1


def test_radii_grow_with_epsilon(rows: pl.DataFrame) -> None:
    for order in (0, 1, 2):
        for direction in ("principal", "random", "update"):
            own = rows.filter(kind="radius", lr=0.3, order=order, direction=direction)
            found = np.array([column(own.filter(epsilon=epsilon), "radius") for epsilon in EPSILONS])
            assert (np.diff(found, axis=0) > 0).all()


def test_the_figure_has_three_panels(rows: pl.DataFrame) -> None:
    figure = Figure(layout="constrained")
    STUDY.draw(rows, figure)
    by_epsilon, by_lr, smallest = list[Any](figure.axes)
    assert len(by_epsilon.lines) == 3 * 3 + 3 and by_epsilon.get_xscale() == by_epsilon.get_yscale() == "log"
    labels = [text.get_text() for text in by_lr.get_legend().get_texts()]
    assert labels[:2] == ["principal eigenvectors", "random directions"] and len(labels) == 5
    rates = [text.get_text() for text in smallest.get_legend().get_texts()]
    assert rates == ["learning rate 0.02", "learning rate 0.3"]


def test_the_summary_follows_the_rows(rows: pl.DataFrame) -> None:
    low, moment = pl.col("lr") == 0.02, pl.col("kind") == "moment"
    smallest = pl.when(moment & low).then(0.02).when(moment).then(3.0)
    summary = STUDY.summarize(rows.with_columns(smallest=smallest))
    assert [row["smallest ε"] for row in summary.table] == [0.02, 3.0] and "agrees" in summary.verdict
    opposite = rows.with_columns(smallest=pl.when(low).then(1.0).otherwise(0.5))
    assert "does not agree" in STUDY.summarize(opposite).verdict
    never = rows.with_columns(learnt=pl.when(pl.col("kind") == "break").then(np.inf).otherwise(pl.col("learnt")))
    assert [row["tasks until ξ ≥ 0.1"] for row in STUDY.summarize(never).table] == [np.inf, np.inf]


def test_values_that_are_not_finite_are_drawn(rows: pl.DataFrame) -> None:
    lost = rows.with_columns(radius=pl.lit(np.nan), distance=pl.lit(np.nan), smallest=pl.lit(np.inf))
    assert STUDY.summarize(lost).table[0]["radius, random"] == np.inf
    STUDY.draw(lost, Figure())


def test_a_diverged_run_has_rows() -> None:
    rows = STUDY.measure(ITEM | {"lrs": [1e20], "epochs": 1, "examples": 10}, CONTEXT)
    found = pl.DataFrame(rows, infer_schema_length=None)
    assert found.filter(pl.col("direction") != "trajectory", kind="radius")["radius"].is_nan().all()
    assert found.filter(kind="moment")["smallest"].is_infinite().all()
    assert set(found.filter(kind="break")["learnt"]) == {1.0}


def test_measured_tasks_have_a_next_solution() -> None:
    for demo in (False, True):
        assert all(max(item["measured_tasks"]) + 1 < item["tasks"] for item in STUDY.work_items(demo))
