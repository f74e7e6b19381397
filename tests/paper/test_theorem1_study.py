"""The study of Theorem 4.1: its rows against a Hessian product by hand, its figure and sentences from made-up rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure

from glocal.paper import get_study
from glocal.paper.studies.common import record_item
from glocal.paper.studies.theorems import DEMO
from glocal.paper.study import Context, Row

STUDY = get_study("theorem1")
SMALL = DEMO | {"hidden": [6, 6], "epochs": 1, "batch_size": 400, "examples": 50, "lrs": (0.05, 0.3), "seeds": (13,)}


def context(folder: Path) -> Context:
    return Context(torch.device("cpu"), None, folder)


def forward(theta: torch.Tensor, like: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """784-6-6-10 with ReLUs, from a flat vector, in double precision."""
    parts = dict(zip(like, theta.split([p.numel() for p in like.values()]), strict=True))
    h = x.double().flatten(1)
    for i in range(3):
        weight = parts[f"layers.{i}.weight"].view(like[f"layers.{i}.weight"].shape)
        h = h @ weight.T + parts[f"layers.{i}.bias"]
        h = h.relu() if i < 2 else h
    return h


@pytest.mark.parametrize(("algorithm", "options"), [("sgd", {}), ("optimal-hard", {"rank": 3, "samples": 50})])
def test_rows_are_what_the_theorem_names(tmp_path: Path, algorithm: str, options: dict) -> None:
    item = {"algorithm": algorithm, "options": options, **SMALL}
    rows = STUDY.measure(item, context(tmp_path))
    assert [(row["lr"], row["t"]) for row in rows] == [(0.05, 2), (0.05, 3), (0.3, 2), (0.3, 3)]
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert {row["locality"] for row in rows} == {"global" if algorithm == "sgd" else "local"}
    _, (_, run) = record_item(item, context(tmp_path))
    trace = run.trace
    like = trace.checkpoints[0].params
    points = [torch.cat([p.flatten() for p in s.params.values()]).double() for s in trace.checkpoints]
    x, y = trace.tasks[0]

    def loss(theta: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(forward(theta, like, x), y)

    delta = points[2] - points[1]
    _, product = torch.autograd.functional.vhp(loss, points[1], delta)
    gradient = torch.autograd.functional.jacobian(loss, points[1])
    row = rows[2]
    # E(2) is averaged over two tasks, of which the second has forgotten nothing.
    assert row["measured"] == pytest.approx(float(loss(points[2]) - loss(points[1])) / 2, rel=1e-3)
    assert row["quadratic"] == pytest.approx(float(delta @ product) / 4, rel=1e-3)
    assert row["second_order"] == pytest.approx(float(delta @ gradient + delta @ product / 2) / 2, rel=1e-3)
    assert row["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-3)
    assert row["reach"] == pytest.approx(float(delta.norm()) ** 3, rel=1e-3)
    assert row["forgotten"] == 0


def made_up(factor: float, diverged: bool = False) -> pl.DataFrame:
    """Forgetting that grows with the learning rate, of which the quadratic is a factor."""
    rows: list[Row] = [
        {
            "algorithm": algorithm,
            "locality": locality,
            "lr": lr,
            "seed": seed,
            "t": t,
            "measured": np.nan if diverged and (lr, seed) == (0.1, 2) and t > 2 else lr * t * (1 + seed),
            "quadratic": factor * lr * t * (1 + seed),
            **dict.fromkeys(("second_order", "condition", "relative", "forgotten", "lowest"), 0.0),
            "gradient_norm": 10 * lr,
            "reach": 8.0,
        }
        for algorithm, locality in (("sgd", "global"), ("ewc", "local"))
        for lr in (0.01, 0.1)
        for seed in (1, 2)
        for t in (2, 3, 4)
    ]
    return pl.DataFrame(rows)


def test_the_summary_follows_the_rows() -> None:
    exact, off, below = (STUDY.summarize(made_up(f)).table for f in (1.0, 5.0, -1.0))
    assert [row["within a factor of 2 (%)"] for row in exact] == [100.0, 100.0]
    assert [row["within a factor of 2 (%)"] for row in off] == [0.0, 0.0]
    correlations = [[row["rank correlation"] for row in table] for table in (exact, below)]
    assert correlations == [pytest.approx([1, 1]), pytest.approx([-1, -1])]
    assert [row["largest ‖∇L_o(θ_o)‖"] for row in exact] == pytest.approx([0.1, 1.0])
    assert [row["largest distance of solutions"] for row in exact] == pytest.approx([2.0, 2.0])
    verdict = STUDY.summarize(made_up(1.0, diverged=True)).verdict
    assert "100 % of 8 runs." in verdict and "2 of 8 runs diverged" in verdict
    before = made_up(1.0).with_columns(measured=pl.when(pl.col("t") > 2, seed=0).then(np.nan).otherwise("measured"))
    assert STUDY.summarize(before).table == STUDY.summarize(made_up(1.0)).table
    nothing = made_up(1.0).with_columns(measured=pl.lit(np.nan))
    assert STUDY.summarize(nothing).table == []


@pytest.mark.parametrize("diverged", [False, True])
def test_figure_shows_every_pair_of_runs_that_did_not_diverge(diverged: bool) -> None:
    figure, rows = Figure(), made_up(1.0, diverged)
    STUDY.draw(rows, figure)
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["sgd (global)", "ewc (local)"]
    for axes in panels:
        shown = np.asarray(axes.collections[0].get_offsets())
        assert len(shown) == (9 if diverged else 12)
        assert shown[:, 0] == pytest.approx(shown[:, 1])
