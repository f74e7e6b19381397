"""Array jobs on a real Slurm, which `.ci/slurm` starts: whatever happens to a job, the results are the same."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

import glocal
from glocal.cli.main import main
from glocal.cluster.status import Status, read_status
from glocal.store.store import Store

pytestmark = [
    pytest.mark.skipif("GLOCAL_SLURM" not in os.environ, reason="needs a Slurm: run .ci/slurm"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # submitit leaves files to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HERE = Path(__file__).parent
CHALLENGE, NETWORK = (f"{HERE.parent / 'faults' / name}:make" for name in ("small_challenge.py", "linear.py"))
ALGORITHM = f"{HERE / 'slow_er.py'}:SlowER"
RUNS = 2


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Submit(Protocol):
    """Submit a sweep of two runs to two workers, with tasks that take so many seconds, and return the job's number."""

    def __call__(self, seconds: float, *options: str) -> str: ...


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Submit:
    names = [CHALLENGE, "--algorithms", ALGORITHM, "--network", NETWORK, "--store", str(tmp_path)]
    sizes = ["--epochs", "1", "--batch-size", "50", "--cohort-size", "1", "--lrs", "0.1", "--seeds", "1", "2"]

    def submit(seconds: float, *options: str) -> str:
        monkeypatch.setenv("GLOCAL_TEST_SECONDS", str(seconds))
        assert main(["sweep", *names, *sizes, "--on", "slurm", "--workers", "2", "--gpus", "0", *options]) == 0
        assert "Submitted 2 workers" in capsys.readouterr().err
        newest = max(tmp_path.glob("slurm/*_0_submitted.pkl"), key=lambda path: path.stat().st_mtime)
        return newest.name.partition("_")[0]

    return submit


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 110) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} after {seconds} s"
        time.sleep(0.2)


def jobs(job: str) -> dict[str, str]:
    """Return the states of an array's jobs that Slurm has not finished with."""
    listed = run("squeue", "--noheader", "--array", "--format=%i %T", "--me").split()
    return {id: state for id, state in zip(listed[::2], listed[1::2], strict=True) if id.startswith(f"{job}_")}


def wait_for_tasks(store: Path, job: str) -> None:
    """Wait until both jobs have trained a task."""
    wait_until(lambda: len(list(store.glob("cohorts/*/*/checkpoint.safetensors"))) == RUNS, "in training")
    assert jobs(job) == {f"{job}_0": "RUNNING", f"{job}_1": "RUNNING"}


def status(store: Path) -> Status:
    return read_status(Store.open(store))


def log(store: Path, name: str = "*") -> str:
    return "".join(path.read_text() for path in store.glob(f"slurm/{name}_0_log.*"))


def assert_finished(store: Path, job: str, expected: glocal.Runs) -> None:
    wait_until(lambda: not jobs(job), "finished")
    assert (status(store).finished, status(store).waiting) == (RUNS, 0), log(store)
    for run in expected:
        assert run.path is not None
        arrays = Store.open(store).run(run.path.name).arrays
        assert arrays.keys() == run.arrays.keys()
        for name, array in run.arrays.items():
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> glocal.Runs:
    """What the sweep gives when it is trained here."""
    sizes: dict[str, Any] = {"network": NETWORK, "epochs": 1, "batch_size": 50, "cohort_size": 1}
    runs = glocal.sweep(CHALLENGE, [ALGORITHM], [0.1], [1, 2], store=tmp_path_factory.mktemp("expected"), **sizes)
    assert len(runs) == RUNS
    return runs


def test_jobs_whose_time_is_up_are_requeued(tmp_path: Path, submit: Submit, expected: glocal.Runs) -> None:
    """Slurm warns a job of a minute 15 s to 45 s before its end; each would need 48 s."""
    job = submit(4, "--time", "1m", "--slurm", "signal=USR2@15")
    assert_finished(tmp_path, job, expected)
    assert "Requeued job" in log(tmp_path, f"{job}_0") and "Requeued job" in log(tmp_path, f"{job}_1")


def test_an_array_trains_a_sweep(tmp_path: Path, submit: Submit, expected: glocal.Runs) -> None:
    job = submit(0.2, "--time", "1h")
    before = status(tmp_path)
    assert (before.finished, before.running + before.waiting) == (0, RUNS)
    wait_for_tasks(tmp_path, job)
    assert status(tmp_path).running == RUNS
    assert_finished(tmp_path, job, expected)


def test_a_cancelled_job_does_not_come_back(tmp_path: Path, submit: Submit, expected: glocal.Runs) -> None:
    """The other worker trains its run too; if both are cancelled, submitting again resumes the sweep."""
    job = submit(0.5, "--time", "1h")
    wait_for_tasks(tmp_path, job)
    run("scancel", f"{job}_0")
    wait_until(lambda: list(jobs(job)) == [f"{job}_1"], "cancelled")
    wait_until(lambda: status(tmp_path).finished > 0, "finished by the other job")
    run("scancel", job)
    wait_until(lambda: not jobs(job), "cancelled")
    assert status(tmp_path).finished < RUNS
    assert_finished(tmp_path, submit(0, "--time", "1h"), expected)


@pytest.mark.parametrize("partition", ["main", "spot"])
def test_a_preempted_job_is_requeued(tmp_path: Path, submit: Submit, expected: glocal.Runs, partition: str) -> None:
    """Slurm requeues it at once, or gives it time to requeue itself before a more urgent job starts."""
    job = submit(0.5, "--time", "1h", "--partition", partition)
    wait_for_tasks(tmp_path, job)
    if partition == "main":
        run("scontrol", "requeue", f"{job}_0")
    else:
        run("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(lambda: "PENDING" in jobs(job).values(), "requeued")
    assert_finished(tmp_path, job, expected)
    assert log(tmp_path, f"{job}_0").count("Starting with") == 2
