r"""Compare our Table 1 with the published one, and run the paper's test on both (§6.1).

Two means differ by z standard errors, with standard error √(s²/(n−1) + s'²/(n'−1)), where s and s' are the standard
deviations over seeds (ddof = 0) and n and n' the numbers of seeds. A single seed has no deviation of its own; the
published variance stands in for it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console, RenderableType

from glocal import tree
from glocal.errors import GlocalError, require_known
from glocal.files import report_os_errors
from glocal.metrics import END_LRS, OVER, Over, Scope, low_minus_high, scope_of
from glocal.paper.table1 import COLUMNS, SEEDS
from glocal.report import summary, table
from glocal.report.summary import Group, TrendRow, View
from glocal.report.table import ABSENT, Cell, CellKey, Table, by_learning_rate, mean_std, signed, to_csv, to_json
from glocal.store.run import Run, Runs

MAX_Z = 2.0
"""Larger differences from a published number are marked."""
TEXT_WIDTH = 100


@dataclass(frozen=True)
class Estimate:
    """Mean, standard deviation (ddof = 0; NaN for one seed) and number of seeds."""

    mean: float
    std: float
    seeds: int

    @property
    def variance(self) -> float:
        """Unbiased variance over seeds; NaN for one seed."""
        # The paper does not state the ddof of its deviations. ddof = 0 gives the larger variance, so if they have
        # ddof = 1 their part of the standard error is at most √(5/4) too large, and |z| too small.
        return self.std**2 * self.seeds / (self.seeds - 1) if self.seeds > 1 else math.nan


@dataclass(frozen=True)
class Difference:
    """Our estimate and the published one; either may be missing."""

    ours: Estimate | None
    published: Estimate | None

    @property
    def standard_error(self) -> float | None:
        if self.ours is None or self.published is None:
            return None
        variance = self.ours.variance if self.ours.seeds > 1 else self.published.variance
        return math.sqrt(variance / self.ours.seeds + self.published.variance / self.published.seeds)

    @property
    def difference(self) -> float | None:
        return self.ours.mean - self.published.mean if self.ours and self.published else None

    @property
    def z(self) -> float | None:
        """The difference in standard errors."""
        return self.difference / self.standard_error if self.standard_error and self.difference is not None else None

    @property
    def differs(self) -> bool:
        """Whether |z| > 2."""
        return self.z is not None and abs(self.z) > MAX_Z

    def record(self, name: str) -> dict[str, Any]:
        numbers = {part: getattr(self.ours, part, None) for part in ("mean", "std")}
        numbers |= {f"published_{part}": getattr(self.published, part, None) for part in ("mean", "std")}
        numbers |= {part: getattr(self, part) for part in ("difference", "standard_error", "z")}
        record: dict[str, Any] = {f"{name}_{part}": table.finite(x, 9) for part, x in numbers.items()}
        return record | {f"{name}_differs": None if self.z is None else self.differs}


@dataclass(frozen=True, eq=False)
class ComparisonRow(Group):
    """One (challenge, algorithm, lr): accuracy, and forgetting over T−1 and over T tasks, in percent."""

    acc: Difference
    forgetting: Mapping[Over, Difference]

    def record(self) -> dict[str, Any]:
        record = self.identity() | self.acc.record("acc")
        return record | self.forgetting["t-1"].record("forgetting") | self.forgetting["t"].record("forgetting_over_t")


@dataclass(frozen=True)
class Comparison:
    """Rows of the comparison and the paper's test; tables have columns for the published numbers if `published`."""

    rows: tuple[ComparisonRow, ...]
    trends: tuple[TrendRow, ...]
    over: Over
    published: bool


def compare(runs: Iterable[Run], over: Over = "t-1", scope: Scope | None = None, published: bool = True) -> Comparison:
    """Compare runs with the published numbers, by challenge, locality (global first), algorithm and learning rate.

    Args:
        runs: runs of Table 1; runs of one cell may differ only in their seed.
        over: average forgetting over 't-1' tasks, as the published numbers do, or over 't', as the paper states; the
            published numbers are then scaled by (T−1)/T, which is exact.
        scope: accuracy among the task's classes or among all classes; by default that of the run's setting.
        published: False shows our numbers alone.
    """
    require_known("forgetting", over, OVER)
    rows = tuple(_row(group, scope, published) for group in _group(runs))
    return Comparison(rows, tuple(_trends(rows, View(over, scope))), over, published)


def render(comparison: Comparison, format: str) -> RenderableType:
    """Render the tables in a format of `report.table`; 'csv' holds the cells, 'json' the cells and the test."""
    cells = [row.record() for row in comparison.rows]
    if format == "json":
        return to_json({"cells": cells, "test": [trend.record() for trend in comparison.trends]})
    if format == "csv":
        return to_csv(cells)
    tables = [_challenge_table(rows, comparison) for rows in summary.split_groups(comparison.rows, "challenge")]
    if len(tables) > 1 and format != "rich":
        tables.insert(0, paper_layout(comparison))
    if not tables:
        tables = [Table((), (), notes=("No runs.",))]
    tests = summary.trend_tables(comparison.trends, comparison.published)
    no_tests = Table((), (), notes=(f"The paper's test needs at least {2 * END_LRS} learning rates.",))
    return table.render([*tables, *(tests or [no_tests])], format)


