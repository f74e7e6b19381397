"""The style of all figures. matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.errors import unknown
from glocal.files import user_path
from glocal.report.table import format_lr
from glocal.store.conditions import as_text, is_number, natural_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

MAX_DIGITS = 6
"""Characters of a learning rate on an axis; longer ones are rounded."""
LEGEND_WIDTH = 2.0
"""Inches of a line of text in a legend."""
PANEL_WIDTH, CROWDED_WIDTH, CHARACTER_WIDTH = 3.6, 1.8, 0.07
"""Inches of an axis for its labels, and of a character of these."""
INK, FAINT = "#333333", "#6E6E6E"
# Paul Tol's colour-blind-safe colours; dashes and markers carry the same information without colour.
COOL = ("#0077BB", "#009988", "#33BBEE", "#332288", "#44AA99", "#6699CC")
WARM = ("#CC3311", "#EE7733", "#AA3377", "#DDAA33", "#882255", "#EE6677")
DASHES = {"global": "-", "local": "--"}
MARKERS = {"global": ("o", "s", "D", "^", "v", "8"), "local": ("X", "P", "<", ">", "p", "h")}
TITLE_COLOURS = {"global": COOL[0], "local": WARM[0]}
SUFFIXES = (".pdf", ".pgf", ".png", ".svg")

INK_PARTS = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
RC: dict[Any, Any] = {
    **dict.fromkeys(INK_PARTS, INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize", "legend.title_fontsize"), "small"),
    **dict.fromkeys(("font.size", "axes.labelsize"), 9.0),
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "figure.titlesize": 10.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "svg.hashsalt": "glocal",  # the same runs draw the same file
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class LineStyle:
    """How to draw one algorithm, in every panel."""

    colour: str
    dashes: str
    marker: str

    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dashes}

    def point(self) -> dict[str, Any]:
        return {"marker": self.marker, "markeredgecolor": "white", "markeredgewidth": 0.6}


def line_styles(algorithms: Iterable[tuple[str, str]]) -> dict[tuple[str, str], LineStyle]:
    """Return a style per (algorithm, locality): cool and solid if global, warm and dashed if local."""
    algorithms = set(algorithms)
    styles = {}
    for locality, hues in (("global", COOL), ("local", WARM)):
        for i, name in enumerate(sorted(name for name, kind in algorithms if kind == locality)):
            marker = MARKERS[locality][(i + i // len(hues)) % len(hues)]
            styles[name, locality] = LineStyle(hues[i % len(hues)], DASHES[locality], marker)
    return styles


def require_figure(path: str | Path) -> Path:
    """Return the path of a figure; raise unless its suffix is one of `SUFFIXES`."""
    path = user_path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    return path


def wrap(text: str, width: float) -> str:
    """Break a text into lines of at most `width` inches on a screen, by the mean width of a letter."""
    letters = max(int(width * 72 / (0.56 * RC["font.size"])), 12)
    lines = (textwrap.wrap(line, letters, break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join(part for line in lines for part in line)


def legend(figure: Figure, names: Iterable[str] | Mapping[str, str], note: str | None = None) -> None:
    """Add one legend beside all panels for the lines of these names, in their order, with a note above it.

    A mapping gives the texts to show instead of the names.
    """
    texts = names if isinstance(names, Mapping) else {name: name for name in names}
    handle_of: dict[str, Any] = {}
    for axes in figure.axes:
        handles: list[Any] = [*axes.lines, *axes.collections, *axes.containers]
        handle_of |= {str(handle.get_label()): handle for handle in handles}
    # Matplotlib hides what begins with an underscore.
    shown = {re.sub("^_", " _", wrap(text, LEGEND_WIDTH)): handle_of.get(name) for name, text in texts.items()}
    entries = {text: handle for text, handle in shown.items() if handle is not None}
    title = wrap(note, LEGEND_WIDTH) + "\n" if note else None
    options: dict[str, Any] = {"title": title, "alignment": "left", "handlelength": 2.8, "labelspacing": 0.7}
    figure.legend(entries.values(), entries, loc="outside right center", **options)


def draw_path(axes: Axes, x: np.ndarray, y: np.ndarray, style: LineStyle, sizes: Sequence[float], label: str) -> None:
    """Draw a path through points, with error bars at the last one: at all of them they would hide the paths.

    x and y hold means and standard deviations, as two rows; `sizes` are the areas of the points.
    """
    bars: dict[str, Any] = {"fmt": "none", "ecolor": style.colour, "elinewidth": 0.8, "alpha": 0.5}
    axes.errorbar(x[0, -1:], y[0, -1:], y[1, -1:], x[1, -1:], **bars)
    axes.plot(x[0], y[0], **style.line(), linewidth=1.1, alpha=0.85)
    edges: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.6, "zorder": 3}
    axes.scatter(x[0], y[0], s=sizes, color=style.colour, marker=style.marker, **edges)
    axes.plot([], [], **style.line(), **style.point(), label=label)


def lighten(colour: str, share: float) -> tuple[float, float, float]:
    """Mix a colour with this share of white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (share + (1 - share) * part for part in to_rgb(colour))
    return red, green, blue


def dark_plasma(brightest: float) -> ListedColormap:
    """Return the colour map plasma up to a brightness; its brightest end is invisible on white."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.0, brightest, 256)))


def positions(values: Iterable[Any]) -> dict[Any, float]:
    """Return the position of each value on an axis: positive numbers at their value, others evenly spaced in order."""
    values = list(dict.fromkeys(values))
    if all(is_number(value) and value > 0 for value in values):
        return {value: float(value) for value in values}
    return {value: float(i) for i, value in enumerate(sorted(values, key=natural_order))}


def option_axis(axes: Axes, values: Iterable[Any], name: str, crowded: bool = False) -> None:
    """Make the x axis that of an option whose ticks are its values: logarithmic if they are positive numbers."""
    places = positions(values)
    axes.set_xlabel("learning rate" if name == "lr" else name)
    if not all(is_number(value) and value > 0 for value in places):
        axes.set_xticks(list(places.values()), [as_text(value) for value in places])
        axes.set_xlim(-0.5, len(places) - 0.5)
        return
    axes.set_xscale("log")
    low, high = min(places), max(places)
    margin = (high / low) ** 0.08 if high > low else 2.0
    axes.set_xlim(low / margin, high * margin)
    exact = {value: format_lr(value) for value in sorted(places)}
    labels = {v: np.format_float_positional(v, 3, fractional=False, trim="-") for v in exact}
    labels = {v: text if len(text) <= MAX_DIGITS else labels[v] for v, text in exact.items()}
    labels = labels if len({*labels.values()}) == len(labels) else exact
    room = (CROWDED_WIDTH if crowded else PANEL_WIDTH) / (max(map(len, labels.values())) * CHARACTER_WIDTH + 0.1)
    ticks = _select_ticks(list(labels), room)
    axes.set_xticks(ticks, [labels[value] for value in ticks])
    axes.set_xticks([], minor=True)


def _select_ticks(lrs: Sequence[float], max_ticks: float) -> list[float]:
    """Choose ticks whose labels do not overlap: the ends first, then powers of ten, then the others."""
    spacing = np.log(lrs[-1] / lrs[0]) / max_ticks - 1e-9
    ticks = {lrs[0], lrs[-1]}
    for lr in sorted(lrs, key=lambda lr: (not float(np.log10(lr)).is_integer(), lr)):
        if all(abs(np.log(lr / other)) >= spacing for other in ticks):
            ticks.add(lr)
    return sorted(ticks)
