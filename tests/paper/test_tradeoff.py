"""Stability and plasticity: from Table 1's runs, from a file of results, and from made-up rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from glocal.cli.main import main
from glocal.paper.studies import get
from glocal.paper.study import Place, Row
from glocal.paper.tables import read_table
from glocal.sweeps.sweep import load

STUDY = get("tradeoff")
RESULTS = Path(__file__).parents[2] / "results" / "rotated-mnist.parquet"


def test_rows_are_the_runs_of_table_1(tmp_path: Path) -> None:
    piece = STUDY.pieces(True)[0] | {"tasks": 2, "epochs": 1, "lrs": (0.05, 0.3), "seeds": (11,)}
    rows = STUDY.measure(piece, Place(torch.device("cpu"), None, tmp_path))
    assert {tuple(row) for row in rows} == {tuple(STUDY.columns.split())}
    for run, row in zip(sorted(load(tmp_path), key=lambda run: run.lr), rows, strict=True):
        R = 100 * run.arrays["test_class_accuracy"]
        assert (row["algorithm"], row["locality"], row["lr"]) == ("sgd", "global", run.lr)
        assert row["acc"] == pytest.approx(R[2].mean())
        assert row["forgetting"] == pytest.approx(R[1, 0] - R[2, 0])
        assert row["learning_accuracy"] == pytest.approx((R[1, 0] + R[2, 1]) / 2)
    for demo in (True, False):
        names = [piece["algorithm"] for piece in STUDY.pieces(demo)]
        assert {"sgd", "er", "si", "ewc", "ogd-gtl"} <= set(names)


def test_a_file_of_results_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "tradeoff", "--results", str(RESULTS), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    sound = pl.read_parquet(RESULTS).filter(pl.col("acc").is_finite())
    means = sound.group_by("algorithm", "locality", "lr").agg(pl.col("acc").mean()).sort("acc")
    best = means.row(-1, named=True)
    assert f"that of {best['algorithm']} at {best['lr']:g}: {best['acc']:.1f} %" in said
    low, high = (
        means.filter(pl.col("lr").is_in(lrs))
        .group_by("algorithm", "locality")
        .agg(pl.col("acc").mean(), pl.len().alias("rates"))
        .filter(pl.col("rates") == 2)
        for lrs in ([0.001, 0.005], [0.05, 0.1])
    )
    gains = low.join(high, on=["algorithm", "locality"]).with_columns(gain=pl.col("acc_right") - pl.col("acc"))
    by_kind = dict(gains.group_by("locality").agg(pl.col("gain").mean()).iter_rows())
    assert f"So global algorithms gain {by_kind['global'] - by_kind['local']:+.1f} points more" in said
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".pdf", ".parquet"}
    figure = Figure()
    STUDY.draw(read_table(RESULTS), figure)
    labels = {line.get_label() for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")}
    assert labels == {f"{row['algorithm']} ({row['locality']})" for row in read_table(RESULTS)}


def made_up(gain: float, diverged: bool = False) -> list[Row]:
    """From low learning rates to high, the global algorithm ends `gain` points higher, and the local one the same."""
    rows: list[Row] = []
    for name, locality, rise in (("er", "global", gain), ("ewc", "local", 0.0)):
        for lr in (0.1, 0.2, 0.3, 0.4):
            for seed in (1, 2):
                number = np.nan if diverged and (name, lr, seed) == ("ewc", 0.4, 2) else 50 + rise * (lr > 0.15)
                who: Row = {"challenge": "rotated-digits", "algorithm": name, "locality": locality}
                who |= {"lr": lr, "seed": seed}
                rows.append(who | dict.fromkeys(("acc", "forgetting", "learning_accuracy"), number))
    return rows


def test_sentences_follow_the_rows() -> None:
    up, down = (" ".join(STUDY.conclude(made_up(gain))) for gain in (8.0, -8.0))
    # of the two low rates, one has risen already
    assert "So global algorithms gain +4.0 points more accuracy than local ones, as the paper says." in up
    assert "gain -4.0 points more accuracy than local ones, against the paper." in down
    assert "that of er at 0.2: 58.0 %" in up
    assert ": 50.0 %" in down
    assert "1 of 16 runs diverged" in " ".join(STUDY.conclude(made_up(8.0, diverged=True)))
    gone = [row for row in made_up(8.0) if row["algorithm"] != "er" or row["lr"] in (0.1, 0.2)]
    told = " ".join(STUDY.conclude(gone + [row | {"algorithm": "gem"} for row in made_up(8.0)[:8]]))
    assert "(gem +4.0, without er, of which no run is left at some rate)." in told and "nan" not in told
    assert "have one alone" in STUDY.conclude([row for row in made_up(1.0) if row["lr"] == 0.1])[0]


@pytest.mark.parametrize("diverged", [False, True])
def test_figure_has_a_growing_curve_for_each_algorithm(diverged: bool) -> None:
    figure = Figure()
    STUDY.draw(made_up(8.0, diverged), figure)
    for axes in figure.axes:
        curves = [line for line in axes.lines if np.size(line.get_xdata()) == 4]
        assert [line.get_linestyle() for line in curves] == ["-", "--"]
        assert np.asarray(curves[0].get_ydata()).tolist() == [50, 58, 58, 58]
        sizes = [points.get_sizes() for points in axes.collections if isinstance(points, PathCollection)]
        assert len(sizes) == 2
        assert all((np.diff(growing) > 0).all() for growing in sizes)
