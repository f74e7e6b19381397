"""A sweep in several processes, and a worker that notices that its lease is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from workers import CODE, difference, plan

import glocal
from glocal.store.store import Store


def start_worker(store: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "glocal", "work", store, "--code", *CODE, *arguments]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(map(str, command)), **options)


@pytest.mark.slow
def test_a_worker_notices_that_its_lease_is_gone(tmp_path: Path) -> None:
    """It is stopped until another one has trained everything, and wakes up."""
    store = plan(tmp_path / "store", 4, 2, 1, 4)
    stopped = start_worker(store, "--lease", 1)
    while not list(store.glob("cohorts/[!.]*/*/checkpoint.safetensors")):
        assert stopped.poll() is None
        time.sleep(0.02)
    stopped.send_signal(signal.SIGSTOP)
    other = start_worker(store)
    printed, _ = other.communicate(timeout=600)
    assert other.returncode == 0, printed
    stopped.send_signal(signal.SIGCONT)
    printed, _ = stopped.communicate(timeout=600)
    assert stopped.returncode == 0 and "taken over" in printed, printed


@pytest.mark.slow
def test_a_sweep_starts_workers(tmp_path: Path) -> None:
    """Two processes give the runs of one that cuts its cohorts in the same way."""
    arguments: dict[str, Any] = {"network": f"{CODE[1]}:make", "epochs": 1, "batch_size": 50, "tasks": 3}
    arguments |= {"challenge": f"{CODE[0]}:make", "algorithms": ["sgd", "er"], "lrs": [0.1, 0.2], "seeds": [1]}
    two = glocal.sweep(**arguments, store=tmp_path / "two", workers=2)
    glocal.sweep(**arguments, store=tmp_path / "one")
    assert len(two) == 4 and difference(Store.open(tmp_path / "one"), Store.open(tmp_path / "two")) is None
