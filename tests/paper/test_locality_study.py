"""The study of who is local: its rows are the verdicts, its figure and sentences follow the rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

from glocal.algorithms import ALGORITHMS
from glocal.lens.locality import locality
from glocal.paper.studies import get
from glocal.paper.studies.locality import Locality, gathered, over_theta
from glocal.paper.study import Place, Row, draw
from glocal.paper.tables import read_table, write_table

matplotlib.use("Agg")
TINY: dict[str, Any] = {"solutions": 6, "draws": 2, "probes": 4, "examples": 60, "epochs": 1, "lr": 0.1, "seed": 0}
PLACE = Place(torch.device("cpu"), None, Path("unused"))
TRIED = {"er": "rotated-digits", "pnn": "split-digits", "si": "rotated-digits", "ewc": "rotated-digits"}
STUDY = Locality()


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    pieces = [{"challenge": challenge, "algorithm": name, **TINY} for name, challenge in TRIED.items()]
    return [row for piece in pieces for row in STUDY.measure(piece, PLACE)]


def made_up(algorithm: str, declared: str, found: str, explained: float, **more: Any) -> list[Row]:
    row: Row = {
        "challenge": "made-up",
        "algorithm": algorithm,
        "family": "replay",
        "declared": declared,
        "found": found,
        "p_value": 0.001 if found == "local" else 0.7,
        "explained": explained,
        "involved": explained,
        "information": explained,
        "over_theta": 0.5,
        "solutions": 5,
        "draws": 2,
        "lost": 0,
        "distance": 1.0,
    }
    return [
        {**row, **more, "probe": i, "place": "path", **{f"probe_{k}": explained for k in ("explained", "p_value")}}
        for i in range(2)
    ]


def test_it_has_its_name_and_every_algorithm() -> None:
    assert get("locality").name == "locality"
    for demo in (False, True):
        assert {piece["algorithm"] for piece in STUDY.pieces(demo)} == set(ALGORITHMS)
        assert str(len(STUDY.pieces(demo))) in STUDY.cost(demo)
    full = [(p["challenge"], p["algorithm"]) for p in STUDY.pieces(False)]
    assert len(set(full)) == len(full) and ("rotated-mnist", "icarl") not in full and ("split-mnist", "icarl") in full


def test_a_row_is_what_the_instrument_finds(rows: list[Row]) -> None:
    assert len(rows) == 4 * len(TRIED) and {tuple(row) for row in rows} == {tuple(STUDY.columns.split())}
    direct = locality("er", "rotated-digits", **TINY)
    own = [row for row in rows if row["algorithm"] == "er"]
    assert [row["place"] for row in own] == list(direct.places)
    assert all(row["found"] == direct.found == "global" and row["distance"] == direct.distance for row in own)
    # Its memory holds all 60 examples, whoever draws: one function of θ. pnn's is one number for every solution.
    assert own[1]["over_theta"] == pytest.approx(1)
    assert {row["over_theta"] for row in rows if row["algorithm"] == "pnn"} == {0.0}
    for verdict in gathered(rows):
        mine = [row for row in rows if row["algorithm"] == verdict.algorithm]
        share = sum(verdict.each) / len(mine)
        assert mine[0]["explained"] == pytest.approx(share)


def test_a_constant_has_no_variance_over_theta() -> None:
    constant = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 2, 2, 3)
    assert over_theta(constant) == 0 and over_theta(torch.ones(3, 2, 2, 2)) == 0
    assert over_theta(torch.arange(3.0).expand(6, 2, 2, 3)) == pytest.approx(1)
    assert over_theta(torch.stack([constant[..., 0], constant[..., 0] + 1], -1)) == pytest.approx(
        0.25 / (0.25 + 35 / 12)
    )


def test_what_it_says_of_the_disputed(rows: list[Row]) -> None:
    said = STUDY.conclude(rows)
    assert "Of 4 algorithms on rotated-digits and split-digits, 2 are found as they are declared" in said[0]
    assert said[1].startswith("Found global: er. θ_o explains 0 % ") and said[1].endswith("p ≥ 1.")
    assert said[2].startswith("Found local: pnn, si, ewc.")
    (pnn,) = (s for s in said if s.startswith("pnn is called global and found local on split-digits"))
    (si,) = (s for s in said if s.startswith("si is called global and found local on rotated-digits"))
    assert "one number for all θ" in pnn and "current θ" in pnn
    assert "one number for all θ" not in si and "moves on" in si


def test_other_rows_other_words() -> None:
    agree = STUDY.conclude([*made_up("a", "global", "global", 0.01), *made_up("b", "local", "local", 0.4)])
    assert agree[-1] == "No algorithm disagrees." and "2 are found as they are declared" in agree[0]
    assert "1.0 %" in agree[1] and "40 %" in agree[2]
    other = STUDY.conclude([*made_up("a", "local", "global", 0.03), *made_up("b", "local", "local", 0.4)])
    assert "1 are found" in other[0] and "a is called local and found global on made-up" in other[-1]
    assert "no more than 3.0 %" in other[-1]
    alike = [*made_up("a", "global", "local", 0.6), *made_up("b", "global", "local", 0.8)]
    assert STUDY.conclude(alike)[1] == "None is found global."
    assert STUDY.conclude(alike)[-1].startswith(
        "a and b are called global and found local on made-up: θ_o explains 60 %"
    )


@pytest.mark.parametrize(("found", "said"), [("local", "local still, by the targets"), ("global", "as the paper says")])
def test_what_is_left_of_icarl_without_herding(found: str, said: str) -> None:
    rows = [*made_up("icarl", "local", "local", 1.0), *made_up("icarl-random", "local", found, 0.07)]
    (sentence,) = (s for s in STUDY.conclude(rows) if "herding" in s)
    assert "explains 100 % of the variance, however small; where chance does, 7 %" in sentence and said in sentence
    assert not any("herding" in s for s in STUDY.conclude(rows[: len(rows) // 2]))


def test_a_figure_from_the_table_alone(rows: list[Row], tmp_path: Path) -> None:
    kept = read_table(write_table(rows, tmp_path / "rows.parquet"))
    figure = Figure(layout="constrained")
    STUDY.draw(kept, figure)
    labels = [[t.get_text() for t in axes.get_yticklabels()] for axes in figure.axes]
    assert labels == [["er", "si", "ewc"], ["pnn"]]  # declared global ones first, the least explained before others
    texts = {t.get_text() for t in figure.axes[0].texts}
    assert {"nats", "p", "0.00", "1"} <= texts
    means = {float(line.get_xdata()[0]): line for line in figure.axes[0].lines if line.get_marker() == "o"}  # type: ignore[index,arg-type]
    assert means[0.0].get_markerfacecolor() != "white" and 0.0 in means
    hollow = [line for axes in figure.axes for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 2  # si and pnn
    assert draw(STUDY, kept, tmp_path / "f.png").stat().st_size > 10_000


def test_what_is_not_a_number_survives(tmp_path: Path) -> None:
    rows = [*made_up("a", "local", "global", math.nan, information=math.nan), *made_up("b", "local", "local", 0.4)]
    assert "not known" in STUDY.conclude(rows)[1] and math.isnan(gathered(rows)[0].explained)
    draw(STUDY, rows, tmp_path / "f.png")
