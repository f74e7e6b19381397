"""Results as a table: one row for each (challenge, algorithm, learning rate), in any of five formats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from glocal.errors import unknown
from glocal.metrics import MEASURES, OVER, SCOPES, Measure, Over, Scope
from glocal.report.groups import Group, View, grouped
from glocal.store.run import Run

if TYPE_CHECKING:
    import polars
    from rich.console import RenderableType

Row: TypeAlias = dict[str, Any]

STATISTICS = ("acc", "forgetting", "backward_transfer", "forward_transfer", "learning_accuracy", "distance")
FORMATS = ("rich", "json", "csv", "latex", "markdown")


def rows(
    runs: Iterable[Run], forgetting: Over = "t-1", scope: Scope | None = None, measure: Measure = "accuracy"
) -> list[Row]:
    """One row for each (challenge, algorithm, lr), by challenge, global before local, algorithm, learning rate.

    `<name>_mean` and `<name>_std` (ddof = 0) of acc, forgetting, backward_transfer, forward_transfer and
    learning_accuracy, in percent, and of distance = ‖θ_T − θ_0‖₂, over the seeds that did not diverge; None where
    there is none, or where a number is undefined (forgetting over t − 1 tasks of one). `seeds` counts all of them.
    `memory_bytes` is what a run's algorithm keeps after the last task, `seconds` a run's share of its cohort's time.

    forgetting: averaged over 't-1' or 't' tasks. scope: which accuracy, 'task' or 'class'; the challenge's own setting
    unless given. measure: what forgetting is measured by, 'accuracy' or 'loss' (then in the loss's own unit).
    """
    for kind, given, allowed in (("forgetting", forgetting, OVER), ("measure", measure, MEASURES)):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    if scope is not None and scope not in SCOPES:
        raise unknown("scope", scope, SCOPES)
    return [_row(group, View(forgetting, scope, measure)) for group in grouped(runs)]


def frame(
    runs: Iterable[Run], forgetting: Over = "t-1", scope: Scope | None = None, measure: Measure = "accuracy"
) -> polars.DataFrame:
    """`rows` as a data frame."""
    return _frame(rows(runs, forgetting, scope, measure))


@overload
def render(rows: Sequence[Row], format: Literal["json", "csv", "latex", "markdown"]) -> str: ...
@overload
def render(rows: Sequence[Row], format: str) -> RenderableType: ...
def render(rows: Sequence[Row], format: str) -> RenderableType:
    """Rows as the paper's Table 1 ('rich' for a terminal, 'latex'), for a page ('markdown'), whole ('json', 'csv')."""
    if format == "rich":
        from glocal.report.terminal import TerminalTable

        return TerminalTable(rows)
    if format == "latex":
        from glocal.report.latex import latex

        return latex(rows)
    if format == "markdown":
        from glocal.report.markdown import markdown

        return markdown(rows)
    if format == "json":
        return json.dumps(list(rows), indent=2, allow_nan=False, ensure_ascii=False)
    if format == "csv":
        return _frame(rows).write_csv()
    raise unknown("format", format, FORMATS)


def _row(group: Group, view: View) -> Row:
    row: Row = {
        "challenge": group.challenge,
        "algorithm": group.algorithm,
        "locality": group.locality,
        "lr": group.lr,
        "tasks": group.tasks,
        "seeds": len(group.runs),
        "diverged": len(group.runs) - len(group.finished),
    }
    statistics = group.statistics(view)
    for name in STATISTICS:
        mean, std = statistics[name]
        row[f"{name}_mean"] = mean if math.isfinite(mean) else None
        row[f"{name}_std"] = std if math.isfinite(std) else None
    cost = [run.info["cost"] for run in group.runs]
    return row | {
        "memory_bytes": max(c["memory_bytes"] for c in cost),
        "seconds": sum(c["seconds"] for c in cost) / len(cost),
        "setting": group.runs[0].setting,
        "scope": group.scope(view),
        "forgetting_over": view.over,
        "forgetting_by": view.measure,
    }


def _frame(rows: Sequence[Row]) -> polars.DataFrame:
    import polars as pl

    text = ("challenge", "algorithm", "locality", "setting", "scope", "forgetting_over", "forgetting_by")
    before = {"challenge": pl.String, "algorithm": pl.String, "locality": pl.String, "lr": pl.Float64}
    counts = dict.fromkeys(("tasks", "seeds", "diverged"), pl.Int64)
    numbers = {f"{name}_{of}": pl.Float64 for name in STATISTICS for of in ("mean", "std")}
    cost = {"memory_bytes": pl.Int64, "seconds": pl.Float64}
    after = {name: pl.String for name in text if name not in before}
    return pl.DataFrame(list(rows), schema={**before, **counts, **numbers, **cost, **after}, orient="row")
