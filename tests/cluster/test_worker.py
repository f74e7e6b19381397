"""Workers: plans are trained as sweeps are, code comes from named files alone, failures and signals cost little."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glocal
from glocal import files
from glocal.cli.main import main
from glocal.cluster.status import Status, read_status
from glocal.cluster.worker import Stop, work, worker_devices
from glocal.engine import loop
from glocal.store.store import Store
from glocal.sweeps.context import ProgressReporter
from glocal.sweeps.options import parse_time
from glocal.sweeps.plan import read_plans, write_plan
from glocal.sweeps.sweep import prepare

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500}
MINE = """
from glocal.algorithms.baselines import SGD

class Mine(SGD):
    name = "mine"

class Bad(SGD):
    name = "bad"

    def objective(self, model, params, memory, batch):
        raise ZeroDivisionError("no objective")
"""


def plan(store: Path, algorithms: Sequence[Any] = ("sgd", "er"), **options: Any) -> Store:
    write_plan("rotated-digits", algorithms, [0.1, 0.2], [1], store=store, **QUICK, **options)
    return Store.open(store)


def assert_same(store: Store, runs: glocal.Runs) -> None:
    assert len(store.runs()) == len(runs)
    for run in runs:
        assert run.path is not None
        for name, array in store.run(run.path.name).arrays.items():
            np.testing.assert_array_equal(array, run.arrays[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> glocal.Runs:
    store = tmp_path_factory.mktemp("whole") / "store"
    return glocal.sweep("rotated-digits", ["sgd", "er"], [0.1, 0.2], [1], store=store, **QUICK)


def test_a_plan_is_trained_as_a_sweep_is(tmp_path: Path, whole: glocal.Runs) -> None:
    store = plan(tmp_path / "store")
    assert not store.runs()
    assert work(store) == (0, [])
    assert_same(store, whole)
    assert not read_plans(store) and not store.cohorts()


@pytest.mark.parametrize("workers", [None, 2])
def test_damaged_runs_are_trained_again(workers: int | None, tmp_path: Path, whole: glocal.Runs) -> None:
    store = plan(tmp_path / "store")
    work(store)
    arrays = store.runs_path / store.names()[0] / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-9])
    with pytest.warns(glocal.errors.GlocalWarning, match="moved to"):
        if workers is None:
            plan(store.path)
            assert work(store) == (0, [])
        else:
            options: dict[str, Any] = {"store": store.path, "workers": workers, **QUICK}
            glocal.sweep("rotated-digits", ["sgd", "er"], [0.1, 0.2], [1], **options)
    assert_same(store, whole)


def test_a_plan_that_another_worker_removes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = plan(tmp_path / "store"), files.read_text

    def remove_then_read(path: Path) -> Any:
        path.unlink()
        return read(path)

    monkeypatch.setattr(files, "read_text", remove_then_read)
    assert read_plans(store) == []


@pytest.mark.parametrize("damage", ["cut", "fields are missing", "edited"])
def test_a_damaged_plan_does_not_stop_the_others(damage: str, tmp_path: Path, whole: glocal.Runs) -> None:
    store = plan(tmp_path / "store", ["agem"])
    path = read_plans(store)[0].path
    content = json.loads(path.read_text())
    content = {"runs": content["runs"]} if damage == "fields are missing" else content | {"runs": content["runs"][:1]}
    path.write_text(path.read_text()[:50] if damage == "cut" else json.dumps(content))
    plan(tmp_path / "store")
    status = read_status(store)
    assert status.waiting == 4 and path.name in status.damaged_plans[0]
    left, (problem,) = work(store)
    assert left == 0 and path.name in problem
    assert_same(store, whole)
    assert main(["verify", str(store.path)]) == 2
    path.unlink()
    assert main(["verify", str(store.path)]) == 0


class FromPython(glocal.Algorithm):
    """An algorithm that no file can name."""


@pytest.mark.parametrize("algorithm", [FromPython, glocal.algorithms.EWC(penalty=2.0)], ids=["class", "instance"])
def test_what_has_no_name_is_refused(tmp_path: Path, algorithm: Any) -> None:
    with pytest.raises(glocal.GlocalError, match=r"from Python cannot be named in a plan: .* path\.py:"):
        plan(tmp_path / "store", [algorithm])


def test_code_is_loaded_from_files_of_the_workers_user_alone(tmp_path: Path) -> None:
    file, copy = tmp_path / "mine.py", tmp_path / "copy.py"
    file.write_text(MINE)
    copy.write_text(MINE)
    store = plan(tmp_path / "store", [f"{file}:Mine"])
    left, (problem,) = work(store)
    assert left == 0 and "mine.py" in problem and "--code" in problem and not store.runs()
    marker = tmp_path / "executed"
    file.write_text(f"{MINE}\nopen({str(marker)!r}, 'w')\n")
    assert len(work(store, code=[file])[1]) == 1 and not store.runs(), "the file has changed"
    assert work(store, code=[copy]) == (0, []) and len(store.runs()) == 2, "another copy of the same file will do"
    assert not marker.exists()


def test_a_file_that_a_plan_does_not_declare_is_not_loaded(tmp_path: Path) -> None:
    store, marker, evil = plan(tmp_path / "store", ["sgd"]), tmp_path / "executed", tmp_path / "evil.py"
    evil.write_text(f"{MINE}\nopen({str(marker)!r}, 'w')\n")
    (known,) = read_plans(store)
    for field in ("algorithms", "network", "challenge"):
        content = json.loads(known.path.read_text())
        changed: dict[str, Any] = {"algorithms": [[f"{evil}:Mine", {}]], "challenge": f"{evil}:Mine"}
        if field == "network":
            content["arguments"]["options"][field] = f"{evil}:Mine"
        else:
            content["arguments"][field] = changed[field]
        name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        (store.path / "plans" / f"{name}.json").write_text(json.dumps(content))
    known.path.unlink()
    assert len(work(store)[1]) == 3
    assert not marker.exists() and not store.runs()


@pytest.mark.parametrize("lrs", [[0.1], [0.1, 0.2]], ids=["in training", "while memory is measured"])
def test_a_cohort_that_fails_does_not_stop_the_others(tmp_path: Path, lrs: list[float]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    arguments: dict[str, Any] = {"store": tmp_path / "store", **QUICK}
    write_plan("rotated-digits", [f"{file}:Bad", "sgd"], lrs, [1], **arguments)
    store = Store.open(tmp_path / "store")
    left, (problem,) = work(store, code=[file])
    assert problem.endswith("mine.py, line 11: ZeroDivisionError: no objective")
    assert left == 0 and len(store.runs()) == len(lrs)
    (failed,) = store.cohorts()
    assert failed.failed == problem
    attempts = failed.last.number
    assert work(store, code=[file])[1] == [failed.failed] and store.cohorts()[0].last.number == attempts
    assert len(work(store, code=[file], retry_failed=True)[1]) == 1 and store.cohorts()[0].last.number > attempts
    with pytest.raises(ZeroDivisionError, match="no objective"):
        glocal.sweep("rotated-digits", [f"{file}:Bad", "er"], lrs, [1], **arguments)
    assert len(store.runs()) == 2 * len(lrs), "the others are trained before the error"


ONCE = """
from pathlib import Path
from glocal.algorithms.baselines import SGD

