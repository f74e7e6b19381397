"""One look for all figures. Nothing here imports matplotlib before a figure is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.errors import GlocalError
from glocal.report.groups import Group, by_algorithm, by_challenge, format_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

INK, FAINT = "#333333", "#6E6E6E"
# Paul Tol's colour-blind-safe hues, split by temperature; line style and marker say the same without colour.
COOL = ("#0077BB", "#009988", "#33BBEE", "#332288", "#44AA99", "#6699CC")
WARM = ("#CC3311", "#EE7733", "#AA3377", "#DDAA33", "#882255", "#EE6677")
DASHES = {"global": "-", "local": "--"}
MARKERS = {"global": ("o", "s", "D", "^", "v", "8"), "local": ("X", "P", "<", ">", "p", "h")}
TITLE_COLOURS = {"global": COOL[0], "local": WARM[0]}
WIDEST = 4  # panels in a row

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
class Pen:
    """How one algorithm is drawn, in every panel."""

    colour: str
    dashes: str
    marker: str

    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dashes}

    def point(self) -> dict[str, Any]:
        return {"marker": self.marker, "markeredgecolor": "white", "markeredgewidth": 0.6}


def pens(groups: Sequence[Group]) -> dict[tuple[str, str], Pen]:
    """A pen for each (algorithm, locality): cool and solid if global, warm and dashed if local."""
    made = {}
    for locality, hues in (("global", COOL), ("local", WARM)):
        names = sorted({group.algorithm for group in groups if group.locality == locality})
        for i, name in enumerate(names):
            marker = MARKERS[locality][(i + i // len(hues)) % len(hues)]
            made[name, locality] = Pen(hues[i % len(hues)], DASHES[locality], marker)
    return made


@contextmanager
def looks() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(RC):
        yield


def drawn(draw: Callable[[Figure], None], path: Path) -> Path:
    """A figure in these looks as a file; missing folders are made. Undated, so the same numbers give the same bytes."""
    from matplotlib.figure import Figure

    metadata: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix.lower(), {})
    with looks():
        figure = Figure(layout="constrained")
        draw(figure)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata=metadata)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise GlocalError(f"cannot write to '{path}': {reason}. Give a path in a writable folder.") from error
    return path


def side_by_side(
    figure: Figure, groups: Sequence[Group], width: float, height: float
) -> list[tuple[Axes, list[Group]]]:
    """A panel for each challenge, titled, with its groups, and room for a legend beside them."""
    parts = by_challenge(groups)
    figure.set_size_inches(len(parts) * width + 1.5, height)
    cells = list(zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True))
    lines = max(len(told(members)) for members in parts)
    for axes, members in cells:
        axes.set_title(members[0].challenge, loc="left", pad=4 + 10 * lines, fontweight="bold")
        subtitle = "\n".join(told(members))
        axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=FAINT, fontsize=8, va="bottom", linespacing=1.1)
    return cells


def sections(
    figure: Figure, groups: Sequence[Group], width: float, height: float, **more: Any
) -> list[tuple[SubFigure, list[tuple[Axes, list[Group]]]]]:
    """A titled section for each challenge, one below the other, a panel for each algorithm with finished runs."""
    parts = by_challenge(groups)
    inside = [by_algorithm(group for group in members if group.finished) for members in parts]
    parts, inside = [p for p, own in zip(parts, inside, strict=True) if own], [own for own in inside if own]
    columns = max(-(-len(own) // -(-len(own) // WIDEST)) for own in inside)
    rows = [-(-len(own) // columns) for own in inside]
    heights = [n * height + 0.6 for n in rows]
    figure.set_size_inches(max(columns * width + 1.1, 4.2), sum(heights))
    below = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    made = []
    for subfigure, members, algorithms, count in zip(below, parts, inside, rows, strict=True):
        title = f"{members[0].challenge} · " + "\n".join(told(members))
        subfigure.suptitle(title, x=0.012, ha="left", fontweight="bold")
        cells = list(subfigure.subplots(count, columns, squeeze=False, **more).flat)
        for axes in cells[len(algorithms) :]:
            axes.set_visible(False)
        for axes, own in zip(cells, algorithms, strict=False):
            axes.set_title(own[0].title, color=TITLE_COLOURS[own[0].locality], loc="left")
        made.append((subfigure, list(zip(cells, algorithms, strict=False))))
    return made


def legend(figure: Figure, order: Sequence[str], note: str | None = None) -> None:
    """One legend beside all panels, in the given order, and a note above it."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    names = [name for name in order if name in found]
    shown = [found[name] for name in names]
    spacing = {"handlelength": 2.8, "labelspacing": 0.7}
    figure.legend(shown, names, loc="outside right center", title=note, alignment="left", **spacing)


def log_lr(axes: Axes, lrs: Sequence[float], crowded: bool = False) -> None:
    """The learning rate on a logarithmic axis, with the rates that were used as its ticks."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axes.set_xscale("log")
    low, high = min(lrs), max(lrs)
    margin = (high / low) ** 0.08 if high > low else 2.0
    axes.set_xlim(low / margin, high * margin)
    shown = _apart(sorted(set(lrs)), most=4 if crowded else 8)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FixedFormatter([format_lr(lr) for lr in shown]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate")


def told(groups: Sequence[Group]) -> list[str]:
    """What a title adds to the challenge's name: tasks and seeds, and how many runs were left out."""
    counts = sorted({len(group.runs) for group in groups})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    tasks = max(group.tasks for group in groups)
    diverged = sum(len(group.runs) - len(group.finished) for group in groups)
    of = sum(len(group.runs) for group in groups)
    lines = [f"{tasks} task{'s' if tasks > 1 else ''} · {seeds} seed{'s' if counts[-1] > 1 else ''}"]
    return lines + ([f"{diverged} of {of} runs diverged and are left out"] if diverged else [])


def _apart(lrs: Sequence[float], most: int) -> list[float]:
    """Ticks whose labels do not run into each other, a `most`-th of the axis apart: the ends, powers of ten, others."""
    least = np.log(lrs[-1] / lrs[0]) / most - 1e-9
    kept = {lrs[0], lrs[-1]}
    for lr in sorted(lrs, key=lambda lr: (not float(np.log10(lr)).is_integer(), lr)):
        if all(abs(np.log(lr / other)) >= least for other in kept):
            kept.add(lr)
    return sorted(kept)
