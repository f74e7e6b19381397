"""The perturbation score as a study: its rows against losses computed directly, its figure, its sentences."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional

from glocal import challenges
from glocal.lens.perturbation import with_batch_statistics
from glocal.networks import mlp
from glocal.paper import get_study
from glocal.paper.studies.hessian import float32_radii, float32_scores, quantiles, radius_curve, small_resnet18
from glocal.paper.study import Context, Row, Study, WorkItem, run
from glocal.report.figure import save_figure
from glocal.report.style import RC
from glocal.store.store import load

NAMES = ("perturbation-cifar10", "perturbation-mnist")
TINY: WorkItem = {"epochs": 1, "batch_size": 400, "tasks": 2, "samples": 12, "examples": 12}
TINY |= {"eigenvectors": 2, "directions": 2}


class Tiny:
    """A study with its smallest items."""

    def __init__(self, name: str) -> None:
        self.name, self.study = name, get_study(name)

    def work_items(self, demo: bool) -> list[WorkItem]:
        kept = [("running", 1), ("batch", 0), ("none", 0), ("none", 1)]
        return [item | TINY for item in self.study.work_items(True) if (item["statistics"], item["task"]) in kept]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.study, name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, list[Row]]]]:
    found = {}
    for name in NAMES:
        store = tmp_path_factory.mktemp(name)
        study: Study = Tiny(name)
        found[name] = store, run(study, Context(torch.device("cpu"), None, store))[0].to_dicts()
    yield found


def test_progress_counts_tasks_from_one(measured: dict[str, tuple[Path, list[Row]]]) -> None:
    """The items are in the store already, which names them by the indices of their tasks."""
    store, _ = measured["perturbation-mnist"]
    study: Study = Tiny("perturbation-mnist")
    said: list[str] = []
    run(study, Context(torch.device("cpu"), None, store), on_progress=lambda done, total, what: said.append(what))
    assert [f" {word} " in f" {text} " for text, word in zip(said, ("task=1", "task=2"), strict=False)] == [True, True]


def only(rows: list[Row], **values: object) -> list[Row]:
    return [row for row in rows if all(row[k] == v for k, v in values.items())]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_complete(name: str, measured: dict[str, tuple[Path, list[Row]]]) -> None:
    store, rows = measured[name]
    statistics = {"running", "batch"} if name.endswith("cifar10") else {"none"}
    assert {tuple(row) for row in rows} == {tuple(get_study(name).columns.split())}
    assert {row["statistics"] for row in rows} == statistics
    assert {row["task"] for row in rows} == {0, 1}
    assert len(rows) == 2 * 2 * 2 * 2 * 10  # items, splits, kinds, directions, radii
    assert len(
        {tuple(row[k] for k in ("statistics", "task", "split", "kind", "direction", "radius")) for row in rows}
    ) == len(rows)
    assert all((row["eigenvalue"] is None) == (row["kind"] == "random") for row in rows)
    runs = load(store)
    assert len(runs) == len(get_study(name).work_items(True)[0]["lrs"]), "trained once for all items"
    lowest = min(runs, key=lambda run: run.arrays["train_class_loss"][[1, 2], [0, 1]].mean())
    assert {row["lr"] for row in rows} == {lowest.lr}


@pytest.mark.parametrize(("name", "statistics"), [(NAMES[0], "running"), (NAMES[0], "batch"), (NAMES[1], "none")])
def test_a_solutions_loss_by_hand(name: str, statistics: str, measured: dict[str, tuple[Path, list[Row]]]) -> None:
    """The kept state in a network of its own, in float64, on the same examples."""
    store, rows = measured[name]
    task = 0 if statistics == "batch" else 1
    rows = only(rows, statistics=statistics, task=task, split="test")
    (run,) = [r for r in load(store) if r.lr == rows[0]["lr"]]
    challenge = challenges.make(str(rows[0]["challenge"]), 2)
    make = mlp if statistics == "none" else small_resnet18
    network: nn.Module = make(challenge.input_shape, challenge.outputs)
    network.load_state_dict(run.state(task + 1))
    network = with_batch_statistics(network) if statistics == "batch" else network
    test = challenge.task(task, run.seed).test
    chosen = np.linspace(0, len(test.y) - 1, 12).round().astype(int)
    x, y = test.x[chosen].double() / 255, test.y[chosen]
    with torch.no_grad():
        expected = functional.cross_entropy(network.double().eval()(x), y).item()
    (base,) = {row["base"] for row in rows}
    assert base == pytest.approx(expected, rel=1e-6)


def test_the_batchs_statistics_are_measured_at_a_few_tasks() -> None:
    found = {name: [item["statistics"] for item in get_study(name).work_items(False)] for name in NAMES}
    assert found == {NAMES[0]: 3 * (["running"] * 5 + ["batch"] * 3), NAMES[1]: 3 * (["none"] * 20)}


def test_scores_are_made_of_the_losses_in_the_rows(measured: dict[str, tuple[Path, list[Row]]]) -> None:
    rows = only(measured["perturbation-mnist"][1], task=0, split="train", radius=1.0)
    base = float(rows[0]["base"])
    changes = {kind: [abs(float(r["loss"]) - base) for r in only(rows, kind=kind)] for kind in ("eigen", "random")}
    for row, change in zip(only(rows, kind="eigen"), changes["eigen"], strict=True):
        assert row["score"] == pytest.approx(np.mean([change / other for other in changes["random"]]), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_figure(name: str, measured: dict[str, tuple[Path, list[Row]]], tmp_path: Path) -> None:
    study, rows = get_study(name), measured[name][1]
    with matplotlib.rc_context(RC):
        figure = Figure(layout="constrained")
        study.draw(pl.DataFrame(rows), figure)
    sections = 2 if name.endswith("cifar10") else 1
    assert len(figure.axes) == 4 * sections
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert len(axes.lines) == 5  # two eigenvectors, two medians, 1 or the loss at the solution
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["training data", "test data", "", ""] * sections
    assert save_figure(partial(study.draw, pl.DataFrame(rows)), tmp_path / "figure.pdf").stat().st_size > 0


def made_up(name: str, scores: list[float], statistics: str) -> pl.DataFrame:
    """A curve of scores, the same for all tasks, directions and splits; random ones are 1."""
    common: Row = {"challenge": "c", "network": "n", "parameters": 9, "lr": 0.1, "seed": 0, "statistics": statistics}
    rows: list[Row] = []
    for task in range(2):
        for split in ("train", "test"):
            for kind in ("eigen", "random"):
                for i in range(2):
                    for r, score in enumerate(scores):
                        row: Row = {"task": task, "split": split, "kind": kind, "direction": i, "base": 0.1}
                        row |= {"eigenvalue": 1.0, "residual": 0.0, "radius": 10.0**r, "known": 2}
                        value = score if kind == "eigen" or np.isnan(score) else 1.0
                        rows.append(common | row | {"loss": 0.1 + value, "score": value})
    return pl.DataFrame(rows)


@pytest.mark.parametrize(("name", "statistics"), [(NAMES[0], "batch"), (NAMES[1], "none")])
def test_the_verdict_follows_the_rows(name: str, statistics: str) -> None:
    """The paper: scores rise and return to 1 on Split CIFAR-10, and do not return on Rotated-MNIST."""
    falls, stays, flat = (
        get_study(name).summarize(made_up(name, scores, statistics))
        for scores in ([10.0, 40, 30, 1.2, 0.9], [10.0, 40, 30, 50, 60], [10.0, 10, 10, 10])
    )
    assert [row["eigen, train"] for row in falls.table] == [10, 40, 30, 1.2, 0.9]
    assert ("does not agree" in falls.verdict) == (name == NAMES[1])
    assert ("does not agree" in stays.verdict) == (name == NAMES[0])
    assert "does not agree" in flat.verdict


def test_scores_that_are_not_finite(tmp_path: Path) -> None:
    study = get_study(NAMES[1])
    some, none = (made_up(NAMES[1], scores, "none") for scores in ([10, 40, np.nan, np.inf], [np.nan] * 3))
    assert study.summarize(some).table[-1]["eigen, train"] == np.inf
    assert study.summarize(none).verdict == "No score is finite."
    for number, rows in enumerate((some, none)):
        assert save_figure(partial(study.draw, rows), tmp_path / f"{number}.png").stat().st_size > 0


def test_the_figure_ends_where_single_precision_does() -> None:
    """Losses are 0.1 more than the scores; the largest number of single precision is 3.4e38."""
    rows = made_up(NAMES[0], [1e37, 1e38, 1e39, 1e40], "running")
    assert float32_radii(rows) == [1.0, 10.0] and float32_radii(made_up(NAMES[0], [1, np.nan], "batch")) == [1.0, 10.0]
    figure = Figure()
    get_study(NAMES[0]).draw(rows, figure)
    assert all(np.max(np.asarray(line.get_xdata(), dtype=float)) <= 10 for axes in figure.axes for line in axes.lines)
    assert "from r = 100 on losses exceed single precision" in str(figure.subfigs[0].get_suptitle())


def test_scores_of_losses_in_single_precision() -> None:
    """With a loss of 0 at the solution scores are ratios of losses. Out of range are both of the last radius, and the
    eigenvector's of the one before, whose largest number is then divided by 2."""
    rows = made_up(NAMES[0], [8.0, 8.0, 8.0], "running").with_columns(base=pl.lit(0.0))
    eigen = pl.col("kind") == "eigen"
    losses = {1.0: (8.0, 2.0), 10.0: (1e39, 2.0), 100.0: (1e60, 1e39)}
    for radius, (high, low) in losses.items():
        given = pl.when(eigen).then(high).otherwise(low)
        rows = rows.with_columns(loss=pl.when(pl.col("radius") == radius).then(given).otherwise("loss"))
    found = float32_scores(rows, saturate=False)
    assert found.x.tolist() == list(losses) and found.middle[:2].tolist() == [4, np.inf] and np.isnan(found.middle[2])
    np.testing.assert_allclose(float32_scores(rows, saturate=True).middle, [4, 3.4028235e38 / 2, 1], rtol=1e-6)


def test_medians_of_what_is_known() -> None:
    assert quantiles(np.array([np.nan, 1.0, 2.0, 3.0, np.inf, np.inf, np.nan]))[1:] == [3.0, np.inf]
    assert all(np.isnan(quantiles(np.array([np.nan]))))
    points = [{"radius": r, "score": r * k} for r in (2.0, 1.0) for k in range(11)]
    found = radius_curve(pl.DataFrame(points), "score")
    assert found.x.tolist() == [1.0, 2.0]
    assert (
        found.low.tolist() == [1.0, 2.0] and found.middle.tolist() == [5.0, 10.0] and found.high.tolist() == [9.0, 18.0]
    )
