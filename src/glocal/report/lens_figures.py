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
MAX_NAMED_SOLUTIONS = 5
"""The same for an examination."""
REGION = "#D9D9D9"
"""The color of regions."""
LEGEND_HEIGHT = 44
"""Typographic points between a panel of an examination and its title."""


def _task_colours(tasks: int) -> list[Any]:
    """Return a color for every task, brighter for later ones."""
    return list(dark_plasma(0.85)(np.linspace(0.0, 1.0, max(tasks, 2))))


def draw_examination(result: Examination, figure: Figure) -> None:
    """Draw three panels below the finding; in the first two, the color is that of the later solution θ_t."""
    figure.set_size_inches(11.4, 4.1)
    figure.suptitle(result.finding, x=0.008, ha="left", fontweight="bold")
    distances, forgetting, curvature = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    n = len(result.losses)
    colours = _task_colours(n)
    _draw_distances(distances, result, colours)
    _draw_forgetting(forgetting, result, colours)
    _draw_curvature(curvature, result)
    if n > 1:
        named_tasks = list(range(1, n)) if n <= MAX_NAMED_SOLUTIONS else [1, n - 1]
        lines = [distances.plot([], [], "o", color=colours[t])[0] for t in named_tasks]
        labels = [rf"$\theta_t$ after task {t + 1}" for t in named_tasks]
        figure.legend(lines, labels, loc="outside upper right", ncols=len(named_tasks), handletextpad=0.1)


def _draw_distances(axes: Axes, result: Examination, colours: list[Any]) -> None:
    """Draw the distance of every later solution on a bar that ends where the region of the task does."""
    n = len(result.losses)
    radii = {"random directions": result.random_radius, "the sharpest direction, $v_1$": result.eigenvector_radius}
    lengths = np.concatenate([result.distance.flatten(), result.radius.flatten(), *radii.values(), result.updates])
    lengths = lengths[np.isfinite(lengths) & (lengths > 0)]
    low, high = (lengths.min() / 2, lengths.max() * 2) if len(lengths) else (0.1, 10.0)
    points = []
    for o in range(n):
        width = 0.84 / max(n - 1 - o, 3)
        for t in range(o + 1, n):
            x = o + width * (t - (o + n) / 2)
            border = float(result.radius[t, o])
            if not np.isnan(border):
                label = r"region in the direction of $\theta_t$"
                axes.bar(x, min(border, high) - low, 0.8 * width, low, color=REGION, zorder=1, label=label)
            if 0 < result.distance[t, o] < np.inf:
                points.append((t, o, x, float(result.distance[t, o])))
    _draw_points(axes, result, colours, points)
    for (name, task_radii), dashes in zip(radii.items(), ("--", ":"), strict=True):
        for o, radius in enumerate(task_radii.tolist()):
            y = min(max(radius, low), high)
            axes.plot([o - 0.45, o + 0.45], [y, y], dashes, color=INK, linewidth=1.1, label=f"radius in {name}")
    axes.set(yscale="log", ylim=(low, high), xlim=(-0.6, n - 0.4))
    axes.set(xticks=range(n), xticklabels=range(1, n + 1), xlabel="task $o$", ylabel=r"distance from $\theta_o$")
    _set_title(axes, "Distances and ε-regions", columns=2)


def _draw_forgetting(axes: Axes, result: Examination, colours: list[Any]) -> None:
    """Draw measured over predicted forgetting, a point for every pair."""
    n = len(result.losses)
    measured, predicted = result.forgetting.measured, result.forgetting.predicted
    pairs = [(t, o) for t in range(n) for o in range(t) if bool((measured[t, o] + predicted[t, o]).isfinite())]
    num_left_out = n * (n - 1) // 2 - len(pairs)
    values = np.array([[float(predicted[p]), float(measured[p])] for p in pairs]).reshape(-1, 2)
    low, high = min(values.min(initial=0), 0), max(values.max(initial=0), result.epsilon)
    margin = 0.07 * (high - low)
    ends = np.array([low - margin, high + margin])
    band = rf"differ by less than $\epsilon$ = {result.epsilon:.3g}"
    axes.fill_between(ends, ends - result.epsilon, ends + result.epsilon, color=REGION, linewidth=0, label=band)
    axes.plot(ends, ends, color=FAINT, linewidth=0.8)
    _draw_points(axes, result, colours, [(t, o, x, y) for (t, o), (x, y) in zip(pairs, values, strict=True)])
    axes.set(xlim=ends, ylim=ends, xlabel="forgetting predicted to the second order", ylabel="forgetting measured")
    note = f": {num_left_out} not finite" if num_left_out else "" if n > 1 else ": no later task"
    _set_title(axes, f"Forgetting{note}")


