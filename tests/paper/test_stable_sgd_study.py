"""The study of plastic and stable SGD: its regimes, its rows against the runs', figure and sentences by rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure

from glocal.networks import mlp
from glocal.paper import get_study
from glocal.paper.studies.common import make_challenge
from glocal.paper.studies.stability import BATCH_SIZES, DEMO, REGIMES, effects
from glocal.paper.study import Context, Row
from glocal.store.store import load
from glocal.sweeps.sweep import sweep

STUDY = get_study("stable-sgd")
SMALL = DEMO | {"tasks": 3, "hidden": [6, 6], "lrs": (0.05, 0.3), "seeds": (11, 13)}


def test_rows_are_the_runs_after_every_task(tmp_path: Path) -> None:
    context = Context(torch.device("cpu"), None, tmp_path)
    items = [item | SMALL | {"batch_size": 400} for item in STUDY.work_items(True)]
    assert [item["batch_size"] for item in STUDY.work_items(False)] == [size for size in BATCH_SIZES for _ in range(2)]
    rows = [row for item in items[:2] for row in STUDY.measure(item, context)]
    assert len(rows) == len(REGIMES) * 2 * 2 * 3
    assert {tuple(row) for row in rows} == {tuple(STUDY.columns.split())}
    assert list(dict.fromkeys(row["algorithm"] for row in rows)) == list(REGIMES)
    runs = load(tmp_path)
    for regime, (name, options) in REGIMES.items():
        for run in runs:
            config = run.config["algorithm"]
            if config["name"] != name or config["options"] != options:
                continue
            own = [r for r in rows if (r["algorithm"], r["lr"], r["seed"]) == (regime, run.lr, run.seed)]
            R = 100 * run.arrays["test_class_accuracy"]
            assert [r["distance_from_init"] for r in own] == pytest.approx(run.arrays["distance_from_init"].tolist())
            assert own[-1]["acc"] == pytest.approx(R[3].mean())
            assert own[-1]["forgetting"] == pytest.approx(((R[1, 0] - R[3, 0]) + (R[2, 1] - R[3, 1])) / 2)
            assert own[-1]["learning_accuracy"] == pytest.approx((R[1, 0] + R[2, 1] + R[3, 2]) / 3)
            assert own[1]["acc"] == pytest.approx((R[2, 0] + R[2, 1]) / 2)
            assert str(own[0]["forgetting"]) == "nan"


def test_the_plastic_regime_is_the_stable_one_without_dropout_and_decay(tmp_path: Path) -> None:
    item = STUDY.work_items(True)[0] | SMALL | {"batch_size": 400}
    context = Context(torch.device("cpu"), None, tmp_path)
    assert item["regimes"] == ["plastic"]
    rows = STUDY.measure(item, context)
    same = sweep(
        make_challenge(item, context),
        [("stable-sgd", {"dropout": 0.0, "decay": 1.0})],
        SMALL["lrs"],
        SMALL["seeds"],
        network=partial(mlp, hidden=(6, 6)),
        epochs=SMALL["epochs"],
        batch_size=400,
        store=tmp_path,
        device="cpu",
    )
    for run in same:
        own = [r["distance_from_init"] for r in rows if (r["lr"], r["seed"]) == (run.lr, run.seed)]
        assert own == pytest.approx(run.arrays["distance_from_init"].tolist(), rel=1e-4)


def made_up(stable: float, diverged: bool = False) -> pl.DataFrame:
    """The plastic regime forgets 30 and walks on; the stable one forgets `stable` and slows down by half a task."""
    rows: list[Row] = []
    for regime, forgotten, pace in (("plastic", 30.0, 1.0), ("stable", stable, 0.5)):
        for lr in (0.01, 0.1):
            for seed in (1, 2):
                for t in (1, 2, 3):
                    gone = diverged and (regime, lr, seed) == ("stable", 0.1, 2) and t > 1
                    numbers = {"acc": 60.0, "forgetting": forgotten + 100 * lr, "learning_accuracy": 90.0}
                    numbers |= {"distance_from_init": t * pace, "update_norm": pace**t}
                    numbers = dict.fromkeys(numbers, np.nan) if gone else numbers
                    who: Row = {"algorithm": regime, "locality": "global", "lr": lr, "seed": seed, "t": t}
                    rows.append(who | dict(numbers))
    small = pl.DataFrame(rows).with_columns(batch_size=10)
    return pl.concat([small, small.with_columns(pl.col("forgetting", "distance_from_init") * 2, batch_size=128)])


def test_the_summary_follows_the_rows() -> None:
    less, more = (STUDY.summarize(made_up(x)) for x in (10.0, 40.0))
    assert (
        "at 2 of 2 learning rates: agrees" in less.verdict
        and "at 0 of 2 learning rates: does not agree" in more.verdict
    )
    table = {(row["algorithm"], row["lr"]): row for row in less.table if row["batch_size"] == 10}
    assert table["stable", 0.1]["forgetting"] == 20.0 and table["plastic", 0.01]["forgetting"] == 31.0
    assert table["stable", 0.1]["‖θ_T − θ_0‖"] == 1.5 and table["plastic", 0.1]["‖θ_T − θ_{T−1}‖"] == 1.0
    assert "2 of 16 runs diverged" in STUDY.summarize(made_up(10.0, diverged=True)).verdict
    alone = made_up(10.0).filter(algorithm="plastic")
    assert "at 0 of 0 learning rates: does not agree" in STUDY.summarize(alone).verdict


@pytest.mark.parametrize("diverged", [False, True])
def test_figure_shows_both_ways(diverged: bool) -> None:
    figure = Figure()
    STUDY.draw(made_up(10.0, diverged), figure)
    left, right, plastic, stable, _ = figure.axes
    assert len(left.lines) == len(right.lines) == 2
    legend = right.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["plastic", "stable"]
    for axes, name, pace in ((plastic, "plastic", 1.0), (stable, "stable", 0.5)):
        assert axes.get_title().startswith(name)
        means = [line for line in axes.lines if line.get_marker() == "o"]
        assert [line.get_label() for line in means] == ["0.01", "0.1"]
        assert all(np.asarray(line.get_ydata()) == pytest.approx(pace * np.array([1, 2, 3])) for line in means)


def test_effects_of_the_parts() -> None:
    """Forgetting that is a sum of the parts' effects, which differ between seeds, and of an interaction."""
    rows: list[Row] = []
    for seed, (dropout, decay, batch) in enumerate([(1.0, -8.0, 3.0), (3.0, -12.0, 3.0)]):
        for regime, (has_dropout, has_decay) in {
            "plastic": (0, 0),
            "dropout alone": (1, 0),
            "decay alone": (0, 1),
            "stable": (1, 1),
        }.items():
            for size, small in ((10, 1), (128, 0)):
                value = 40 + dropout * has_dropout + decay * has_decay + batch * small + 2 * has_dropout * has_decay
                rows.append({"algorithm": regime, "batch_size": size, "seed": seed, "lr": 0.1, "forgetting": value})
    found = effects(pl.DataFrame(rows))
    assert [effect.mean for effect in found.values()] == pytest.approx([2 + 1, -10 + 1, 3])
    half = 12.706 * np.std([1, 3], ddof=1) / 2**0.5  # the quantile of Student's t with one degree of freedom
    assert found["dropout"].high == pytest.approx(3 + half, rel=1e-4)
    assert found["a small batch"].low == pytest.approx(3)
    twice = pl.DataFrame(rows).with_columns(acc=-2 * pl.col("forgetting"))
    assert effects(twice, "acc")["decay"].mean == pytest.approx(18)
