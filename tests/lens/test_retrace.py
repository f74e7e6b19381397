"""A stored run goes its way again, and along it errors are what they are by definition."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from recordings import Together, blobs, cohort, hidden, linear, normalised, regressions, taylor_curves

import glocal
from glocal.algorithms import ER, EWC, PNN, SGD, Joint
from glocal.cli.main import main
from glocal.errors import GlocalError
from glocal.lens.locality_assumption import training_errors
from glocal.lens.record import StoredRun, open_run, record
from glocal.report.lens_figures import errors_table
from glocal.store.run import Run

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 2, "batch_size": 1_000}  # 4 steps an epoch


def swept(store: Path, algorithm: str, **more: Any) -> Run:
    (run,) = glocal.sweep("rotated-digits", [algorithm], [0.1], [7], store=store, **QUICK, **more)
    return run


@pytest.mark.parametrize("algorithm", ["er", "ewc"])
def test_it_goes_the_stored_runs_way(tmp_path: Path, algorithm: str) -> None:
    run = swept(tmp_path, algorithm, keep_parameters=True)
    assert run.path is not None
    found = open_run(run.path).retrace(1, 100)
    assert found.deviation == 0 and found.task_sizes == [4_000, 4_000]
    for t, point in enumerate(found.run.trace.checkpoints):
        assert all(torch.equal(p, run.state(t)[k]) for k, p in point.params.items())
    steps = [(m.finished, m.step) for m in found.run.snapshots]
    assert steps == [(0, s) for s in range(9)] + [(1, s) for s in range(8, 17)] + [(2, 16)]
    epochs = [(m.finished, m.step) for m in open_run(run.path).retrace(examples=100).run.snapshots]
    assert epochs == [(0, 0), (0, 4), (0, 8), (1, 8), (1, 12), (1, 16), (2, 16)]


def test_a_deviation_from_the_stored_run_is_reported(tmp_path: Path) -> None:
    run = swept(tmp_path, "sgd")
    assert run.path is not None
    for of_the_last, expected in ((0.8, 0.25), (np.nan, np.inf)):
        start = run.arrays["distance_from_init"] * np.array([1, of_the_last])
        other = replace(run, arrays={**run.arrays, "distance_from_init": start})
        stored = StoredRun(other, open_run(run.path).cohort)
        assert stored.retrace(examples=100).deviation == pytest.approx(expected, rel=1e-4)


def test_more_moments_than_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 89,610 numbers of four bytes: θ_0, two epochs of two tasks and these tasks' ends again are 7, and four steps
    of each epoch 16 more."""
    run = swept(tmp_path, "sgd")
    assert run.path is not None
    for snapshots, message in (
        (22, r"23 snapshots of θ and memory take 0\.0082 GB.* Record fewer steps, or epochs only"),
        (7, "epochs only"),
        (6, "epochs only"),
    ):
        monkeypatch.setattr(sys.modules["glocal.lens.record"], "MAX_SNAPSHOT_BYTES", snapshots * 4 * 89_610)
        with pytest.raises(GlocalError, match=message):
            open_run(run.path).retrace(1)
        steps = {22: 2, 7: None, 6: None}[snapshots]
        if snapshots > 6:
            assert len(open_run(run.path).retrace(steps, 20).run.snapshots) <= snapshots
    monkeypatch.undo()
    with pytest.raises(GlocalError, match="every_steps = 0"):
        open_run(run.path).retrace(0)


