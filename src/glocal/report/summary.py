"""Summaries of runs: statistics per (challenge, algorithm, learning rate), and the paper's test per algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import RenderableType

from glocal.errors import require_known, unknown
from glocal.metrics import (
    CONFIDENCE,
    MEASURES,
    OVER,
    SCOPES,
    LearningRateTest,
    Measure,
    Over,
    Scope,
    accuracy_of,
    average_accuracy,
    average_forgetting,
    learning_rate_test,
)
from glocal.report import table
from glocal.report.groups import Group, View, by_algorithm, by_challenge, format_lr, group_runs
from glocal.report.table import ABSENT, Cell, Column, Section, Table, mean_std, signed
from glocal.store.run import Run

if TYPE_CHECKING:
    import polars

Row: TypeAlias = dict[str, Any]

MAX_MATRIX_TASKS = 12
STATISTICS = ("acc", "forgetting", "backward_transfer", "forward_transfer", "learning_accuracy", "distance")
SCOPE_NOTES = {
    "class": "class-incremental (among all classes)",
    "task": "task-incremental (among the task's classes)",
    "domain": "domain-incremental (all tasks share their classes)",
}
TREND_NOTE = (
    "Low − high: mean forgetting at the two lowest learning rates minus that at the two highest, paired by seed, "
    f"with its {CONFIDENCE:.0%} t-interval over seeds. The paper (§6.1) predicts a negative difference for local "
    "algorithms and no sign for global ones."
)


def rows(
    runs: Iterable[Run], forgetting: Over = "t-1", scope: Scope | None = None, measure: Measure = "accuracy"
) -> list[Row]:
    """Compute one row of statistics per (challenge, algorithm, lr), global algorithms before local ones.

    Args:
        runs: runs of any challenges and algorithms; equal runs count once.
        forgetting: average forgetting over 't-1' or 't' tasks.
        scope: accuracy among the task's classes ('task') or all classes ('class'); by default that of the setting.
        measure: measure forgetting by 'accuracy', in points, or by 'loss'.

    Returns:
        `<name>_mean` and `<name>_std` (ddof = 0) over the seeds that did not diverge, for each of `STATISTICS`:
        percent, except distance = ‖θ_T − θ_0‖₂. Undefined values are None. `seeds` counts all runs, `diverged` those
        that diverged. `memory_bytes` is the algorithm's memory after the last task, `seconds` the time per run.
    """
    view = _view(forgetting, scope, measure)
    return [_row(group, view) for group in group_runs(runs)]


def frame(
    runs: Iterable[Run], forgetting: Over = "t-1", scope: Scope | None = None, measure: Measure = "accuracy"
) -> polars.DataFrame:
    """Return `rows` as a data frame."""
    import polars as pl

    numbers = {f"{name}_{suffix}": pl.Float64 for name in STATISTICS for suffix in ("mean", "std")}
    schema: dict[str, Any] = {
        **dict.fromkeys(("challenge", "algorithm", "locality"), pl.String),
        "lr": pl.Float64,
        **dict.fromkeys(("tasks", "seeds", "diverged"), pl.Int64),
        **numbers,
        "memory_bytes": pl.Int64,
        "seconds": pl.Float64,
        **dict.fromkeys(("setting", "scope", "forgetting_over", "forgetting_by"), pl.String),
    }
    return pl.DataFrame(rows(runs, forgetting, scope, measure), schema=schema, orient="row")


def render(
    runs: Iterable[Run],
    format: str,
    *,
    forgetting: Over = "t-1",
    scope: Scope | None = None,
    measure: Measure = "accuracy",
) -> RenderableType:
    """Render the results and, where it can be made, the paper's test; see `rows` for the arguments.

    Args:
        runs: the runs to summarize.
        format: 'rich' and 'latex' follow the layout of the paper's Table 1; 'markdown' has one row per algorithm and
            the cost; 'json' and 'csv' hold all statistics.
        forgetting: average forgetting over 't-1' or 't' tasks.
        scope: accuracy among the task's classes or among all classes.
        measure: measure forgetting by 'accuracy' or by 'loss'.
    """
    runs = list(runs)
    view = _view(forgetting, scope, measure)
    if format == "csv":
        return frame(runs, forgetting, scope, measure).write_csv()
    records = rows(runs, forgetting, scope, measure)
    tables = markdown_tables(records) if format == "markdown" else [results_table(records)]
    return table.render([*tables, *trend_tables(trends(runs, view))], format)


def results_table(rows: Sequence[Row]) -> Table:
    """Lay out rows as the paper's Table 1: ACC and FGT of each challenge, one line per algorithm and learning rate."""
    challenges = list(dict.fromkeys(row["challenge"] for row in rows))
    columns = [Column("lr", align="left"), *(Column(name, group) for group in challenges for name in _headers(rows))]
    by_key = {(row["challenge"], row["locality"], row["algorithm"], row["lr"]): row for row in rows}
    best = _best(rows)
    sections = []
    for locality, algorithm in sorted({(row["locality"], row["algorithm"]) for row in rows}):
        lrs = sorted({row["lr"] for row in rows if (row["locality"], row["algorithm"]) == (locality, algorithm)})
        lines = []
        for lr in lrs:
            cells = [Cell(format_lr(lr))]
            for challenge in challenges:
                cells += _cells(by_key.get((challenge, locality, algorithm, lr)), best)
            lines.append(tuple(cells))
        sections.append(Section(algorithm, locality, tuple(lines)))
    return Table(tuple(columns), tuple(sections), notes=_notes(rows), records=tuple(rows))


