"""What an instrument found, as a table for a terminal and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.report.examination import require_figure
from glocal.report.style import COOL, FAINT, MARKERS, WARM, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from glocal.lens.instruments import Look

HUES = (*COOL, *WARM)


def save(found: Look, path: str | Path) -> Path:
    """The figure as a file. Missing folders are made."""
    return save_figure(lambda figure: draw(found, figure), require_figure(path))


def draw(found: Look, figure: Figure) -> None:
    """A panel for each quantity and in it a line for each kind of row; one panel where there is one kind."""
    from matplotlib.ticker import MaxNLocator

    how, rows = found.instrument, found.rows
    panels = [(line,) for line in how.lines] if how.by else [how.lines]
    figure.set_size_inches(2.0 + 3.4 * len(panels), 3.4)
    figure.suptitle(f"{how.title[0].upper()}{how.title[1:]}", x=0.012, ha="left", fontweight="bold")
    kinds = list(dict.fromkeys(row[how.by] for row in rows)) if how.by else [None]
    for axes, names in zip(figure.subplots(1, len(panels), squeeze=False, sharey=how.compared)[0], panels, strict=True):
        drawn_any = False
        for i, (name, kind) in enumerate((name, kind) for name in names for kind in kinds):
            own = [row for row in rows if how.by is None or row[how.by] == kind]
            x, y = (np.array([row[k] for row in own], dtype=float) for k in (how.x, name))
            shown = np.isfinite(x) & np.isfinite(y) & ((x > 0) & (y > 0) if how.log else True)
            order = np.argsort(x[shown], kind="stable")
            drawn_any |= bool(shown.any())
            label = _worded(name) if how.by is None else f"{how.by} {kind}" if isinstance(kind, int) else kind
            marks: dict[str, Any] = {"marker": MARKERS["global"][i % 4], "color": HUES[i % len(HUES)], "markersize": 4}
            axes.plot(x[shown][order], y[shown][order], label=label, linestyle="-" if how.joined else "", **marks)
        if not drawn_any:
            axes.text(0.5, 0.5, "no numbers to draw", transform=axes.transAxes, ha="center", color=FAINT)
            axes.tick_params(bottom=False, labelbottom=False, left=False, labelleft=False)
        elif how.log:
            axes.set(xscale="log", yscale="log")
        elif how.counted:
            axes.set_yscale("symlog", linthresh=1)
        elif all(isinstance(row[how.x], int) for row in rows):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel(_worded(how.x))
        if len(names) == 1:
            axes.set_title(_worded(names[0]), loc="left")
    if how.by or len(how.lines) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def tables(found: Look, width: int) -> list[Table]:
    """All rows. Columns that a terminal has no room for go to further tables, each with what the rows are of."""
    from rich import box
    from rich.table import Table

    cells = {name: [_told(row[name]) for row in found.rows] for name in (found.rows[0] if found.rows else ())}
    made: list[Table] = []
    for names in _groups(cells, [name for name in cells if not isinstance(found.rows[0][name], float)], width):
        title = found.instrument.title if not made else None
        one = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for name in names:
            one.add_column(_worded(name), justify="right", overflow="fold", min_width=_least(name, cells[name]))
        for row in zip(*(cells[name] for name in names), strict=True):
            one.add_row(*row)
        made.append(one)
    return made


def _groups(cells: dict[str, list[str]], heads: list[str], width: int) -> list[list[str]]:
    """Columns by their tables: as many as fit, those at the head in all of them."""
    needs = {name: 2 + _least(name, column) for name, column in cells.items()}
    groups: list[list[str]] = [[]]
    for name in (name for name in cells if name not in heads):
        if groups[-1] and 1 + sum(needs[n] for n in (*heads, *groups[-1], name)) > width:
            groups.append([])
        groups[-1].append(name)
    return [[*heads, *names] for names in groups]


def _least(name: str, column: list[str]) -> int:
    """The width at which no word breaks."""
    return max(map(len, (*_worded(name).split(), *column)))


def _told(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def _worded(name: str) -> str:
    return name.replace("_", " ")
