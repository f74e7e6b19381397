"""Workers that are killed, or stopped for longer than their leases: the results are those of one undisturbed worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import glocal
from glocal.store.store import Store

HERE = Path(__file__).parent
CODE = [HERE / "small_challenge.py", HERE / "linear.py"]
LRS, SEEDS = [f"{0.01 * (i + 1):.2f}" for i in range(16)], ["1", "2", "3", "4"]
RUNS = len(LRS) * len(SEEDS)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Outcome(NamedTuple):
    """Cases that were tried, those after which all results were right, and runs that were lost or wrong."""

    name: str
    tried: int
    survived: int
    lost: int


def glocal_command(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "glocal", *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode in (0, -signal.SIGKILL), output
    return output


def write_plan(store: Path) -> None:
    challenge, network = f"{CODE[0]}:make", f"{CODE[1]}:make"
    sizes = ["--epochs", 2, "--batch-size", 20, "--cohort-size", 8, "--store", store]
    choices = ["--algorithms", "er", "--network", network, "--lrs", *LRS, "--seeds", *SEEDS]
    finish(glocal_command("sweep", challenge, *choices, *sizes, "--plan"))


def start_worker(store: Path, lease: float = 60.0) -> subprocess.Popen[str]:
    return glocal_command("work", store, "--code", *CODE, "--lease", lease)


def wait_for_checkpoints(store: Path, count: int, workers: list[subprocess.Popen[str]]) -> None:
    """Wait until workers have begun so many cohorts, or finished some."""
    while not list(store.glob("runs/[!.]*")) and any(worker.poll() is None for worker in workers):
        if len(list(store.glob("cohorts/[!.]*/*/checkpoint.safetensors"))) >= count:
            return
        time.sleep(0.02)


def wrong_runs(expected: Store, store: Store) -> int:
    """Return how many runs are missing or differ."""
    found = {run.path.name: run for run in store.runs() if run.path}
    wrong = 0
    for run in expected.runs():
        assert run.path is not None
        other = found.get(run.path.name)
        same = other is not None and all(np.array_equal(a, other.arrays[k], True) for k, a in run.arrays.items())
        wrong += not same
    return wrong


def disturb(
    name: str, store: Path, expected: Store, workers: list[subprocess.Popen[str]], how: Callable[..., int]
) -> tuple[Outcome, str]:
    """Disturb workers by `how`, which returns the number of cases; compare the results, and return the output."""
    wait_for_checkpoints(store, len(workers) // 2, workers)
    tried = how(workers)
    output = "".join([finish(worker) for worker in workers])
    lost = wrong_runs(expected, Store.open(store)) + len(Store.open(store).cohorts())
    return Outcome(name, tried, tried if lost == 0 else 0, lost), output


def kill_two(workers: list[subprocess.Popen[str]]) -> int:
    alive = [worker for worker in workers if worker.poll() is None][:2]
    for worker in alive:
        worker.kill()
    return len(alive)


def stop_until_taken_over(workers: list[subprocess.Popen[str]]) -> int:
    """Stop a worker until the other one has trained everything, and wake it up."""
    workers[0].send_signal(signal.SIGSTOP)
    workers[1].wait(timeout=600)
    workers[0].send_signal(signal.SIGCONT)
    return 1


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What one worker makes of the plan, undisturbed."""
    store = tmp_path_factory.mktemp("expected") / "store"
    write_plan(store)
    finish(start_worker(store))
    assert len(Store.open(store).runs()) == RUNS
    return Store.open(store)


@pytest.mark.slow
def test_two_of_four_workers_are_killed(tmp_path: Path, expected: Store) -> None:
    write_plan(tmp_path / "store")
    workers = [start_worker(tmp_path / "store") for _ in range(4)]
    outcome, _ = disturb("SIGKILL of two of four workers", tmp_path / "store", expected, workers, kill_two)
    assert outcome[1:] == (2, 2, 0)


@pytest.mark.slow
def test_a_worker_is_stopped_for_longer_than_its_lease(tmp_path: Path, expected: Store) -> None:
    write_plan(tmp_path / "store")
    workers = [start_worker(tmp_path / "store", lease=1.0) for _ in range(2)]
    name, how = "SIGSTOP of a worker past its lease's expiry", stop_until_taken_over
    outcome, output = disturb(name, tmp_path / "store", expected, workers, how)
    assert outcome[1:] == (1, 1, 0)
    assert "taken over" in output, "it has noticed"


@pytest.mark.slow
def test_a_sweep_starts_workers(tmp_path: Path) -> None:
    """Two processes give the runs of one that cuts its cohorts in the same way."""
    arguments: dict[str, Any] = {"network": f"{CODE[1]}:make", "epochs": 1, "batch_size": 50, "tasks": 3}
    arguments |= {"challenge": f"{CODE[0]}:make", "algorithms": ["sgd", "er"], "lrs": [0.1, 0.2], "seeds": [1]}
    two = glocal.sweep(**arguments, store=tmp_path / "two", workers=2)
    glocal.sweep(**arguments, store=tmp_path / "one")
    assert len(two) == 4 and wrong_runs(Store.open(tmp_path / "one"), Store.open(tmp_path / "two")) == 0
