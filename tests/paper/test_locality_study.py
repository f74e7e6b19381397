"""The locality study: its rows equal the verdicts; figure and summary are made from the rows."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure

from glocal.algorithms import ALGORITHMS
from glocal.lens.local_or_global import locality
from glocal.paper import STUDIES, get_study
from glocal.paper.studies.locality import Locality
from glocal.paper.study import Context, Row, read_table, write_table
from glocal.report.figure import save_figure

matplotlib.use("Agg")
TINY: dict[str, Any] = {"solutions": 6, "draws": 2, "probes": 4, "examples": 60, "epochs": 1, "lr": 0.1, "seed": 0}
CONTEXT = Context(torch.device("cpu"), None, Path("unused"))
CHALLENGES = {"er": "rotated-digits", "pnn": "split-digits", "si": "rotated-digits", "ewc": "rotated-digits"}
STUDY = Locality()


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    items = [{"challenge": challenge, "algorithm": name, **TINY} for name, challenge in CHALLENGES.items()]
    return [row for item in items for row in STUDY.measure(item, CONTEXT)]


def fake_rows(algorithm: str, declared: str, found: str, explained: float, **more: Any) -> list[Row]:
    row: Row = {
        "challenge": "fake",
        "algorithm": algorithm,
        "family": "replay",
        "declared": declared,
        "found": found,
        "p_value": 0.001 if found == "local" else 0.7,
        "explained": explained,
        "involved": explained,
        "information": explained,
        "solutions": 5,
        "draws": 2,
        "lost": 0,
        "distance": 1.0,
    }
    return [
        {**row, **more, "probe": i, "place": "path", **{f"probe_{k}": explained for k in ("explained", "p_value")}}
        for i in range(2)
    ]


def test_work_items_cover_every_algorithm() -> None:
    assert get_study("locality").name == "locality"
    for demo in (False, True):
        assert {item["algorithm"] for item in STUDY.work_items(demo)} == set(ALGORITHMS)
    assert f"{len(STUDY.work_items(False))} tests" in STUDIES["locality"].cost
    full = [(p["challenge"], p["algorithm"]) for p in STUDY.work_items(False)]
    assert len(set(full)) == len(full) and ("rotated-mnist", "icarl") not in full and ("split-mnist", "icarl") in full


def test_rows_equal_the_verdicts(rows: list[Row]) -> None:
    assert len(rows) == 4 * len(CHALLENGES) and {tuple(row) for row in rows} == {tuple(STUDY.columns.split())}
    direct = locality("er", "rotated-digits", **TINY)
    own = [row for row in rows if row["algorithm"] == "er"]
    assert [row["place"] for row in own] == list(direct.probe_locations)
    assert all(row["found"] == direct.found == "global" and row["distance"] == direct.distance for row in own)
    for algorithm in CHALLENGES:
        own = [row for row in rows if row["algorithm"] == algorithm]
        share = sum(float(row["probe_explained"] or 0) for row in own) / len(own)
        assert own[0]["explained"] == pytest.approx(share, abs=1e-6)


def test_the_summary_counts_agreement(rows: list[Row]) -> None:
    summary = STUDY.summarize(pl.DataFrame(rows))
    assert [(row["algorithm"], row["found"]) for row in summary.table] == [
        ("er", "global"),
        ("pnn", "local"),
        ("si", "local"),
        ("ewc", "local"),
    ]
    assert (
        summary.verdict == "The test agrees with the declared locality for 2 of 4 algorithms; it differs for pnn, si."
    )
    agree = [*fake_rows("a", "global", "global", 0.01), *fake_rows("b", "local", "local", 0.4)]
    assert (
        STUDY.summarize(pl.DataFrame(agree)).verdict
        == "The test agrees with the declared locality for 2 of 2 algorithms."
    )


def test_figure(rows: list[Row], tmp_path: Path) -> None:
    kept = read_table(write_table(rows, tmp_path / "rows.parquet"))
    figure = Figure(layout="constrained")
    STUDY.draw(kept, figure)
    labels = [[t.get_text() for t in axes.get_yticklabels()] for axes in figure.axes]
    assert labels == [["er", "si", "ewc"], ["pnn"]]  # declared global first, then by increasing share
    means = {float(line.get_xdata()[0]): line for line in figure.axes[0].lines if line.get_marker() == "o"}  # type: ignore[index,arg-type]
    assert means[0.0].get_markerfacecolor() != "white" and 0.0 in means
    hollow = [line for axes in figure.axes for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 2  # si and pnn
    assert save_figure(partial(STUDY.draw, kept), tmp_path / "f.png").stat().st_size > 10_000


def test_nan_values_are_accepted(tmp_path: Path) -> None:
    nan = fake_rows("a", "local", "global", math.nan, information=math.nan)
    rows = pl.DataFrame([*nan, *fake_rows("b", "local", "local", 0.4)])
    assert len(STUDY.summarize(rows).table) == 2
    save_figure(partial(STUDY.draw, rows), tmp_path / "f.png")
