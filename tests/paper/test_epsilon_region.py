"""The study of ε-regions on a small network: borders are where the error is ε, and breaks where it was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from glocal.lens.record import train_traces
from glocal.paper.experiments import get_study
from glocal.paper.studies.common import column, make_cohort, where
from glocal.paper.studies.epsilon_region import EPSILONS, SHOWN_EPSILON
from glocal.paper.study import Context, Row
from glocal.tree import from_vector, to_vector

STUDY = get_study("epsilon-region")
CONTEXT = Context(torch.device("cpu"), None, Path("unused"))
ITEM: dict[str, Any] = {"challenge": "rotated-digits", "tasks": 2, "epochs": 2, "hidden": [4], "seeds": [0]}
ITEM |= {"lrs": [0.02, 0.3], "examples": 40, "measured_tasks": [0], "principal": 1, "random": 2}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return STUDY.measure(ITEM, CONTEXT)


def test_rows_are_complete(rows: list[Row]) -> None:
    assert {tuple(row) for row in rows} == {tuple(STUDY.columns.split())}
    rays = [row for row in where(rows, kind="radius") if row["direction"] != "trajectory"]
    assert len(rays) == 2 * 3 * len(EPSILONS) * 5  # rates, orders, and both senses of the eigenvector among directions
    assert len(where(rows, direction="trajectory")) == len(where(rows, kind="break")) == 2 * len(EPSILONS)
    moments = where(rows, kind="moment", lr=0.3)
    # After the first task, after each epoch of the second, and after it.
    assert column(moments, "learnt").tolist() == [1, 1.5, 2, 2] and column(moments, "step").tolist() == [
        64,
        96,
        128,
        128,
    ]
    assert moments[0]["smallest"] == pytest.approx(0, abs=1e-6)


def test_a_radius_ends_where_the_error_is_epsilon_and_a_moment_has_the_error_of_the_expansion(rows: list[Row]) -> None:
    cohort = make_cohort(ITEM, CONTEXT)
    for member, trace in zip(cohort.members, train_traces(cohort, 40), strict=True):
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
        own = where(rows, kind="radius", lr=member.lr, direction="update", epsilon=SHOWN_EPSILON)
        for order, curve in ((0, 0.0), (1, 0.0), (2, float(update @ hvp) / 2 / float(update @ update))):
            (row,) = where(own, order=order)
            r = float(row["radius"])  # type: ignore[arg-type]
            expected = level + (r * gradient @ unit if order else 0.0) + r * r * curve
            assert abs(float(expected - loss(points[1] + r * unit))) == pytest.approx(SHOWN_EPSILON, rel=0.05)
        (row,) = where(rows, kind="moment", lr=member.lr, step=128)[:1]
        error = abs(float(level + update @ gradient + update @ hvp / 2 - loss(points[2])))
        assert row["smallest"] == pytest.approx(error, rel=1e-2, abs=1e-5)


def test_a_break_is_the_first_moment_with_an_error_of_epsilon(rows: list[Row]) -> None:
    for row in where(rows, kind="break"):
        moments = where(rows, kind="moment", lr=row["lr"])
        out = [m for m in moments if float(m["smallest"]) >= float(row["epsilon"])]  # type: ignore[arg-type]
        assert row["learnt"] == (out[0]["learnt"] if out else np.inf)
        assert row["step"] == (out[0]["step"] if out else None)
    assert len({row["learnt"] for row in where(rows, kind="break")}) > 1


def test_radii_grow_with_epsilon(rows: list[Row]) -> None:
    for order in (0, 1, 2):
        for direction in ("principal", "random", "update"):
            own = where(rows, kind="radius", lr=0.3, order=order, direction=direction)
            found = np.array([column(where(own, epsilon=epsilon), "radius") for epsilon in EPSILONS])
            assert (np.diff(found, axis=0) > 0).all()


def test_the_figure_has_four_panels(rows: list[Row]) -> None:
    figure = Figure(layout="constrained")
    STUDY.draw(rows, figure)
    by_epsilon, by_lr, smallest, breaks = list[Any](figure.axes)
    assert len(by_epsilon.lines) == 3 * 3 + 3 and by_epsilon.get_xscale() == by_epsilon.get_yscale() == "log"
    labels = [text.get_text() for text in by_lr.get_legend().get_texts()]
    assert labels[:2] == ["principal eigenvectors", "random directions"] and len(labels) == 5
    assert [text.get_text() for text in smallest.get_legend().get_texts()] == ["0.02", "0.3"]
    assert len(breaks.lines) == len(EPSILONS) + 1 and breaks.get_xlabel() == "learning rate"


def test_the_summary_follows_the_rows(rows: list[Row]) -> None:
    moments = [row | {"smallest": 0.02 if row["lr"] == 0.02 else 3.0} for row in rows if row["kind"] == "moment"]
    rest = [row for row in rows if row["kind"] != "moment"]
    summary = STUDY.summarize(moments + rest)
    assert [row["smallest ε"] for row in summary.table] == [0.02, 3.0] and "agrees" in summary.verdict
    opposite = [row | {"smallest": 1.0 if row["lr"] == 0.02 else 0.5} for row in moments]
    assert "does not agree" in STUDY.summarize(opposite + rest).verdict
    never = [row | {"learnt": np.inf, "step": None} if row["kind"] == "break" else row for row in rows]
    assert [row["tasks until ξ ≥ 0.1"] for row in STUDY.summarize(never).table] == [np.inf, np.inf]


def test_values_that_are_not_finite_are_drawn(rows: list[Row]) -> None:
    lost = [row | {"radius": np.nan, "distance": np.nan, "smallest": np.inf} for row in rows]
    assert STUDY.summarize(lost).table[0]["radius, random"] == np.inf
    STUDY.draw(lost, Figure())


def test_a_diverged_run_has_rows() -> None:
    found = STUDY.measure(ITEM | {"lrs": [1e20], "epochs": 1, "examples": 10}, CONTEXT)
    assert np.isnan(column([r for r in where(found, kind="radius") if r["direction"] != "trajectory"], "radius")).all()
    assert np.isinf(column(where(found, kind="moment"), "smallest")).all()
    assert {row["learnt"] for row in where(found, kind="break")} == {1.0}


def test_pieces_fit_their_cost() -> None:
    for demo in (False, True):
        items = STUDY.work_items(demo)
        assert all(max(item["measured_tasks"]) + 1 < item["tasks"] for item in items)  # there is a next solution
        assert str(len(items) * len(items[0]["lrs"])) in STUDY.cost(demo)
