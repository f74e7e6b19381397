"""`glocal demo`: the main job on embedded data."""

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
    """Local against global in a minute: sgd, er, agem and ewc on rotated digits, five learning rates, three seeds.

    Trains 60 networks on the embedded digits, shows a table in the layout of the paper's Table 1, draws forgetting and
    distance against the learning rate, and says in three sentences what the numbers show.
    """

    out: Path = Path("demo")
    """The folder for figures and runs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.report.progress import Bars
        from glocal.report.sentences import what_it_shows
        from glocal.report.table import render, rows
        from glocal.sweeps.sweep import sweep

        begun = time.perf_counter()
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
        console.print(render(rows(runs), "rich"))
        figures = [runs.plot(kind, self.out / f"{kind}.png") for kind in ("forgetting", "distance")]
        for sentence in what_it_shows(runs):
            console.print(f"• {sentence}")
        console.print(f"\nFigures: {', '.join(str(f) for f in figures)}. Runs: {self.out / 'runs'}.")
        console.print(f"{len(runs)} runs in {time.perf_counter() - begun:.0f} s.")
