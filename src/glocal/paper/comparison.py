r"""Compare our Table 1 with the published one, and run the paper's test on both (§6.1).

Two means differ by z standard errors, with standard error √(s²/(n−1) + s'²/(n'−1)), where s and s' are the standard
deviations over seeds (ddof = 0) and n and n' the numbers of seeds. A single seed has no deviation of its own; the
published variance stands in for it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from glocal.errors import GlocalError, require_known
from glocal.metrics import END_LRS, OVER, Over, Scope, learning_rate_test, low_minus_high, over_seeds, scope_of, summary
from glocal.paper.table1 import COLUMNS, SEEDS, PublishedCell
from glocal.report import table
from glocal.report.summary import TrendRow, diverged_note, format_range, round_finite, trend_tables
from glocal.report.table import ABSENT, Cell, Column, Section, Table, format_lr, mean_std, signed, to_csv, to_json
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
    def difference(self) -> float | None:
        return None if self.ours is None or self.published is None else self.ours.mean - self.published.mean

    @property
    def standard_error(self) -> float | None:
        if self.ours is None or self.published is None:
            return None
        variance = self.ours.variance if self.ours.seeds > 1 else self.published.variance
        return math.sqrt(variance / self.ours.seeds + self.published.variance / self.published.seeds)

    @property
    def z(self) -> float | None:
        """The difference in standard errors."""
        return None if not self.standard_error or self.difference is None else self.difference / self.standard_error

    @property
    def differs(self) -> bool:
        """Whether |z| > 2."""
        return self.z is not None and abs(self.z) > MAX_Z

    def record(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for prefix, estimate in (("", self.ours), ("published_", self.published)):
            record[f"{name}_{prefix}mean"] = round_finite(estimate.mean if estimate else None)
            record[f"{name}_{prefix}std"] = round_finite(estimate.std if estimate else None)
        record |= {f"{name}_difference": round_finite(self.difference)}
        record |= {f"{name}_standard_error": round_finite(self.standard_error)}
        return record | {f"{name}_z": round_finite(self.z), f"{name}_differs": None if self.z is None else self.differs}


@dataclass(frozen=True)
class ComparisonRow:
    """One (challenge, algorithm, lr): accuracy, and forgetting over T−1 and over T tasks, in percent.

    `by_seed[seed][over]` is the forgetting of each run that did not diverge.
    """

    challenge: str
    algorithm: str
    locality: str
    lr: float
    tasks: int
    seeds: int
    diverged: int
    acc: Difference
    forgetting: Mapping[Over, Difference]
    by_seed: Mapping[int, Mapping[Over, float]]

    def record(self) -> dict[str, Any]:
        names = ("challenge", "algorithm", "locality", "lr", "tasks", "seeds", "diverged")
        record = {name: getattr(self, name) for name in names} | self.acc.record("acc")
        return record | self.forgetting["t-1"].record("forgetting") | self.forgetting["t"].record("forgetting_over_t")


@dataclass(frozen=True)
class Comparison:
    """Rows of the comparison and the paper's test.

    angles: 'published', 'seed' or both, for rotated challenges.
    other_size: challenges with published numbers whose runs do not have the published size, so are not compared.
    other_scope: challenges whose published accuracy is among the task's classes while ours is among all classes.
    with_published: whether tables have columns for the published numbers.
    """

    rows: tuple[ComparisonRow, ...]
    trends: tuple[TrendRow, ...]
    angles: str | None
    other_size: tuple[str, ...] = ()
    other_scope: tuple[str, ...] = ()
    over: Over = "t-1"
    with_published: bool = True

    @property
    def challenges(self) -> list[str]:
        return list(dict.fromkeys(row.challenge for row in self.rows))

    def select(self, challenge: str) -> Comparison:
        """Return the part of the comparison that concerns one challenge."""
        return replace(
            self,
            rows=tuple(row for row in self.rows if row.challenge == challenge),
            trends=tuple(trend for trend in self.trends if trend.challenge == challenge),
            angles=self.angles if challenge.startswith("rotated-") else None,
            other_size=tuple(name for name in self.other_size if name == challenge),
            other_scope=tuple(name for name in self.other_scope if name == challenge),
        )


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
    groups = _group(runs)
    rows = tuple(_row(group, scope, published) for group in groups)
    flat = [run for group in groups for run in group]
    angles = sorted({angles_of(run) for run in flat if run.challenge.startswith("rotated-")})
    known = [run for run in flat if published and run.challenge in COLUMNS]
    return Comparison(
        rows,
        _trends(rows, over),
        angles=" and ".join(angles) or None,
        other_size=tuple(sorted({run.challenge for run in known if not _has_published_size(run)})),
        other_scope=tuple(sorted({run.challenge for run in known if not _has_published_scope(run, scope)})),
        over=over,
        with_published=published,
    )


def render(comparison: Comparison, format: str) -> RenderableType:
    """Render the tables in a format of `report.table`; 'csv' holds the cells, 'json' the cells and the test."""
    cells = [row.record() for row in comparison.rows]
    if format == "json":
        return to_json({"cells": cells, "test": [trend.record() for trend in comparison.trends]})
    if format == "csv":
        return to_csv(cells)
    several = len(comparison.challenges) > 1
    tables = [paper_layout(comparison)] if several and format != "rich" else []
    tables += [comparison_table(comparison.select(challenge)) for challenge in comparison.challenges]
    if not comparison.rows:
        tables = [Table((), (), notes=("No runs.",))]
    trends = trend_tables(comparison.trends, comparison.with_published)
    few = Table((), (), notes=(f"The paper's test needs at least {2 * END_LRS} learning rates.",))
    return table.render([*tables, *(trends or [few])], format)


def write_tables(comparison: Comparison, folder: str | Path, name: str = "table1") -> list[Path]:
    """Write the comparison in every format, and the test as a second CSV file."""
    folder = Path(folder)
    text = io.StringIO()
    Console(file=text, width=TEXT_WIDTH, color_system=None).print(render(comparison, "rich"))
    texts = {
        f"{name}.md": render(comparison, "markdown"),
        f"{name}.tex": render(comparison, "latex"),
        f"{name}.csv": render(comparison, "csv"),
        f"{name}-test.csv": to_csv([trend.record() for trend in comparison.trends]),
        f"{name}.txt": text.getvalue(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in texts.items():
            (folder / file).write_text(str(content).rstrip() + "\n", encoding="utf-8")
    except OSError as error:
        raise GlocalError(f"cannot write the table to '{folder}': {error.strerror or error}.") from error
    return [folder / file for file in texts]


def comparison_table(comparison: Comparison) -> Table:
    """Lay out one challenge: ACC and FGT, each ours, published and z."""
    names = ["ours", *(["published", "Δ"] if comparison.with_published else [])]
    columns = (Column("lr", align="left"), *(Column(name, group) for group in ("ACC (↑)", "FGT (↓)") for name in names))

    def cells(row: ComparisonRow) -> list[Cell]:
        cells = [Cell(format_lr(row.lr))]
        for difference in (row.acc, row.forgetting[comparison.over]):
            cells.append(_ours(row, difference))
            if comparison.with_published:
                z = signed(difference.z, 1)
                cells += [_estimate(difference.published), Cell(z, marked=difference.differs)]
        return cells

    sections: dict[tuple[str, str], list[tuple[Cell, ...]]] = {}
    for row in comparison.rows:
        sections.setdefault((row.algorithm, row.locality), []).append(tuple(cells(row)))
    title = comparison.rows[0].challenge
    body = tuple(Section(*key, tuple(lines)) for key, lines in sections.items())
    return Table(columns, body, title, notes=_notes(comparison))


def paper_layout(comparison: Comparison) -> Table:
    """Lay out our numbers as the paper's Table 1: the challenges beside each other, forgetting over T−1 and over T."""
    names = ("ACC", "FGT over T−1", "over T")
    columns = (
        Column("lr", align="left"),
        *(Column(name, challenge) for challenge in comparison.challenges for name in names),
    )
    by_key = {(row.challenge, row.algorithm, row.lr): row for row in comparison.rows}
    algorithms = sorted({(row.locality, row.algorithm) for row in comparison.rows})
    sections = []
    for locality, algorithm in algorithms:
        lines = []
        for lr in sorted({row.lr for row in comparison.rows if row.algorithm == algorithm}):
            cells = [Cell(format_lr(lr))]
            for challenge in comparison.challenges:
                row = by_key.get((challenge, algorithm, lr))
                if row is None:
                    cells += [Cell(ABSENT)] * len(names)
                else:
                    cells += [_ours(row, x) for x in (row.acc, row.forgetting["t-1"], row.forgetting["t"])]
            lines.append(tuple(cells))
        sections.append(Section(algorithm, locality, tuple(lines)))
    note = "Ours: mean ± standard deviation over seeds (ddof = 0), in percent; – where there are no runs."
    return Table(columns, tuple(sections), "All challenges", notes=(note,))