class Once(SGD):
    name = "once"

    def consolidate(self, model, params, memory, data):
        if not Path(__file__).with_name("licence").exists():
            raise ValueError("no licence")
        return super().consolidate(model, params, memory, data)
"""


def test_a_sweep_with_workers_trains_failed_cohorts_again(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    file.write_text(ONCE)
    arguments: dict[str, Any] = {"store": tmp_path / "store", "workers": 2, **QUICK}
    with (
        pytest.warns(glocal.errors.GlocalWarning, match="exit status 2"),
        pytest.raises(glocal.GlocalError, match=r"once\.py, line 10: ValueError: no licence"),
    ):
        glocal.sweep("rotated-digits", [f"{file}:Once"], [0.1, 0.2], [1], **arguments)
    (tmp_path / "licence").touch()
    assert len(glocal.sweep("rotated-digits", [f"{file}:Once"], [0.1, 0.2], [1], **arguments)) == 2
    assert not Store.open(tmp_path / "store").cohorts()


class Failing(ProgressReporter):
    def finish_cohort(self, runs: int) -> None:
        raise ZeroDivisionError


NOTED = """
from dataclasses import dataclass
from glocal.algorithms.baselines import SGD

@dataclass(frozen=True)
class Noted(SGD):
    note: str = ""
