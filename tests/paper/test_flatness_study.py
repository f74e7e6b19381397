"""Flat minima as a study: its rows against matrices made by autograd, rank correlations against scipy's, sentences."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

import glocal
from glocal import challenges
from glocal.networks import MLP
from glocal.paper import get_study
from glocal.paper.studies.common import rank_correlation
from glocal.paper.studies.forgetting import DEMO, REGIMES, paired
from glocal.paper.study import Context, Row, WorkItem
from glocal.report.figure import save_figure
from glocal.report.style import RC

TINY: WorkItem = DEMO | {"tasks": 2, "epochs": 1, "hidden": [1], "examples": 40, "lrs": [0.1, 0.5], "seeds": [1]}
TINY |= {"batch_size": 200, "steps": 60, "probes": 60}


def narrow(shape: object, outputs: int) -> MLP:
    return MLP(784, outputs, [1])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    context = Context(torch.device("cpu"), None, tmp_path_factory.mktemp("store"))
    regimes = [{"algorithm": name, "options": options} for name, options in REGIMES.items()]
    return [row for regime in regimes for row in get_study("flatness").measure(regime | TINY, context)]


def test_rows_are_complete(measured: list[Row]) -> None:
    assert len({tuple(row) for row in measured}) == 1
    keys = ("algorithm", "lr", "seed", "task")
    assert len({tuple(row[k] for k in keys) for row in measured}) == len(measured) == 2 * 2 * 2
    last = [row for row in measured if row["task"] == 1]
    assert all(np.isnan(float(row[k])) for row in last for k in ("after_next", "at_end", "moved"))
    assert all(np.isfinite(float(row[k])) for row in measured for k in ("top", "trace"))


def test_a_solution_by_autograd(measured: list[Row], tmp_path: Path) -> None:
    """From the same run, trained by a sweep."""
    common = {"network": narrow, "tasks": 2, "epochs": 1, "batch_size": 200, "keep_parameters": True}
    (run,) = glocal.sweep("rotated-digits", ["sgd"], [0.5], [1], store=tmp_path, **common)  # type: ignore[arg-type]
    train = challenges.make("rotated-digits", 2).task(0, 1).train
    chosen = np.linspace(0, len(train.y) - 1, 40).round().astype(int)
    x, y = train.x[chosen].double() / 255, train.y[chosen]
    network = narrow(None, 10)
    network.load_state_dict(run.state(1))
    params = {k: p.detach().double() for k, p in network.named_parameters()}
    sizes = [p.numel() for p in params.values()]

    def loss(theta: Tensor) -> Tensor:
        moved = {k: part.view_as(p) for (k, p), part in zip(params.items(), theta.split(sizes), strict=True)}
        return functional.cross_entropy(functional_call(network, moved, (x,)), y)

    learnt, end = (torch.cat([run.state(t)[k].double().flatten() for k in params]) for t in (1, 2))
    matrix = torch.autograd.functional.hessian(loss, learnt).numpy()
    (row,) = [r for r in measured if (r["algorithm"], r["lr"], r["task"]) == ("sgd", 0.5, 0)]
    assert row["top"] == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=1e-4)
    assert row["trace"] == pytest.approx(np.trace(matrix), rel=0.05)
    assert row["at_end"] == row["after_next"] == pytest.approx(float(loss(end) - loss(learnt)), abs=1e-5)
    assert row["moved"] == pytest.approx(float((end - learnt).norm()), rel=1e-5)


def test_rank_correlation_of_what_is_finite() -> None:
    x = np.array([1.0, 2.0, 3.0, np.nan, 5.0, np.inf])
    assert rank_correlation(x, np.array([1.0, 4.0, 9.0, 0.0, np.nan, -1.0])) == pytest.approx(1)
    assert np.isnan(rank_correlation(x[:2], x[:2])) and np.isnan(rank_correlation(x[3:], x[3:]))


def test_the_figure(measured: list[Row], tmp_path: Path) -> None:
    study = get_study("flatness")
    with matplotlib.rc_context(RC):
        figure = Figure(layout="constrained")
        study.draw(pl.DataFrame(measured), figure)
    assert len(figure.axes) == 4
    for axes in figure.axes:
        assert len(axes.collections) == 4  # regimes, learning rates
        assert sum(len(np.asarray(part.get_offsets())) for part in axes.collections) == 4  # the last has no forgetting
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["sgd 0.1", "sgd 0.5", "stable-sgd 0.1", "stable-sgd 0.5"]
    assert save_figure(partial(study.draw, pl.DataFrame(measured)), tmp_path / "figure.pdf").stat().st_size > 0


def made_up(slope: float, stable: float = 0.5, nothing: bool = False) -> pl.DataFrame:
    """Forgetting that is `slope` times sharpness at each rate; higher rates are flatter and forget more."""
    rows: list[Row] = []
    for algorithm, factor in (("sgd", 1.0), ("stable-sgd", stable)):
        for lr in (0.01, 1.0):
            for seed in range(4):
                top = factor * (1 + seed) * (0.01 if lr == 1.0 else 1.0)
                forgotten = np.nan if nothing else slope * top + 1e3 * lr
                row: Row = {
                    "challenge": "c",
                    "algorithm": algorithm,
                    "batch_size": 16,
                    "lr": lr,
                    "seed": seed,
                    "task": 0,
                    "top": top,
                }
                row |= {"top_error": 0.0, "trace": 10 * top, "trace_error": 0.0, "after_next": forgotten}
                rows.append(row | {"at_end": forgotten, "moved": np.nan if nothing else 1.0 + lr})
    return pl.DataFrame(rows)


def test_the_summary_follows_the_rows() -> None:
    rising, falling, sharper = (
        get_study("flatness").summarize(made_up(slope, stable))
        for slope, stable in ((1.0, 0.5), (-1.0, 0.5), (1.0, 2.0))
    )
    assert [row["ρ with λ_max"] for row in rising.table[:4]] == pytest.approx([1, 1, 1, 1])
    assert [row["ρ with λ_max"] for row in falling.table[:4]] == pytest.approx([-1, -1, -1, -1])
    assert "in 4 of 4 combinations" in rising.verdict and "in 0 of 4 combinations" in falling.verdict
    assert "flatter than plain SGD in 8 of 8 pairs and forgets less in 8: agrees" in rising.verdict
    assert "forgets less in 0: does not agree" in falling.verdict
    assert "in 0 of 8 pairs" in sharper.verdict and "does not agree" in sharper.verdict


def test_regimes_are_compared_at_equal_batch_size() -> None:
    """Stable SGD is flatter with either batch size, but not if its small batches are compared with large ones."""
    factors = {16: 4.0, 64: 1.0}
    parts = [
        made_up(1.0).with_columns(pl.col("top", "at_end") * factor, batch_size=batch)
        for batch, factor in factors.items()
    ]
    rows = pl.concat(parts)
    assert "in 16 of 16 pairs and forgets less in 16: agrees" in get_study("flatness").summarize(rows).verdict
    pairs = paired(rows)
    assert (pairs["top"] == 2 * pairs["top_stable"]).all()


def test_runs_that_diverged(tmp_path: Path) -> None:
    study = get_study("flatness")
    lost, names = pl.int_range(pl.len()) < 3, ("top", "trace", "at_end", "moved")
    some = made_up(1.0).with_columns(pl.when(lost).then(np.nan).otherwise(pl.col(name)).alias(name) for name in names)
    assert len(paired(some)) == 5
    nothing = made_up(1.0, nothing=True)
    assert paired(nothing).is_empty() and np.isnan(float(study.summarize(nothing).table[0]["ρ with λ_max"]))
    for number, rows in enumerate((some, nothing)):
        assert save_figure(partial(study.draw, rows), tmp_path / f"{number}.png").stat().st_size > 0
