"""Every tracker, written and read back by its own library: during training, after an interruption, and from a store."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import readers

import glocal
from glocal.challenges import Challenge, from_tasks
from glocal.cli.main import main
from glocal.cluster.worker import work
from glocal.engine.loop import Progress
from glocal.errors import GlocalError, GlocalWarning
from glocal.store.run import Run
from glocal.store.store import Store
from glocal.sweeps.context import ProgressReporter
from glocal.sweeps.plan import write_plan
from glocal.track.tracking import RunLog

LRS = [0.1, 1e15]
"""At the second one a run diverges."""
LIBRARIES = [
    "tensorboard",
    pytest.param(
        "mlflow",
        marks=[
            pytest.mark.slow,
            pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
        ],
    ),
    pytest.param("wandb", marks=pytest.mark.slow),
    "trackio",
]


def challenge() -> Challenge:
    random = np.random.default_rng(0)

    def part(n: int, classes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        y = np.resize(classes, n)
        return np.eye(6, dtype=np.float32)[y] + 0.1 * random.random((n, 6), dtype=np.float32), y

    return from_tasks("small", [(part(40, c), part(20, c)) for c in ([0, 1], [2, 3], [4, 5])], setting="class")


def sweep(store: Path, **options: Any) -> glocal.Runs:
    return glocal.sweep(challenge(), "sgd", LRS, [1], epochs=2, batch_size=8, store=store, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> glocal.Runs:
    return sweep(tmp_path_factory.mktemp("store"))


class Interrupt(ProgressReporter, Progress):
    def start_cohort(self, *shown: Any) -> Progress:
        return self

    def task(self, task: int) -> None:
        if task == 2:
            raise KeyboardInterrupt


def locations(library: str) -> tuple[str, str]:
    """Return two places to log to."""
    if library != "mlflow":
        return "live", "later"
    from mlflow import MlflowClient

    MlflowClient("sqlite:///live.db").search_experiments()  # creates a database, which takes seconds
    shutil.copy("live.db", "later.db")
    return "sqlite:///live.db", "sqlite:///later.db"


def check(logged: readers.Logged, runs: Sequence[Run], without: str = "") -> None:
    """Check that the runs, and nothing else, are logged, `without` one of their metrics."""
    logs = {log.name: log for log in (RunLog(run, run.tasks) for run in runs)}
    assert logged.keys() == logs.keys()
    for name, (settings, steps) in logged.items():
        for setting, value in logs[name].settings.items():
            assert type(value)(settings[setting]) == value
        expected = dict(logs[name].steps())
        assert steps.keys() == expected.keys()
        for step, metrics in expected.items():
            assert steps[step].keys() == metrics.keys()
            assert {**steps[step], without: 0} == pytest.approx({**metrics, without: 0})


@pytest.mark.parametrize("library", LIBRARIES)
def test_live_resumed_and_replayed_logs_are_the_same(library: str, runs: glocal.Runs, tmp_path: Path) -> None:
    live, later = locations(library)
    read, to = getattr(readers, library), f"{library}:{live}"
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "store", track=to, progress=Interrupt())
    assert [max(steps) for _, steps in read(live).values()] == [4, 4], "two tasks of two epochs are logged"
    resumed = sweep(tmp_path / "store", track=to)
    check(read(live), resumed)
    resumed.track(to)
    check(read(live), resumed)
    runs.track(f"{library}:{later}")
    check(read(later), resumed, without="final/seconds")


def test_metrics_of_a_run(runs: glocal.Runs) -> None:
    good, diverged = (dict(RunLog(run, run.tasks).steps()) for run in runs)
    R = 100 * runs[0].arrays["test_class_accuracy"]
    assert list(good) == [0, 1, 2, 3, 4, 5, 6] and list(good[3]) == ["objective"]
    assert good[0] == {"task": 0, **{f"accuracy/task_{o + 1}": R[0, o] for o in range(3)}}
    assert good[4]["average_accuracy"] == pytest.approx(R[2, :2].mean())
    assert good[4]["forgetting"] == pytest.approx(R[1, 0] - R[2, 0]) and "forgetting" not in good[2]
    assert good[4]["average_loss"] == pytest.approx(runs[0].arrays["test_class_loss"][2, :2].mean())
    assert good[6]["accuracy/task_1"] == R[3, 0] and good[6]["final/acc"] == pytest.approx(R[3].mean())
    assert good[6]["distance_from_init"] == runs[0].arrays["distance_from_init"][2]
    assert good[5]["objective"] == runs[0].arrays["epoch_loss"][2, 0] and good[6]["final/diverged"] == 0
    assert diverged[6]["final/diverged"] == 1 and not {"final/acc", "average_accuracy"} & diverged[6].keys()


def test_a_tracker_that_fails_warns_once_and_does_not_stop_training(elsewhere: Path) -> None:
    (elsewhere / "file").touch()
    with pytest.warns(GlocalWarning, match="NotADirectory.* `glocal track .*/store --to tensorboard:file`") as warned:
        runs = sweep(elsewhere / "store", track="tensorboard:file")
    assert len(warned) == 1 and len(runs) == 2
    with pytest.raises(GlocalError, match="tracking with 'tensorboard:file' failed"):
        runs.track("tensorboard:file")


def test_a_missing_library_is_named(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.delitem(sys.modules, "glocal.track.trackio", raising=False)
    with pytest.warns(GlocalWarning, match=r"pip install 'glocal\[trackio\]'"):
        sweep(elsewhere / "store", track="trackio")


def test_an_unknown_tracker_is_refused_before_training(elsewhere: Path) -> None:
    with pytest.raises(GlocalError, match="unknown tracker 'tensorbord'\\. Did you mean 'tensorboard'"):
        sweep(elsewhere / "store", track="tensorbord:logs")


def test_runs_that_the_store_holds_already_are_logged(elsewhere: Path) -> None:
    sweep(elsewhere / "store")
    runs = sweep(elsewhere / "store", track="tensorboard:logs")
    check(readers.tensorboard("logs"), runs)


def test_a_torn_event_file_is_continued(runs: glocal.Runs) -> None:
    runs.track("tensorboard:logs")
    for path in Path("logs").rglob("events*"):
        path.write_bytes(path.read_bytes()[:-5])
    runs.track("tensorboard:logs")
    check(readers.tensorboard("logs"), runs)


def test_commands(runs: glocal.Runs, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs[0].path is not None
    store = str(runs[0].path.parents[1])
    assert main(["track", store, "--to", "tensorboard:logs", "--where", "lr<1"]) == 0
    assert capsys.readouterr().out == "Logged 1 run to tensorboard:logs.\n"
    check(readers.tensorboard("logs"), runs[:1])
    assert main(["track", store, "--to", "mlfow"]) == 2
    assert "Did you mean 'mlflow'?" in capsys.readouterr().err


def test_workers_track_what_they_train(elsewhere: Path) -> None:
    options: dict[str, Any] = {"tasks": 2, "epochs": 1, "train_eval": 50, "store": elsewhere / "store"}
    plan, _ = write_plan("split-digits", "sgd", [0.1], [1, 2], **options, track="tensorboard:not-here")
    assert "not-here" not in plan.path.read_text(), "a worker chooses where it logs"
    assert work(Store.open(elsewhere / "store"), "cpu", track="tensorboard:logs") == (0, [])
    check(readers.tensorboard("logs"), glocal.load(elsewhere / "store"))
    assert not Path("not-here").exists()
