"""Are our cells of Table 1 the paper's? The published angles with other seeds (docs/experiments/retraining.md).

Both sides share the angles, so only initialisation and order are noise. Ten other seeds for every sequence of angles
measure it, and each cell is tested for equivalence with the published one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from scipy import stats

from glocal import challenges
from glocal.paper import table1
from glocal.paper.studies import common
from glocal.paper.studies.common import MeanInterval, column, names
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, legend
from glocal.report.summary import DEFAULT_VIEW, run_statistics

COLUMN = table1.COLUMNS["rotated-mnist"]
ALGORITHMS = [row.algorithm for row in COLUMN.rows if row.published]
FULL: WorkItem = common.FULL | {"batch_size": COLUMN.batch_size, "lrs": COLUMN.lrs, "seeds": list(range(101, 111))}
DEMO: WorkItem = common.DEMO | {"tasks": 3, "epochs": 1, "batch_size": 64, "lrs": [0.05, 0.2], "seeds": [101, 102]}
SEQUENCES = COLUMN.seeds
"""Published seeds, whose sequences of angles are trained; the demo has the first two."""
MARGIN, LEVEL = 2.0, 0.9
"""The largest difference that counts as equal, in points, and the level of the intervals."""


class Retraining:
    """A row for every run: its sequence of angles, accuracy and forgetting in points."""

    name = "retraining"
    columns = "challenge algorithm locality lr seed sequence acc forgetting"

    def work_items(self, demo: bool) -> list[WorkItem]:
        """One item for each algorithm and sequence of angles."""
        size, algorithms, sequences = (DEMO, ALGORITHMS[1:4], SEQUENCES[:2]) if demo else (FULL, ALGORITHMS, SEQUENCES)
        return [{"algorithm": name, "sequence": sequence, **size} for name in algorithms for sequence in sequences]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        row = COLUMN.row(item["algorithm"])
        angles = table1.published_angles(row.angles)[item["sequence"]][: item["tasks"]]
        challenge = challenges.make(item["challenge"], item["tasks"], context.data, angles=angles)
        network = common.item_mlp(item)
        runs = common.sweep_item(item, context, challenge, [(row.algorithm, row.options)], network=network)
        values = run_statistics(runs, DEFAULT_VIEW)
        return [
            common.run_row(self.columns, item, run, statistics) for run, statistics in zip(runs, values, strict=True)
        ]

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Ours minus published with intervals, and the margin."""
        figure.set_size_inches(8.6, 4.2)
        intervals = {measure: differences(rows, measure) for measure in ("acc", "forgetting")}
        for axes, (measure, cells) in zip(figure.subplots(1, 2, sharey=True), intervals.items(), strict=True):
            axes.axvspan(-MARGIN, MARGIN, color=FAINT, alpha=0.15, linewidth=0, label=f"±{MARGIN:g} points")
            axes.axvline(0, color=FAINT, linewidth=0.9)
            for place, difference in enumerate(cells.values()):
                half = difference.high - difference.mean
                axes.errorbar(difference.mean, place, xerr=half, fmt="o", markersize=3, color="C0")
            axes.set(title={"acc": "ACC", "forgetting": "FGT"}[measure], xlabel="ours − published (points)")
            axes.set_yticks(range(len(cells)), [f"{name} {lr:g}" for name, lr in cells])
            axes.tick_params(labelsize=7)
        figure.axes[0].invert_yaxis()
        legend(figure, [f"±{MARGIN:g} points"], note=f"bars: {LEVEL:.0%} intervals\n")

    def summarize(self, rows: pl.DataFrame) -> Summary:
        intervals = {measure: differences(rows, measure) for measure in ("acc", "forgetting")}
        table: list[Row] = []
        for name, lr in intervals["acc"]:
            row: Row = {"algorithm": name, "lr": lr}
            for measure, title in (("acc", "ACC"), ("forgetting", "FGT")):
                cell = intervals[measure][name, lr]
                cell_rows = rows.filter(algorithm=name, lr=lr)
                row |= {f"{title}, ours − published": str(cell), title: verdict_of(cell)}
                row[f"{title}, share of angles"] = share_of_angles(cell_rows, measure)
            table.append(row)
        counts = {
            kind: sum(verdict_of(cell) == kind for cells in intervals.values() for cell in cells.values())
            for kind in ("equivalent", "different", "undecided")
        }
        total = sum(map(len, intervals.values()))
        if not sum(counts.values()):
            return Summary(table, "There are no published numbers for this challenge.")
        text = (
            f"Of {total} intervals, {counts['equivalent']} lie within ±{MARGIN:g} points of the published number, "
            f"{counts['different']} outside, and {counts['undecided']} are undecided: the hypothesis is "
            f"{'refuted' if counts['different'] else 'not refuted'}."
        )
        return Summary(table, text + common.diverged_note(rows, "acc"))


