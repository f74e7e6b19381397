"""Rows of a study as lines over the learning rate: a line for each algorithm, through the middle of its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from glocal.report.style import COOL, DASHES, MARKERS, WARM, Pen, log_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from glocal.paper.study import Row, Scalar

Spread: TypeAlias = Literal["deviation", "range"]


class Line(NamedTuple):
    """At every learning rate the middle of the seeds' numbers, and a band around it."""

    lrs: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def where(rows: Iterable[Row], **fixed: Scalar) -> list[Row]:
    """The rows in which these names have these values."""
    return [row for row in rows if all(row[name] == value for name, value in fixed.items())]


def distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """The values of a name, in the order of their first appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def rates(rows: Iterable[Row]) -> list[float]:
    return sorted(distinct(rows, "lr"))


def numbers(rows: Iterable[Row], name: str) -> np.ndarray:
    """A name's numbers, NaN where there is none."""
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=np.float64)


def middle(values: np.ndarray, spread: Spread = "deviation") -> float:
    """The mean of the finite ones, or their median where spreads are ranges; NaN where there is none."""
    found = values[np.isfinite(values)]
    return float("nan") if not found.size else float(found.mean() if spread == "deviation" else np.median(found))


def line(rows: Sequence[Row], name: str, spread: Spread = "deviation") -> Line:
    """Mean and standard deviation (ddof = 0) over finite numbers; or the median, the least and the largest."""
    columns = []
    for lr in rates(rows):
        values = numbers(where(rows, lr=lr), name)
        values = values[np.isfinite(values)]
        if values.size:
            centre = middle(values, spread)
            low, high = (values.min(), values.max()) if spread == "range" else centre + values.std() * np.array([-1, 1])
            columns.append((lr, centre, low, high))
    return Line(*np.array(columns, dtype=np.float64).reshape(-1, 4).T)


def pens(rows: Iterable[Row]) -> dict[str, Pen]:
    """A pen for each algorithm: cool and solid if it is global, warm and dashed if local."""
    rows = list(rows)
    made = {}
    for locality, hues in (("global", COOL), ("local", WARM)):
        for i, name in enumerate(sorted(distinct(where(rows, locality=locality), "algorithm"))):
            marker = MARKERS[locality][(i + i // len(hues)) % len(hues)]
            made[name] = Pen(hues[i % len(hues)], DASHES[locality], marker)
    return made


def title(rows: Sequence[Row]) -> str:
    """An algorithm's name and its locality, as legends have it."""
    return f"{rows[0]['algorithm']} ({rows[0]['locality']})"


def order(rows: Sequence[Row]) -> list[str]:
    """The titles of all algorithms, global ones first."""
    names = sorted((str(row["locality"]), str(row["algorithm"])) for row in rows)
    return list(dict.fromkeys(f"{name} ({locality})" for locality, name in names))


def over_lr(
    axes: Axes, rows: Sequence[Row], name: str, styles: Mapping[str, Pen], spread: Spread = "deviation"
) -> None:
    """A line and its band for every algorithm."""
    for algorithm in distinct(rows, "algorithm"):
        own, pen = where(rows, algorithm=algorithm), styles[algorithm]
        found = line(own, name, spread)
        axes.plot(found.lrs, found.middle, **pen.line(), **pen.point(), label=title(own))
        axes.fill_between(found.lrs, found.low, found.high, color=pen.colour, alpha=0.12, linewidth=0)
    log_lr(axes, rates(rows), crowded=True)


def lost(rows: Sequence[Row], name: str) -> str:
    """What to say of runs without a number: they have diverged. Nothing where there is none."""
    runs = {(row["algorithm"], row["lr"], row["seed"]) for row in rows}
    gone = {(row["algorithm"], row["lr"], row["seed"]) for row in rows if not np.isfinite(numbers([row], name))[0]}
    return f"{len(gone)} of {len(runs)} runs diverged and are left out." if gone else ""
