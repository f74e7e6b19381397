"""Summaries of runs: groups over seeds, their statistics, tables, and the paper's test of each algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rich.console import RenderableType
from rich.filesize import decimal

from glocal import metrics
from glocal.metrics import CONFIDENCE, LearningRateTest, Measure, Over, Scope, Split
from glocal.report import table
from glocal.report.labels import label_runs, option_value
from glocal.report.table import ABSENT, Cell, Column, Section, Table, finite, format_lr, mean_std, signed
from glocal.store.conditions import natural_order
from glocal.store.run import Run

if TYPE_CHECKING:
    import polars

Row: TypeAlias = dict[str, Any]

MAX_MATRIX_TASKS = 12
PERCENT = ("acc", "forgetting", "backward_transfer", "forward_transfer", "learning_accuracy")
STATISTICS = (*PERCENT, "loss", "distance")
SCOPE_NOTES = {
    "class": "class-incremental (among all classes)",
    "seen": "class-incremental (among the classes seen so far)",
    "task": "task-incremental (among the task's classes)",
    "domain": "domain-incremental (all tasks share their classes)",
}
NO_CELLS = (Cell(ABSENT), Cell(ABSENT))
COST_NOTE = "Memory: held by the algorithm after the last task. Time: seconds per run, its share of its cohort's."
INTERVAL = f"{CONFIDENCE:.0%} interval"
TREND_NOTE = (
    "Low − high: mean forgetting at the two lowest learning rates minus that at the two highest, paired by seed, "
    f"with its {CONFIDENCE:.0%} t-interval over seeds. The paper (§6.1) predicts a negative difference for local "
    "algorithms and no sign for global ones."
)
NO_TREND_EXPECTED = ("icarl-random",)
"""Algorithms for which the paper predicts the same forgetting at low and at high learning rates."""
NO_TREND_NOTE = "For iCaRL with random exemplars it predicts no difference."


@dataclass(frozen=True)
class View:
    """Options of the statistics.

    forgetting: average forgetting over 't-1' or 't' tasks.
    scope: accuracy among the task's classes ('task') or all classes ('class'); by default that of the setting.
    measure: measure forgetting by 'accuracy', in points, or by 'loss'; by loss where there are no classes.
    """

    forgetting: Over = "t-1"
    scope: Scope | None = None
    measure: Measure = "accuracy"


DEFAULT_VIEW = View()


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one (challenge, algorithm, lr), one per seed, and the labels to show them under.

    x: the learning rate, or the value of another option, `over`, that differs between the runs of an algorithm.
    """

    challenge: str
    locality: str
    algorithm: str
    x: Any
    runs: tuple[Run, ...]
    over: str = field(default="lr", kw_only=True)

    @property
    def lr(self) -> float:
        return self.runs[0].lr

    @property
    def tasks(self) -> int:
        return self.runs[0].tasks

    @property
    def seeds(self) -> int:
        return len(self.runs)

    @property
    def diverged(self) -> int:
        return len(self.runs) - len(self.finished)

    @property
    def title(self) -> str:
        return f"{self.algorithm} ({self.locality})"

    @property
    def finished(self) -> tuple[Run, ...]:
        """The runs that did not diverge. Statistics are computed over these."""
        return tuple(run for run in self.runs if run.diverged is None)

    def identity(self) -> Row:
        """Return what the group is, as the first columns of its row."""
        names = ("challenge", "algorithm", "locality", "lr", "tasks", "seeds", "diverged")
        return {name: getattr(self, name) for name in names}

    @property
    def metric(self) -> str:
        """The statistic that says how well the tasks are learnt: 'acc', or 'loss' without classes."""
        return "loss" if metrics.measure_of(self.runs[0]) == "loss" else "acc"

    @property
    def choice_split(self) -> Split:
        """The data on which a learning rate is chosen: validation data if the runs have any, otherwise test data."""
        return metrics.choice_split(self.runs[0])

    def by_seed(self, view: View, split: Split = "test") -> dict[int, dict[str, float]]:
        """Return the statistics of each finished run, accuracies in percent."""
        if (view, split) not in self._by_seed:
            statistics = run_statistics(self.finished, view, split)
            self._by_seed[view, split] = {run.seed: x for run, x in zip(self.finished, statistics, strict=True)}
        return self._by_seed[view, split]

    @cached_property
    def _by_seed(self) -> dict[tuple[View, Split], dict[int, dict[str, float]]]:
        return {}

    def statistics(self, view: View, split: Split = "test") -> dict[str, tuple[float, float]]:
        """Compute (mean, standard deviation) over the finished runs; NaN where undefined or if none finished."""
        values = dict.fromkeys(STATISTICS, (math.nan, math.nan))
        values |= metrics.over_seeds(list(self.by_seed(view, split).values()))
        return values | {"metric": values[self.metric]}


