"""Tables and figures of the instruments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.report.examination import require_figure
from glocal.report.style import COOL, FAINT, MARKERS, WARM, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from glocal.lens.instruments import Measurement

HUES = (*COOL, *WARM)


def save(result: Measurement, path: str | Path) -> Path:
    """Save the figure."""
    return save_figure(lambda figure: draw(result, figure), require_figure(path))


def draw(result: Measurement, figure: Figure) -> None:
    """Draw a panel for each quantity with a line for each group, or one panel without groups."""
    from matplotlib.ticker import MaxNLocator

    instrument, rows = result.instrument, result.rows
    panels = [(line,) for line in instrument.y] if instrument.group else [instrument.y]
    figure.set_size_inches(2.0 + 3.4 * len(panels), 3.4)
    figure.suptitle(f"{instrument.title[0].upper()}{instrument.title[1:]}", x=0.012, ha="left", fontweight="bold")
    kinds = list(dict.fromkeys(row[instrument.group] for row in rows)) if instrument.group else [None]
    for axes, names in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=instrument.share_y)[0], panels, strict=True
    ):
        any_drawn = False
        for i, (name, kind) in enumerate((name, kind) for name in names for kind in kinds):
            group_rows = [row for row in rows if instrument.group is None or row[instrument.group] == kind]
            x, y = (np.array([row[k] for row in group_rows], dtype=float) for k in (instrument.x, name))
            shown = np.isfinite(x) & np.isfinite(y) & ((x > 0) & (y > 0) if instrument.log else True)
            order = np.argsort(x[shown], kind="stable")
            any_drawn |= bool(shown.any())
            label = (
                _label(name)
                if instrument.group is None
                else f"{instrument.group} {kind}"
                if isinstance(kind, int)
                else kind
            )
            marks: dict[str, Any] = {"marker": MARKERS["global"][i % 4], "color": HUES[i % len(HUES)], "markersize": 4}
            axes.plot(
                x[shown][order], y[shown][order], label=label, linestyle="-" if instrument.connect else "", **marks
            )
        if not any_drawn:
            axes.text(0.5, 0.5, "no numbers to draw", transform=axes.transAxes, ha="center", color=FAINT)
            axes.tick_params(bottom=False, labelbottom=False, left=False, labelleft=False)
        elif instrument.log:
            axes.set(xscale="log", yscale="log")
        elif instrument.symlog:
            axes.set_yscale("symlog", linthresh=1)
        elif all(isinstance(row[instrument.x], int) for row in rows):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel(_label(instrument.x))
        if len(names) == 1:
            axes.set_title(_label(names[0]), loc="left")
    if instrument.group or len(instrument.y) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def tables(result: Measurement, width: int) -> list[Table]:
    """Return all rows; columns that do not fit into the width go to further tables, with the same row labels."""
    from rich import box
    from rich.table import Table

    cells = {name: [_format(row[name]) for row in result.rows] for name in (result.rows[0] if result.rows else ())}
    tables_: list[Table] = []
    for names in _groups(cells, [name for name in cells if not isinstance(result.rows[0][name], float)], width):
        title = result.instrument.title if not tables_ else None
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for name in names:
            table.add_column(_label(name), justify="right", overflow="fold", min_width=_min_width(name, cells[name]))
        for row in zip(*(cells[name] for name in names), strict=True):
            table.add_row(*row)
        tables_.append(table)
    return tables_


def _groups(cells: dict[str, list[str]], labels: list[str], width: int) -> list[list[str]]:
    """Split the columns into tables that fit, each beginning with the row labels."""
    widths = {name: 2 + _min_width(name, column) for name, column in cells.items()}
    groups: list[list[str]] = [[]]
    for name in (name for name in cells if name not in labels):
        if groups[-1] and 1 + sum(widths[n] for n in (*labels, *groups[-1], name)) > width:
            groups.append([])
        groups[-1].append(name)
    return [[*labels, *names] for names in groups]


def _min_width(name: str, column: list[str]) -> int:
    """Return the width at which no word is broken."""
    return max(map(len, (*_label(name).split(), *column)))


def _format(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def _label(name: str) -> str:
    return name.replace("_", " ")
