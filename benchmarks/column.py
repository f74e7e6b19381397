"""Duration of the Rotated-MNIST column of the paper's Table 1 on one GPU: 5 algorithms × 5 learning rates × 5 seeds.

    python -m benchmarks.column --data DIR        writes results/column-gpu.json
    python -m benchmarks.column --demo            a small column on a CPU; writes no file

Every algorithm trains in its own process with an empty store, all at the same time; with CUDA's MPS their kernels run
concurrently. The time covers everything from the start of the first process to the last stored run: imports, loading
the data, training, and the evaluation of all tasks after each task.
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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import RESULTS, save
from glocal.paper.table1 import COLUMNS, DEMO, Column
from glocal.store.store import load

GOAL_SECONDS = 130.0
REFERENCE_SECONDS = 14.5e-3
"""Time of one step of one run with the paper's published code on the same GPU."""


def published_rows(column: Column) -> list[str]:
    """Return the algorithms of the column that the paper's table has."""
    return [row.algorithm for row in column.rows if row.published]


def train(column: Column, folder: Path, options: list[str]) -> float:
    """Train every row in its own process; return the seconds until the last one has finished."""
    start = time.perf_counter()
    processes = {}
    for name in published_rows(column):
        command = [sys.executable, "-m", "benchmarks.table1_runs", "--algorithms", name, *options]
        command += ["--store", str(folder / f"store-{name}")]
        with (folder / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for name, process in processes.items():
            if process.wait():
                raise SystemExit(f"{name} failed: {(folder / f'{name}.log').read_text()[-2000:]}")
    finally:
        for process in processes.values():
            process.kill()
    return time.perf_counter() - start


@contextmanager
def mps() -> Iterator[bool]:
    """Start CUDA's MPS unless it is running, and stop it at the end; yield whether it is available."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield False
        return

    def send(*arguments: str, command: str = "") -> bool:
        return subprocess.run([control, *arguments], input=command, capture_output=True, text=True).returncode == 0

    running = send(command="get_server_list\n")
    started = not running and send("-d")
    try:
        yield running or started
    finally:
        if started:
            send(command="quit\n")


def summarize(column: Column, folder: Path, seconds: float, with_mps: bool) -> dict[str, Any]:
    runs = [run for store in sorted(folder.glob("store-*")) for run in load(store)]
    steps = len(runs) * column.steps
    per_algorithm = dict.fromkeys(published_rows(column), 0.0)
    for run in runs:
        per_algorithm[run.config["algorithm"]["name"]] += run.info["cost"]["seconds"]
    return {
        "mps": with_mps,
        "challenge": column.challenge,
        "algorithms": published_rows(column),
        "runs": len(runs),
        "steps": steps,
        "seconds": seconds,
        "goal_seconds": GOAL_SECONDS,
        "seconds_per_algorithm": per_algorithm,
        "speedup_over_published_code": REFERENCE_SECONDS * steps / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with data sets")
    parser.add_argument("--demo", action="store_true", help="train a small column on a CPU; write no file")
    parser.add_argument("--out", type=Path, default=RESULTS / "column-gpu.json")
    args = parser.parse_args()
    device, column = ("cpu", DEMO) if args.demo else ("cuda", COLUMNS["rotated-mnist"])
    options = ["--device", device, "--challenge", column.challenge]
    options += [] if args.data is None else ["--data", str(args.data)]
    with tempfile.TemporaryDirectory() as folder:
        with nullcontext(False) if args.demo else mps() as with_mps:
            seconds = train(column, Path(folder), options)
        summary = summarize(column, Path(folder), seconds, with_mps)  # after MPS has ended, which waits for its clients
    Console().print_json(json.dumps(summary))
    if not args.demo:
        save(args.out, summary, torch.device(device))


if __name__ == "__main__":
    main()