AnyGroup = TypeVar("AnyGroup", bound=Group)


def run_statistics(runs: Sequence[Run], view: View, split: Split = "test") -> list[dict[str, float]]:
    """Compute the statistics of each of several runs of one challenge, accuracies in percent."""
    by_accuracy = bool(runs) and metrics.measure_of(runs[0], view.measure) == "accuracy"
    percent = {name for name in PERCENT if name != "forgetting" or by_accuracy}
    values = metrics.summaries(runs, view.scope, view.measure, view.forgetting, split)
    return [{name: 100 * x if name in percent else x for name, x in statistics.items()} for statistics in values]


def group_runs(runs: Iterable[Run], over: str = "lr") -> list[Group]:
    """Group runs by challenge, locality (global first), algorithm and learning rate, or another option than that.

    Equal runs count once, and runs that are not comparable never share a label.
    """
    members: dict[tuple[str, str, str, Any], list[Run]] = {}
    for challenge, algorithm, run in label_runs(runs, over):
        members.setdefault((challenge, run.locality, algorithm, option_value(run, over)), []).append(run)
    ordered = sorted(members.items(), key=lambda item: [natural_order(part) for part in item[0]])
    return [Group(*key, tuple(sorted(group, key=lambda run: run.seed)), over=over) for key, group in ordered]


def split_groups(groups: Iterable[AnyGroup], *attributes: str) -> list[list[AnyGroup]]:
    """Split sorted groups into lists that have equal attributes."""
    return [list(part) for _, part in groupby(groups, attrgetter(*attributes))]


def rows(runs: Iterable[Run], view: View = DEFAULT_VIEW) -> list[Row]:
    """Compute one row of statistics per (challenge, algorithm, lr), global algorithms before local ones.

    Returns:
        `<name>_mean` and `<name>_std` (ddof = 0) over the seeds that did not diverge, for each of `STATISTICS`:
        percent, except loss and distance = ‖θ_T − θ_0‖₂. Undefined values are None. `seeds` counts all runs, `diverged`
        those that diverged. `memory_bytes` is the algorithm's memory after the last task, `seconds` the time per run.
        `after` is the number of tasks of the runs that these go on from, or None.
        `metric` is 'acc', or 'loss' without classes; `chosen_on` the data on which the best learning rate is chosen,
        'validation' or 'test', and `choice_metric` and `choice_forgetting` the means there.
    """
    return [summarize(group, view) for group in group_runs(runs)]


def summarize(group: Group, view: View = DEFAULT_VIEW) -> Row:
    """Return the row of a group, as `rows` describes it."""
    statistics, costs = group.statistics(view), [run.info["cost"] for run in group.runs]
    choice = statistics if group.choice_split == "test" else group.statistics(view, group.choice_split)
    first = group.runs[0]
    scope = metrics.scope_of(first, view.scope)
    numbers = {
        f"{name}_{suffix}": finite(value)
        for name in STATISTICS
        for suffix, value in zip(("mean", "std"), statistics[name], strict=True)
    }
    return {
        **group.identity(),
        **numbers,
        "memory_bytes": max(cost["memory_bytes"] for cost in costs),
        "seconds": sum(cost["seconds"] for cost in costs) / len(costs),
        "after": first.after or None,
        "setting": group.runs[0].setting,
        "scope": "seen" if scope == "class" and first.config["challenge"].get("evaluate") == "seen" else scope,
        "forgetting_over": view.forgetting,
        "forgetting_by": metrics.measure_of(group.runs[0], view.measure),
        "metric": group.metric,
        "chosen_on": group.choice_split,
        **{f"choice_{n}": finite(choice[n][0]) for n in ("metric", "forgetting")},
    }