"""


def test_a_plan_agrees_with_its_name_whatever_characters_it_has(tmp_path: Path) -> None:
    """Those that a terminal should not be shown are escaped when it is read."""
    file = tmp_path / "noted.py"
    file.write_text(NOTED)
    store = plan(tmp_path / "store", [(f"{file}:Noted", {"note": "a\u00a0b\tc"})])
    assert len(read_plans(store)) == 1 and not read_status(store).damaged_plans


def test_runs_in_the_store_have_not_failed(tmp_path: Path, whole: glocal.Runs) -> None:
    store = plan(tmp_path / "store")
    with pytest.warns(glocal.errors.GlocalWarning, match="ZeroDivisionError"):
        assert work(store, progress=Failing()) == (0, [])
    assert_same(store, whole)
    assert not store.cohorts()


@pytest.mark.parametrize("in_store", [True, False])
def test_failures_whose_runs_were_stored_later(in_store: bool, tmp_path: Path, whole: glocal.Runs) -> None:
    store = plan(tmp_path / "store")
    for run in whole if in_store else []:
        assert run.path is not None
        shutil.copytree(run.path, store.runs_path / run.path.name)
    claim = store.claim(read_plans(store)[0].runs[:2], parameters=False)
    assert claim is not None
    claim.leave(failed="no reason")
    assert read_status(store).failed == (0 if in_store else 2)
    if in_store:
        assert work(store) == (0, []) and not store.cohorts() and not read_plans(store)


class Signalling(ProgressReporter, loop.Progress):
    """Sends this process a signal in the middle of a task."""

    sent = False

    def __init__(self, in_task: int = 0) -> None:
        self.in_task, self.now = in_task, 0

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> loop.Progress:
        return self

    def task(self, number: int) -> None:
        self.now = number

    def steps(self, count: int) -> None:
        if not self.sent and self.now == self.in_task:
            self.sent = True
            os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_stops_a_worker_at_the_end_of_a_task(tmp_path: Path, whole: glocal.Runs) -> None:
    store = plan(tmp_path / "store")
    before = signal.getsignal(signal.SIGUSR1)
    left, problems = work(store, progress=Signalling())
    assert left == 4 and not problems and not store.runs()
    assert signal.getsignal(signal.SIGUSR1) is before
    (cohort,) = store.cohorts()
    assert cohort.last.about["finished"] == 1 and not cohort.last.held
    assert work(store) == (0, [])
    assert_same(store, whole)


def test_a_worker_that_is_stopped_in_the_last_task_has_nothing_left(tmp_path: Path) -> None:
    store = plan(tmp_path / "store", ["sgd"])
    assert work(store, progress=Signalling(in_task=1)) == (0, [])
    assert len(store.runs()) == 2


def test_time_that_is_up_stops_a_worker_in_a_task(tmp_path: Path) -> None:
    """Before it, no task is begun that would take longer than the last one did."""
    stop, began = Stop(0.3), time.monotonic()
    with pytest.raises(KeyboardInterrupt), stop.listening():
        time.sleep(10)
    assert 0.25 < time.monotonic() - began < 5
    stop = Stop(1_000)
    assert not stop()
    stop._boundary -= 1_100
    assert stop(), "the last task took 1,100 s, and 1,000 s are left"
    store = plan(tmp_path / "store")
    _, problems = work(store, seconds=0.001)
    assert not problems and not store.runs() and not any(cohort.last.held for cohort in store.cohorts())


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGUSR2, 100.0), (signal.SIGTERM, 20.0)])
def test_a_worker_stops_before_slurm_kills_it(number: signal.Signals, seconds: float) -> None:
    """It does so 30 s after SIGTERM, and as long after its warning as it was asked to."""
    with Stop(grace=100.0).listening():
        os.kill(os.getpid(), number)
        assert seconds - 5 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_worker_has_something_to_train(tmp_path: Path, workers: int) -> None:
    """And the cut does not depend on what is finished."""
    options: dict[str, Any] = {"store": tmp_path / "store", "workers": workers, **QUICK}
    job = prepare("rotated-digits", ["sgd", "er"], [0.1, 0.2, 0.3], [1, 2], **options)
    cohorts = [cohort for group in job.groups for cohort in group.cohorts]
    assert len(cohorts) >= workers and {hash for cohort in cohorts for hash in cohort} == job.requests.keys()
    assert sum(map(len, cohorts)) == 12
    assert max(map(len, cohorts)) - min(map(len, cohorts)) <= 1


def test_the_status_of_a_store(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    store = plan(tmp_path / "store", [f"{file}:Bad", "sgd", "er"])
    assert read_status(store) == Status(0, 0, 0, 6, 0, None, [], [], [])
    work(store, code=[file])
    status = read_status(store)
    assert (status.finished, status.waiting, status.failed, status.running) == (4, 0, 2, 0)
    assert len(status.failures) == 1 and status.seconds_left is None
    plan(tmp_path / "store", ["agem"])
    claim = store.claim(read_plans(store)[-1].runs[:1], parameters=False)
    assert claim is not None
    claim.lease.note(tasks=2, begun=0, finished=1, since=(datetime.now(UTC) - timedelta(hours=1)).isoformat())
    status = read_status(Store.open(store.path))
    assert (status.finished, status.waiting, status.failed, status.running) == (4, 1, 2, 1)
    assert status.seconds_left == pytest.approx(3_600, rel=0.1), (
        "as long as the first task took; the other run is short"
    )
    claim.leave()


def test_runs_that_another_process_claims_while_memory_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare("rotated-digits", ["sgd"], [0.1, 0.2, 0.3], [1], store=tmp_path / "store", **QUICK)
    other, hashes = Store.open(tmp_path / "store"), list(job.requests)
    claims: list[Any] = []

    def measure(cohort: Any, budget: int | None) -> int:
        claims.append(other.claim(hashes[:2], parameters=False))
        return 3

    monkeypatch.setattr("glocal.sweeps.resume.largest_cohort", measure)
    assert job.train_next(job.missing())
    assert other.names() == hashes[2:]
    claims[0].leave()


def test_runs_that_cannot_be_read_are_not_finished(tmp_path: Path) -> None:
    store = plan(tmp_path / "store")
    work(store)
    first, second, *_ = (store.runs_path / name for name in store.names())
    shutil.copytree(second, store.runs_path / f"{second.name} (copy)")
    (store.runs_path / "notes.txt").write_text("notes")
    assert read_status(store).finished == 4
    (first / "arrays.safetensors").write_bytes(b"")
    assert read_status(store).finished == 3


def test_work_tells_of_interrupted_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = plan(tmp_path / "store", ["sgd"])
    runs = list(prepare("rotated-digits", ["er"], [0.1, 0.2, 0.3], [1], store=store.path, **QUICK).requests)
    claim = store.claim(runs, parameters=False)
    assert claim is not None
    claim.leave()
    assert main(["work", str(store.path)]) == 0
    assert "3 runs" in capsys.readouterr().out and len(store.names()) == 2


def test_workers_of_a_machine() -> None:
    assert worker_devices("cpu", 3) == ["cpu"] * 3 and worker_devices("cuda:1") == ["cuda:1"]
    with pytest.raises(glocal.GlocalError, match="workers = 100000 was given"):
        worker_devices("all", 100_000)


@pytest.mark.parametrize("gpus", [0, 2])
def test_workers_of_all_devices(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert worker_devices("all") == (["cuda:0", "cuda:1"] if gpus else ["auto"])
    assert worker_devices("all", 3) == (["cuda:0", "cuda:1", "cuda:0"] if gpus else ["auto"] * 3)


@pytest.mark.parametrize(("text", "seconds"), [("3h50m", 13_800), ("1d", 86_400), ("90s", 90), ("1m1s", 61)])
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "h", "3h 50m", "-1h", "3h50", "9" * 30 + "h"])
def test_bad_times(text: str) -> None:
    with pytest.raises(glocal.GlocalError, match="write days, hours"):
        parse_time(text)


def test_an_interrupt_ends_a_sweep_with_workers(tmp_path: Path) -> None:
    """The workers stop at the end of a task, and nothing is trained after them."""
    options = "split-digits --algorithms sgd --lrs 0.1 --tasks 5 --epochs 20 --cohort-size 1 --workers 2"
    seeds = [str(seed) for seed in range(40)]
    command = [sys.executable, "-m", "glocal", "sweep", *options.split(), "--store", str(tmp_path / "s")]
    sweep = subprocess.Popen([*command, "--seeds", *seeds], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not any((tmp_path / "s" / "runs").glob("*")):
            assert sweep.poll() is None
            time.sleep(0.1)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(timeout=100) == 130
    finally:
        sweep.kill()
    store = Store.open(tmp_path / "s")
    assert 0 < len(store.runs()) < len(seeds) and not read_status(store).cohorts
