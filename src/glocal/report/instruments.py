"""What an instrument found, as a table for a terminal and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.report.examination import require_figure
from glocal.report.style import COOL, MARKERS, WARM, drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from glocal.lens.instruments import Look

HUES = (*COOL, *WARM)


def save(found: Look, path: str | Path) -> Path:
    """The figure as a file. Missing folders are made."""
    return drawn(lambda figure: draw(found, figure), require_figure(path))


def draw(found: Look, figure: Figure) -> None:
    """A panel for each quantity and in it a line for each kind of row; one panel where there is one kind."""
    from matplotlib.ticker import MaxNLocator

    how, rows = found.instrument, found.rows
    panels = [(line,) for line in how.lines] if how.by else [how.lines]
    figure.set_size_inches(2.0 + 3.4 * len(panels), 3.4)
    figure.suptitle(f"{how.title[0].upper()}{how.title[1:]}", x=0.012, ha="left", fontweight="bold")
    kinds = list(dict.fromkeys(row[how.by] for row in rows)) if how.by else [None]
    for axes, names in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for i, (name, kind) in enumerate((name, kind) for name in names for kind in kinds):
            own = [row for row in rows if how.by is None or row[how.by] == kind]
            x, y = (np.array([row[k] for row in own], dtype=float) for k in (how.x, name))
            shown = np.isfinite(x) & np.isfinite(y) & ((x > 0) & (y > 0) if how.log else True)
            order = np.argsort(x[shown], kind="stable")
            label = _worded(name) if how.by is None else f"{how.by} {kind}" if isinstance(kind, int) else kind
            marks: dict[str, Any] = {"marker": MARKERS["global"][i % 4], "color": HUES[i % len(HUES)], "markersize": 4}
            axes.plot(x[shown][order], y[shown][order], label=label, linestyle="-" if how.joined else "", **marks)
        if how.log:
            axes.set(xscale="log", yscale="log")
        elif how.counted:
            axes.set_yscale("symlog", linthresh=1)
        elif all(isinstance(row[how.x], int) for row in rows):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(_worded(how.x))
        if len(names) == 1:
            axes.set_title(_worded(names[0]), loc="left")
    if how.by or len(how.lines) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def table(found: Look) -> Table:
    """All rows."""
    from rich import box
    from rich.table import Table

    made = Table(title=found.instrument.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in found.rows[0] if found.rows else ():
        made.add_column(_worded(name), justify="right", overflow="fold")
    for row in found.rows:
        made.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()))
    return made


def _worded(name: str) -> str:
    return name.replace("_", " ")