def write_tables(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the comparison in every format, and the test as a second CSV file."""
    text = io.StringIO()
    Console(file=text, width=TEXT_WIDTH, color_system=None, force_jupyter=False).print(render(comparison, "rich"))
    formats = {"md": "markdown", "tex": "latex", "csv": "csv"}
    texts = {f"table1.{suffix}": str(render(comparison, format)) for suffix, format in formats.items()}
    test = to_csv([trend.record() for trend in comparison.trends])
    texts |= {"table1-test.csv": test, "table1.txt": text.getvalue()}
    with report_os_errors("write the table to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in texts.items():
            (folder / file).write_text(content.rstrip() + "\n", encoding="utf-8")
    return [folder / file for file in texts]


def paper_layout(comparison: Comparison) -> Table:
    """Lay out our numbers as the paper's Table 1: the challenges beside each other."""
    cells = {}
    for row in comparison.rows:
        row_cells = [_cell(x.ours, not row.finished) for x in (row.acc, row.forgetting[comparison.over])]
        cells[row.locality, row.algorithm, row.lr, row.challenge] = [*row_cells, _seeds_cell(row)]
    notes = (
        "Ours: mean ± standard deviation over seeds (ddof = 0), in percent; – where there are no runs.",
        f"FGT: loss of test accuracy since each task was learnt, averaged over {_averaged_tasks(comparison.over)}.",
    )
    return by_learning_rate(("ACC", "FGT", "seeds"), cells, title="All challenges", notes=notes)


def relabel(runs: Iterable[Run]) -> Runs:
    """Label runs by their row of the table, without the options that the table fixes; used for figures.

    Runs whose random numbers follow other protocols have the same distribution, and count as seeds of one row.
    """
    return Runs(
        [
            replace(
                run,
                config={k: v for k, v in run.config.items() if k != "protocol"},
                info={**run.info, "label": _label(run)},
            )
            for run in runs
        ]
    )


def angles_of(run: Run) -> str:
    """Return whether a rotated challenge has the 'published' angles or draws them from the 'seed'."""
    return "seed" if run.config["challenge"].get("options", {}).get("angles") is None else "published"


def _challenge_table(rows: Sequence[ComparisonRow], comparison: Comparison) -> Table:
    """Lay out one challenge: ACC and FGT, each ours, published and z."""
    cells: dict[CellKey, list[Cell]] = {}
    for row in rows:
        cells[row.locality, row.algorithm, row.lr, ""] = [_seeds_cell(row)]
        for group, x in (("ACC (↑)", row.acc), ("FGT (↓)", row.forgetting[comparison.over])):
            group_cells = cells.setdefault(
                (row.locality, row.algorithm, row.lr, group), [_cell(x.ours, not row.finished)]
            )
            if comparison.published:
                group_cells += [_cell(x.published), Cell(signed(x.z, ".1f"), marked=x.differs)]
    columns = ("ours", "published", "Δ") if comparison.published else ("ours",)
    names = {"": ("seeds",), "ACC (↑)": columns, "FGT (↓)": columns}
    return by_learning_rate(names, cells, title=rows[0].challenge, notes=_notes(rows, comparison))


def _cell(estimate: Estimate | None, diverged: bool = False) -> Cell:
    return mean_std(estimate.mean, estimate.std) if estimate else Cell("diverged" if diverged else ABSENT)


def _seeds_cell(row: Group) -> Cell:
    """Return over how many seeds a mean is taken."""
    return Cell(f"{len(row.finished)} of {row.seeds}" if row.diverged else str(row.seeds))


def _notes(rows: Sequence[ComparisonRow], comparison: Comparison) -> tuple[str, ...]:
    """Explain the numbers of one challenge."""
    name = rows[0].challenge
    compared = any(row.acc.published for row in rows)
    single = any(row.acc.ours is not None and row.acc.ours.seeds == 1 for row in rows)
    seeds = summary.format_range((row.seeds for row in rows), "seed")
    notes = [
        f"Mean ± standard deviation (ddof = 0) in percent, ours over {seeds}"
        f"{'; one seed has no deviation' if single else ''}.",
        f"FGT: loss of test accuracy since each task was learnt, averaged over {_averaged_tasks(comparison.over)}.",
    ]
    if compared:
        deviation_text = "; one seed borrows the published deviation" if single else ""
        notes.append(
            f"Δ: ours − published in standard errors √(s²/(n−1) + s'²/(n'−1)){deviation_text}. Bold: |Δ| > {MAX_Z:g}."
        )
    if compared and name.startswith("rotated-"):
        published = all(angles_of(run) == "published" for row in rows for run in row.runs)
        angles_text = "use the published angles, so both have part of their deviations in common"
        notes.append(f"Ours {angles_text if published else 'do not use the published angles'}.")
    if compared and any(row.algorithm == "ogd-published" for row in rows):
        notes.append("ogd-published is compared with the published OGD row; ogd-gtl is the paper's OGD-GTL.")
    if comparison.published and not compared:
        column, reason = COLUMNS.get(name), f"there are no published numbers for {name}"
        if column is not None:
            size = f"{column.tasks} tasks, {column.epochs} epochs, batches of {column.batch_size} and {column.network}"
            scope = "; their accuracy is among the task's classes" if column.setting == "task" else ""
            reason = f"the published numbers of {name} are of {size}{scope}"
        notes.append(f"Not compared: {reason}.")
    if any(row.diverged for row in rows):
        notes.append(summary.diverged_note(row.identity() for row in rows))
    return tuple(notes)


def _averaged_tasks(over: Over) -> str:
    return "the T−1 tasks before the last, as published" if over == "t-1" else "all T tasks"


def _group(runs: Iterable[Run]) -> list[Group]:
    """Group runs by cell, sorted by seed; raise an error if they differ in more than their random numbers."""
    cells: dict[tuple[str, str, str, float], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        cells.setdefault((run.challenge, run.locality, _label(run), run.lr), []).append(run)
    for _, (first, *others) in sorted(cells.items()):
        for run in others:
            _require_equal_settings(first, run)
    return [Group(*key, tuple({run.seed: run for run in members}.values())) for key, members in sorted(cells.items())]


def _require_equal_settings(first: Run, second: Run) -> None:
    first_settings, second_settings = tree.flatten(first.config), tree.flatten(second.config)
    # Protocols 1 and 2 draw different random numbers from the same distributions.
    for name in sorted((first_settings.keys() | second_settings.keys()) - {"seed", "protocol"}):
        if first_settings.get(name) != second_settings.get(name):
            old, new = (
                shorten(str(x.get(name, "absent")), 40, placeholder="...") for x in (first_settings, second_settings)
            )
            raise GlocalError(
                f"the runs of {_label(second)} on {second.challenge} at lr {second.lr:g} differ in {name}: "
                f"{old} with seed {first.seed}, {new} with seed {second.seed}; runs of one cell may only differ in "
                "their seed. Select runs of one size and one kind of angles."
            )


def _label(run: Run) -> str:
    """Return the algorithm's name, or its label if the table has a row of that name with other options."""
    column, algorithm = COLUMNS.get(run.challenge), run.config["algorithm"]
    name, options = str(algorithm["name"]), algorithm.get("options", {})
    has_row = column is not None and any(row.algorithm == name for row in column.all_rows)
    return run.algorithm if column and has_row and column.find_row(name, options) is None else name


def _published_cell(run: Run, scope: Scope | None) -> dict[str, Any] | None:
    """Return the published numbers of a run with the published protocol, and of its scope."""
    column, config = COLUMNS.get(run.challenge), run.config
    if column is None or (column.setting == "task" and scope_of(run, scope) != "task"):
        return None
    size = run.tasks, config["epochs"], config["batch_size"], config["network"]["name"]
    row = column.find_row(config["algorithm"]["name"], config["algorithm"].get("options", {}))
    if row is None or size != (column.tasks, column.epochs, column.batch_size, column.network):
        return None
    return column.published_cell(row, run.lr)


def _row(group: Group, scope: Scope | None, with_published: bool) -> ComparisonRow:
    published = _published_cell(group.runs[0], scope) if with_published else None
    count = len(group.finished)

    def difference(name: str, over: Over = "t-1") -> Difference:
        mean, std = group.statistics(View(over, scope))[name]
        ours = Estimate(mean, std if count > 1 else math.nan, count) if math.isfinite(mean) else None
        if published is None:
            return Difference(ours, None)
        scale = 1.0 if over == "t-1" else (group.tasks - 1) / group.tasks
        mean, std = (scale * published[f"{name}_{part}"] for part in ("mean", "std"))
        return Difference(ours, Estimate(mean, std, len(SEEDS)))

    forgetting = {over: difference("forgetting", over) for over in OVER}
    attributes = {field.name: getattr(group, field.name) for field in fields(group)}
    return ComparisonRow(**attributes, acc=difference("acc"), forgetting=forgetting)


def _trends(rows: Sequence[ComparisonRow], view: View) -> Iterator[TrendRow]:
    """Run the paper's test on each algorithm, and compute the same difference of the published numbers."""
    for trend in summary.trends(rows, view):
        algorithm_rows = [row for row in rows if (row.challenge, row.algorithm) == (trend.challenge, trend.algorithm)]
        ends = algorithm_rows[:END_LRS] + algorithm_rows[-END_LRS:]
        means = {row.lr: estimate.mean for row in ends if (estimate := row.forgetting[view.forgetting].published)}
        yield replace(trend, published=low_minus_high(means) if len(means) == len(ends) else None)
