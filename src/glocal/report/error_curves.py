"""A run's approximation errors over its steps: the losses of finished tasks, and a panel for each approximation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.report.examination import colours, require_figure
from glocal.report.style import FAINT, INK, WARM, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from glocal.lens.approximation import Curves
    from glocal.lens.error_curves import Along

COLUMNS = 3
BELOW = 300
"""Errors that are smaller than ε by more than this factor are below the panels."""
NAMED = 10
"""Tasks of which each has its name in the legend; of more, the first and the last one."""


def save(found: Along, path: str | Path) -> Path:
    """The figure as a file. Missing folders are made."""
    return save_figure(lambda figure: draw(found, figure), require_figure(path))


def draw(found: Along, figure: Figure) -> None:
    """Lines are tasks; grey ones where the next task begins, the dashed one ε."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = 1 + len(found.curves)
    columns = min(COLUMNS, panels)
    rows = -(-panels // columns)
    figure.set_size_inches(2.75 * columns + 0.9, 2.3 * rows + 0.5)
    title = f"{found.algorithm}: how far old losses are told, along training"
    figure.suptitle(title, x=0.008, ha="left", fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    any_of_them = next(iter(found.curves.values()))
    _lines(grid[0], any_of_them, any_of_them.true.numpy(), "$L_o$")
    low, high = grid[0].get_ylim()
    if grid[0].get_yscale() == "log" and high < 20 * low:  # powers of ten alone would be one number or none
        grid[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        grid[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        grid[0].yaxis.set_minor_formatter(NullFormatter())
    errors = np.concatenate([c.error.numpy().reshape(-1) for c in found.curves.values()])
    largest = max(errors[np.isfinite(errors)].max(initial=0.0), found.epsilon)
    for axes, (name, curves) in zip(grid[1:], found.curves.items(), strict=False):
        _lines(axes, curves, curves.error.numpy(), f"$\\xi_o$, {name}")
        axes.set_ylim(found.epsilon / BELOW, 2 * largest)
        axes.axhline(found.epsilon, color=INK, linestyle="--", linewidth=1)
        broken = found.assumptions[name].first_break
        if broken is not None:
            axes.axvline(broken.step, color=WARM[0], linewidth=1)
    for axes in list(grid)[panels:]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")


def _lines(axes: Axes, curves: Curves, values: Any, title: str) -> None:
    step, finished = curves.step.numpy(), curves.finished.numpy()
    tasks, hues = values.shape[1] - 1, colours(values.shape[1])  # nothing follows the last one
    for t in range(1, int(finished.max())):
        axes.axvline(step[finished == t][0], color="#C8C8C8", linewidth=0.8, zorder=0)
    for o in range(tasks):
        named = tasks <= NAMED or o in (0, tasks - 1)
        label = f"task {o}" if named else None
        # A line ends where a number is 0 or beyond numbers.
        shown = np.where(np.isfinite(values[:, o]) & (values[:, o] > 0), values[:, o], np.nan)
        axes.plot(step[finished > o], shown[finished > o], color=hues[o], linewidth=1.2, label=label)
    known = values[:, :tasks][finished[:, None] > np.arange(tasks)]
    if (np.isfinite(known) & (known > 0)).any():
        axes.set_yscale("log")
    else:
        said = "0 everywhere" if (known == 0).all() else "beyond numbers"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_yticks([])
    first, last = step[finished > 0].min(), step.max()
    axes.set_xlim(first, last + 0.02 * max(last - first, 1))  # what happens at the end is seen
    axes.set_title(title.replace("θ_o", r"$\theta_o$"), loc="left")
    axes.set_xlabel("step", color=FAINT)


def table(found: Along) -> Table:
    """A row for every approximation: how large its errors were, how far it was right, and where it first was not."""
    from rich import box
    from rich.table import Table

    title = f"Along training, of {found.algorithm}: the locality assumption with ε = {found.epsilon:.3g}"
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    made.add_column("approximation", overflow="fold")
    for name in ("largest ξ", "right up to\n‖θ − θ_o‖", "broke\nat step", "tasks\nlearnt", "of task", "ξ there"):
        made.add_column(name, justify="right", overflow="fold")
    for name, held in found.assumptions.items():
        reach, broken = found.stays[name].inside.nan_to_num(0), held.first_break
        far = reach.max() if broken is None else reach[broken.broken[0]]
        row = [name, f"{float(held.smallest.max()):.3g}", f"{float(far):.3g}"]
        if broken is None:
            made.add_row(*row, "[green]never[/]")
        else:
            where = f"{broken.after + 1} – {broken.step}" if 0 <= broken.after < broken.step - 1 else f"{broken.step}"
            made.add_row(
                *row, f"[red]{where}[/]", str(broken.task), ", ".join(map(str, broken.broken)), f"{broken.error:.3g}"
            )
    return made
