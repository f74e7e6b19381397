"""`glocal demo`: a sweep on embedded data, its table, its figures and the paper's test."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

CHALLENGE = "rotated-digits"
ALGORITHMS = ("sgd", "er", "agem", "ewc")
LRS = (0.005, 0.02, 0.05, 0.2, 0.5)
SEEDS = (11, 13, 33)
TASKS, EPOCHS = 5, 4
TRAIN_EVAL = 500


@dataclass(frozen=True)
class Demo:
    """Compare local and global algorithms in a minute: sgd, er, agem and ewc, five learning rates, three seeds.

    Trains 60 networks on the embedded digits, prints a table like the paper's Table 1 and the paper's test of each
    algorithm, and plots forgetting and distance against the learning rate.
    """

    out: Path = Path("demo")
    """Folder for figures and runs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.report.progress import Bars
        from glocal.report.summary import render
        from glocal.sweeps.sweep import sweep

        started = time.perf_counter()
        runs = sweep(
            CHALLENGE,
            ALGORITHMS,
            LRS,
            SEEDS,
            tasks=TASKS,
            epochs=EPOCHS,
            train_eval=TRAIN_EVAL,
            store=self.out / "runs",
            device=self.device,
            progress=Bars(),
        )
        console = Console()
        console.print(render(runs, "rich"))
        figures = [runs.plot(kind, self.out / f"{kind}.png") for kind in ("forgetting", "distance")]
        console.print(f"\nFigures: {', '.join(str(f) for f in figures)}. Runs: {self.out / 'runs'}.")
        console.print(f"{len(runs)} runs in {time.perf_counter() - started:.0f} s.")
