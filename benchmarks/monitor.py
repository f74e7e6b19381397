"""What it costs to watch a training: whole runs with a monitor at its default rate beside the same runs without.

python -m benchmarks.monitor [--device cpu|cuda] [--data FOLDER] [--rounds N] [--tiny]

On a CPU all is of rotated digits; on a GPU what one is used for comes first.

Both take turns in one process, tasks and evaluation included. The first round warms up: what torch imports once for a
monitor is shown by itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks import setting
from benchmarks.device import chosen
from benchmarks.results import Spread, machine
from glocal import __version__
from glocal.algorithms import SGD
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import train
from glocal.lens.monitor import Monitor
from glocal.networks.mlp import mlp
from glocal.networks.resnet import resnet18
from glocal.precision import Precision
from glocal.sweeps import resolve

ROUNDS, GOAL, EPSILON = 5, 5.0, 0.1


def convolutional(shape: Sequence[int], outputs: int) -> nn.Module:
    channels, height, width = shape
    flat = 32 * (height // 4) * (width // 4)
    layers = nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(flat, outputs))


NETWORKS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": mlp,
    "convolutions": convolutional,
    "resnet18": resnet18,
}


@dataclass(frozen=True)
class Case:
    """Plain SGD; of the digits, 4,000 make a task."""

    network: str
    runs: int
    tasks: int
    epochs: int
    challenge: str = "rotated-digits"
    seeds: int = 1
    batch: int = 64
    precision: Precision = "fp32"

    @property
    def name(self) -> str:
        several = "s" * (self.runs > 1), "s" * (self.epochs > 1)
        size = f"{self.runs} run{several[0]}, {self.tasks} tasks, {self.epochs} epoch{several[1]}"
        return f"{self.network}, {size}" if self.challenge == "rotated-digits" else f"{self.challenge}, {size}"

    def cohort(self, device: torch.device, data: Path | None) -> Cohort:
        rates = [0.01 + 0.001 * run for run in range(self.runs // self.seeds)]
        members = tuple(Member(seed, lr, SGD()) for seed in range(self.seeds) for lr in rates)
        challenge = resolve.challenge(self.challenge, data=data, tasks=self.tasks).value
        return Cohort(
            challenge,
            NETWORKS[self.network],
            members,
            self.epochs,
            self.batch,
            device=device,
            precision=self.precision,
        )

    def seconds(self, device: torch.device, data: Path | None, watched: bool) -> float:
        cohort = self.cohort(device, data)
        begun = time.perf_counter()
        for _ in train(cohort, watch=Monitor(cohort, EPSILON) if watched else None):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun


CASES = (
    *(Case("mlp", 1, 20, 5), Case("mlp", 10, 5, 5), Case("mlp", 1, 5, 5), Case("mlp", 1, 5, 1)),
    *(Case("convolutions", 1, 5, 5), Case("convolutions", 1, 5, 1)),
)
GPU_CASES = (
    *(Case("mlp", 1, 20, 5, "rotated-mnist", 1, 128), Case("mlp", 25, 20, 5, "rotated-mnist", 5, 128)),
    *(Case("mlp", 1, 5, 1, "rotated-mnist", 1, 128), Case("resnet18", 5, 3, 1, "split-cifar10", 1, 32, "bf16")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--data", type=Path, help="a folder with data sets, for a GPU's cases")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=setting.THREADS)
    parser.add_argument("--tiny", action="store_true", help="rehearse with two tasks; write nothing")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console, device = Console(), chosen(given.device)
    if given.rounds < 2:
        parser.error(f"quartiles need 2 rounds or more; --rounds {given.rounds} was given.")
    cases: Sequence[Case] = GPU_CASES if device.type == "cuda" else CASES
    if given.tiny:
        cases = Case("mlp", 1, 2, 1), Case("convolutions", 1, 2, 1)
    shortest = min(cases, key=lambda case: case.tasks * case.epochs)
    _, first_time, again = (shortest.seconds(device, given.data, watched) for watched in (False, True, True))
    once = first_time - again
    times: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for number in track(range(given.rounds + 1), "rounds", console=console, transient=True):
        for case in cases:
            first = number % 2 == 0  # who begins a round changes
            pair = {watched: case.seconds(device, given.data, watched) for watched in (first, not first)}
            if number:
                times[case].append((pair[False], pair[True]))
    table = Table("", "s without", "s with", "more", title=f"A monitor at its default rate, {device}")
    made: dict[str, Any] = {}
    for case, rounds in times.items():
        more = Spread.of([100 * (watched / alone - 1) for alone, watched in rounds])
        alone, watched = (Spread.of([pair[i] for pair in rounds]).middle for i in range(2))
        colour = "green" if more.middle < GOAL else "red"
        told = f"[{colour}]{more.middle:.1f} %[/] [dim]{more.low:.1f}–{more.high:.1f}[/] (< {GOAL:g} %)"
        table.add_row(case.name, f"{alone:.2f}", f"{watched:.2f}", told)
        made[case.name] = {"percent_more": asdict(more), "rounds_s": rounds}
    console.print(table)
    console.print(f"Medians over {given.rounds} rounds; dim: quartiles. Once a process: {once:.1f} s.")
    if not given.tiny:
        found = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "once_s": once}
        found["versions"] = {"torch": torch.__version__, "glocal": __version__}
        if device.type == "cuda":
            found["gpu"] = torch.cuda.get_device_name(device)
        file = Path(__file__).parent / "results" / f"monitor-{device.type}.json"
        file.write_text(json.dumps({**found, "threads": given.threads, "cases": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
