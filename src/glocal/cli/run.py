"""`glocal run`: one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glocal.cli.common import (
    AlgorithmName,
    ChallengeName,
    Count,
    Flag,
    Name,
    Number,
    PathName,
    Texts,
    parse_options,
    with_options,
)


@dataclass(frozen=True)
class Run:
    """Train one run and show what it learnt and forgot.

    For example: glocal run rotated-digits ewc --lr 0.1 --seed 11 --options penalty=10 fisher=exact
    """

    challenge: ChallengeName
    """A name from `glocal list challenges`, or path.py:function for your own."""
    algorithm: AlgorithmName
    """A name from `glocal list algorithms`, or path.py:Name for your own."""
    lr: float = 0.1
    """Learning rate."""
    seed: int = 11
    """Seed of the initialisation, the order of the data and all other draws."""
    options: Texts = ()
    """The algorithm's options as NAME=VALUE."""
    network: str = "mlp"
    """A name from `glocal list networks`, or path.py:function for your own."""
    setting: Name = None
    """task or class: which accuracy of a split challenge is reported; the challenge's own unless given."""
    tasks: Count = None
    """Stop after so many tasks."""
    epochs: Count = None
    """Passes over each task; the challenge's own number unless given."""
    batch_size: Count = None
    """Examples in a batch; the challenge's own number unless given."""
    store: Path = Path("runs")
    """Where runs are kept."""
    train_eval: int = 2_000
    """Measure training loss and accuracy on at most so many examples of each task."""
    data: PathName = None
    """A folder with data sets, looked at first."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "fp32"
    """fp32, tf32 or bf16: how exactly the network multiplies (bf16: GPUs are far faster, CPUs slower)."""
    keep_parameters: Flag = False
    """Keep the parameters after every task."""
    monitor: Number = None
    """An ε: watch for the step at which training leaves an old task's ε-region, where local approximations end."""
    monitor_by: Name = None
    """Whose region: diagonal or kronecker, of expansions, or own, of the algorithm's own approximation (diagonal,
    but own for networks that are split among tasks, unless given)."""
    monitor_every: Count = None
    """Look after every N-th epoch (so seldom that it costs less than 5 % of the time, unless given)."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.cli.matrix import accuracy_matrix
        from glocal.report.progress import Bars
        from glocal.sweeps.sweep import sweep

        options = parse_options(self.options, [self.algorithm])
        runs = sweep(
            self.challenge,
            with_options([self.algorithm], options),
            [self.lr],
            [self.seed],
            network=self.network,
            setting=self.setting,
            tasks=self.tasks,
            epochs=self.epochs,
            batch_size=self.batch_size,
            train_eval=self.train_eval,
            store=self.store,
            data=self.data,
            device=self.device,
            precision=self.precision,
            keep_parameters=self.keep_parameters,
            monitor=self.monitor,
            monitor_by=self.monitor_by,
            monitor_every=self.monitor_every,
            progress=Bars(),
        )
        console = Console()
        for run in runs:
            console.print(accuracy_matrix(run))
            for note in run.info["notes"]:
                console.print(f"Note: {note}")
            if self.monitor is not None and not any("monitored" in note for note in run.info["notes"]):
                console.print("Note: it was in the store already, and was not monitored; give another --store")
            console.print(f"Kept in {run.path}")