def frame(runs: Iterable[Run], view: View = DEFAULT_VIEW) -> polars.DataFrame:
    """Return `rows` as a data frame."""
    import polars as pl

    numbers = (f"{name}_{suffix}" for name in STATISTICS for suffix in ("mean", "std"))
    schema: dict[str, Any] = {
        **dict.fromkeys(("challenge", "algorithm", "locality"), pl.String),
        "lr": pl.Float64,
        **dict.fromkeys(("tasks", "seeds", "diverged"), pl.Int64),
        **dict.fromkeys(numbers, pl.Float64),
        "memory_bytes": pl.Int64,
        "seconds": pl.Float64,
        "after": pl.Int64,
        **dict.fromkeys(("setting", "scope", "forgetting_over", "forgetting_by", "metric", "chosen_on"), pl.String),
        **dict.fromkeys(("choice_metric", "choice_forgetting"), pl.Float64),
    }
    return pl.DataFrame(rows(runs, view), schema)


def render(runs: Iterable[Run], format: str, view: View = DEFAULT_VIEW) -> RenderableType:
    """Render the results and, where it can be made, the paper's test.

    Args:
        runs: the runs to summarize.
        format: 'rich' and 'latex' follow the layout of the paper's Table 1; 'markdown' has one row per algorithm and
            the cost; 'json' and 'csv' hold all statistics.
        view: options of the statistics.
    """
    groups = group_runs(runs)
    records = [summarize(group, view) for group in groups]
    tables = markdown_tables(records) if format == "markdown" else [results_table(records)]
    return table.render([*tables, *trend_tables(trends(groups, view))], format)


def results_table(rows: Sequence[Row]) -> Table:
    """Lay out rows as the paper's Table 1: ACC and FGT of each challenge, one line per algorithm and learning rate."""
    names = {row["challenge"]: [f"{n} ({'↑' if n == 'ACC' else '↓'})" for n in _headings(row)] for row in rows}
    return table.by_learning_rate(names, _cells(rows), notes=_notes(rows), records=tuple(rows))


def markdown_tables(rows: Sequence[Row]) -> list[Table]:
    """Lay out rows as one table per challenge: one line per algorithm, ACC and FGT by learning rate, and the cost."""
    tables, cells, key = [], _cells(rows), itemgetter("locality", "algorithm")
    for challenge in sorted({row["challenge"] for row in rows}):
        members = [row for row in rows if row["challenge"] == challenge]
        lrs = sorted({row["lr"] for row in members})
        columns = [Column(name, f"lr {format_lr(lr)}") for lr in lrs for name in _headings(members[0])]
        sections = []
        for (locality, algorithm), group in groupby(sorted(members, key=key), key):
            algorithm_rows = list(group)
            memory = decimal(max(row["memory_bytes"] for row in algorithm_rows))
            seconds = f"{sum(row['seconds'] for row in algorithm_rows) / len(algorithm_rows):.2g} s"
            lr_cells = (x for lr in lrs for x in cells.get((locality, algorithm, lr, challenge), NO_CELLS))
            sections.append(Section(algorithm, locality, ((*lr_cells, Cell(memory), Cell(seconds)),)))
        tables.append(Table((*columns, Column("memory"), Column("time")), tuple(sections), challenge))
    return [*tables, Table((), (), notes=(*_notes(rows), COST_NOTE))]


def _headings(row: Row) -> tuple[str, str]:
    """Return the names of the two columns of a row's challenge."""
    return "ACC" if row["metric"] == "acc" else "loss", "FGT" if row["forgetting_by"] == "accuracy" else "FGT, loss"