class Estimate(NamedTuple):
    """An estimate, its standard error and the degrees of freedom of that."""

    mean: float
    error: float
    freedom: float


def estimate(rows: pl.DataFrame, measure: str, ratio: float = 1.0) -> Estimate:
    """Return the mean over sequences, and the error of its difference from a mean of one run for each sequence.

    These runs are assumed to have `ratio` times the variance of ours. Sequences with fewer than two finite runs are
    left out.
    """
    parts = [column(part, measure) for part in rows.partition_by("sequence", maintain_order=True)]
    parts = [values[np.isfinite(values)] for values in parts]
    parts = [values for values in parts if len(values) > 1]
    if not parts:
        return Estimate(np.nan, np.nan, np.nan)
    variances = np.array([(ratio + 1 / len(values)) * values.var(ddof=1) for values in parts]) / len(parts) ** 2
    freedom = variances.sum() ** 2 / sum(v**2 / (len(values) - 1) for v, values in zip(variances, parts, strict=True))
    return Estimate(
        float(np.mean([values.mean() for values in parts])), float(np.sqrt(variances.sum())), float(freedom)
    )


def differences(rows: pl.DataFrame, measure: str, ratio: float = 1.0) -> dict[tuple[str, float], MeanInterval]:
    """Return ours minus the published number of every cell; NaN where nothing was published.

    `ratio` is the variance of published runs over that of ours.
    """
    intervals = {}
    published = set(names(rows, "challenge")) == {COLUMN.challenge}
    for name in names(rows):
        for lr in common.distinct(rows.filter(algorithm=name), "lr"):
            ours = estimate(rows.filter(algorithm=name, lr=lr), measure, ratio)
            cell = COLUMN.published_cell(COLUMN.row(name), lr) if published else None
            difference = ours.mean - (cell[f"{measure}_mean"] if cell else np.nan)
            half = float(stats.t.ppf((1 + LEVEL) / 2, ours.freedom)) * ours.error
            intervals[name, lr] = MeanInterval(difference, difference - half, difference + half)
    return intervals


def verdict_of(difference: MeanInterval) -> str:
    """Return 'equivalent', 'different' or 'undecided'; '' where nothing was published."""
    if not np.isfinite(difference.low):
        return ""
    if difference.low >= -MARGIN and difference.high <= MARGIN:
        return "equivalent"
    return "different" if difference.low > MARGIN or difference.high < -MARGIN else "undecided"


def share_of_angles(rows: pl.DataFrame, measure: str) -> float:
    """Return the share of the variance over runs that is between sequences of angles (one-way analysis of variance)."""
    finite_rows = rows.filter(pl.col(measure).is_finite())
    parts = [column(part, measure) for part in finite_rows.partition_by("sequence")]
    parts = [values for values in parts if len(values) > 1]
    if len(parts) < 2:
        return np.nan
    size = np.mean([len(values) for values in parts])
    within = np.mean([values.var(ddof=1) for values in parts])
    between = max(0.0, float(np.var([values.mean() for values in parts], ddof=1) - within / size))
    return between / (between + within) if between + within > 0 else np.nan


STUDIES = (Retraining(),)