def relabel(runs: Iterable[Run]) -> Runs:
    """Label runs by their row of the table, without the options that the table fixes; used for figures."""
    return Runs([replace(run, info={**run.info, "label": _label(run)}) for run in runs])


def angles_of(run: Run) -> str:
    """Return whether a rotated challenge has the 'published' angles or draws them from the 'seed'."""
    return "seed" if run.config["challenge"].get("options", {}).get("angles") is None else "published"


def _estimate(estimate: Estimate | None) -> Cell:
    return mean_std(estimate.mean, estimate.std) if estimate else Cell(ABSENT)


def _ours(row: ComparisonRow, difference: Difference) -> Cell:
    diverged = difference.ours is None and row.diverged == row.seeds
    return Cell("diverged") if diverged else _estimate(difference.ours)


def _notes(comparison: Comparison) -> tuple[str, ...]:
    """Explain the numbers of one challenge."""
    rows, name = comparison.rows, comparison.rows[0].challenge
    published = any(row.acc.published for row in rows)
    single = any(row.acc.ours is not None and row.acc.ours.seeds == 1 for row in rows)
    over = "the T−1 tasks before the last, as published" if comparison.over == "t-1" else "all T tasks"
    notes = [
        f"Mean ± standard deviation (ddof = 0) in percent, ours over {format_range((r.seeds for r in rows), 'seed')}"
        f"{'; one seed has no deviation' if single else ''}.",
        f"FGT: loss of test accuracy since each task was learnt, averaged over {over}.",
    ]
    if published:
        borrowed = "; one seed borrows the published deviation" if single else ""
        notes.append(
            f"Δ: ours − published in standard errors √(s²/(n−1) + s'²/(n'−1)){borrowed}. Bold or *: |Δ| > {MAX_Z:g}."
        )
    if published and comparison.angles == "published":
        notes.append("Ours use the published angles, so both have part of their deviations in common.")
    elif published and comparison.angles:
        notes.append("Ours do not use the published angles.")
    if published and any(row.algorithm == "ogd-published" for row in rows):
        notes.append("ogd-published is compared with the published OGD row; ogd-gtl is the paper's OGD-GTL.")
    if comparison.with_published and not published:
        if comparison.other_size:
            notes.append(f"Not compared: the runs of {name} do not have the published size.")
        elif comparison.other_scope:
            notes.append(f"Not compared: the published accuracy on {name} is among the task's classes.")
        else:
            notes.append(f"Not compared: there are no published numbers for {name}.")
    if any(row.diverged for row in rows):
        notes.append(diverged_note((r.algorithm, r.lr, r.challenge, r.diverged, r.seeds) for r in rows))
    return tuple(notes)


