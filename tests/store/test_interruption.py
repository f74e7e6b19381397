"""Ctrl-C ends a sweep with a sentence and keeps its checkpoint; `tests/faults` sends other signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

SWEEP = ["--algorithms", "er", "agem", "--lrs", "0.05", "0.2", "--seeds", "1", "2", "--tasks", "3", "--epochs", "1"]


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-m", "glocal", "sweep", "rotated-digits", *SWEEP, "--store", str(store)]
    # A shell that starts the tests in the background lets all of its processes ignore Ctrl-C.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    while process.poll() is None and not list(store.glob("cohorts/[!.]*/*/checkpoint.safetensors")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("glocal: interrupted.") and "same command again" in errors
    assert list(store.glob("cohorts/[!.]*/*/checkpoint.safetensors")), "the checkpoint is kept"