def _cells(rows: Sequence[Row]) -> dict[table.CellKey, list[Cell]]:
    """Return metric and FGT by (locality, algorithm, lr, challenge); mark the best of each algorithm and challenge."""
    cells: dict[table.CellKey, list[Cell]] = {}
    for row in rows:
        num_finished = row["seeds"] - row["diverged"]
        for name, best in ((row["metric"], max if row["metric"] == "acc" else min), ("forgetting", min)):
            spec = "z.2f" if name == "acc" or row["forgetting_by"] == "accuracy" else ".3g"
            group = [r for r in rows if all(r[k] == row[k] for k in ("locality", "algorithm", "challenge"))]
            min_diverged = min(r["diverged"] for r in group)  # which come first, as in `glocal.selection.choose`
            choice = "choice_forgetting" if name == "forgetting" else "choice_metric"
            values = [x for r in group if r["diverged"] == min_diverged and (x := r[choice]) is not None]
            is_best = len(group) > 1 and row["diverged"] == min_diverged and row[choice] == best(values, default=None)
            mean, std = row[f"{name}_mean"], row[f"{name}_std"] if num_finished > 1 else None
            cell = mean_std(mean, std, is_best, spec) if num_finished else Cell("diverged")
            cells.setdefault((row["locality"], row["algorithm"], row["lr"], row["challenge"]), []).append(cell)
    return cells


def _notes(rows: Sequence[Row]) -> tuple[str, ...]:
    if not rows:
        return ("No runs.",)
    tasks = "the T−1 tasks before the last" if rows[0]["forgetting_over"] == "t-1" else "all T tasks"
    changes = {"loss": "rise in test loss", "accuracy": "loss of test accuracy in points"}
    forgetting = {row["challenge"]: changes[row["forgetting_by"]] for row in rows}
    kinds = {row["challenge"]: "domain" if row["setting"] == "domain" else row["scope"] for row in rows}
    scopes = {row["challenge"]: SCOPE_NOTES[kinds[row["challenge"]]] for row in rows if row["metric"] == "acc"}
    counts = {row["challenge"]: str(row["tasks"]) for row in rows}
    chosen_on = {row["challenge"]: row["chosen_on"] for row in rows}
    compared = len({(row["challenge"], row["locality"], row["algorithm"]) for row in rows}) < len(rows)
    rule = ", where the fewest runs diverged" if any(row["diverged"] for row in rows) else ""
    seeds = format_range((row["seeds"] for row in rows), "seed")
    starts = {row["challenge"]: f"runs of {n} tasks" if (n := row["after"]) else "initialisations" for row in rows}
    return (
        f"Mean ± standard deviation (ddof = 0) over {seeds}; T = {_by_challenge(counts)} tasks.",
        *([f"ACC: average test accuracy in percent, {_by_challenge(scopes)}."] if scopes else []),
        *(["Loss: average test loss, of challenges without classes."] if len(scopes) < len(kinds) else []),
        f"FGT: {_by_challenge(forgetting)} since each task was learnt, averaged over {tasks}.",
        *([f"Runs start from {_by_challenge(starts)}."] if any(row["after"] for row in rows) else []),
        diverged_note(rows),
        *(
            [f"Bold: the best values of each algorithm and column, chosen on {_by_challenge(chosen_on)} data{rule}."]
            * compared
        ),
    )


def _by_challenge(texts: Mapping[str, str]) -> str:
    """Return the text that all challenges share, or each with its challenge."""
    distinct = set(texts.values())
    return distinct.pop() if len(distinct) == 1 else "; ".join(f"{name}: {text}" for name, text in texts.items())


def format_range(values: Iterable[int], noun: str) -> str:
    """Format counts with their noun: '3 seeds', '1 to 5 seeds'."""
    low, high = min(counts := set(values)), max(counts)
    return f"{low} {noun}{'s' if low != 1 else ''}" if low == high else f"{low} to {high} {noun}s"


def diverged_note(rows: Iterable[Row]) -> str:
    """Return a note that lists the rows with diverged runs."""
    place = "{algorithm} at {rate} on {challenge}: {diverged} of {seeds}"
    places = [place.format(rate=format_lr(row["lr"]), **row) for row in rows if row["diverged"]]
    return f"Diverged, and left out of the means: {', '.join(places)}." if places else "No run diverged."


