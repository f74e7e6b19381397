"""`glocal plot`: figures of the runs of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from glocal.cli.common import StorePath


@dataclass(frozen=True)
class Plot:
    """Draw a figure from the runs of a store.

    Kinds: forgetting, accuracy and distance against the learning rate; matrix (accuracy on every task after every
    task); loss (the objective over epochs); tradeoff (accuracy against forgetting).
    For example: glocal plot runs --kind forgetting -o forgetting.png
    """

    store: StorePath = Path("runs")
    """The store to read."""
    kind: str = "forgetting"
    """Name of the figure."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")] = None
    """File to write: .png, .pdf or .svg (default: KIND.png)."""

    def __call__(self) -> None:
        from glocal.sweeps.sweep import load

        path = self.output or Path(f"{self.kind}.png")
        print(f"Wrote {load(self.store).plot(self.kind, path)}")
