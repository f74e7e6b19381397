"""Ranks of the average Hessian as a study: its rows against matrices made by autograd, its figure, its sentences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import glocal
from glocal import challenges
from glocal.paper import STUDIES, get_study
from glocal.paper.studies.hessian import DEMO, FULL, pooled_mlp
from glocal.paper.study import Context, Row, WorkItem
from glocal.report.figure import save_figure
from glocal.report.style import RC

TINY: WorkItem = DEMO | {"tasks": 3, "epochs": 1, "pool": 14, "hidden": [3], "examples": 50, "lrs": [0.3]}


def tiny(shape: Sequence[int], outputs: int) -> nn.Module:
    return pooled_mlp(shape, outputs, pool=14, hidden=[3])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    context = Context(torch.device("cpu"), None, tmp_path_factory.mktemp("store"))
    return [row for seed in (1, 2) for row in get_study("hessian-rank").measure(TINY | {"seeds": [seed]}, context)]


def test_rows_are_complete(measured: list[Row]) -> None:
    assert {tuple(row) for row in measured} == {tuple(get_study("hessian-rank").columns.split())}
    assert len(measured) == 2 * 3 * 11  # seeds, tasks, definitions
    assert {row["parameters"] for row in measured} == {4 * 3 + 3 + 3 * 10 + 10}
    keys = ("seed", "tasks", "kind", "threshold")
    assert len({tuple(row[k] for k in keys) for row in measured}) == len(measured)


def test_ranks_by_autograd_and_numpy(measured: list[Row], tmp_path: Path) -> None:
    """From the same run, trained by a sweep: dense Hessians of the kept states, averaged with the paper's 1/t."""
    how = {"epochs": 1, "batch_size": 128, "tasks": 3}
    (run,) = glocal.sweep(
        "rotated-digits",
        ["sgd"],
        [0.3],
        [1],
        network=tiny,
        store=tmp_path,
        keep_parameters=True,
        **how,  # type: ignore[arg-type]
    )
    challenge, total = challenges.make("rotated-digits", 3), np.zeros((55, 55))
    for o in range(3):
        train = challenge.task(o, 1).train
        chosen = np.linspace(0, len(train.y) - 1, 50).round().astype(int)
        x, y = train.x[chosen].double() / 255, train.y[chosen]
        network = tiny([1, 28, 28], 10)
        network.load_state_dict(run.state(o + 1))
        params = {k: p.detach().double() for k, p in network.named_parameters()}
        sizes = [p.numel() for p in params.values()]

        def loss(theta: Tensor) -> Tensor:
            parts = zip(params.items(), theta.split(sizes), strict=True)  # noqa: B023
            moved = {k: part.view_as(p) for (k, p), part in parts}
            return functional.cross_entropy(functional_call(network, moved, (x,)), y)  # noqa: B023

        total += torch.autograd.functional.hessian(loss, torch.cat([p.flatten() for p in params.values()])).numpy()
        values = np.abs(np.linalg.eigvalsh(total / (o + 2)))
        p = values / values.sum()
        expected = {
            "effective": np.exp(-(p[p > 0] * np.log(p[p > 0])).sum()),
            "participation": values.sum() ** 2 / (values**2).sum(),
            "numerical": (values > 55 * 2.0**-23 * values.max()).sum(),
        }
        rows = [row for row in measured if row["seed"] == 1 and row["tasks"] == o + 1]
        for row in rows:
            scale = values.max() if row["kind"] == "relative" else 1.0
            counted = expected.get(str(row["kind"]), (values > scale * (row["threshold"] or 0)).sum())
            assert row["rank"] == pytest.approx(counted, rel=1e-4), row
            assert row["top"] == pytest.approx(values.max(), rel=1e-5)


def test_the_figure(measured: list[Row], tmp_path: Path) -> None:
    study = get_study("hessian-rank")
    with matplotlib.rc_context(RC):
        figure = Figure(layout="constrained")
        study.draw(pl.DataFrame(measured), figure)
    left, middle = figure.axes
    assert (len(left.lines), len(middle.lines)) == (4, 7)
    labels = [text.get_text() for axes in (left, middle) for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert len(set(labels)) == 11 and {"|λ| > 0.01", "|λ| > 0.01 of the largest", "effective rank"} <= set(labels)
    assert save_figure(partial(study.draw, pl.DataFrame(measured)), tmp_path / "figure.pdf").stat().st_size > 0


def made_up(power: float, broken: float = 0.0) -> pl.DataFrame:
    """Ranks that grow as a power of the tasks, by two definitions."""
    rows: list[Row] = []
    for seed in range(2):
        for tasks in range(1, 6):
            for kind, threshold in (("numerical", 1e-4), ("effective", None)):
                row: Row = {"challenge": "c", "seed": seed, "lr": 0.1, "parameters": 1000, "tasks": tasks}
                found = np.nan if seed < broken else 10 * tasks**power
                rows.append(row | {"kind": kind, "threshold": threshold, "rank": found, "top": 1.0})
    return pl.DataFrame(rows)


def test_the_verdict_follows_the_rows() -> None:
    slow, fast = (get_study("hessian-rank").summarize(made_up(power)) for power in (0.5, 1.5))
    assert [row["exponent"] for row in slow.table] == pytest.approx([0.5, 0.5])
    assert slow.table[0]["after 1 task"] == 10 and slow.table[0]["after 5"] == pytest.approx(10 * 5**0.5)
    assert slow.table[0]["% of parameters"] == pytest.approx(5**0.5)
    assert slow.table[0]["after 1 task, in √P"] == pytest.approx(10 / 1000**0.5)
    assert "By 2 of 2" in slow.verdict and "agrees" in slow.verdict
    assert "By 0 of 2" in fast.verdict and "does not agree" in fast.verdict


def test_runs_that_diverged(tmp_path: Path) -> None:
    study = get_study("hessian-rank")
    assert study.summarize(made_up(0.5, broken=1)) == study.summarize(made_up(0.5))
    nothing = made_up(0.5, broken=2)
    assert study.summarize(nothing).verdict == "No rank is finite."
    for number, rows in enumerate((made_up(0.5, broken=1), nothing)):
        assert save_figure(partial(study.draw, rows), tmp_path / f"{number}.png").stat().st_size > 0


def test_the_full_networks_size_is_the_papers() -> None:
    cost = STUDIES["hessian-rank"].cost
    size = sum(p.numel() for p in pooled_mlp([1, 28, 28], 10, pool=1, hidden=FULL["hidden"]).parameters())
    assert f"{size:,} parameters" in cost and size == 18_006
