"""Leases: one holder at a time, taken over when the holder ends, stops or loses touch; and fenced-off holders."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glocal
from glocal import files
from glocal.engine.cohort import CPU
from glocal.engine.loop import Snapshot
from glocal.store import lease
from glocal.store.lease import Lease, LeaseLost, LeaseObserver
from glocal.store.store import Claim, Store

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500, "keep_parameters": True}
HOLDER = f"""
import sys
sys.path.insert(0, {str(Path(lease.__file__).parent)!r})
from pathlib import Path
from lease import Lease, LeaseLost, LeaseObserver
held = Lease.take(Path(sys.argv[1]), LeaseObserver(), float(sys.argv[2]))
print(held and held.number, flush=True)
for _ in sys.stdin:
    try:
        print(held.check() or "held", flush=True)
    except LeaseLost:
        print("lost", flush=True)
"""


class Holder:
    """A process that takes a lease and says on request whether it still has it."""

    def __init__(self, folder: Path, expiry: float) -> None:
        command = [sys.executable, "-c", HOLDER, str(folder), str(expiry)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "1"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self._line()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def take_within(folder: Path, seconds: float) -> Lease | None:
    watch, end = LeaseObserver(), time.monotonic() + seconds
    while time.monotonic() < end:
        if (taken := Lease.take(folder, watch)) is not None:
            return taken
        time.sleep(0.02)
    return None


def test_one_of_many_contenders_gets_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        taken = [
            held for held in pool.map(lambda _: Lease.take(tmp_path, LeaseObserver()), range(64)) if held is not None
        ]
    assert len(taken) == 1
    taken[0].check()
    taken[0].release()
    successor = Lease.take(tmp_path, LeaseObserver())
    assert successor is not None and successor.number == 2
    with pytest.raises(LeaseLost):
        taken[0].check()
    successor.release()


def test_a_stopped_process_loses_it_and_notices(tmp_path: Path) -> None:
    holder = Holder(tmp_path, expiry=1.0)
    try:
        assert take_within(tmp_path, 2.0) is None, "it gives signs of life"
        assert holder.ask() == "held"
        holder.process.send_signal(signal.SIGSTOP)
        taken = take_within(tmp_path, 10.0)
        holder.process.send_signal(signal.SIGCONT)
        assert taken is not None and taken.number == 2
        assert holder.ask() == "lost"
        taken.check()
        taken.release()
    finally:
        holder.end()


def test_a_killed_process_of_this_machine_loses_it_at_once(tmp_path: Path) -> None:
    holder = Holder(tmp_path, expiry=1_000)
    assert Lease.take(tmp_path, LeaseObserver()) is None
    holder.end()
    taken = Lease.take(tmp_path, LeaseObserver())
    assert taken is not None
    taken.release()


def test_clocks_of_two_machines_are_not_compared(tmp_path: Path) -> None:
    """A holder elsewhere, whose clock is years off, keeps its lease for as long as it promised."""
    (tmp_path / "0001").mkdir()
    about = {"expiry": 0.5, "since": "1999-01-01T00:00:00+00:00", "machine": "elsewhere", "pid": 1, "start": "1"}
    (tmp_path / "0001" / "lease.json").write_text(json.dumps(about))
    began = time.monotonic()
    taken = take_within(tmp_path, 10.0)
    assert taken is not None and time.monotonic() - began > 0.5
    taken.release()


def interrupt(monkeypatch: pytest.MonkeyPatch, store: Path) -> Path:
    """Interrupt a sweep after its first task and return its cohort."""
    save = Claim.save

    def save_then_stop(self: Claim, snapshot: Snapshot) -> None:
        save(self, snapshot)
        if snapshot.finished == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Claim, "save", save_then_stop)
        sweep(store)
    (cohort,) = Store.open(store).cohorts()
    return cohort.path


def sweep(store: Path) -> glocal.Runs:
    return glocal.sweep("rotated-digits", ["er"], [0.1, 0.2], [1], store=store, **QUICK)


def assert_same(one: glocal.Runs, other: glocal.Runs) -> None:
    for a, b in zip(one, other, strict=True):
        for name, array in a.arrays.items():
            np.testing.assert_array_equal(array, b.arrays[name], err_msg=name)
        for task in range(3):
            for name, tensor in a.state(task).items():
                np.testing.assert_array_equal(tensor, b.state(task)[name], err_msg=name)


def test_a_late_writer_changes_nothing_of_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that was stopped between the check of its lease and its writing."""
    whole = sweep(tmp_path / "whole")
    interrupt(monkeypatch, tmp_path / "store")
    late_store, store = Store.open(tmp_path / "store"), Store.open(tmp_path / "store")
    late = late_store.take(late_store.cohorts()[0])
    assert late is not None
    snapshot = late.load(CPU)
    assert snapshot is not None
    monkeypatch.setattr(late.lease, "about", late.lease.about | {"released": True})  # as if it had expired
    late.lease.note()
    successor = store.take(store.cohorts()[0])
    assert successor is not None and successor.load(CPU) is not None
    successor.save(snapshot)
    with pytest.raises(LeaseLost):
        late.save(snapshot)
    for tensor in snapshot.state.params.values():
        tensor.zero_()
    monkeypatch.setattr(late.lease, "check", lambda: None)
    late.save(snapshot)
    late.leave()
    successor.leave()
    assert_same(whole, sweep(tmp_path / "store"))


def test_a_cohort_that_an_older_version_was_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its checkpoint and its parameters in the cohort's folder, and a lock."""
    whole = sweep(tmp_path / "whole")
    cohort = interrupt(monkeypatch, tmp_path / "store")
    for path in (cohort / "0001").glob("*.safetensors"):
        tensors, metadata = files.read_tensors(path)
        if "about" in metadata:
            about = json.loads(metadata["about"])
            assert len(about.pop("kept")) == 2
            metadata = {"about": json.dumps(about)}
        files.write_tensors(cohort / path.name, tensors, metadata)
    files.remove_directory(cohort / "0001")
    (cohort / "lock").touch()
    assert_same(whole, sweep(tmp_path / "store"))
    assert not list(cohort.parent.glob("[!.]*"))
