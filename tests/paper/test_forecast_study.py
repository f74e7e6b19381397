"""The forecast: its statistics against refits and counts by hand, its predictors against the runs' own numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure

from glocal import load
from glocal.cli.lens import Lens
from glocal.paper import get_study
from glocal.paper.studies.common import column
from glocal.paper.studies.forecast import (
    EARLY,
    IMPLICIT,
    LARGE_REPLAY,
    LENS,
    LOCAL,
    REPLAY,
    SETTING,
    auc,
    leads,
    leave_one_out,
    r_squared,
    settings_table,
)
from glocal.paper.study import Context, read_table

STUDY = get_study("forecast")
ALL = np.arange(12)


def table(**columns: np.ndarray) -> pl.DataFrame:
    return pl.DataFrame(columns)


def test_leaving_one_out_is_a_refit_without_it() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=12), draw.normal(size=12)
    for i, predicted in enumerate(leave_one_out(x, y)):
        slope, intercept = np.polyfit(np.delete(x, i), np.delete(y, i), 1)
        assert predicted == pytest.approx(slope * x[i] + intercept)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_perfect_predictor_of_either_sign(sign: int) -> None:
    gain = np.linspace(-3, 2, 12)
    found = table(gain=gain, perfect=sign * gain, constant=np.ones(12), noise=np.random.default_rng(3).normal(size=12))
    assert auc(found, "perfect")(ALL) == 1 and r_squared(found, "perfect", "gain")(ALL) == pytest.approx(1)
    assert auc(found, "constant")(ALL) == 0.5 and r_squared(found, "constant", "gain")(ALL) == pytest.approx(0)
    assert r_squared(found, "noise", "gain")(ALL) < 0.5


def test_the_area_counts_pairs() -> None:
    """Two wins against two losses: the predictor ranks three of four pairs rightly."""
    found = table(gain=np.array([1.0, 2.0, -1.0, -2.0]), score=np.array([0.2, 0.9, 0.3, 0.1]))
    assert auc(found, "score")(np.arange(4)) == 0.75


def test_rows_of_a_small_setting(tmp_path: Path) -> None:
    size = {"tasks": 3, "epochs": 1, "width": 8, "batch_size": 200, "examples": 60, "lrs": [0.1], "seeds": [11]}
    items = [item | size for item in STUDY.work_items(True) if item["angles"] == 180]
    context = Context(torch.device("cpu"), None, tmp_path)
    rows = pl.DataFrame([row for item in items for row in STUDY.measure(item, context)], infer_schema_length=None)
    sgd = next(run for run in load(tmp_path) if run.config["algorithm"]["name"] == "sgd")
    (row,) = rows.filter(algorithm="sgd").rows(named=True)
    assert row["distance"] == pytest.approx(sgd.arrays["update_norm"][1:].mean(), rel=1e-4)
    assert row["kl"] > 0 and row["radius_over_travel"] > 0 and 0 < row["break_time"] <= 1
    assert 0 < row["early_distance_0.05"] < row["early_distance_0.2"] < 2 * row["distance"]
    assert all(row[name] is not None for name in (*LENS, *(f"early_{name}_0.1" for name in EARLY)))
    (setting,) = settings_table(rows).rows(named=True)
    best = max(rows.filter(algorithm=name)["acc"][0] for name in LOCAL)
    assert setting["gain"] == pytest.approx(best - rows.filter(algorithm="er")["acc"][0])
    (setting,) = settings_table(rows, implicit=True).rows(named=True)
    best = max(rows.filter(algorithm=name)["acc"][0] for name in ("ewc", "ogd-gtl", IMPLICIT))
    assert setting["gain"] == pytest.approx(best - rows.filter(algorithm="er")["acc"][0])
    trained = [run.config["algorithm"]["options"]["implicit"] for run in load(tmp_path) if "laplace" in run.algorithm]
    assert sorted(trained) == [False, True]
    largest = [
        max(run.arrays["memory_bytes"][-1] for run in load(tmp_path) if name in run.algorithm)
        for name in ("laplace", "er")
    ]
    assert largest[1] == pytest.approx(largest[0], rel=1e-3)


def test_implicit_steps_replace_explicit_ones() -> None:
    """A local algorithm wins with implicit steps alone: at rates up to 0.01, or at all."""
    base: dict[str, object] = {**dict.fromkeys(STUDY.columns.split(), 1.0), "seed": 11}
    for highest, expected in ((0.01, "the highest AUC is that of"), (1.0, "too little to predict")):
        rows = []
        for number, lr in enumerate(np.geomspace(0.001, 0.1, 24)):
            acc = {"sgd": 60.0, "er": 80.0, **dict.fromkeys(LOCAL, 70.0), IMPLICIT: 90.0 if lr < highest else 75.0}
            acc[LARGE_REPLAY] = 85.0
            values = base | dict(zip(SETTING, (lr, 1, 30, 8), strict=True)) | {"distance": 1.0 + number}
            rows += [values | {"algorithm": name, "acc": value} for name, value in acc.items()]
        table = pl.DataFrame(rows)
        assert (settings_table(table)["gain"] < 0).all()
        wins = sum(lr < highest for lr in np.geomspace(0.001, 0.1, 24))
        verdict = STUDY.summarize(table).verdict
        assert f"wins in {wins} of 24 settings" in verdict and expected in verdict
        assert f"At equal memory, laplace with implicit steps beats replay in {wins} of 24 settings" in verdict


def test_a_diverged_run_loses() -> None:
    runs = {IMPLICIT: [80.0, np.nan, 80.0], REPLAY: [np.nan, 70.0, 70.0]}
    rows = [
        (lr, 1, 30, 8, name, acc[i])
        for name, acc in runs.items()
        for i, lr in enumerate((0.01, 0.02, 0.03))
        for _ in range(2)
    ]
    table = pl.DataFrame(rows, [*SETTING, "algorithm", "acc"], orient="row")
    np.testing.assert_array_equal(column(leads(table), "lead"), [np.inf, np.nan, 10.0])


def test_the_help_of_the_lens_has_the_measured_counts() -> None:
    rows = read_table(Path(__file__).parents[2] / "results" / "forecast.parquet")
    means = rows.group_by(*SETTING).agg(
        **{name: pl.col("acc").filter(algorithm=name).mean() for name in (IMPLICIT, REPLAY, LARGE_REPLAY)}
    )
    won = [int((means[IMPLICIT] > means[name]).sum()) for name in (REPLAY, LARGE_REPLAY)]
    numbers = [int(n) for n in re.findall(r"\b\d+\b", (Lens.__doc__ or "").partition("recommended:")[2])]
    assert numbers[:4] == [len(means), 500, *won]


def test_the_decision_follows_the_interval() -> None:
    """Settings in which a recommendation by the true outcome beats the distance, and one by chance does not."""
    draw = np.random.default_rng(0)
    rows = []
    for lr in np.geomspace(0.001, 0.1, 24):
        gain = draw.normal()
        base = {
            **dict.fromkeys(STUDY.columns.split(), 1.0),
            **dict(zip(SETTING, (lr, 1, 30, 8), strict=True)),
            "seed": 11,
        }
        for name in ("sgd", "er", *LOCAL):
            acc = 80.0 + (gain if name in LOCAL else 0)
            values = {name: float(draw.uniform(0.5, 2)) for name in (*LENS, "distance", "kl", "lr_sqrt_loss")}
            values |= {
                f"early_{own}_{share:g}": float(draw.uniform(0.5, 2)) for own in EARLY for share in (0.05, 0.1, 0.2)
            }
            values |= {"forgetting": float(draw.normal()), "advice": float(gain > 0)}
            rows.append(base | values | {"algorithm": name, "locality": "local", "acc": acc})
    frame = pl.DataFrame(rows)
    assert "is kept" in STUDY.summarize(frame).verdict
    chance = frame.with_columns(pl.Series("advice", draw.integers(2, size=len(frame)).astype(float)))
    assert "is replaced" in STUDY.summarize(chance).verdict
    STUDY.draw(frame, Figure())
