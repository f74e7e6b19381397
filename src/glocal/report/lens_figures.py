"""Figures and tables of `glocal lens`: an examination, the errors along a training, and single instruments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.report.style import COOL, FAINT, INK, MARKERS, TITLE_COLOURS, WARM, dark_plasma
from glocal.report.table import ABSENT, Cell, Column, Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from glocal.lens.approximation_error import ErrorCurves
    from glocal.lens.examination import Examination
    from glocal.lens.instruments import Measurement
    from glocal.lens.locality_assumption import TrainingErrors

COLUMNS = 3
"""Panels of error curves per row of a figure."""
MAX_BELOW_EPSILON = 300
"""Panels of error curves begin at ε divided by this factor."""
MAX_LEGEND_TASKS = 10
"""Of more tasks, only the first and the last are in the legend."""


def _task_colours(tasks: int) -> list[Any]:
    """Return a color for every task, brighter for later ones."""
    return list(dark_plasma(0.85)(np.linspace(0.0, 1.0, max(tasks, 2))))


def draw_examination(result: Examination, figure: Figure) -> None:
    """Draw three panels below the finding."""
    figure.set_size_inches(11.4, 3.7)
    figure.suptitle(result.finding, x=0.008, ha="left", fontweight="bold")
    distances, forgetting, curvature = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    colours = _task_colours(len(result.losses))
    _draw_distances(distances, result, colours)
    _draw_forgetting(forgetting, result, colours)
    _draw_curvature(curvature, result)


def _draw_distances(axes: Axes, result: Examination, colours: list[Any]) -> None:
    """Draw the distances of later solutions over every task, and the radius of its region in their directions."""
    n = len(result.losses)
    radii = np.array([result.eigenvector_radius.numpy(), result.random_radius.numpy()])
    lengths = np.concatenate([result.distance.flatten(), result.radius.flatten(), radii.flatten(), result.updates])
    lengths = lengths[np.isfinite(lengths) & (lengths > 0)]
    low, high = (lengths.min() / 2, lengths.max() * 2) if len(lengths) else (0.1, 10.0)
    for o in range(n):
        ends = [min(max(r, low), high) for r in radii[:, o] if not np.isnan(r)]
        if ends:
            axes.bar(o, max(ends) - min(ends), 0.56, min(ends), color="#E4E4E4", zorder=1)
        for t in range(o + 1, n):
            x = o + 0.56 * ((t - o) / (n - o) - 0.5)
            far, border = float(result.distance[t, o]), float(result.radius[t, o])
            if not np.isnan(border):
                axes.plot([x, x], [low, min(border, high)], color=colours[t], linewidth=1.1, alpha=0.55, zorder=2)
                mark = "_" if border < np.inf else "^"
                axes.plot(x, min(border, high), mark, color=colours[t], markersize=8, zorder=2)
            face = colours[t] if bool(result.inside[t, o]) else "white"
            if 0 < far < np.inf:
                axes.plot(x, far, "o", color=colours[t], markerfacecolor=face, markeredgewidth=1.4, zorder=3)
    axes.set(yscale="log", ylim=(low, high), xlim=(-0.6, n - 0.4))
    axes.set(xticks=range(n), xticklabels=range(1, n + 1), xlabel="task $o$", ylabel=r"distance from $\theta_o$")
    note = r"● $\theta_t$ inside $\Omega^\epsilon_o$   ○ outside   — radius towards it   ▒ along $v_1$ to random"
    _set_title(axes, "Distances and ε-regions", note)


def _draw_forgetting(axes: Axes, result: Examination, colours: list[Any]) -> None:
    """Draw measured over predicted forgetting, a point for every pair."""
    n = len(result.losses)
    measured, predicted = result.forgetting.measured, result.forgetting.predicted
    shown = [(t, o) for t in range(n) for o in range(t) if bool((measured[t, o] + predicted[t, o]).isfinite())]
    left_out = n * (n - 1) // 2 - len(shown)
    values = np.array([[float(predicted[p]), float(measured[p])] for p in shown]).reshape(-1, 2)
    low, high = min(values.min(initial=0), 0), max(values.max(initial=0), result.epsilon)
    margin = 0.07 * (high - low)
    ends = np.array([low - margin, high + margin])
    axes.fill_between(ends, ends - result.epsilon, ends + result.epsilon, color="#E4E4E4", linewidth=0)
    axes.plot(ends, ends, color=FAINT, linewidth=0.8)
    for (t, o), (x, y) in zip(shown, values, strict=True):
        face = colours[t] if bool(result.inside[t, o]) else "white"
        axes.plot(x, y, "o", color=colours[t], markerfacecolor=face, markeredgewidth=1.4)
    axes.set(xlim=ends, ylim=ends, xlabel="forgetting predicted to the second order", ylabel="forgetting measured")
    note = rf"grey: within $\epsilon${f'; {left_out} not finite' if left_out else ''}"
    _set_title(axes, "Forgetting", note if n > 1 else "no later task")
    if n > 1:
        for t in range(1, n) if n <= 7 else (1, n - 1):
            axes.plot([], [], "o", color=colours[t], label=f"after task {t + 1}")
        axes.legend(loc="best", handletextpad=0.1)


def _draw_curvature(axes: Axes, result: Examination) -> None:
    """Draw the largest eigenvalues of every task's Hessian and its trace."""
    n, count = result.eigenvalues.shape
    for o, (values, trace) in enumerate(zip(result.eigenvalues.numpy(), result.trace.tolist(), strict=True)):
        for below, face in ((False, INK), (True, "white")):
            chosen = np.abs(values[(values < 0) == below])
            axes.plot([o] * len(chosen), chosen, "o", color=INK, markersize=4, markerfacecolor=face)
        if trace > 0:
            axes.plot(o, trace, "_", color=TITLE_COLOURS["local"], markersize=16, markeredgewidth=2)
    axes.set_yscale("log", nonpositive="mask")
    axes.set(xlim=(-0.6, n - 0.4), xticks=range(n), xticklabels=range(1, n + 1))
    axes.set(xlabel="task $o$", ylabel=r"$|\lambda|$ of $H_o$ at $\theta_o$")
    _set_title(axes, "Curvature", f"red: trace   ● the {count} largest eigenvalues   ○ negative")


