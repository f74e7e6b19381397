"""The Rotated-MNIST column of the paper's Table 1 on one GPU, from an empty store: 5 algorithms × 5 rates × 5 seeds.

Every algorithm trains in a process of its own, all of them side by side; where there is CUDA's MPS their kernels run
side by side too. The clock begins before the first process starts and ends after the last one has written its runs:
interpreters, data, training, evaluation of all tasks after each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.results import machine
from glocal import __version__
from glocal.paper.table1 import COLUMNS, DEMO, Column
from glocal.sweeps.sweep import load

GOAL = 180.0
REFERENCE = 14.5e-3
"""Seconds of a step of a run by the paper's published code, on the same GPU."""


def rows(column: Column) -> list[str]:
    """The column's algorithms in the paper's table."""
    return [row.algorithm for row in column.rows if row.published]


def train(column: Column, folder: Path, options: list[str]) -> float:
    """All rows, a process each; the seconds until the last one is done."""
    begun = time.perf_counter()
    jobs = {}
    for name in rows(column):
        command = [sys.executable, "-m", "benchmarks.table1_runs", "--algorithms", name, *options]
        command += ["--store", str(folder / f"store-{name}")]
        with (folder / f"{name}.log").open("w") as log:
            jobs[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for name, job in jobs.items():
            if job.wait():
                raise SystemExit(f"{name}: {(folder / f'{name}.log').read_text()[-2000:]}")
    finally:
        for job in jobs.values():
            job.kill()
    return time.perf_counter() - begun


@contextmanager
def side_by_side() -> Iterator[bool]:
    """Whether kernels of several processes run side by side, by CUDA's MPS: served already, or now, until this ends."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield False
        return

    def told(*how: str, what: str = "") -> bool:
        return subprocess.run([control, *how], input=what, capture_output=True, text=True).returncode == 0

    served = told(what="get_server_list\n")
    started = not served and told("-d")
    try:
        yield served or started
    finally:
        if started:
            told(what="quit\n")


def document(column: Column, folder: Path, seconds: float, mps: bool, device: str) -> dict[str, Any]:
    found = [run for store in sorted(folder.glob("store-*")) for run in load(store)]
    steps = len(found) * column.steps
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | gpu,
        "versions": {"torch": torch.__version__, "glocal": __version__},
        "mps": mps,
        "challenge": column.challenge,
        "algorithms": rows(column),
        "runs": len(found),
        "steps": steps,
        "seconds": seconds,
        "goal_seconds": GOAL,
        "seconds_of_each": {
            n: sum(r.info["cost"]["seconds"] for r in found if r.config["algorithm"]["name"] == n) for n in rows(column)
        },
        "times_as_fast_as_the_published_code": REFERENCE * steps / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="a folder with data sets")
    parser.add_argument("--demo", action="store_true", help="try it out on a CPU: a small column, nothing is filed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "column-gpu.json")
    given = parser.parse_args()
    device, column = ("cpu", DEMO) if given.demo else ("cuda", COLUMNS["rotated-mnist"])
    options = ["--device", device, "--challenge", column.challenge]
    options += [] if given.data is None else ["--data", str(given.data)]
    alone: AbstractContextManager[bool] = nullcontext(False)
    with tempfile.TemporaryDirectory() as folder:
        with alone if given.demo else side_by_side() as mps:
            seconds = train(column, Path(folder), options)
        made = document(column, Path(folder), seconds, mps, device)  # after MPS has ended, which waits for its clients
    Console().print_json(json.dumps(made))
    if not given.demo:
        given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
