r"""Stability and plasticity (§6.1): what an algorithm learns against what it forgets, from low learning rates to high.

The paper: higher learning rates make a network more plastic, and global algorithms gain the most by it, for their
forgetting stays the same; local ones pay with forgetting. It takes the runs of Table 1, and its rows have the names of
those of a file of results: `--results results/rotated-mnist.parquet` draws the figure without training anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.metrics import summary
from glocal.paper import table1
from glocal.paper.selection import Selection, train
from glocal.paper.studies.lr_plots import line, listed, lost, mean, names, order, pens, title
from glocal.paper.studies.row_filters import column, distinct, where
from glocal.paper.study import Piece, Place, Row
from glocal.report.groups import PERCENT
from glocal.report.style import FAINT, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from glocal.report.style import Pen

ENDS = 2
"""So many learning rates make an end of their range, as in the paper's test."""
PANELS = {
    "learning_accuracy": "accuracy right after learning (%)",
    "acc": r"accuracy in the end, $\mathrm{ACC}(T)$ (%)",
}


class Tradeoff:
    """A row for every run of Table 1's column: accuracies and forgetting in percent."""

    name = "tradeoff"
    columns = (
        "challenge algorithm locality lr seed acc forgetting backward_transfer forward_transfer learning_accuracy "
        "distance"
    )

    def pieces(self, demo: bool) -> list[Piece]:
        chosen = _column(demo)
        return [
            {"challenge": chosen.challenge, "algorithm": row.algorithm, "demo": demo, "tasks": chosen.tasks}
            | {"epochs": chosen.epochs, "lrs": chosen.lrs, "seeds": chosen.seeds}
            for row in chosen.rows
        ]

    def cost(self, demo: bool) -> str:
        chosen = _column(demo)
        runs = len(chosen.rows) * len(chosen.lrs) * len(chosen.seeds)
        return f"{chosen.challenge}: the {runs} runs of table1, further rows apart; nothing where they are in the store"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        chosen = _column(piece["demo"])
        part = Selection(
            chosen,
            (chosen.row(piece["algorithm"]),),
            tuple(piece["lrs"]),
            tuple(piece["seeds"]),
            piece["tasks"],
            piece["epochs"],
        )
        rows: list[Row] = []
        for run in train(part, store=place.store, data=place.data, device=str(place.device)):
            numbers: Row = {name: 100 * x if name in PERCENT else x for name, x in summary(run).items()}
            whose: Row = {"challenge": run.challenge, "algorithm": piece["algorithm"], "locality": run.locality}
            rows.append(whose | {"lr": float(run.lr), "seed": int(run.seed)} | numbers)
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """A curve for each algorithm, from its lowest learning rate to its highest, in growing points."""
        figure.set_size_inches(9.6, 4.3)
        styles = pens(rows)
        for axes, (name, label) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
            for algorithm in names(rows):
                _curve(axes, where(rows, algorithm=algorithm), name, styles[algorithm], distinct(rows, "lr"))
            _around_the_points(axes)
            axes.set_xlabel("forgetting $E(T)$ (points, over $T - 1$ tasks)")
            axes.set_title(label, loc="left")
            axes.text(1, 1.02, "↖ better", transform=axes.transAxes, color=FAINT, fontsize=8, ha="right", va="bottom")
        rates = ", ".join(f"{lr:g}" for lr in distinct(rows, "lr"))
        legend(figure, order(rows), note=f"points grow with\nthe learning rate:\n{rates}\n")

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        if not np.isfinite(column(rows, "acc")).any():
            return ["Stability and plasticity cannot be looked at: no run has a finite loss."]
        lrs = distinct(rows, "lr")
        ends = min(ENDS, len(lrs) // 2)
        if not ends:
            return ["Stability and plasticity are seen over learning rates: these rows have one alone."]
        low, high = lrs[:ends], lrs[-ends:]
        said = [
            "The paper says that higher learning rates make networks more plastic, and that global algorithms gain "
            "more by it, since local ones pay with forgetting."
        ]
        changes: dict[str, dict[str, float]] = {}
        for kind in ("global", "local"):
            own = where(rows, locality=kind)
            if not own:
                continue
            changes[kind] = {name: _change(own, name, low, high) for name in ("learning_accuracy", "acc", "forgetting")}
            each = {a: _change(where(own, algorithm=a), "acc", low, high) for a in names(own)}
            told = [f"{a} {change:+.1f}" for a, change in each.items() if np.isfinite(change)]
            absent = [a for a, change in each.items() if not np.isfinite(change)]
            told += [f"without {listed(absent)}, of which no run is left at some rate"] if absent else []
            said.append(
                f"From learning rates of {_told(low)} to {_told(high)}, the accuracy of {kind} algorithms right after "
                f"learning changes by {changes[kind]['learning_accuracy']:+.1f} points, their forgetting by "
                f"{changes[kind]['forgetting']:+.1f}, and their accuracy in the end by {changes[kind]['acc']:+.1f} "
                f"({', '.join(told)})."
            )
        if len(changes) == 2:
            gain = changes["global"]["acc"] - changes["local"]["acc"]
            verdict = "as the paper says" if gain > 0 else "against the paper"
            said.append(f"So global algorithms gain {gain:+.1f} points more accuracy than local ones, {verdict}.")
        best = max(names(rows), key=lambda a: np.nan_to_num(_best(where(rows, algorithm=a))[0], nan=-np.inf))
        accuracy, lr = _best(where(rows, algorithm=best))
        said.append(f"The highest accuracy in the end is that of {best} at {lr:g}: {accuracy:.1f} %.")
        return said + lost(rows, "acc")


def _column(demo: bool) -> table1.Column:
    return table1.DEMO if demo else table1.COLUMNS["rotated-mnist"]


def _told(lrs: Sequence[float]) -> str:
    return listed([f"{lr:g}" for lr in lrs])


def _change(rows: Sequence[Row], name: str, low: Sequence[float], high: Sequence[float]) -> float:
    """The mean at the high learning rates less that at the low ones, every algorithm with the same weight."""
    each = []
    for algorithm in names(rows):
        own = where(rows, algorithm=algorithm)
        ends = [[mean(where(own, lr=lr), name) for lr in some] for some in (low, high)]
        each.append(np.mean(ends[1]) - np.mean(ends[0]))
    return float(np.nanmean(each)) if np.isfinite(each).any() else np.nan


def _best(rows: Sequence[Row]) -> tuple[float, float]:
    """The highest mean accuracy, and its learning rate."""
    found = line(rows, "acc")
    if not len(found.lrs):
        return np.nan, np.nan
    i = int(found.middle.argmax())
    return float(found.middle[i]), float(found.lrs[i])


def _curve(axes: Axes, rows: Sequence[Row], name: str, pen: Pen, lrs: Sequence[float]) -> None:
    sound = [row for row in rows if np.isfinite(column([row], "acc"))[0]]
    x, y = line(sound, "forgetting"), line(sound, name)
    spread: dict[str, Any] = {"ecolor": pen.colour, "elinewidth": 0.7, "alpha": 0.3}
    axes.errorbar(x.middle, y.middle, y.high - y.middle, x.high - x.middle, fmt="none", **spread)
    axes.plot(x.middle, y.middle, **pen.line(), linewidth=1.1, alpha=0.85)
    sizes = [16 + 64 * lrs.index(lr) / max(len(lrs) - 1, 1) for lr in x.lrs]
    edges: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.6, "zorder": 3}
    axes.scatter(x.middle, y.middle, s=sizes, color=pen.colour, marker=pen.marker, **edges)
    axes.plot([], [], **pen.line(), **pen.point(), label=title(rows))


def _around_the_points(axes: Axes) -> None:
    """Limits that the means set: one run that collapsed makes an error bar as long as all curves together."""
    from matplotlib.collections import PathCollection

    points = [np.asarray(part.get_offsets()) for part in axes.collections if isinstance(part, PathCollection)]
    shown = np.concatenate(points)
    shown = shown[np.isfinite(shown).all(1)]
    if len(shown):
        (left, low), (right, high) = shown.min(0), shown.max(0)
        beside, above = 0.06 * (right - left or 1), 0.06 * (high - low or 1)
        axes.set(xlim=(left - beside, right + beside), ylim=(low - above, high + above))


STUDIES = (Tradeoff(),)
