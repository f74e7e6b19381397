"""The style of all figures. matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.errors import GlocalError, unknown
from glocal.report.groups import Group, by_algorithm, by_challenge, format_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure, SubFigure

INK, FAINT = "#333333", "#6E6E6E"
# Paul Tol's colour-blind-safe colours; dashes and markers carry the same information without colour.
COOL = ("#0077BB", "#009988", "#33BBEE", "#332288", "#44AA99", "#6699CC")
WARM = ("#CC3311", "#EE7733", "#AA3377", "#DDAA33", "#882255", "#EE6677")
DASHES = {"global": "-", "local": "--"}
MARKERS = {"global": ("o", "s", "D", "^", "v", "8"), "local": ("X", "P", "<", ">", "p", "h")}
TITLE_COLOURS = {"global": COOL[0], "local": WARM[0]}
MAX_PANELS_PER_ROW = 4
SUFFIXES = (".pdf", ".png", ".svg")

RC: dict[Any, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "figure.titlesize": 10.5,
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "mathtext.fontset": "dejavusans",
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
        names = sorted(name for name, kind in algorithms if kind == locality)
        for i, name in enumerate(names):
            marker = MARKERS[locality][(i + i // len(hues)) % len(hues)]
            styles[name, locality] = LineStyle(hues[i % len(hues)], DASHES[locality], marker)
    return styles


@contextmanager
def style_context() -> Iterator[None]:
    """Apply the style to figures drawn in this context."""
    import matplotlib

    with matplotlib.rc_context(RC):
        yield


def require_figure(path: str | Path) -> Path:
    """Return the path of a figure; raise unless its suffix is one of `SUFFIXES`."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    return path


def save_figure(draw: Callable[[Figure], None], path: Path) -> Path:
    """Draw a figure in this style and save it, without a date, so that equal data give equal files."""
    from matplotlib.figure import Figure

    metadata: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix.lower(), {})
    with style_context():
        figure = Figure(layout="constrained")
        draw(figure)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata=metadata)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise GlocalError(f"cannot write to '{path}': {reason}. Choose a path in a writable folder.") from error
    return path


def challenge_panels(
    figure: Figure, groups: Sequence[Group], width: float, height: float
) -> list[tuple[Axes, list[Group]]]:
    """Make a titled panel per challenge, with space for a legend; return each with its groups."""
    parts = by_challenge(groups)
    figure.set_size_inches(len(parts) * width + 1.5, height)
    cells = list(zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True))
    lines = max(len(_subtitle(members)) for members in parts)
    for axes, members in cells:
        axes.set_title(members[0].challenge, loc="left", pad=4 + 10 * lines, fontweight="bold")
        subtitle = "\n".join(_subtitle(members))
        axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=FAINT, fontsize=8, va="bottom", linespacing=1.1)
    return cells


def algorithm_panels(
    figure: Figure, groups: Sequence[Group], width: float, height: float, **more: Any
) -> list[tuple[SubFigure, list[tuple[Axes, list[Group]]]]]:
    """Make a titled section per challenge, one below the other, with a panel per algorithm that has finished runs."""
    parts = by_challenge(groups)
    inside = [by_algorithm(group for group in members if group.finished) for members in parts]
    parts, inside = [p for p, own in zip(parts, inside, strict=True) if own], [own for own in inside if own]
    columns = max(-(-len(own) // -(-len(own) // MAX_PANELS_PER_ROW)) for own in inside)
    rows = [-(-len(own) // columns) for own in inside]
    heights = [n * height + 0.6 for n in rows]
    figure.set_size_inches(max(columns * width + 1.1, 4.2), sum(heights))
    below = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    sections = []
    for subfigure, members, algorithms, count in zip(below, parts, inside, rows, strict=True):
        title = f"{members[0].challenge} · " + "\n".join(_subtitle(members))
        subfigure.suptitle(title, x=0.012, ha="left", fontweight="bold")
        cells = list(subfigure.subplots(count, columns, squeeze=False, **more).flat)
        for axes in cells[len(algorithms) :]:
            axes.set_visible(False)
        for axes, own in zip(cells, algorithms, strict=False):
            axes.set_title(own[0].title, color=TITLE_COLOURS[own[0].locality], loc="left")
        sections.append((subfigure, list(zip(cells, algorithms, strict=False))))
    return sections


def legend(figure: Figure, order: Sequence[str], note: str | None = None) -> None:
    """Add one legend beside all panels, in this order, with a note above it."""
    handle_of: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        handle_of |= dict(zip(labels, handles, strict=True))
    names = [name for name in order if name in handle_of]
    shown = [handle_of[name] for name in names]
    spacing = {"handlelength": 2.8, "labelspacing": 0.7}
    figure.legend(shown, names, loc="outside right center", title=note, alignment="left", **spacing)


def draw_path(axes: Axes, x: np.ndarray, y: np.ndarray, style: LineStyle, sizes: Sequence[float], label: str) -> None:
    """Draw a path through points over learning rates, with error bars.

    Args:
        axes: Where to draw.
        x: Means and standard deviations, as two rows.
        y: The same for the other axis.
        style: Colour, dashes and marker.
        sizes: The area of each point.
        label: The label in the legend.
    """
    axes.errorbar(x[0], y[0], y[1], x[1], fmt="none", ecolor=style.colour, elinewidth=0.7, alpha=0.3)
    axes.plot(x[0], y[0], **style.line(), linewidth=1.1, alpha=0.85)
    edges: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.6, "zorder": 3}
    axes.scatter(x[0], y[0], s=sizes, color=style.colour, marker=style.marker, **edges)
    axes.plot([], [], **style.line(), **style.point(), label=label)


def dark_plasma(brightest: float) -> ListedColormap:
    """Return the colour map plasma up to a brightness; its brightest end is invisible on white."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.0, brightest, 256)))


def log_lr(axes: Axes, lrs: Sequence[float], crowded: bool = False) -> None:
    """Make the x axis a logarithmic learning rate whose ticks are the rates used."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axes.set_xscale("log")
    low, high = min(lrs), max(lrs)
    margin = (high / low) ** 0.08 if high > low else 2.0
    axes.set_xlim(low / margin, high * margin)
    shown = _select_ticks(sorted(set(lrs)), max_ticks=4 if crowded else 8)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FixedFormatter([format_lr(lr) for lr in shown]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate")


def _subtitle(groups: Sequence[Group]) -> list[str]:
    """Describe the groups of a challenge: tasks and seeds, and how many runs diverged."""
    counts = sorted({len(group.runs) for group in groups})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    tasks = max(group.tasks for group in groups)
    diverged = sum(len(group.runs) - len(group.finished) for group in groups)
    total = sum(len(group.runs) for group in groups)
    lines = [f"{tasks} task{'s' if tasks > 1 else ''} · {seeds} seed{'s' if counts[-1] > 1 else ''}"]
    return lines + ([f"{diverged} of {total} runs diverged and are left out"] if diverged else [])


def _select_ticks(lrs: Sequence[float], max_ticks: int) -> list[float]:
    """Choose ticks whose labels do not overlap: the ends first, then powers of ten, then the others."""
    spacing = np.log(lrs[-1] / lrs[0]) / max_ticks - 1e-9
    ticks = {lrs[0], lrs[-1]}
    for lr in sorted(lrs, key=lambda lr: (not float(np.log10(lr)).is_integer(), lr)):
        if all(abs(np.log(lr / other)) >= spacing for other in ticks):
            ticks.add(lr)
    return sorted(ticks)