def matrix_table(run: Run) -> Table:
    """Lay out one run's test accuracies in percent, or losses: a row per task trained, a column per task tested."""
    by, R = metrics.measure_of(run), metrics.shown_matrix(run)
    unit, short, exact = ("", ".3g", ".3g") if by == "loss" else (", %", ".1f", ".2f")
    tasks = range(run.tasks) if run.tasks <= MAX_MATRIX_TASKS else [*range(MAX_MATRIX_TASKS - 1), run.tasks - 1]

    def cell(t: int, o: int) -> Cell:
        return Cell(ABSENT) if math.isnan(R[t, o]) else Cell(f"{R[t, o]:{short}}", marked=o == t - 1)

    sections = tuple(Section(str(t), "", (tuple(cell(t, o) for o in tasks),)) for t in range(1, run.tasks + 1))
    title = f"{run.algorithm} ({run.locality}) on {run.challenge}, lr {run.lr:g}, seed {run.seed}: test {by}{unit}"
    if run.diverged is not None:
        note = f"The run diverged {run.diverged}."
    else:
        note = f"Average {by} {metrics.average_accuracy(R):{exact}}"
        if metrics.choice_split(run) == "validation":
            validation_accuracy = metrics.average_accuracy(metrics.shown_matrix(run, split="validation"))
            note += f", on validation data {validation_accuracy:{exact}}"
        if run.tasks > 1:
            note += f"; forgetting, over all tasks but the last, {metrics.average_forgetting(R, by=by):{exact}}"
        note += "."
    return Table(tuple(Column(str(o + 1)) for o in tasks), sections, title, "after task", notes=(note,))


@dataclass(frozen=True)
class TrendRow:
    """The paper's test of one algorithm on one challenge, and the same difference of the published numbers."""

    challenge: str
    algorithm: str
    trend: LearningRateTest
    published: float | None = None
    spec: str = ".2f"
    """How its numbers are shown."""

    def record(self) -> Row:
        trend = self.trend
        numbers = {"difference": trend.difference, "low": trend.lower, "high": trend.upper, "published": self.published}
        return {
            "challenge": self.challenge,
            "algorithm": self.algorithm,
            "locality": trend.locality,
            "seeds": trend.seeds,
            **{name: finite(value, 9) for name, value in numbers.items()},
            "sign": trend.sign,
            "verdict": trend.verdict,
        }


def trends(groups: Iterable[Group], view: View = DEFAULT_VIEW) -> list[TrendRow]:
    """Run the paper's test on every algorithm that has at least four learning rates."""
    trend_rows = []
    for members in split_groups(groups, "challenge", "title"):
        forgetting = {g.lr: {seed: x["forgetting"] for seed, x in g.by_seed(view).items()} for g in members}
        trend = metrics.learning_rate_test(forgetting, members[0].locality)
        if trend is not None:
            run = members[0].runs[0]
            trend = replace(trend, flat=run.config["algorithm"]["name"] in NO_TREND_EXPECTED)
            spec = ".2f" if metrics.measure_of(run, view.measure) == "accuracy" else ".3g"
            trend_rows.append(TrendRow(members[0].challenge, members[0].algorithm, trend, spec=spec))
    return trend_rows


def trend_tables(rows: Sequence[TrendRow], published: bool = False) -> list[Table]:
    """Lay out the paper's test with one verdict per algorithm; no table without rows."""
    if not rows:
        return []
    hidden_columns = set() if published else {"published"}
    if len({row.challenge for row in rows}) == 1:
        hidden_columns.add("challenge")
    sections = []
    for row in rows:
        trend = row.trend
        lower, upper = (signed(bound, row.spec) for bound in (trend.lower, trend.upper))
        texts = {
            "challenge": row.challenge,
            "low − high": signed(trend.difference, row.spec),
            INTERVAL: ABSENT if math.isnan(trend.lower) else f"[{lower}, {upper}]",
            "published": signed(row.published),
            "seeds": str(trend.seeds),
            "verdict": trend.verdict,
        }
        cells = {name: Cell(text) for name, text in texts.items() if name not in hidden_columns}
        sections.append(Section(row.algorithm, trend.locality, (tuple(cells.values()),)))
    columns = tuple(Column(name, align="left" if name in ("challenge", "verdict") else "right") for name in cells)
    notes = (TREND_NOTE, *([NO_TREND_NOTE] if any(row.trend.flat for row in rows) else []))
    return [Table(columns, tuple(sections), "The paper's test", notes=notes)]
