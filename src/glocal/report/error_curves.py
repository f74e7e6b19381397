"""Plot and tabulate a run's approximation errors over its steps, with a panel for each approximation."""

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

    from glocal.lens.approximation import ErrorCurves
    from glocal.lens.locality_assumption import TrainingErrors

COLUMNS = 3
MAX_BELOW_EPSILON = 300
"""Panels begin at ε divided by this factor."""
MAX_LEGEND_TASKS = 10
"""Of more tasks, only the first and the last are in the legend."""


def save(errors: TrainingErrors, path: str | Path) -> Path:
    """Save the figure."""
    return save_figure(lambda figure: draw(errors, figure), require_figure(path))


def draw(errors: TrainingErrors, figure: Figure) -> None:
    """Draw a line for every task; vertical grey lines are the beginnings of tasks, the dashed one is ε."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = 1 + len(errors.curves)
    columns = min(COLUMNS, panels)
    rows = -(-panels // columns)
    figure.set_size_inches(2.75 * columns + 0.9, 2.3 * rows + 0.5)
    title = f"{errors.algorithm}: approximation errors of old losses"
    figure.suptitle(title, x=0.008, ha="left", fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    first = next(iter(errors.curves.values()))
    _draw_lines(grid[0], first, first.true.numpy(), "$L_o$")
    low, high = grid[0].get_ylim()
    if grid[0].get_yscale() == "log" and high < 20 * low:  # powers of ten would give one tick or none
        grid[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        grid[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        grid[0].yaxis.set_minor_formatter(NullFormatter())
    values = np.concatenate([c.error.numpy().reshape(-1) for c in errors.curves.values()])
    largest = max(values[np.isfinite(values)].max(initial=0.0), errors.epsilon)
    for axes, (name, curves) in zip(grid[1:], errors.curves.items(), strict=False):
        _draw_lines(axes, curves, curves.error.numpy(), f"$\\xi_o$, {name}")
        axes.set_ylim(errors.epsilon / MAX_BELOW_EPSILON, 2 * largest)
        axes.axhline(errors.epsilon, color=INK, linestyle="--", linewidth=1)
        violation = errors.assumptions[name].first_violation
        if violation is not None:
            axes.axvline(violation.step, color=WARM[0], linewidth=1)
    for axes in list(grid)[panels:]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")


def _draw_lines(axes: Axes, curves: ErrorCurves, values: Any, title: str) -> None:
    step, finished = curves.step.numpy(), curves.finished.numpy()
    tasks, hues = values.shape[1] - 1, colours(values.shape[1])  # without the last one
    for t in range(1, int(finished.max())):
        axes.axvline(step[finished == t][0], color="#C8C8C8", linewidth=0.8, zorder=0)
    for o in range(tasks):
        named = tasks <= MAX_LEGEND_TASKS or o in (0, tasks - 1)
        label = f"task {o}" if named else None
        shown = np.where(np.isfinite(values[:, o]) & (values[:, o] > 0), values[:, o], np.nan)
        axes.plot(step[finished > o], shown[finished > o], color=hues[o], linewidth=1.2, label=label)
    known = values[:, :tasks][finished[:, None] > np.arange(tasks)]
    if (np.isfinite(known) & (known > 0)).any():
        axes.set_yscale("log")
    else:
        text = "0 everywhere" if (known == 0).all() else "not finite"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_yticks([])
    first, last = step[finished > 0].min(), step.max()
    axes.set_xlim(first, last + 0.02 * max(last - first, 1))
    axes.set_title(title.replace("θ_o", r"$\theta_o$"), loc="left")
    axes.set_xlabel("step", color=FAINT)


def table(errors: TrainingErrors) -> Table:
    """Return a row for every approximation: its largest error, the radius it held in, and its first violation."""
    from rich import box
    from rich.table import Table

    title = f"{errors.algorithm}: the locality assumption with ε = {errors.epsilon:.3g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("approximation", overflow="fold")
    for name in ("largest ξ", "holds up to\n‖θ − θ_o‖", "violated\nat step", "tasks\nlearned", "of task", "ξ there"):
        table.add_column(name, justify="right", overflow="fold")
    for name, check in errors.assumptions.items():
        radii, violation = errors.radii[name].last_inside.nan_to_num(0), check.first_violation
        radius = radii.max() if violation is None else radii[violation.tasks[0]]
        row = [name, f"{float(check.min_epsilon.max()):.3g}", f"{float(radius):.3g}"]
        if violation is None:
            table.add_row(*row, "[green]never[/]")
        else:
            where = (
                f"{violation.last_step_inside + 1} – {violation.step}"
                if 0 <= violation.last_step_inside < violation.step - 1
                else f"{violation.step}"
            )
            table.add_row(
                *row,
                f"[red]{where}[/]",
                str(violation.task),
                ", ".join(map(str, violation.tasks)),
                f"{violation.error:.3g}",
            )
    return table