def _group(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs by cell, sorted by seed; raise an error if their configurations differ in more than the seed."""
    cells: dict[tuple[str, str, str, float], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        cells.setdefault((run.challenge, run.locality, _label(run), run.lr), []).append(run)
    groups = [group for _, group in sorted(cells.items())]
    for group in groups:
        _require_equal_settings(group)
    return [list({run.seed: run for run in group}.values()) for group in groups]


def _require_equal_settings(group: Sequence[Run]) -> None:
    first = _settings(group[0].config)
    for run in group[1:]:
        other = _settings(run.config)
        for name in sorted(first.keys() | other.keys()):
            one, two = first.get(name, "absent"), other.get(name, "absent")
            if one != two:
                raise GlocalError(
                    f"the runs of {_label(run)} on {run.challenge} at lr {run.lr:g} differ in {name}: "
                    f"{_shorten(one)} with seed {group[0].seed}, {_shorten(two)} with seed {run.seed}; runs of one "
                    "cell may only differ in their seed. Select runs of one size and one kind of angles."
                )


def _settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration without its seed to dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _settings(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "seed":
            flat[f"{prefix}{key}"] = value
    return flat


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _label(run: Run) -> str:
    """Return the algorithm's name, or its label if the table has a row of that name with other options."""
    column, algorithm = COLUMNS.get(run.challenge), run.config["algorithm"]
    if column is None or not any(row.algorithm == algorithm["name"] for row in column.all_rows):
        return str(algorithm["name"])
    matches = column.find_row(algorithm["name"], algorithm.get("options", {})) is not None
    return str(algorithm["name"]) if matches else run.algorithm


def _has_published_size(run: Run) -> bool:
    column = COLUMNS[run.challenge]
    size = run.tasks, run.config["epochs"], run.config["batch_size"], run.config["network"]["name"]
    return size == (column.tasks, column.epochs, column.batch_size, column.network)


def _has_published_scope(run: Run, scope: Scope | None) -> bool:
    """Return whether the accuracy is comparable: on split challenges it must be among the task's classes."""
    return COLUMNS[run.challenge].setting != "task" or scope_of(run, scope) == "task"


def _published_cell(run: Run, scope: Scope | None) -> PublishedCell | None:
    column, algorithm = COLUMNS.get(run.challenge), run.config["algorithm"]
    if column is None or not _has_published_size(run) or not _has_published_scope(run, scope):
        return None
    row = column.find_row(algorithm["name"], algorithm.get("options", {}))
    return None if row is None else column.published_cell(row, run.lr)


def _row(group: Sequence[Run], scope: Scope | None, with_published: bool) -> ComparisonRow:
    first, finished = group[0], [run for run in group if run.diverged is None]
    published = _published_cell(first, scope) if with_published else None
    count = len(finished)

    def ours(name: str, over: Over) -> Estimate | None:
        statistics = over_seeds([{name: 100 * summary(run, scope, over=over)[name]} for run in finished])
        mean, std = statistics.get(name, (math.nan, math.nan))
        return Estimate(mean, std if count > 1 else math.nan, count) if math.isfinite(mean) else None

    def theirs(mean: float, std: float, scale: float = 1.0) -> Estimate:
        return Estimate(scale * mean, scale * std, len(SEEDS))

    forgetting: dict[Over, Difference] = {}
    for over in OVER:
        scale = 1.0 if over == "t-1" else (first.tasks - 1) / first.tasks
        reference = theirs(published.forgetting_mean, published.forgetting_std, scale) if published else None
        forgetting[over] = Difference(ours("forgetting", over), reference)
    acc = Difference(ours("acc", "t-1"), theirs(published.acc_mean, published.acc_std) if published else None)
    by_seed = {run.seed: {o: 100 * summary(run, scope, over=o)["forgetting"] for o in OVER} for run in finished}
    name, diverged = _label(first), len(group) - count
    return ComparisonRow(
        first.challenge, name, first.locality, first.lr, first.tasks, len(group), diverged, acc, forgetting, by_seed
    )


def _trends(rows: Sequence[ComparisonRow], over: Over) -> tuple[TrendRow, ...]:
    """Run the paper's test on each algorithm, and compute the same difference of the published numbers."""
    algorithms: dict[tuple[str, str, str], list[ComparisonRow]] = {}
    for row in rows:
        algorithms.setdefault((row.challenge, row.locality, row.algorithm), []).append(row)
    trends = []
    for (challenge, locality, algorithm), own in algorithms.items():
        forgetting = {row.lr: {seed: values[over] for seed, values in row.by_seed.items()} for row in own}
        trend = learning_rate_test(forgetting, locality)
        if trend is not None:
            own = sorted(own, key=lambda row: row.lr)
            ends = own[:END_LRS] + own[-END_LRS:]
            known = {row.lr: estimate.mean for row in ends if (estimate := row.forgetting[over].published)}
            published = low_minus_high(known) if len(known) == len(ends) else None
            trends.append(TrendRow(challenge, algorithm, trend, published))
    return tuple(trends)