def test_expansions_of_quadratics_are_exact_at_every_step() -> None:
    """Linear regression: order 2 has no error, and order 1 leaves out ½ Δᵀ H Δ, here the mean of half the squares that
    the move changes the outputs by."""
    (trajectory,) = record(cohort(regressions(orthogonal=False), SGD(), linear, batch_size=4), every_steps=1)
    found, trace = training_errors(trajectory, 1e-6), trajectory.trace
    known = found.curves["order 2"].known
    assert found.curves["order 2"].error[known].max() < 1e-12 < found.curves["order 1"].error[known].max()
    # The losses are rounded to single precision, each by half an eps of its size; the error is a difference of two.
    eps, largest = torch.finfo(torch.float32).eps, float(found.curves["order 1"].true[known].max())
    for i, moment in enumerate(trajectory.snapshots):
        for o in range(moment.finished):
            x = trace.tasks[o].x
            moved = trace.outputs(moment.checkpoint, x) - trace.outputs(trace.checkpoints[o + 1], x)
            loss = trace.loss.per_sample(moved, torch.zeros_like(moved)).mean()
            assert float(found.curves["order 1"].error[i, o]) == pytest.approx(
                float(loss), rel=1e-6, abs=4 * eps * largest
            )
    assert found.assumptions["order 2"].first_violation is None
    broken = found.assumptions["order 1"].first_violation
    outside = [i for i, row in enumerate(found.curves["order 1"].error.nan_to_num(0)) if (row >= 1e-6).any()]
    assert broken is not None and broken.snapshot == outside[0]
    # Arrays and tuples count tasks from 0, the table from 1.
    table = errors_table(found)
    (section,) = [section for section in table.sections if section.label == "order 1"]
    of_task = [column.group for column in table.columns].index("of task")
    errors = found.curves["order 1"].error[outside[0]].nan_to_num(0).tolist()
    left = [number for number, error in enumerate(errors, 1) if error >= 1e-6]
    assert section.rows[0][of_task].text == ", ".join(map(str, left))


def test_rows_are_the_curves() -> None:
    (trajectory,) = record(cohort(blobs(), EWC(), hidden), every_steps=2)
    found = training_errors(trajectory, 0.1)
    expected = taylor_curves(trajectory.trace, 2, "diagonal", snapshots=trajectory.snapshots)
    rows = [row for row in found.rows() if row["approximation"] == "order 2, diagonal"]
    at = [(i, o) for i, m in enumerate(trajectory.snapshots) for o in range(m.finished)]
    assert [(row["step"], row["task"]) for row in rows] == [(trajectory.snapshots[i].step, o + 1) for i, o in at]
    for name in ("true", "approximate", "error", "distance"):
        wanted = [float(getattr(expected, name)[i, o]) for i, o in at]
        assert [row[name] for row in rows] == pytest.approx(wanted, rel=1e-6)


def test_own_approximations_that_are_exact() -> None:
    """Retraced of everything, and columns that nobody changes any more; ε by what learning gains."""
    for algorithm in (ER(slots=240), PNN()):
        (trajectory,) = record(cohort(blobs(), algorithm, hidden))
        found = training_errors(trajectory)
        assert found.curves["own"].error[found.curves["own"].known].max() < 1e-5 and found.epsilon > 0
        assert found.assumptions["own"].first_violation is None
        assert f"{algorithm.name}, ε = " in str(found) and "own: the locality assumption holds" in str(found)
        kinds = {"own", "own, from θ_o"}
        assert set(found.curves) == kinds if algorithm.name == "pnn" else {*kinds, "order 2"} < set(found.curves)


def test_constants_do_not_count_from_the_solution_on() -> None:
    """Of sgd, which approximates nothing: its error is the loss, and counted from θ_o forgetting."""
    (trajectory,) = record(cohort(blobs(), SGD(), hidden))
    found, trace = training_errors(trajectory, 0.1).curves, trajectory.trace
    for i, moment in enumerate(trajectory.snapshots):
        for o in range(moment.finished):
            loss, then = (float(trace.value(o, point)) for point in (moment.checkpoint, trace.checkpoints[o + 1]))
            assert float(found["own"].error[i, o]) == pytest.approx(loss, rel=1e-5)
            assert float(found["own, from θ_o"].error[i, o]) == pytest.approx(abs(loss - then), abs=1e-6)


