"""`glocal table`: accuracy, forgetting and the paper's test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glocal.cli.common import StorePath


@dataclass(frozen=True)
class Table:
    """Show a store's runs as the paper's Table 1, accuracy and forgetting over seeds, and the paper's test."""

    store: StorePath = Path("runs")
    """The store to read."""
    format: Literal["rich", "json", "csv", "latex", "markdown"] = "rich"
    """Output format."""
    forgetting: Literal["t-1", "t"] = "t-1"
    """Average forgetting over all tasks but the last, as the published table does, or over all tasks."""
    measure: Literal["accuracy", "loss"] = "accuracy"
    """Measure forgetting by test accuracy, in points, or by test loss."""
    scope: Literal["class", "task"] | None = None
    """Accuracy among all classes or among the task's classes; by default that of the challenge's setting."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.errors import GlocalError
        from glocal.report.summary import render
        from glocal.sweeps.sweep import load

        runs = load(self.store)
        if not runs and self.format == "rich":
            raise GlocalError(f"the store '{self.store}' has no finished run yet.")
        output = render(runs, self.format, forgetting=self.forgetting, scope=self.scope, measure=self.measure)
        if isinstance(output, str):
            print(output.rstrip())
        else:
            Console().print(output)