def _draw_points(
    axes: Axes, result: Examination, colours: list[Any], points: Sequence[tuple[int, int, float, float]]
) -> None:
    """Draw (t, o, x, y) as a point in the color of t, filled if θ_t is in the region of o."""
    for t, o, x, y in points:
        face = colours[t] if bool(result.inside[t, o]) else "white"
        axes.plot(x, y, "o", color=colours[t], markerfacecolor=face, markeredgewidth=1.4, zorder=3)
    for is_inside in sorted({bool(result.inside[t, o]) for t, o, *_ in points}, reverse=True):
        label = rf"$\theta_t$ {'inside' if is_inside else 'outside'} the region"
        axes.plot([], [], "o", color=FAINT, markerfacecolor=FAINT if is_inside else "white", label=label)


def _draw_curvature(axes: Axes, result: Examination) -> None:
    """Draw the largest eigenvalues of every task's Hessian and its trace."""
    n, count = result.eigenvalues.shape
    for o, (values, trace) in enumerate(zip(result.eigenvalues.numpy(), result.trace.tolist(), strict=True)):
        for sign, face, kind in ((1, INK, "positive"), (-1, "white", "negative")):
            sizes = sign * values[sign * values > 0]
            if len(sizes):
                label = f"{kind} eigenvalues"
                axes.plot([o] * len(sizes), sizes, "o", color=INK, markersize=4, markerfacecolor=face, label=label)
        if trace > 0:
            axes.plot(o, trace, "_", color=TITLE_COLOURS["local"], markersize=12, markeredgewidth=2, label="trace")
    axes.set_yscale("log", nonpositive="mask")
    axes.set(xlim=(-0.6, n - 0.4), xticks=range(n), xticklabels=range(1, n + 1))
    axes.set(xlabel="task $o$", ylabel=r"$|\lambda|$ of $H_o$ at $\theta_o$")
    _set_title(axes, f"Curvature: the {count} largest eigenvalues")


def _set_title(axes: Axes, title: str, columns: int = 1) -> None:
    """Set a title and, in up to three lines below it, a legend of what was drawn."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    axes.set_title(title, loc="left", pad=LEGEND_HEIGHT)
    figure = axes.get_figure(root=True)
    assert figure is not None
    offset = axes.transAxes + ScaledTranslation(0, (LEGEND_HEIGHT - 6) / 72, figure.dpi_scale_trans)
    entries = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda pair: isinstance(pair[0], Line2D))
    handles = {label: handle for handle, label in entries}  # regions first
    options: dict[str, Any] = {"bbox_to_anchor": (0, 1), "bbox_transform": offset, "borderaxespad": 0, "borderpad": 0}
    options |= {"labelspacing": 0.25, "columnspacing": 1.5, "handletextpad": 0.6, "handlelength": 1.6}
    options |= {"ncols": columns, "labelcolor": FAINT, "fontsize": 7.5}
    axes.legend(handles.values(), handles.keys(), loc="upper left", **options)


def examination_table(result: Examination) -> Table:
    """Return a row for every task, measured after the last one."""
    names = (
        "inside",
        "distance",
        "radius",
        "radius along v_1 – random",
        "forgetting (predicted)",
        "loss",
        "λ_max",
        "trace",
    )
    rows = []
    for row in result.rows():
        region = ["yes" if row["inside"] else "no", f"{row['distance']:.3g}", f"{row['radius']:.3g}"]
        radii = f"{row['eigenvector_radius']:.2g} – {row['random_radius']:.2g}"
        forgetting = f"{row['measured']:.2g} ({row['predicted']:.2g})"
        if row["inside"] is None:  # the last task
            region, forgetting = [ABSENT] * 3, ABSENT
        curvature = (f"{row[k]:.3g}" for k in ("loss", "largest_eigenvalue", "trace"))
        rows.append((str(row["task"]), *region, radii, forgetting, *curvature))
    title = f"After the last task; inside: the expansion's error is below ε = {result.epsilon:.3g}"
    return _table(title, ("task",), names, rows)


def _table(title: str, labels: Sequence[str], names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return rows of texts: columns of labels, and those of names, which may be shown below the others."""
    columns = (*map(Column, labels[1:]), *(Column("", name) for name in names))
    sections = (Section(first, "", (tuple(map(Cell, texts)),)) for first, *texts in rows)
    return Table(columns, tuple(sections), title, labels[0])