def test_statistics_are_the_solutions_own() -> None:
    """With BatchNorm an expansion of order 0 is L_o(θ_o) with θ_o's statistics: no error at θ_o, before and after."""
    (trajectory,) = record(cohort(blobs(), SGD(), normalised))
    found = training_errors(trajectory, 0.1).curves["order 0"]
    for o in range(3):
        first = found.finished.tolist().index(o + 1)
        assert float(found.error[first, o]) < 1e-6


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = swept(tmp_path, "ewc")
    figure = tmp_path / "made" / "way.svg"
    assert main(["lens", str(run.path), "--retrace", "2", "--examples", "50", "-o", str(figure)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "equals the stored one" in said and "50 of 4,000 examples per task" in said
    rows = pl.read_parquet(figure.with_suffix(".parquet"))
    # One row per snapshot and finished task: task 1 is measured until the end of task 2, task 2 only at its end.
    assert rows.filter(approximation="own")["task"].value_counts().sort("task").rows() == [(1, 6), (2, 1)]
    text = figure.read_text()
    assert "task 1" in text and "task 0" not in text
    for name in rows["approximation"].unique():
        assert re.search(rf"\b{name.removesuffix(' θ_o')}\b", text)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--retrace", "0"], "--retrace 0 was given; it takes a number of steps from 1 on, or epochs"),
        (["--retrace", "epoch"], "--retrace epoch was given; it takes a number of steps from 1 on, or epochs"),
        (["--retrace", "3", "--show", "error"], "--retrace 3 does not apply to --show"),
        (["--retrace", "3", "--seed", "1"], "--seed 1 does not apply to --retrace"),
        (["--retrace", "epochs", "--epsilon", "-1"], "epsilon = -1.0 was given; it must be finite and above 0"),
        (["--retrace", "epochs", "--examples", "0"], "examples = 0 was given"),
        (["--examples", "-3"], "examples = -3 was given"),
    ],
)
def test_bad_input_is_said(given: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = swept(tmp_path, "sgd")
    assert main(["lens", str(run.path), *given, "-o", str(tmp_path / "x.png")]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_looked_at_is_said(tmp_path: Path) -> None:
    (single,) = glocal.sweep("rotated-digits", ["sgd"], [0.1], [7], store=tmp_path, tasks=1, epochs=1)
    assert single.path is not None
    with pytest.raises(GlocalError, match="learned a single task"):
        open_run(single.path).retrace()
    (trajectory,) = record(cohort(blobs(1), SGD(), hidden))
    with pytest.raises(GlocalError, match="has a single task: there is no forgetting"):
        training_errors(trajectory, 0.1)


def test_networks_with_chance_of_their_own_go_the_same_way_again(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import math\nfrom torch import nn\ndef net(shape, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(math.prod(shape), outputs))\n"
    )
    run = swept(tmp_path / "store", "sgd", network=f"{mine}:net")
    assert run.path is not None
    for steps in (1, None):
        assert open_run(run.path, network=f"{mine}:net").retrace(steps, 20).deviation == 0


def test_networks_that_take_no_single_samples_have_the_other_expansions() -> None:
    (trajectory,) = record(cohort(blobs(), SGD(), Together))
    found = training_errors(trajectory, 0.1).curves
    assert set(found) == {"own", "own, from θ_o", "order 0", "order 1", "order 2", "order 2, low-rank"}
    assert found["order 2"].error[found["order 2"].known].max() < found["order 1"].error[found["order 1"].known].max()


def test_figures_of_nothing_but_zeros_and_of_nothing_finite(tmp_path: Path) -> None:
    for algorithm, lr, said in ((Joint(), 0.1, "0 everywhere"), (SGD(), 1e20, "not finite")):
        (trajectory,) = record(cohort(blobs(), algorithm, hidden, [(0, lr)]))
        assert said in training_errors(trajectory, 0.1).plot(tmp_path / "way.svg").read_text()


def test_only_stored_runs_are_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", "mine.py:make", "--retrace", "1", "-o", str(tmp_path / "x.png")]) == 2
    assert "'mine.py:make' is not a run of a store" in capsys.readouterr().err