def _set_title(axes: Axes, title: str, note: str) -> None:
    axes.set_title(title, loc="left", pad=18)
    axes.text(0, 1.02, note, transform=axes.transAxes, color=FAINT, fontsize=7.5, va="bottom")


def examination_table(result: Examination) -> Table:
    """Return a row for every task, measured after the last one."""
    names = ("inside", "distance", "radius", "along v_1 – random", "forgetting (predicted)", "loss", "λ_max", "trace")
    rows = []
    for row in result.rows():
        later = ["yes" if row["inside"] else "no", f"{row['distance']:.3g}", f"{row['radius']:.3g}"]
        radii = f"{row['eigenvector_radius']:.2g} – {row['random_radius']:.2g}"
        forgetting = f"{row['measured']:.2g} ({row['predicted']:.2g})"
        if row["inside"] is None:  # the last task
            later, forgetting = [ABSENT] * 3, ABSENT
        curvature = (f"{row[k]:.3g}" for k in ("loss", "largest_eigenvalue", "trace"))
        rows.append((str(row["task"]), *later, radii, forgetting, *curvature))
    return _table(f"After the last task, ε = {result.epsilon:.3g}", ("task",), names, rows)


def _table(title: str, labels: Sequence[str], names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return rows of texts: columns of labels, and those of names, which may be shown below the others."""
    columns = (*map(Column, labels[1:]), *(Column("", name) for name in names))
    sections = (Section(first, "", (tuple(map(Cell, texts)),)) for first, *texts in rows)
    return Table(columns, tuple(sections), title, labels[0])


def draw_errors(errors: TrainingErrors, figure: Figure) -> None:
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
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")


def _draw_lines(axes: Axes, curves: ErrorCurves, values: Any, title: str) -> None:
    step, finished = curves.step.numpy(), curves.finished.numpy()
    tasks, hues = values.shape[1] - 1, _task_colours(values.shape[1])  # without the last one
    for t in range(1, int(finished.max())):
        axes.axvline(step[finished == t][0], color="#C8C8C8", linewidth=0.8, zorder=0)
    for o in range(tasks):
        label = f"task {o + 1}" if tasks <= MAX_LEGEND_TASKS or o in (0, tasks - 1) else None
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


def errors_table(errors: TrainingErrors) -> Table:
    """Return a row for every approximation: its largest error, how far it holds, and its first violation."""
    names = ("largest ξ", "holds up to ‖θ−θ_o‖", "violated at step", "tasks learned", "of task", "ξ there")
    rows = []
    for name, check in errors.assumptions.items():
        radii, where = errors.radii[name].last_inside.nan_to_num(0), check.first_violation
        radius = radii.max() if where is None else radii[where.tasks[0]]
        violation = ["never", ABSENT, ABSENT, ABSENT]
        if where is not None:
            between = 0 <= where.last_step_inside < where.step - 1
            steps = f"{where.last_step_inside + 1} – {where.step}" if between else f"{where.step}"
            tasks = ", ".join(str(o + 1) for o in where.tasks)
            violation = [steps, str(where.task), tasks, f"{where.error:.3g}"]
        rows.append([name, f"{float(check.min_epsilon.max()):.3g}", f"{float(radius):.3g}", *violation])
    title = f"{errors.algorithm}: the locality assumption with ε = {errors.epsilon:.3g}"
    return _table(title, ("approximation",), names, rows)


def draw_measurement(result: Measurement, figure: Figure) -> None:
    """Draw a panel for each quantity with a line for each group, or one panel without groups."""
    from matplotlib.ticker import MaxNLocator

    instrument, rows = result.instrument, result.rows
    panels = [(name,) for name in instrument.y] if instrument.group else [instrument.y]
    figure.set_size_inches(2.0 + 3.4 * len(panels), 3.4)
    figure.suptitle(f"{instrument.title[0].upper()}{instrument.title[1:]}", x=0.012, ha="left", fontweight="bold")
    groups = list(dict.fromkeys(row[instrument.group] for row in rows)) if instrument.group else [None]
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=instrument.share_y)[0]
    for axes, names in zip(grid, panels, strict=True):
        for i, (name, group) in enumerate(product(names, groups)):
            own = [row for row in rows if instrument.group is None or row[instrument.group] == group]
            x, y = (np.array([row[k] for row in own], dtype=float) for k in (instrument.x, name))
            shown = np.isfinite(x) & np.isfinite(y) & ((x > 0) & (y > 0) if instrument.scale == "log" else True)
            x, y = x[shown], y[shown]
            order = np.argsort(x, kind="stable")
            label = f"{instrument.group} {group}" if isinstance(group, int) else group or _label(name)
            (line,) = axes.plot(x[order], y[order], label=label, color=(*COOL, *WARM)[i % 12], markersize=4)
            line.set(marker=MARKERS["global"][i % 4], linestyle="-" if instrument.connect else "")
        if not any(len(line.get_xdata()) for line in axes.lines):
            axes.text(0.5, 0.5, "no numbers to draw", transform=axes.transAxes, ha="center", color=FAINT)
            axes.tick_params(bottom=False, labelbottom=False, left=False, labelleft=False)
        elif instrument.scale == "log":
            axes.set(xscale="log", yscale="log")
        elif instrument.scale == "symlog":
            axes.set_yscale("symlog", linthresh=1)
        elif all(isinstance(row[instrument.x], int) for row in rows):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel(_label(instrument.x))
        if len(names) == 1:
            axes.set_ylabel(_label(names[0]))
    if instrument.group or len(instrument.y) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def measurement_table(result: Measurement) -> Table:
    """Return all rows; quantities that do not fit into a terminal's width are shown below, with the same row labels."""
    floats = [name for name, value in result.rows[0].items() if isinstance(value, float)]
    labels = [name for name in result.rows[0] if name not in floats]
    cells = ([row[name] for name in (*labels, *floats)] for row in result.rows)
    rows = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in cells]
    return _table(result.instrument.title, [*map(_label, labels)], [*map(_label, floats)], rows)


def _label(name: str) -> str:
    return name.replace("_", " ")
