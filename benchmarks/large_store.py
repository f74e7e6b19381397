"""Seconds that commands take on a store of 10,000 finished runs, on a CPU.

    python -m benchmarks.large_store [--runs N]        writes results/large-store-cpu.json

One run of each algorithm is trained; its measurements, with a little noise, are written under the names of all runs of
a sweep. Every command is timed from the start of its process to its end: without an index (`glocal.store.index`), with
one, and on a store with the trained runs alone, where it is all start-up, most of it imports.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import RESULTS, save
from glocal.store import index
from glocal.store.store import Store
from glocal.sweeps.sweep import prepare, sweep

GOAL = 5.0
ROUNDS = 3
CHALLENGE, ALGORITHMS, SEEDS = "rotated-digits", ("sgd", "er", "agem", "ewc", "ogd"), range(50)
TRAINED_LR = 0.05
OPTIONS: dict[str, Any] = {"tasks": 10, "epochs": 1, "train_eval": 500, "device": "cpu"}


def make_stores(large: Path, small: Path, lrs: Sequence[float]) -> None:
    """Write a store with all runs of a sweep, and one with those that were trained."""
    trained = {
        run.config["algorithm"]["name"]: run
        for run in sweep(CHALLENGE, ALGORITHMS, [TRAINED_LR], [0], **OPTIONS, store=small)
    }
    requests, generator = prepare(CHALLENGE, ALGORITHMS, lrs, SEEDS, **OPTIONS, store=large).requests, torch.Generator()
    with mock.patch("os.fsync"):  # nothing here must survive a power failure
        for request in track(requests.values(), "Writing", transient=True):
            run = trained[request.config.algorithm["name"]]
            arrays = {name: torch.from_numpy(array) for name, array in run.arrays.items()}
            noise = 1 + 0.01 * torch.rand(1, generator=generator).item()
            noisy = {name: array * noise if array.is_floating_point() else array for name, array in arrays.items()}
            Store(large).write(request.config, noisy, run.info, {})


def commands(folder: Path, lrs: Iterable[float], seeds: Iterable[int]) -> dict[str, list[str]]:
    """Return the arguments of Python for every command; the store comes last."""
    values = {"--algorithms": ALGORITHMS, "--lrs": lrs, "--seeds": seeds}
    flags = [str(part) for flag, arguments in values.items() for part in (flag, *arguments)]
    flags += [str(part) for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", value)]
    return {
        "status": ["-m", "glocal", "status"],
        "table": ["-m", "glocal", "table"],
        "plot": ["-m", "glocal", "plot", "--kind", "forgetting", "-o", str(folder / "figure.png")],
        "glocal.load": ["-c", "import glocal, sys; glocal.load(sys.argv[1])"],
        "sweep, again": ["-m", "glocal", "sweep", CHALLENGE, *flags, "--store"],
    }


def time_command(arguments: Sequence[str], store: Path) -> dict[str, float]:
    """Run Python; return its elapsed and its CPU seconds. Modules are compiled once, as those of a package are."""
    compiled = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(store.parent / "compiled")}
    start, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *arguments, str(store)], check=True, capture_output=True, env=compiled)
    elapsed, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": elapsed, "cpu_seconds": cpu}


def measure(folder: Path, lrs: Sequence[float]) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Time every command on both stores in a folder."""
    large, small = folder / "large", folder / "small"
    make_stores(large, small, lrs)
    time.sleep(index.SETTLED_SECONDS)
    shorter = commands(folder, [TRAINED_LR], [0])
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, arguments in track(commands(folder, lrs, SEEDS).items(), "Timing", transient=True):
        time_command(shorter[name], small)  # compiles modules
        (large / index.FILE).unlink(missing_ok=True)
        results[name] = {
            "without_index": [time_command(arguments, large)],
            "with_index": [time_command(arguments, large) for _ in range(ROUNDS)],
            "start_up": [time_command(shorter[name], small) for _ in range(ROUNDS)],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="runs in the store, a multiple of 250")
    runs = parser.parse_args().runs
    lrs = [round(1.1**-i, 6) for i in range(runs // (len(ALGORITHMS) * len(SEEDS)))]
    with TemporaryDirectory() as folder:
        results = measure(Path(folder), lrs)
    table = Table("command", "without index", "with index", "CPU seconds", "start-up", title=f"Seconds, {runs} runs")
    for name, measurements in results.items():
        first, repeat, start = (
            median(x["seconds"] for x in measurements[k]) for k in ("without_index", "with_index", "start_up")
        )
        cpu = median(x["cpu_seconds"] for x in measurements["with_index"])
        color = "green" if repeat < GOAL else "red"
        table.add_row(name, f"{first:.1f}", f"[{color}]{repeat:.1f}[/]", f"{cpu:.1f}", f"{start:.1f}")
    Console().print(table)
    if runs == 10_000:
        save(RESULTS / "large-store-cpu.json", {"goal_s": GOAL, "runs": runs, "commands": results})


if __name__ == "__main__":
    main()
