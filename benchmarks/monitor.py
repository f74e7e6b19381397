"""Cost of the monitor: whole trainings with a monitor at its default rate, compared with the same without one.

    python -m benchmarks.monitor [--device cpu|cuda] [--data DIR] [--rounds N] [--tiny]

It writes results/monitor-DEVICE.json. On a CPU all cases train on rotated digits, on a GPU on Rotated-MNIST and Split
CIFAR-10. Trainings with and without a monitor alternate in one process; tasks and evaluation are included. The first
round warms up. What torch imports once per process for a monitor is reported separately.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks import setting
from benchmarks.common import RESULTS, Quartiles, choose_device, save, timed
from glocal.algorithms import SGD
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import train
from glocal.lens.monitor import Monitor
from glocal.networks.mlp import mlp
from glocal.networks.resnet import resnet18
from glocal.precision import Precision
from glocal.sweeps import resolve

NUM_ROUNDS, GOAL_PERCENT, EPSILON = 5, 5.0, 0.1


def convolutional(shape: Sequence[int], outputs: int) -> nn.Module:
    channels, height, width = shape
    features = 32 * (height // 4) * (width // 4)
    layers = nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(features, outputs))


NETWORKS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": mlp,
    "convolutions": convolutional,
    "resnet18": resnet18,
}


@dataclass(frozen=True)
class Case:
    """A cohort trained with plain SGD; a task of rotated digits has 4,000 examples."""

    network: str
    runs: int
    tasks: int
    epochs: int
    challenge: str = "rotated-digits"
    seeds: int = 1
    batch_size: int = 64
    precision: Precision = "fp32"

    @property
    def name(self) -> str:
        runs, epochs = f"{self.runs} run{'s' * (self.runs > 1)}", f"{self.epochs} epoch{'s' * (self.epochs > 1)}"
        prefix = self.network if self.challenge == "rotated-digits" else self.challenge
        return f"{prefix}, {runs}, {self.tasks} tasks, {epochs}"

    def cohort(self, device: torch.device, data: Path | None) -> Cohort:
        lrs = [0.01 + 0.001 * run for run in range(self.runs // self.seeds)]
        return Cohort(
            resolve.challenge(self.challenge, data=data, tasks=self.tasks).value,
            NETWORKS[self.network],
            tuple(Member(seed, lr, SGD()) for seed in range(self.seeds) for lr in lrs),
            self.epochs,
            self.batch_size,
            device=device,
            precision=self.precision,
        )

    def seconds(self, device: torch.device, data: Path | None, monitored: bool) -> float:
        """Train once and return the seconds that it takes."""
        cohort = self.cohort(device, data)

        def run() -> None:
            for _ in train(cohort, watch=Monitor(cohort, EPSILON) if monitored else None):
                pass

        return timed(run, device)[0]


CPU_CASES = (
    *(Case("mlp", 1, 20, 5), Case("mlp", 10, 5, 5), Case("mlp", 1, 5, 5), Case("mlp", 1, 5, 1)),
    *(Case("convolutions", 1, 5, 5), Case("convolutions", 1, 5, 1)),
)
GPU_CASES = (
    *(Case("mlp", 1, 20, 5, "rotated-mnist", 1, 128), Case("mlp", 25, 20, 5, "rotated-mnist", 5, 128)),
    *(Case("mlp", 1, 5, 1, "rotated-mnist", 1, 128), Case("resnet18", 5, 3, 1, "split-cifar10", 1, 32, "bf16")),
)
TINY_CASES = Case("mlp", 1, 2, 1), Case("convolutions", 1, 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--data", type=Path, help="folder with data sets, for the GPU cases")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--threads", type=int, default=setting.THREADS)
    parser.add_argument("--tiny", action="store_true", help="run two cases with two tasks; write no file")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds} is too small: quartiles need at least 2 rounds.")
    torch.set_num_threads(args.threads)
    console, device = Console(), choose_device(args.device)
    cases: Sequence[Case] = TINY_CASES if args.tiny else GPU_CASES if device.type == "cuda" else CPU_CASES
    shortest = min(cases, key=lambda case: case.tasks * case.epochs)
    _, first, second = (shortest.seconds(device, args.data, monitored) for monitored in (False, True, True))
    import_seconds = first - second
    times: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for number in track(range(args.rounds + 1), "rounds", console=console, transient=True):
        for case in cases:
            monitored_first = number % 2 == 0
            pair = {m: case.seconds(device, args.data, m) for m in (monitored_first, not monitored_first)}
            if number:  # the first round warms up
                times[case].append((pair[False], pair[True]))
    table = Table("", "s without", "s with", "overhead", title=f"A monitor at its default rate on {device}")
    results: dict[str, Any] = {}
    for case, rounds in times.items():
        overhead = Quartiles.of([100 * (monitored / plain - 1) for plain, monitored in rounds])
        plain, monitored = (median(pair[i] for pair in rounds) for i in range(2))
        color = "green" if overhead.median < GOAL_PERCENT else "red"
        quartiles = f"[dim]{overhead.q1:.1f}–{overhead.q3:.1f}[/]"
        percent = f"[{color}]{overhead.median:.1f} %[/] {quartiles} (< {GOAL_PERCENT:g} %)"
        table.add_row(case.name, f"{plain:.2f}", f"{monitored:.2f}", percent)
        results[case.name] = {"overhead_percent": asdict(overhead), "rounds_s": rounds}
    console.print(table)
    console.print(f"Medians over {args.rounds} rounds; dim: quartiles. Once per process: {import_seconds:.1f} s.")
    if not args.tiny:
        content = {"once_per_process_s": import_seconds, "threads": args.threads, "cases": results}
        save(RESULTS / f"monitor-{device.type}.json", content, device)


if __name__ == "__main__":
    main()
