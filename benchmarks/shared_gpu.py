"""Does it pay to let several workers share a GPU? The same cohorts, trained by one, two and four processes.

    python -m benchmarks.shared_gpu [--network mlp|resnet18] [--workers 1 2 4] [--device cpu --tiny]

Writes results/shared-gpu-NETWORK.json. Every worker has its own CUDA context, so their kernels take turns on the GPU:
more workers gain only what one leaves idle, and each of them starts up and records its graphs. The cohorts differ in an
option that is no number, the slots of replay, so that they cannot be trained as one. Times are those of whole sweeps,
start-up included.
"""

from __future__ import annotations

import argparse
import time
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

import glocal
from benchmarks.common import RESULTS, choose_device, save

COHORTS = 4
SWEEPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mlp": ("rotated-digits", 25, {"tasks": 4, "epochs": 10, "batch_size": 10, "precision": "fp32"}),
    "resnet18": ("rotated-digits", 5, {"tasks": 2, "epochs": 4, "batch_size": 32, "precision": "bf16"}),
}
TINY: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500, "precision": "fp32"}


def seconds(challenge: str, seeds: int, workers: int, options: dict[str, Any]) -> float:
    """Train all cohorts with so many workers and return the wall-clock time."""
    algorithms = [("er", {"slots": 100 + 100 * i}) for i in range(COHORTS)]
    with TemporaryDirectory() as store:
        started = time.perf_counter()
        runs = glocal.sweep(challenge, algorithms, [0.01], range(seeds), store=store, workers=workers, **options)
        wall = time.perf_counter() - started
    assert len(runs) == COHORTS * seeds
    return wall


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--network", choices=SWEEPS, default="mlp")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tiny", action="store_true", help="two tasks in large batches, to try the benchmark")
    args = parser.parse_args()
    device = choose_device(args.device)
    challenge, seeds, options = SWEEPS[args.network]
    options = {**options, **(TINY if args.tiny else {}), "network": args.network, "device": args.device}
    table, rows = Table("workers", "seconds", "times one worker"), []
    for workers in args.workers:
        wall = seconds(challenge, 2 if args.tiny else seeds, workers, options)
        rows.append({"workers": workers, "seconds": round(wall, 2)})
        table.add_row(str(workers), f"{wall:.1f}", f"{rows[0]['seconds'] / wall:.2f}")
    Console().print(table)
    if not args.tiny:
        content = {"challenge": challenge, "cohorts": COHORTS, "runs per cohort": seeds, "rows": rows}
        save(RESULTS / f"shared-gpu-{args.network}.json", content, device)


if __name__ == "__main__":
    main()
