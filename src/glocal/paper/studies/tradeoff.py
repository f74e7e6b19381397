r"""Stability and plasticity (§6.1): accuracy against forgetting, from low learning rates to high.

The paper: higher learning rates make a network more plastic; global algorithms gain most, since their forgetting stays
the same, and local ones pay with forgetting. The study takes the runs of Table 1, and its columns are those of a file
of results: `--results results/rotated-mnist.parquet` draws the figure without training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from glocal.metrics import summary
from glocal.paper import table1
from glocal.paper.selection import Selection, train
from glocal.paper.studies.common import (
    curve,
    distinct,
    diverged_note,
    finite,
    group,
    label,
    legend_order,
    line_styles,
    mean,
    names,
    of_columns,
    run_row,
    where,
)
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, LineStyle, draw_path, legend
from glocal.report.summary import PERCENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

END_RATES = 2
"""Number of learning rates at either end, as in the paper's test."""
PANELS = {"learning_accuracy": "accuracy right after learning (%)", "acc": r"final accuracy, $\mathrm{ACC}(T)$ (%)"}
HEADINGS = {"Δ accuracy after learning": "learning_accuracy", "Δ forgetting": "forgetting", "Δ final accuracy": "acc"}


class Tradeoff:
    """A row for every run of a column of Table 1: accuracies and forgetting in percent."""

    name = "tradeoff"
    columns = (
        "challenge algorithm locality lr seed acc forgetting backward_transfer forward_transfer learning_accuracy "
        "distance"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        chosen = _column(demo)
        return [
            {"challenge": chosen.challenge, "algorithm": row.algorithm, "demo": demo, "tasks": chosen.tasks}
            | {"epochs": chosen.epochs, "lrs": chosen.lrs, "seeds": chosen.seeds}
            for row in chosen.rows
        ]

    def cost(self, demo: bool) -> str:
        chosen = _column(demo)
        runs = len(chosen.rows) * len(chosen.lrs) * len(chosen.seeds)
        return f"{chosen.challenge}: the {runs} runs of table1 without extra rows; nothing if the store has them"

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        chosen = _column(item["demo"])
        sizes = {"tasks": item["tasks"], "epochs": item["epochs"]}
        part = Selection(chosen, (chosen.row(item["algorithm"]),), tuple(item["lrs"]), tuple(item["seeds"]), **sizes)
        rows: list[Row] = []
        for run in train(part, store=context.store, data=context.data, device=str(context.device)):
            values: Row = {name: 100 * x if name in PERCENT else x for name, x in summary(run).items()}
            rows.append({"challenge": run.challenge} | run_row(run, item["algorithm"]) | values)
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """A curve for each algorithm from its lowest learning rate to its highest, with growing points."""
        figure.set_size_inches(9.6, 4.3)
        styles, lrs = line_styles(rows), distinct(rows, "lr")
        for axes, (name, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
            points = [_draw_curve(axes, where(rows, algorithm=a), name, styles[a], lrs) for a in names(rows)]
            _set_limits(axes, np.concatenate(points))
            axes.set_xlabel("forgetting $E(T)$ (points, over $T - 1$ tasks)")
            axes.set_title(title, loc="left")
            axes.text(1, 1.02, "↖ better", transform=axes.transAxes, color=FAINT, fontsize=8, ha="right", va="bottom")
        rates = ", ".join(f"{lr:g}" for lr in lrs)
        legend(figure, legend_order(rows), note=f"points grow with\nthe learning rate:\n{rates}\n")

    def summarize(self, rows: Sequence[Row]) -> Summary:
        lrs = distinct([row for row in rows if len(finite([row], "acc"))], "lr")
        count = min(END_RATES, len(lrs) // 2)
        if not count:
            return Summary([], "Runs at two or more learning rates are needed.")
        low, high = lrs[:count], lrs[-count:]
        changes = of_columns(HEADINGS, partial(_change, low=low, high=high))
        table = group(rows, "algorithm locality", changes | {"best final accuracy": _best, "at lr": _best_lr})
        change = {kind: mean(where(table, locality=kind), "Δ final accuracy") for kind in ("global", "local")}
        gain = change["global"] - change["local"]
        agrees = "agrees" if gain > 0 else "does not agree"
        verdict = (
            f"From the {count} lowest learning rates to the {count} highest the final accuracy of global algorithms "
            f"changes by {change['global']:+.1f} points and that of local ones by {change['local']:+.1f}: {agrees} "
            "with the paper."
        )
        return Summary(table, verdict + diverged_note(rows, "acc"))


STUDIES = (Tradeoff(),)


def _column(demo: bool) -> table1.Column:
    return table1.DEMO if demo else table1.COLUMNS["rotated-mnist"]


def _change(rows: Sequence[Row], name: str, low: Sequence[float], high: Sequence[float]) -> float:
    """The mean at the high learning rates minus that at the low ones; NaN if a rate has no finite run."""
    ends = [np.mean([mean(where(rows, lr=lr), name) for lr in lrs]) for lrs in (low, high)]
    return float(ends[1] - ends[0])


def _best(rows: Sequence[Row]) -> float:
    points = curve(rows, "acc")
    return float(points.middle.max()) if len(points.lrs) else np.nan


def _best_lr(rows: Sequence[Row]) -> float:
    points = curve(rows, "acc")
    return float(points.lrs[points.middle.argmax()]) if len(points.lrs) else np.nan


def _draw_curve(axes: Axes, rows: Sequence[Row], name: str, style: LineStyle, lrs: Sequence[float]) -> np.ndarray:
    known = [row for row in rows if len(finite([row], "acc"))]
    x, y = curve(known, "forgetting"), curve(known, name)
    sizes = [16 + 64 * lrs.index(lr) / max(len(lrs) - 1, 1) for lr in x.lrs]
    across, up = (np.array([part.middle, part.high - part.middle]) for part in (x, y))
    draw_path(axes, across, up, style, sizes, label(rows))
    return np.stack([x.middle, y.middle], axis=1)


def _set_limits(axes: Axes, points: np.ndarray) -> None:
    """Fit the limits to the means: the error bar of one collapsed run would be as long as all curves together."""
    points = points[np.isfinite(points).all(1)]
    if len(points):
        (left, low), (right, high) = points.min(0), points.max(0)
        dx, dy = 0.06 * (right - left or 1), 0.06 * (high - low or 1)
        axes.set(xlim=(left - dx, right + dx), ylim=(low - dy, high + dy))
