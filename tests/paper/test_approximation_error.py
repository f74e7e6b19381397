"""The study of approximation errors on small networks: its rows against losses that are computed directly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from glocal.lens.training_trace import TrainingTrace
from glocal.paper import get_study
from glocal.paper.studies.approximation_error import OPTIONS, STRUCTURES, skill
from glocal.paper.studies.common import column, record_item
from glocal.paper.study import Context
from glocal.tree import from_vector, to_vector

STUDY = get_study("approximation-error")
CONTEXT = Context(torch.device("cpu"), None, Path("unused"))
BASE: dict[str, Any] = {"challenge": "rotated-digits", "tasks": 3, "epochs": 1, "hidden": [4], "seeds": [0]}
BASE |= {"lrs": [0.02, 0.2]}
SGD = {"algorithm": "sgd", "options": {}, "examples": 60, "rank": 2} | BASE
EXPANSIONS = ("order 0", "order 1", *STRUCTURES, "whole")


def own(algorithm: str, **options: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "options": OPTIONS[algorithm] | options, "examples": 4_000} | BASE


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    items = (SGD, own("ewc"), own("agem", slots=60), own("si"))
    return pl.DataFrame([row for item in items for row in STUDY.measure(item, CONTEXT)], infer_schema_length=None)


def loss(trace: TrainingTrace, task: int, theta: Tensor) -> Tensor:
    params = from_vector(theta, trace.checkpoints[0].params)
    return cross_entropy(functional_call(trace.module, params, (trace.tasks[task].x,)), trace.tasks[task].y)


def test_rows_are_complete(rows: pl.DataFrame) -> None:
    assert rows.columns == STUDY.columns.split()
    training, rays = rows.filter(ray=False), rows.filter(ray=True)
    lines = len(EXPANSIONS) + 3
    # After two tasks the mean and one task, after three the mean and two; for both learning rates; and the constants.
    assert len(training) == (lines + 3) * 2 * 5 and len(rays) == lines * 2 * 15
    assert np.isfinite(column(training, "error")).all()
    means = training.filter(pl.col("task").is_null())
    np.testing.assert_allclose(
        column(means, "error"), np.abs(column(means, "true") - column(means, "approximate")), atol=1e-6
    )
    assert set(rows.filter(algorithm="agem")["locality"]) == {"global"}


def test_expansions_are_those_of_the_losses(rows: pl.DataFrame) -> None:
    for member, run in record_item(SGD | {"examples": 60}, CONTEXT):
        trace = run.trace
        theta = [to_vector(point.params) for point in trace.checkpoints]
        moved = theta[3] - theta[1]
        after = rows.filter(algorithm="sgd", lr=member.lr, ray=False, learnt=3, task=0)
        expected = {"order 0": loss(trace, 0, theta[1])}
        gradient_at = grad(partial(loss, trace, 0))
        gradient, hvp = gradient_at(theta[1]), grad(lambda t, at=gradient_at, v=moved: at(t) @ v)(theta[1])
        expected["order 1"] = expected["order 0"] + moved @ gradient
        expected["whole"] = expected["order 1"] + moved @ hvp / 2
        for name, value in expected.items():
            (row,) = after.filter(approximation=name).to_dicts()
            assert row["true"] == pytest.approx(float(loss(trace, 0, theta[3])), rel=1e-5)
            assert row["approximate"] == pytest.approx(float(value), rel=1e-4, abs=1e-5)
            assert row["distance"] == pytest.approx(float(moved.norm()), rel=1e-5)


def test_constants_are_losses_at_the_solutions_of_the_same_run(rows: pl.DataFrame) -> None:
    for member, run in record_item(own("ewc"), CONTEXT):
        theta = [to_vector(point.params) for point in run.trace.checkpoints]
        (row,) = rows.filter(
            algorithm="ewc", approximation="constant", lr=member.lr, ray=False, learnt=3, task=0
        ).to_dicts()
        now, then = (float(loss(run.trace, 0, theta[t])) for t in (3, 1))
        assert (row["true"], row["approximate"]) == pytest.approx((now, then), rel=1e-5)
        assert row["error"] == pytest.approx(abs(now - then), abs=1e-6)


def test_near_a_solution_errors_are_small_and_of_their_order(rows: pl.DataFrame) -> None:
    powers = {name: column(rows.filter(approximation=name, ray=True), "exponent") for name in ("order 0", "order 1")}
    np.testing.assert_allclose(powers["order 0"], 1, atol=0.5)
    np.testing.assert_allclose(powers["order 1"], 2, atol=0.5)
    nearest = rows.filter(ray=True, distance=0.01)
    local = column(nearest.filter(algorithm="ewc"), "error")
    assert (local < column(nearest.filter(algorithm="agem"), "error")).all() and (local < 0.02).all()


def test_the_figure_has_a_line_for_each_approximation(rows: pl.DataFrame) -> None:
    figure = Figure(layout="constrained")
    STUDY.draw(rows, figure)
    panels = [axes for axes in figure.axes if axes.get_xlabel()]
    assert len(panels) == 6
    assert [len(axes.lines) for axes in panels] == [3, 3, 4, 6, 6, 7]  # and a line where θ_2 is
    legends: list[Any] = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [len(legend.get_texts()) for legend in legends] == [3, 6]
    assert legends[1].get_texts()[5].get_text().startswith("order 2, whole")
    styles = {
        text.get_text().split()[0]: line.get_linestyle()
        for text, line in zip(legends[0].get_texts(), legends[0].get_lines(), strict=True)
    }
    assert styles == {"agem": "-", "si": "-", "ewc": "--"}
    assert "learning rate, 0.2" in panels[1].get_title()


def test_exponents_are_of_the_rate_they_stand_beside(rows: pl.DataFrame) -> None:
    figure = Figure(layout="constrained")
    STUDY.draw(rows.with_columns(exponent=pl.when(pl.col("lr") == 0.02).then(3.0).otherwise(0.5)), figure)
    texts = [text.get_text() for axes in figure.axes if (legend := axes.get_legend()) for text in legend.get_texts()]
    assert len(texts) == 9 and all(text.endswith("$r^{0.5}$") for text in texts)


def test_the_summary_follows_the_rows(rows: pl.DataFrame) -> None:
    low, is_global = pl.col("lr") == 0.02, pl.col("locality") == "global"
    grown = rows.filter(ray=False).with_columns(
        error=pl.when(low | is_global).then(0.1).otherwise(1.0), true=pl.lit(2.0)
    )
    summary = STUDY.summarize(grown)
    (ewc,) = (row for row in summary.table if row["approximation"] == "ewc")
    assert (ewc["error at 0.02"], ewc["error at 0.2"], ewc["growth"]) == pytest.approx((0.1, 1.0, 10.0))
    assert "10-fold for local algorithms and 1-fold for global ones" in summary.verdict and "agrees" in summary.verdict
    opposite = grown.with_columns(error=pl.when(low | ~is_global).then(0.1).otherwise(1.0))
    assert "does not agree" in STUDY.summarize(opposite).verdict
    void = STUDY.summarize(grown.with_columns(true=pl.col("error") / 0.95)).verdict  # \hat L_o is 5 % of the loss
    assert "at 0.2 it is 95 % and 95 % of that loss" in void and "agree" not in void


def test_skill_is_against_the_constant_of_the_same_seed(rows: pl.DataFrame) -> None:
    """Two seeds with errors of 4 and 8 for the constant: half of both is 0.5, twice both −1, and 1 and 12 are 0.75 and
    −0.5, whose t-interval (12.706 standard errors of 0.625) includes 0."""
    seeds = [rows.filter(algorithm="sgd").with_columns(seed=pl.lit(seed, pl.Int64)) for seed in (0, 1)]
    errors = {"order 0": (4, 8), "order 1": (8, 16), "diagonal": (1, 12)}
    made = [
        own.with_columns(error=pl.col("approximation").replace_strict({k: v[i] for k, v in errors.items()}, default=v))
        for i, (own, v) in enumerate(zip(seeds, (2.0, 4.0), strict=True))
    ]
    ewc = pl.concat([rows.filter(algorithm="ewc").with_columns(seed=pl.lit(seed, pl.Int64)) for seed in (0, 1)])
    is_own = pl.col("approximation") == "own"
    given = pl.concat([*made, ewc.with_columns(error=pl.when(is_own).then(3.0).otherwise(pl.col("seed") * 2.0 + 4.0))])
    found = skill(given, 0.2)
    assert "order 0" not in found
    assert found["order 1"] == pytest.approx((-1, -1, -1)) and found["order 2, whole"] == pytest.approx((0.5, 0.5, 0.5))
    assert found["order 2, diagonal"] == pytest.approx((0.125, 0.125 - 12.7062 * 0.625, 0.125 + 12.7062 * 0.625))
    assert found["ewc"] == pytest.approx((0.375, 0.375 - 12.7062 * 0.125, 0.375 + 12.7062 * 0.125))  # 1/4 and 1/2
    summary = STUDY.summarize(given)
    told = summary.verdict.partition("L_o(θ_o) at 0.2, ")[2]
    assert told == "better: kronecker, low-rank, whole; worse: order 1; not shown to differ: diagonal, ewc."
    cells = {row["approximation"]: row["skill at 0.2"] for row in summary.table}
    assert cells["order 1"] == "−1.00 [−1.00, −1.00]" and cells["order 0"] is None and "constant" not in cells
    lost = given.with_columns(error=pl.when(is_own, pl.col("seed") == 1).then(np.inf).otherwise("error"))
    assert "ewc" not in skill(lost, 0.2)
    older = given.filter(pl.col("approximation") != "constant")
    assert "ewc" not in skill(older, 0.2) and "order 1" in skill(older, 0.2)


def test_diverged_runs_are_marked_in_the_figure(rows: pl.DataFrame) -> None:
    diverged = (pl.col("algorithm") == "ewc") & (pl.col("approximation") == "own")
    error, exponent = (
        pl.when(diverged).then(x).otherwise(pl.col(n)) for n, x in (("error", np.inf), ("exponent", np.nan))
    )
    lost = rows.with_columns(error=error, exponent=exponent)
    (ewc,) = (row for row in STUDY.summarize(lost).table if row["approximation"] == "ewc")
    assert ewc["error at 0.2"] == np.inf
    figure = Figure()
    STUDY.draw(lost, figure)
    assert any("diverged" in axes.get_xlabel() for axes in figure.axes)
    nothing = rows.with_columns(pl.lit(np.nan).alias(name) for name in ("error", "exponent", "distance"))
    STUDY.summarize(nothing)
    STUDY.draw(nothing, Figure())


def test_a_diverged_run_has_rows() -> None:
    found = STUDY.measure(SGD | {"lrs": [1e20], "tasks": 2, "examples": 20}, CONTEXT)
    training = [float(row["error"] or 0) for row in found if not row["ray"]]
    assert not np.isfinite(training).any()
    assert len({tuple(row) for row in found}) == 1


def test_pieces_name_all_that_is_asked_for() -> None:
    for demo in (False, True):
        items = STUDY.work_items(demo)
        assert list(dict.fromkeys(item["algorithm"] for item in items)) == ["sgd", *OPTIONS]