def draw_errors(errors: TrainingErrors, figure: Figure) -> None:
    """Draw a panel for L_o and one for ξ_o of every approximation, with a line for every task."""
    panels = 1 + len(errors.curves)
    columns = min(COLUMNS, panels)
    rows = -(-panels // columns)
    figure.set_size_inches(2.75 * columns + 0.9, 2.3 * rows + 0.5)
    title = f"{errors.algorithm}: approximation errors of old losses"
    figure.suptitle(title, x=0.008, ha="left", fontweight="bold")
    grid = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
    first = next(iter(errors.curves.values()))
    _draw_lines(grid[0], first, first.true.numpy(), "$L_o$")
    low, high = grid[0].get_ylim()
    if grid[0].get_yscale() == "log" and high < 20 * low:  # a logarithmic axis would have one tick or none
        grid[0].set_yscale("linear")
    values = np.concatenate([c.error.numpy().reshape(-1) for c in errors.curves.values()])
    largest = max(values[np.isfinite(values)].max(initial=0.0), errors.epsilon)
    for axes, (name, curves) in zip(grid[1:], errors.curves.items(), strict=False):
        _draw_lines(axes, curves, curves.error.numpy(), f"$\\xi_o$, {name}")
        axes.set_ylim(errors.epsilon / MAX_BELOW_EPSILON, 2 * largest)
        axes.axhline(errors.epsilon, color=INK, linestyle="--", linewidth=1, label="ε")
        violation = errors.assumptions[name].first_violation
        if violation is not None:
            axes.axvline(violation.step, color=WARM[0], linewidth=1, label="first violation")
            axes.set_title(f"by step {violation.step}", loc="right", color=WARM[0], fontsize="small")
    for axes in grid[panels:]:
        axes.set_axis_off()
    panel_entries = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid)
    handles = {label: line for entries in panel_entries for line, label in entries}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")


def _draw_lines(axes: Axes, curves: ErrorCurves, values: Any, title: str) -> None:
    step, finished = curves.step.numpy(), curves.finished.numpy()
    tasks, hues = values.shape[1] - 1, _task_colours(values.shape[1])  # without the last one
    for t in range(1, int(finished.max())):
        axes.axvline(step[finished == t][0], color="#A8A8A8", linewidth=0.8, zorder=0, label="next task begins")
    for o in range(tasks):
        label = f"task {o + 1}" if tasks <= MAX_LEGEND_TASKS or o in (0, tasks - 1) else None
        positive_values = np.where(np.isfinite(values[:, o]) & (values[:, o] > 0), values[:, o], np.nan)
        axes.plot(step[finished > o], positive_values[finished > o], color=hues[o], linewidth=1.2, label=label)
    finished_values = values[:, :tasks][finished[:, None] > np.arange(tasks)]
    if (np.isfinite(finished_values) & (finished_values > 0)).any():
        axes.set_yscale("log")
    else:
        text = "0 everywhere" if (finished_values == 0).all() else "not finite"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_yticks([])
    first, last = step[finished > 0].min(), step.max()
    margin = 0.03 * max(last - first, 1)
    axes.set_xlim(first - margin, last + margin)
    axes.tick_params(labelbottom=True)
    axes.set_title(title.replace("θ_o", r"$\theta_o$"), loc="left")
    axes.set_xlabel("step", color=FAINT)


def errors_table(errors: TrainingErrors) -> Table:
    """Return a row for every approximation: its largest error, how far it holds, and its first violation."""
    names = ("largest ξ", "holds up to ‖θ−θ_o‖", "violated at step", "tasks learned", "of task", "ξ there")
    rows = []
    for name, check in errors.assumptions.items():
        radii, violation = errors.radii[name].last_inside.nan_to_num(0), check.first_violation
        radius = radii.max() if violation is None else radii[violation.tasks[0]]
        texts = ["never", ABSENT, ABSENT, ABSENT]
        if violation is not None:
            is_range = 0 <= violation.last_step_inside < violation.step - 1
            steps = f"{violation.last_step_inside + 1} – {violation.step}" if is_range else f"{violation.step}"
            tasks = ", ".join(str(o + 1) for o in violation.tasks)
            texts = [steps, str(violation.task), tasks, f"{violation.error:.3g}"]
        rows.append([name, f"{float(check.min_epsilon.max()):.3g}", f"{float(radius):.3g}", *texts])
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
            group_rows = [row for row in rows if instrument.group is None or row[instrument.group] == group]
            x, y = (np.array([row[k] for row in group_rows], dtype=float) for k in (instrument.x, name))
            mask = np.isfinite(x) & np.isfinite(y) & ((x > 0) & (y > 0) if instrument.scale == "log" else True)
            x, y = x[mask], y[mask]
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
