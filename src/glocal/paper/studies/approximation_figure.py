r"""The figure of how well old losses are approximated: errors while tasks are learnt and against the distance, and the
losses themselves beside what they are taken for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from glocal.paper.studies.row_filters import against, column, distinct, median, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from glocal.paper.study import Row
    from glocal.report.style import Pen


class Series(NamedTuple):
    """A line of the figure: whose run it is about, and which approximation."""

    algorithm: str
    approximation: str
    locality: str

    @property
    def own(self) -> bool:
        return self.approximation == "own"

    @property
    def label(self) -> str:
        if self.own:
            return self.algorithm
        return self.approximation if self.approximation.startswith("order") else f"order 2, {self.approximation}"

    def rows(self, rows: Sequence[Row], **values: Any) -> list[Row]:
        return where(rows, algorithm=self.algorithm, approximation=self.approximation, **values)

    def errors(self, rows: Sequence[Row], lr: float) -> tuple[np.ndarray, np.ndarray]:
        """After how many tasks, and the error of the mean old loss: the median over seeds."""
        return against(self.rows(rows, lr=lr, ray=False, task=None), "learnt", "error")

    def average(self, rows: Sequence[Row], lr: float) -> float:
        """The same over all tasks but the first."""
        _, found = self.errors(rows, lr)
        return float(found.mean()) if len(found) else np.nan

    def exponent(self, rows: Sequence[Row]) -> float:
        """p of an error that grows as rᵖ: the median over the runs where it is known."""
        found = column(self.rows(rows, ray=True), "exponent")
        return median(found[np.isfinite(found)])

    def bound(self, rows: Sequence[Row], order: int, near: float) -> float:
        """The least C of ξ ≤ C rᵖ for all r up to there: the median over the runs where it is known."""
        own = [row for row in self.rows(rows, ray=True) if column([row], "distance")[0] <= near * (1 + 1e-9)]
        found = [column(run, "error") / column(run, "distance") ** order for run in _runs(own)]
        return median([float(np.nanmax(each)) for each in found if np.isfinite(each).any()])


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    return [where(rows, lr=lr, seed=seed) for lr, seed in dict.fromkeys((row["lr"], row["seed"]) for row in rows)]


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Errors of the algorithms' own approximations and of expansions; below them old losses, true and approximated."""
    figure.set_size_inches(10.6, 9.8)
    pens, ends = _pens(rows), rates(rows)
    own, expansions = ({s: pen for s, pen in pens.items() if s.own == kind} for kind in (True, False))
    above, between, below = figure.subfigures(3, 1, height_ratios=(3.1, 3.1, 3.6), squeeze=False)[:, 0]
    _errors(above, rows, own, ends)
    _errors(between, rows, expansions, ends)
    _losses(below, rows, own, ends)
    for section, title in (
        (above, r"The algorithms' own approximations $\hat L_o$"),
        (between, "Taylor expansions of the losses along plain SGD's run"),
        (below, "The mean old loss, true (grey) and as the algorithms take it (in colour)"),
    ):
        section.suptitle(title, x=0.012, ha="left", fontweight="bold")


def _errors(section: SubFigure, rows: Sequence[Row], lines: Mapping[Series, Pen], ends: tuple[float, float]) -> None:
    """While tasks are learnt, at the lowest and the highest learning rate, and against the distance from θ_1."""
    low, high, far, beside = section.subplots(1, 4, width_ratios=(3, 3, 3, 2))
    low.sharey(high)
    for axes, lr, word in zip((low, high), ends, ("low", "high"), strict=True):
        _over_time(axes, rows, lines, lr)
        axes.set_title(f"{word} learning rate, {lr:g}", loc="left")
    low.set_ylabel("error of the mean old loss")
    _over_distance(far, rows, lines, ends[1])
    beside.axis("off")
    spacing: dict[str, Any] = {"handlelength": 3, "labelspacing": 0.7, "borderpad": 0}
    note = "how the error grows\nup to $r = 1$\n"
    beside.legend(*far.get_legend_handles_labels(), loc="center left", title=note, alignment="left", **spacing)


