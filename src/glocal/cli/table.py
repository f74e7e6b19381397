"""`glocal table`: accuracy and forgetting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glocal.cli.common import StorePath


@dataclass(frozen=True)
class Table:
    """Show a store's runs in the layout of the paper's Table 1: accuracy and forgetting over seeds."""

    store: StorePath = Path("runs")
    """The store to read."""
    format: Literal["rich", "json", "csv", "latex", "markdown"] = "rich"
    """How to write the table."""
    forgetting: Literal["t-1", "t"] = "t-1"
    """Average forgetting over all tasks but the last, as the published table does, or over all."""
    measure: Literal["accuracy", "loss"] = "accuracy"
    """Measure forgetting by test accuracy, in points, or by test loss."""
    scope: Literal["class", "task"] | None = None
    """Accuracy among all classes or among the task's own; the challenge's setting decides unless given."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.errors import GlocalError
        from glocal.report.table import render, rows
        from glocal.sweeps.sweep import load

        runs = load(self.store)
        if not runs and self.format == "rich":
            raise GlocalError(f"the store '{self.store}' holds no finished run yet.")
        made = render(rows(runs, forgetting=self.forgetting, scope=self.scope, measure=self.measure), self.format)
        if isinstance(made, str):
            print(made.rstrip())
        else:
            Console().print(made)