def markdown_tables(rows: Sequence[Row]) -> list[Table]:
    """Lay out rows as one table per challenge: one line per algorithm, ACC and FGT by learning rate, and the cost."""
    tables = []
    best = _best(rows)
    for challenge in dict.fromkeys(row["challenge"] for row in rows):
        members = [row for row in rows if row["challenge"] == challenge]
        lrs = sorted({row["lr"] for row in members})
        columns = [Column(name, f"lr {format_lr(lr)}") for lr in lrs for name in ("ACC", "FGT")]
        sections = []
        for locality, algorithm in dict.fromkeys((row["locality"], row["algorithm"]) for row in members):
            own = [row for row in members if (row["locality"], row["algorithm"]) == (locality, algorithm)]
            by_lr = {row["lr"]: row for row in own}
            memory = _format_bytes(max(row["memory_bytes"] for row in own))
            seconds = f"{sum(row['seconds'] for row in own) / len(own):.2g} s"
            cells = [cell for lr in lrs for cell in _cells(by_lr.get(lr), best)]
            sections.append(Section(algorithm, locality, ((*cells, Cell(memory), Cell(seconds)),)))
        tables.append(Table((*columns, Column("memory"), Column("time")), tuple(sections), challenge))
    cost = "Memory: held by the algorithm after the last task. Time: seconds per run, its share of its cohort's."
    return [*tables, Table((), (), notes=(*_notes(rows), cost), records=tuple(rows))]


def matrix_table(run: Run) -> Table:
    """Lay out one run's test accuracies in percent: a row per task trained, a column per task tested."""
    R = accuracy_of(run)
    tasks = range(run.tasks) if run.tasks <= MAX_MATRIX_TASKS else [*range(MAX_MATRIX_TASKS - 1), run.tasks - 1]

    def cell(t: int, o: int) -> Cell:
        return Cell(ABSENT) if math.isnan(R[t, o]) else Cell(f"{100 * R[t, o]:.1f}", marked=o == t - 1)

    sections = tuple(Section(str(t), "", (tuple(cell(t, o) for o in tasks),)) for t in range(1, run.tasks + 1))
    title = f"{run.algorithm} ({run.locality}) on {run.challenge}, lr {run.lr:g}, seed {run.seed}: test accuracy, %"
    if run.diverged is not None:
        note = f"The run diverged at step {run.diverged}: its objective was not finite."
    else:
        forgetting = average_forgetting(R, over="t-1")
        defined = not math.isnan(forgetting)
        note = f"Average accuracy {100 * average_accuracy(R):.2f}" + (
            f"; forgetting, over all tasks but the last, {100 * forgetting:.2f}." if defined else "."
        )
    columns = tuple(Column(str(o + 1)) for o in tasks)
    return Table(columns, sections, title, "after task", notes=(note,))


@dataclass(frozen=True)
class TrendRow:
    """The paper's test of one algorithm on one challenge, and the same difference of the published numbers."""

    challenge: str
    algorithm: str
    trend: LearningRateTest
    published: float | None = None

    def record(self) -> Row:
        trend = self.trend
        numbers = {"difference": trend.difference, "low": trend.low, "high": trend.high, "published": self.published}
        return {
            "challenge": self.challenge,
            "algorithm": self.algorithm,
            "locality": trend.locality,
            "seeds": trend.seeds,
            **{name: round_finite(value) for name, value in numbers.items()},
            "sign": trend.sign,
            "verdict": trend.verdict,
        }


def trends(runs: Iterable[Run], view: View | None = None) -> list[TrendRow]:
    """Run the paper's test on every algorithm that has at least four learning rates."""
    found = []
    for members in by_challenge(group_runs(runs)):
        for groups in by_algorithm(members):
            forgetting = {group.lr: group.values("forgetting", view or View()) for group in groups}
            trend = learning_rate_test(forgetting, groups[0].locality)
            if trend is not None:
                found.append(TrendRow(groups[0].challenge, groups[0].algorithm, trend))
    return found


def trend_tables(rows: Sequence[TrendRow], published: bool = False) -> list[Table]:
    """Lay out the paper's test with one verdict per algorithm; no table without rows."""
    if not rows:
        return []
    several = len({row.challenge for row in rows}) > 1
    columns = [
        *([Column("challenge", align="left")] if several else []),
        *(Column("low − high"), Column(f"{CONFIDENCE:.0%} interval")),
        *([Column("published")] if published else []),
        *(Column("seeds"), Column("verdict", align="left")),
    ]
    sections = []
    for row in rows:
        trend = row.trend
        interval = ABSENT if math.isnan(trend.low) else f"[{signed(trend.low)}, {signed(trend.high)}]"
        cells = [
            *([row.challenge] if several else []),
            *(signed(trend.difference), interval),
            *([signed(row.published)] if published else []),
            *(str(trend.seeds), trend.verdict),
        ]
        sections.append(Section(row.algorithm, trend.locality, (tuple(map(Cell, cells)),)))
    records = tuple(row.record() for row in rows)
    return [Table(tuple(columns), tuple(sections), "The paper's test", notes=(TREND_NOTE,), records=records)]


