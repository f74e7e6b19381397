"""The study of ε-regions on a small network: borders are where the error is ε, and breaks where it was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from glocal.lens.record import train_traces
from glocal.paper.studies import get
from glocal.paper.studies.cohorts import challenge_of, cohort_of
from glocal.paper.studies.epsilon_region import EPSILONS, SHOWN
from glocal.paper.studies.row_filters import column, where
from glocal.paper.study import Place, Row
from glocal.tree import from_vector, to_vector

STUDY = get("epsilon-region")
PLACE = Place(torch.device("cpu"), None, Path("unused"))
PIECE: dict[str, Any] = {"challenge": "rotated-digits", "tasks": 2, "epochs": 2, "hidden": [4], "seeds": [0]}
PIECE |= {"lrs": [0.02, 0.3], "examples": 40, "looked_at": [0], "principal": 1, "random": 2}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return STUDY.measure(PIECE, PLACE)


def test_rows_are_complete(rows: list[Row]) -> None:
    assert {tuple(row) for row in rows} == {tuple(STUDY.columns.split())}
    rays = [row for row in where(rows, kind="radius") if row["direction"] != "trajectory"]
    assert len(rays) == 2 * 3 * len(EPSILONS) * 5  # rates, orders, and both senses of the eigenvector among directions
    assert len(where(rows, direction="trajectory")) == len(where(rows, kind="break")) == 2 * len(EPSILONS)
    moments = where(rows, kind="moment", lr=0.3)
    # After the first task, after each epoch of the second, and after it.
    assert column(moments, "learnt").tolist() == [1, 1.5, 2, 2] and column(moments, "step").tolist() == [
        64,
        96,
        128,
        128,
    ]
    assert moments[0]["smallest"] == pytest.approx(0, abs=1e-6)


def test_a_radius_ends_where_the_error_is_epsilon_and_a_moment_has_the_error_of_the_expansion(rows: list[Row]) -> None:
    cohort = cohort_of(PIECE, PLACE, challenge_of(PIECE, PLACE))
    for member, subject in zip(cohort.members, train_traces(cohort, 40), strict=True):
        points = [to_vector(point.params).double() for point in subject.checkpoints]
        like = {k: p.double() for k, p in subject.checkpoints[0].params.items()}
        x, y = subject.tasks[0].x.double(), subject.tasks[0].y
        module = subject.module.double()

        def loss(theta: torch.Tensor, like: Any = like, x: Any = x, y: Any = y, module: Any = module) -> torch.Tensor:
            return cross_entropy(functional_call(module, from_vector(theta, like), (x,)), y)

        slope_at = grad(loss)
        level, slope, update = loss(points[1]), slope_at(points[1]), points[2] - points[1]
        bent = grad(lambda t, slope_at=slope_at, v=update: slope_at(t) @ v)(points[1])
        unit = update / update.norm()
        own = where(rows, kind="radius", lr=member.lr, direction="update", epsilon=SHOWN)
        for order, curve in ((0, 0.0), (1, 0.0), (2, float(update @ bent) / 2 / float(update @ update))):
            (row,) = where(own, order=order)
            r = float(row["radius"])  # type: ignore[arg-type]
            expected = level + (r * slope @ unit if order else 0.0) + r * r * curve
            assert abs(float(expected - loss(points[1] + r * unit))) == pytest.approx(SHOWN, rel=0.05)
        (row,) = where(rows, kind="moment", lr=member.lr, step=128)[:1]
        error = abs(float(level + update @ slope + update @ bent / 2 - loss(points[2])))
        assert row["smallest"] == pytest.approx(error, rel=1e-2, abs=1e-5)


def test_a_break_is_the_first_moment_with_an_error_of_epsilon(rows: list[Row]) -> None:
    for row in where(rows, kind="break"):
        moments = where(rows, kind="moment", lr=row["lr"])
        out = [m for m in moments if float(m["smallest"]) >= float(row["epsilon"])]  # type: ignore[arg-type]
        assert row["learnt"] == (out[0]["learnt"] if out else np.inf)
        assert row["step"] == (out[0]["step"] if out else None)
    assert len({row["learnt"] for row in where(rows, kind="break")}) > 1


def test_radii_grow_with_epsilon(rows: list[Row]) -> None:
    for order in (0, 1, 2):
        for direction in ("principal", "random", "update"):
            own = where(rows, kind="radius", lr=0.3, order=order, direction=direction)
            found = np.array([column(where(own, epsilon=epsilon), "radius") for epsilon in EPSILONS])
            assert (np.diff(found, axis=0) > 0).all()


def test_the_figure_has_four_panels(rows: list[Row]) -> None:
    figure = Figure(layout="constrained")
    STUDY.draw(rows, figure)
    by_epsilon, by_lr, smallest, breaks = list[Any](figure.axes)
    assert len(by_epsilon.lines) == 3 * 3 + 3 and by_epsilon.get_xscale() == by_epsilon.get_yscale() == "log"
    labels = [text.get_text() for text in by_lr.get_legend().get_texts()]
    assert labels[:2] == ["principal eigenvectors", "random directions"] and len(labels) == 5
    assert [text.get_text() for text in smallest.get_legend().get_texts()] == ["0.02", "0.3"]
    assert len(breaks.lines) == len(EPSILONS) + 1 and breaks.get_xlabel() == "learning rate"


def test_sentences_follow_the_rows(rows: list[Row]) -> None:
    made = [row | {"smallest": 0.02 if row["lr"] == 0.02 else 3.0} for row in rows if row["kind"] == "moment"]
    rest = [row for row in rows if row["kind"] != "moment"]
    assert "the rows agree" in STUDY.conclude(made + rest)[2] and "3 at 0.3" in STUDY.conclude(made + rest)[2]
    opposite = [row | {"smallest": 1.0 if row["lr"] == 0.02 else 0.5} for row in made]
    assert "the rows do not agree" in STUDY.conclude(opposite + rest)[2]
    never = [row | {"learnt": np.inf, "step": None} if row["kind"] == "break" else row for row in rows]
    assert "never at 0.02 and never at 0.3" in STUDY.conclude(never)[3]
    cubic = [r | {"radius": float(r["epsilon"]) ** 0.33} for r in rows if r["kind"] == "radius"]  # type: ignore[arg-type]
    assert "ε^0.33 for order 2" in STUDY.conclude(made + cubic + where(rows, kind="break"))[1]


def test_what_is_no_number_is_drawn_and_told(rows: list[Row]) -> None:
    lost = [row | {"radius": np.nan, "distance": np.nan, "smallest": np.inf} for row in rows]
    assert "beyond numbers" in STUDY.conclude(lost)[0]
    STUDY.draw(lost, Figure())


def test_a_diverged_run_has_rows() -> None:
    found = STUDY.measure(PIECE | {"lrs": [1e20], "epochs": 1, "examples": 10}, PLACE)
    assert np.isnan(column([r for r in where(found, kind="radius") if r["direction"] != "trajectory"], "radius")).all()
    assert np.isinf(column(where(found, kind="moment"), "smallest")).all()
    assert {row["learnt"] for row in where(found, kind="break")} == {1.0}


def test_pieces_fit_their_cost() -> None:
    for demo in (False, True):
        pieces = STUDY.pieces(demo)
        assert all(max(piece["looked_at"]) + 1 < piece["tasks"] for piece in pieces)  # there is a next solution
        assert str(len(pieces) * len(pieces[0]["lrs"])) in STUDY.cost(demo)
