"""One run's accuracies as a table: a row for every task learnt, a column for every task tested."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glocal import metrics
from glocal.store.run import Run

WIDEST = 12


def accuracy_matrix(run: Run) -> RenderableType:
    matrix = metrics.accuracy_of(run)
    shown = range(run.tasks) if run.tasks <= WIDEST else [*range(WIDEST - 1), run.tasks - 1]
    title = f"{run.algorithm} ({run.locality}) on {run.challenge}, lr {run.lr:g}, seed {run.seed}: test accuracy, %"
    table = Table()
    table.add_column("after task", justify="right")
    for task in shown:
        table.add_column(f"{task + 1}", justify="right")
    for t in range(1, run.tasks + 1):
        cells = [_cell(matrix[t, o], own=o == t - 1, future=o >= t) for o in shown]
        table.add_row(str(t), *cells)
    if run.diverged is not None:
        return Group(
            Text(title, style="bold"),
            table,
            Text(f"The run diverged at step {run.diverged}: its objective was no longer finite."),
        )
    accuracy = metrics.average_accuracy(matrix)
    forgetting = metrics.average_forgetting(matrix, over="t-1")
    lost = "" if math.isnan(forgetting) else f"; forgetting, over all tasks but the last, {100 * forgetting:.2f}"
    return Group(Text(title, style="bold"), table, Text(f"Average accuracy {100 * accuracy:.2f}{lost}."))


def _cell(value: float, own: bool, future: bool) -> Text:
    if math.isnan(value):
        return Text("–")
    return Text(f"{100 * value:.1f}", style="bold" if own else "dim" if future else "")
