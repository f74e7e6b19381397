"""A sweep that is killed and started again gives the bits of one that was never interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from glocal.store.store import Store

SWEEP = ["--algorithms", "er", "agem", "--lrs", "0.05", "0.2", "--seeds", "1", "2", "--tasks", "3", "--epochs", "1"]
RUNS = 2 * 2 * 2


def start(store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "glocal", "sweep", "rotated-digits", *SWEEP, "--store", str(store)]
    # A shell that starts the tests in the background lets all of its processes ignore Ctrl-C.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=listen)


def finish(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def wait_for_a_checkpoint(store: Path, process: subprocess.Popen[str]) -> None:
    """Until a cohort has reached its first task boundary: from then on there is something to lose."""
    known = {p: p.stat().st_mtime_ns for p in store.glob("cohorts/[!.]*/*/checkpoint.safetensors")}
    while process.poll() is None:
        if any(known.get(p) != p.stat().st_mtime_ns for p in store.glob("cohorts/[!.]*/*/checkpoint.safetensors")):
            return
        time.sleep(0.02)


def same_results(one: Store, other: Store) -> None:
    ours, theirs = ({r.path.name: r for r in s.runs() if r.path} for s in (one, other))
    assert ours.keys() == theirs.keys() and len(ours) == RUNS
    for name, run in ours.items():
        for key, array in run.arrays.items():
            np.testing.assert_array_equal(array, theirs[name].arrays[key], err_msg=f"{run.algorithm} {key}")


def test_killed_at_random_moments_and_two_at_a_time(tmp_path: Path) -> None:
    began = time.monotonic()
    finish(start(tmp_path / "whole"))
    length = time.monotonic() - began
    whole = Store.open(tmp_path / "whole")

    killed = tmp_path / "killed"
    chance = random.Random(int(os.environ.get("GLOCAL_TEST_SEED", time.time())))
    interruptions = 0
    finished: dict[str, int] = {}
    for attempt in range(4):
        process = start(killed)
        wait_for_a_checkpoint(killed, process)
        time.sleep(chance.uniform(0, 0.2) * length if attempt else 0)  # once surely in the middle
        interruptions += process.poll() is None
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        before = dict(finished)
        finished = {p.name: p.stat().st_ino for p in (killed / "runs").glob("[!.]*")}
        assert before.items() <= finished.items(), "a finished run was written again"
    assert interruptions > 0, "the sweep was over before any signal came"
    finish(start(killed))
    assert finished.items() <= {p.name: p.stat().st_ino for p in (killed / "runs").glob("[!.]*")}.items()
    same_results(whole, Store.open(killed))
    assert not list((killed / "cohorts").glob("[!.]*"))

    shared = tmp_path / "shared"
    pair = [start(shared), start(shared)]
    for process in pair:
        finish(process)
    same_results(whole, Store.open(shared))
    assert not list((shared / "cohorts").glob("[!.]*"))


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    process = start(store)
    wait_for_a_checkpoint(store, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("glocal: interrupted.") and "same command again" in errors
    assert list(store.glob("cohorts/[!.]*/*/checkpoint.safetensors")), "the checkpoint is kept"
