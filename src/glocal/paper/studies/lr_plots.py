"""Rows of a study as lines over the learning rate: a line for each algorithm, through the middle of its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from glocal.paper.studies.row_filters import column, distinct, where
from glocal.report.style import COOL, DASHES, MARKERS, WARM, Pen, log_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

    from glocal.paper.study import Row

Spread: TypeAlias = Literal["deviation", "range"]


class Line(NamedTuple):
    """At every learning rate the middle of the seeds' numbers, and a band around it."""

    lrs: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def names(rows: Iterable[Row], name: str = "algorithm") -> list[Any]:
    """What occurs under a name, in the order of its first appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def finite(rows: Iterable[Row], name: str) -> np.ndarray:
    """The numbers under a name that are some."""
    found = column(rows, name)
    return found[np.isfinite(found)]


def mean(rows: Iterable[Row], name: str) -> float:
    """Over the finite numbers; NaN where there is none."""
    found = finite(rows, name)
    return float(found.mean()) if found.size else float("nan")


def line(rows: Sequence[Row], name: str, spread: Spread = "deviation") -> Line:
    """Mean and standard deviation (ddof = 0) of the finite numbers; or their median, and the least and the largest."""
    found = {lr: finite(where(rows, lr=lr), name) for lr in distinct(rows, "lr")}
    columns = []
    for lr, values in found.items():
        if values.size and spread == "range":
            columns.append((lr, np.median(values), values.min(), values.max()))
        elif values.size:
            columns.append((lr, values.mean(), values.mean() - values.std(), values.mean() + values.std()))
    return Line(*np.array(columns, dtype=np.float64).reshape(-1, 4).T)


def pens(rows: Sequence[Row]) -> dict[str, Pen]:
    """A pen for each algorithm: cool and solid if it is global, warm and dashed if local."""
    made = {}
    for locality, hues in (("global", COOL), ("local", WARM)):
        for i, name in enumerate(sorted(names(where(rows, locality=locality)))):
            marker = MARKERS[locality][(i + i // len(hues)) % len(hues)]
            made[name] = Pen(hues[i % len(hues)], DASHES[locality], marker)
    return made


def title(rows: Sequence[Row]) -> str:
    """An algorithm's name and its locality, as legends have it."""
    return f"{rows[0]['algorithm']} ({rows[0]['locality']})"


def order(rows: Sequence[Row]) -> list[str]:
    """The titles of all algorithms, global ones first."""
    return [title(where(rows, algorithm=a)) for _, a in sorted({(r["locality"], r["algorithm"]) for r in rows})]


def over_lr(
    axes: Axes, rows: Sequence[Row], name: str, styles: Mapping[str, Pen], spread: Spread = "deviation"
) -> None:
    """A line and its band for every algorithm."""
    for algorithm in names(rows):
        own, pen = where(rows, algorithm=algorithm), styles[algorithm]
        found = line(own, name, spread)
        axes.plot(found.lrs, found.middle, **pen.line(), **pen.point(), label=title(own))
        axes.fill_between(found.lrs, found.low, found.high, color=pen.colour, alpha=0.12, linewidth=0)
    log_lr(axes, distinct(rows, "lr"), crowded=True)


def log_y(axes: Axes) -> None:
    """A logarithmic axis with plain numbers, and enough of them where it spans few decades; none without numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    if not axes.dataLim.y1 > 0:
        return
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def rate_colours(rows: Iterable[Row]) -> ScalarMappable:
    """A colour for every learning rate, the brighter the higher."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    lrs = distinct(rows, "lr")
    # The brightest end of the map would vanish on white paper.
    colours = ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.0, 0.88, 256)))
    return ScalarMappable(LogNorm(lrs[0], lrs[-1] if len(lrs) > 1 else 2 * lrs[0]), colours)


def lost(rows: Sequence[Row], name: str, since: str = "") -> list[str]:
    """A sentence on the runs that diverged and have no number; none where there is no such run."""
    runs = {tuple(row.get(k) for k in ("classes", "algorithm", "lr", "seed")): row for row in rows}
    gone = sum(not np.isfinite(column([row], name))[0] for row in runs.values())
    return [f"{gone} of {len(runs)} runs diverged and are left out{since}."] if gone else []


def listed(things: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(things[:-1]), things[-1]] if len(things) > 1 else things)