def _losses(section: SubFigure, rows: Sequence[Row], lines: Mapping[Series, Pen], ends: tuple[float, float]) -> None:
    """A column for every algorithm, a row for either learning rate. What leaves the panels is told by the errors."""
    from matplotlib.ticker import MaxNLocator

    from glocal.report.style import FAINT

    if not lines:
        return
    panels = section.subplots(2, len(lines), sharex=True, sharey="row", squeeze=False)
    for row, lr in zip(panels, ends, strict=True):
        highest = 0.0
        for axes, (series, pen) in zip(row, lines.items(), strict=True):
            own = series.rows(rows, lr=lr, ray=False, task=None)
            for name, colour in (("true", FAINT), ("approximate", pen.colour)):
                learnt, losses = against(own, "learnt", name)
                known = np.isfinite(losses)
                axes.plot(learnt[known], losses[known], color=colour)
                highest = max(highest, losses[known].max(initial=0.0) if name == "true" else 0.0)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if highest:
            row[0].set_ylim(-0.1 * highest, 1.4 * highest)
        row[0].set_ylabel(f"rate {lr:g}")
    for axes, series in zip(panels[0], lines, strict=True):
        axes.set_title(f"{series.label} ({series.locality})", loc="left", fontsize=8)
    section.supxlabel("tasks learnt", fontsize=9)


def series_of(rows: Sequence[Row]) -> list[Series]:
    """All lines: expansions, and the algorithms by their names."""
    found = dict.fromkeys(Series(str(r["algorithm"]), str(r["approximation"]), str(r["locality"])) for r in rows)
    return sorted(found, key=lambda s: (s.own, s.locality * s.own, s.algorithm * s.own))


def rates(rows: Sequence[Row]) -> tuple[float, float]:
    lrs = distinct(rows, "lr")
    return lrs[0], lrs[-1]


def _pens(rows: Sequence[Row]) -> dict[Series, Pen]:
    """Cool and solid if global, warm and dashed if local."""
    from glocal.report.style import COOL, DASHES, MARKERS, WARM, Pen

    pens: dict[Series, Pen] = {}
    for series in series_of(rows):
        before = sum((s.own, s.locality) == (series.own, series.locality) for s in pens)
        hues = COOL if series.locality == "global" else WARM
        marker = MARKERS[series.locality][before % len(hues)]
        pens[series] = Pen(hues[before % len(hues)], DASHES[series.locality], marker)
    return pens


def _over_time(axes: Axes, rows: Sequence[Row], lines: Mapping[Series, Pen], lr: float) -> None:
    """Against the tasks learnt. Where half of the runs have diverged a line ends, and a sign at the top says so."""
    from matplotlib.ticker import MaxNLocator

    lost = False
    for series, pen in lines.items():
        learnt, errors = series.errors(rows, lr)
        finite = np.isfinite(errors)
        axes.plot(learnt[finite], errors[finite], **pen.line(), **pen.point())
        if not finite.all():
            lost = True
            axes.plot(learnt[~finite][0], 0.97, transform=axes.get_xaxis_transform(), color=pen.colour, **pen.point())
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("tasks learnt  (at the top: diverged)" if lost else "tasks learnt")


def _over_distance(axes: Axes, rows: Sequence[Row], lines: Mapping[Series, Pen], lr: float) -> None:
    """ξ_1 against the distance from θ_1, and how far away θ_2 is."""
    from glocal.report.style import FAINT

    for series, pen in lines.items():
        radii, errors = against(series.rows(rows, lr=lr, ray=True), "distance", "error")
        shown = np.isfinite(errors)
        p = series.exponent(where(rows, lr=lr))
        label = f"{series.label}   $r^{{{round(p, 1) + 0:g}}}$" if np.isfinite(p) else series.label
        axes.plot(radii[shown], errors[shown], **pen.line(), **pen.point(), markersize=3.5, label=label)
    after = [row for series in lines for row in series.rows(rows, lr=lr, ray=False, task=0, learnt=2)]
    if np.isfinite(there := median(column(after, "distance"))):
        axes.axvline(there, color=FAINT, linewidth=0.9, linestyle=":")
        axes.text(there, 0.02, r" $\theta_2$", transform=axes.get_xaxis_transform(), color=FAINT, va="bottom")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"from $\\theta_1$ towards $\\theta_2$, rate {lr:g}", loc="left")
    axes.set_xlabel(r"distance  $r = \Vert\theta - \theta_1\Vert_2$")
    axes.set_ylabel(r"$\xi_1(\theta)$")