def round_finite(x: float | None) -> float | None:
    """Round to six decimals; None for NaN and infinity."""
    return None if x is None or not math.isfinite(x) else round(x, 6)


def format_range(values: Iterable[int], noun: str) -> str:
    """Format counts with their noun: '3 seeds', '1 to 5 seeds'."""
    low, high = min(counts := set(values)), max(counts)
    return f"{low} {noun}{'s' if low != 1 else ''}" if low == high else f"{low} to {high} {noun}s"


def diverged_note(rows: Iterable[tuple[str, float, str, int, int]]) -> str:
    """Say which of (algorithm, lr, challenge, diverged, seeds) lost runs."""
    where = [f"{name} at {format_lr(lr)} on {on}: {lost} of {seeds}" for name, lr, on, lost, seeds in rows if lost]
    return f"Diverged, and left out of the means: {', '.join(where)}." if where else "No run diverged."


def _view(forgetting: Over, scope: Scope | None, measure: Measure) -> View:
    for kind, value, allowed in (("forgetting", forgetting, OVER), ("measure", measure, MEASURES)):
        require_known(kind, value, allowed)
    if scope is not None and scope not in SCOPES:
        raise unknown("scope", scope, SCOPES)
    return View(forgetting, scope, measure)


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
    costs = [run.info["cost"] for run in group.runs]
    return row | {
        "memory_bytes": max(cost["memory_bytes"] for cost in costs),
        "seconds": sum(cost["seconds"] for cost in costs) / len(costs),
        "setting": group.runs[0].setting,
        "scope": group.scope(view),
        "forgetting_over": view.over,
        "forgetting_by": view.measure,
    }


def _headers(rows: Sequence[Row]) -> tuple[str, str]:
    return "ACC (↑)", "FGT, loss (↓)" if rows[0]["forgetting_by"] == "loss" else "FGT (↓)"


def _best(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[float | None, float | None]]:
    """Return the highest ACC and the lowest FGT of each (challenge, locality, algorithm)."""
    members: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        members.setdefault((row["challenge"], row["locality"], row["algorithm"]), []).append(row)

    def extreme(own: list[Row], name: str, choose: Callable[[list[float]], float]) -> float | None:
        means = [row[name] for row in own if row[name] is not None]
        return choose(means) if means else None

    return {key: (extreme(own, "acc_mean", max), extreme(own, "forgetting_mean", min)) for key, own in members.items()}


def _cells(row: Row | None, best: dict[tuple[str, str, str], tuple[float | None, float | None]]) -> list[Cell]:
    """Make the cells ACC and FGT of a row; one seed has no deviation."""
    if row is None:
        return [Cell(ABSENT), Cell(ABSENT)]
    if row["diverged"] == row["seeds"]:
        return [Cell("diverged"), Cell("diverged")]
    single = row["seeds"] - row["diverged"] == 1
    cells = []
    extremes = best[row["challenge"], row["locality"], row["algorithm"]]
    for name, extreme in zip(("acc", "forgetting"), extremes, strict=True):
        mean = row[f"{name}_mean"]
        cells.append(mean_std(mean, None if single else row[f"{name}_std"], marked=mean == extreme))
    return cells


def _notes(rows: Sequence[Row]) -> tuple[str, ...]:
    if not rows:
        return ("No runs.",)
    tasks = "the T−1 tasks before the last" if rows[0]["forgetting_over"] == "t-1" else "all T tasks"
    forgetting = "rise in test loss" if rows[0]["forgetting_by"] == "loss" else "loss of test accuracy in points"
    scopes = {row["challenge"]: SCOPE_NOTES["domain" if row["setting"] == "domain" else row["scope"]] for row in rows}
    same = len(set(scopes.values())) == 1
    scope = next(iter(scopes.values())) if same else "; ".join(f"{name}: {note}" for name, note in scopes.items())
    counts = {row["challenge"]: row["tasks"] for row in rows}
    same = len(set(counts.values())) == 1
    T = rows[0]["tasks"] if same else ", ".join(f"{count} ({name})" for name, count in counts.items())
    diverged = ((r["algorithm"], r["lr"], r["challenge"], r["diverged"], r["seeds"]) for r in rows)
    return (
        f"Mean ± standard deviation over {format_range((row['seeds'] for row in rows), 'seed')}; T = {T} tasks.",
        f"ACC: average test accuracy in percent, {scope}.",
        f"FGT: {forgetting} since each task was learnt, averaged over {tasks}.",
        diverged_note(diverged),
        "Bold or *: the best ACC and the lowest FGT of each algorithm.",
    )


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
