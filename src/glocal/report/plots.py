"""Figures of runs by name. matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal import metrics
from glocal.errors import GlocalError, GlocalWarning, require, require_known
from glocal.report.style import (
    FAINT,
    TITLE_COLOURS,
    draw_path,
    legend,
    lighten,
    line_styles,
    option_axis,
    positions,
    wrap,
)
from glocal.report.summary import DEFAULT_VIEW, Group, View, format_range, group_runs, split_groups
from glocal.report.table import format_lr
from glocal.selection import ORACLE, choose, criterion
from glocal.store.conditions import as_text, is_number, natural_order
from glocal.store.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from glocal.report.style import LineStyle

MAX_ANNOTATED_TASKS = 10
MAX_PANELS_PER_ROW = 4
MIN_PANEL_WIDTH = 2.6  # inches
BASELINE = "sgd"
"""The algorithm whose distance others are compared with."""


def drawing(runs: Iterable[Run], kind: str, view: View = DEFAULT_VIEW, over: str = "lr") -> Callable[[Figure], None]:
    """Return the function that draws the runs into a figure.

    Args:
        runs: the runs to show.
        kind: a name in `KINDS`.
        view: options of the statistics.
        over: the option by which the runs of an algorithm are compared.
    """
    require_known("kind of figure", kind, KINDS)
    groups = [
        replace(g, challenge=_without_math(g.challenge), algorithm=_without_math(g.algorithm))
        for g in group_runs(runs, over)
    ]
    require(bool(groups), "no runs were given; train some first (`glocal run`, `glocal sweep`).")
    any_finished, count = any(group.finished for group in groups), sum(group.seeds for group in groups)
    require(any_finished, f"all {count} runs diverged, so there is nothing to show. Try a lower learning rate.")
    return lambda figure: KINDS[kind](figure, groups, view)


def _without_math(text: str) -> str:
    """Escape what matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def draw_over_option(figure: Figure, groups: Sequence[Group], view: View, name: str) -> None:
    """Draw a statistic against the learning rate or another option, with a band of one standard deviation."""
    for axes, members, lines in _challenge_panels(figure, groups, _finite_groups(groups, view, name), 3.9, 3.4):
        places = positions(group.x for group in members)
        for line, style in lines:
            x = np.array([places[group.x] for group in line])
            mean, std = np.array([group.statistics(view)[name] for group in line]).T
            _plot_band(axes, x, mean, std, style, line[0].title)
        option_axis(axes, [group.x for group in members], groups[0].over)
        axes.set_ylabel(_axis_label(name, view, members[0]))
    legend(figure, _titles(groups), _deviation_note(groups, "bands"))


def draw_by_seed(figure: Figure, groups: Sequence[Group], view: View, name: str) -> None:
    """Draw a statistic against the learning rate or another option: thin lines for seeds, thick ones for means."""
    for axes, members, lines in _challenge_panels(figure, groups, _finite_groups(groups, view, name), 3.9, 3.4):
        places = positions(group.x for group in members)
        for line, style in lines:
            values = [(places[group.x], group.by_seed(view)) for group in line]
            for seed in sorted({seed for _, by_seed in values for seed in by_seed}):
                x, y = zip(*((x, by_seed[seed][name]) for x, by_seed in values if seed in by_seed), strict=True)
                axes.plot(x, y, color=style.colour, marker=style.marker, markersize=3, linewidth=0.7, alpha=0.65)
            means = [group.statistics(view)[name][0] for group in line]
            axes.plot(
                [x for x, _ in values], means, **style.line(), **style.point(), linewidth=2.2, label=line[0].title
            )
        option_axis(axes, [group.x for group in members], groups[0].over)
        axes.set_ylabel(_axis_label(name, view, members[0]))
    legend(figure, _titles(groups), "thin: a seed each; thick: mean over seeds")


def draw_over_tasks(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw ACC(t) after every task t: the mean over seeds with a band of one standard deviation.

    An algorithm has a line per learning rate, or other option, the lighter the lower it is.
    """
    finished_groups = [group for group in groups if group.finished]
    values = sorted({group.x for group in finished_groups}, key=natural_order)
    for axes, members, lines in _challenge_panels(figure, groups, finished_groups, 3.9, 3.4):
        for group, style in ((group, style) for line, style in lines for group in line):
            R = np.stack([metrics.shown_matrix(run, view.scope) for run in group.finished])
            steps = range(1, group.tasks + 1)
            averages = np.array([metrics.average_accuracy(R, t) for t in steps])
            mean, std = averages.mean(axis=1), averages.std(axis=1)
            shade = lighten(style.colour, 0.6 * (1 - (values.index(group.x) + 1) / len(values)))
            points = {"markersize": 4.5, **style.point(), "label": group.title}
            axes.plot(steps, mean, **style.line() | {"color": shade}, linewidth=1.2, **points)
            axes.fill_between(steps, mean - std, mean + std, color=shade, alpha=0.14, linewidth=0)
        tasks = max(group.tasks for group in members)
        axes.set(xticks=range(1, tasks + 1, -(-tasks // 10)), xlabel="after task $t$")
        average = r"average accuracy  $\mathrm{ACC}(t)$  (%)"
        axes.set_ylabel(average if members[0].metric == "acc" else "average test loss of tasks $1$ to $t$")
    name, low, high = _option_name(groups), _format_x(values[0]), _format_x(values[-1])
    note = f"lighter: lower {name}, {low} to {high}" if len(values) > 1 else f"{name} {high}"
    legend(figure, _titles(groups), "; ".join(filter(None, [_deviation_note(groups, "bands"), note])))


def draw_tradeoff(figure: Figure, groups: Sequence[Group], view: View, names: tuple[str, str]) -> None:
    """Draw a statistic against another: a path per algorithm whose points grow with the learning rate or other option.

    `names` are those of the x and the y axis.
    """
    values = sorted({group.x for group in groups}, key=natural_order)
    for axes, members, lines in _challenge_panels(figure, groups, _finite_groups(groups, view, *names), 3.9, 3.8):
        for line, style in lines:
            x, y = (np.array([group.statistics(view)[name] for group in line]).T for name in names)
            sizes = [16 + 64 * values.index(group.x) / max(len(values) - 1, 1) for group in line]
            draw_path(axes, x, y, style, sizes, line[0].title)
        right, up = (name != "forgetting" and members[0].metric == "acc" for name in names)
        better = {(False, True): r"$\nwarrow$", (True, False): r"$\searrow$", (False, False): r"$\swarrow$"}[right, up]
        note: dict[str, Any] = {"color": FAINT, "fontsize": "small", "ha": "right", "va": "bottom"}
        axes.text(1, 1.02, f"{better} better", transform=axes.transAxes, **note)
        axes.set(
            **{f"{axis}label": _axis_label(name, view, members[0]) for axis, name in zip("xy", names, strict=True)}
        )
    option_range = f"{_option_name(groups)}, {_format_x(values[0])} to {_format_x(values[-1])}"
    text = f"points grow with the {option_range}" if len(values) > 1 else None
    legend(figure, _titles(groups), "; ".join(filter(None, [text, _deviation_note(groups, "bars at the last points")])))


def draw_distance(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw ‖θ_T − θ_0‖₂ against the learning rate or another option, with a band of one standard deviation.

    Beside it, if there are runs of plain SGD, the distance divided by that of SGD with the same optimiser, learning
    rate, seed and value of the option.
    """
    sgd = {
        _without_algorithm(run, group): _distance(run)
        for group in groups
        for run in group.finished
        if run.config["algorithm"]["name"] == BASELINE
    }
    finished_groups, panels_each = [group for group in groups if group.finished], 2 if sgd else 1
    panels = _challenge_panels(figure, groups, finished_groups, 3.9, 3.4, panels_each)
    for number, (axes, members, lines) in enumerate(panels):
        relative = number % panels_each == 1
        places = positions(group.x for group in members)
        for line, style in lines:
            points = []
            for group in line:
                pairs = [(_distance(run), sgd.get(_without_algorithm(run, group))) for run in group.finished]
                values = [d / base for d, base in pairs if base] if relative else [d for d, _ in pairs]
                if values:
                    points.append((places[group.x], np.mean(values), np.std(values)))
            if points:
                x, mean, std = np.array(points).T
                _plot_band(axes, x, mean, std, style, line[0].title)
        option_axis(axes, [group.x for group in members], groups[0].over)
        axes.set_yscale("log", nonpositive="mask")
        _plain_log_ticks(axes)
        distance = r"$\Vert\theta_T - \theta_0\Vert_2$"
        axes.set_ylabel(f"{distance}  relative to {BASELINE}" if relative else f"distance  {distance}")
    legend(figure, _titles(groups), _deviation_note(groups, "bands"))


def _plot_band(axes: Axes, x: np.ndarray, mean: np.ndarray, std: np.ndarray, style: LineStyle, label: str) -> None:
    """Plot a line with a band of one standard deviation; error bars for a single point."""
    axes.plot(x, mean, **style.line(), **style.point(), label=label)
    if len(x) > 1:
        axes.fill_between(x, mean - std, mean + std, color=style.colour, alpha=0.14, linewidth=0)
    else:
        axes.errorbar(x, mean, std, fmt="none", ecolor=style.colour, capsize=3)


def _without_algorithm(run: Run, group: Group) -> tuple[Any, ...]:
    """Return what runs have in common that differ in the algorithm alone."""
    return group.challenge, str(run.config.get("optimizer")), group.x, run.lr, run.seed


def _distance(run: Run) -> float:
    return float(run.arrays["distance_from_init"][-1])


def _plain_log_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis by numbers such as 0.5 and 20, not by powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_ylim()
    wide = LogLocator(subs=(1, 2, 5) if high < 1_000 * low else (1,))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)) if high < 10 * low else wide)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_matrix(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw R[t, o], the mean test accuracy or loss on task o with θ_t, at each algorithm's best learning rate or other
    option.
    """
    from matplotlib import cm
    from matplotlib.colors import Normalize

    size = 2.6 if max(group.tasks for group in groups) > 5 else 2.2
    for section, cells in _algorithm_panels(figure, groups, width=size, height=size + 0.35):
        best = [best_group(members, view) for _, members in cells]
        matrices = [np.mean([metrics.shown_matrix(run, view.scope) for run in g.finished], axis=0) for g in best]
        by_loss = best[0].metric == "loss"
        largest = np.max(matrices, where=np.isfinite(matrices), initial=0) if by_loss else 100
        scale = cm.ScalarMappable(Normalize(0, largest), "cividis")
        for (axes, members), group, R in zip(cells, best, matrices, strict=True):
            _draw_heat_map(axes, R, largest, ".2g" if by_loss else ".0f")
            choice_text = f", best of {len(members)} on {group.choice_split} data" if len(members) > 1 else ""
            title = f"{group.title}\n{group.over} {_format_x(group.x)}{choice_text}"
            axes.set_title(wrap(title, size - 0.4), color=TITLE_COLOURS[group.locality], loc="left")
        label = "loss  $R[t, o]$" if by_loss else "accuracy  $R[t, o]$  (%)"
        bar = section.colorbar(scale, ax=[axes for axes, _ in cells], label=label, aspect=28, pad=0.02)
        bar.outline.set_visible(False)


def draw_loss(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw the mean of obj_t over each epoch at each algorithm's best learning rate or other option."""
    options: dict[str, list[str]] = {}
    stops = False
    finished_groups = [group for group in groups if group.finished]
    for axes, members, lines in _challenge_panels(figure, groups, finished_groups, 4.6, 3.4):
        tasks = max(group.tasks for group in members)
        low, high = np.inf, -np.inf
        for line, style in lines:
            best = best_group(line, view)
            curves = np.ma.masked_invalid(metrics.learning_curves(best.finished))
            stops |= any(np.isnan(run.arrays["epoch_loss"]).any() for run in best.finished)
            _, count, epochs = curves.shape
            x = (np.arange(count)[:, None] + (np.arange(epochs) + 1) / epochs).ravel()
            mean, std = (f(curves, axis=0).ravel() for f in (np.mean, np.std))
            task_ends = {"markevery": (epochs - 1, epochs), "markersize": 4.5, **style.point()}
            options.setdefault(best.title, []).append(f"{best.over} {_format_x(best.x)}")
            axes.plot(x, mean, **style.line(), linewidth=1.2, label=best.title, **task_ends)
            axes.fill_between(x, mean - std, mean + std, color=style.colour, alpha=0.14, linewidth=0)
            low, high = min(low, np.nanmin(mean - std)), max(high, np.nanmax(mean))
        axes.set(xlim=(0, tasks), xticks=np.arange(0, tasks + 1), xlabel="task $t$, epoch by epoch")
        spacing = -(-tasks // 20)
        axes.set_xticks(np.arange(0, tasks, spacing) + 0.5, [str(t + 1) for t in range(0, tasks, spacing)], minor=True)
        axes.tick_params(axis="x", which="major", labelbottom=False)
        axes.tick_params(axis="x", which="minor", length=0)
        axes.grid(False, axis="y")
        if low > 0 and high / low > 20:
            axes.set_yscale("log")
    figure.axes[0].set_ylabel(r"objective  $\mathrm{obj}_t$")
    splits = " and ".join(sorted({group.choice_split for group in finished_groups}))
    choice_note = (
        f"{_option_name(groups)} chosen on {splits} data" if len({group.x for group in finished_groups}) > 1 else None
    )
    labels = {
        title: f"{title}, {' / '.join(dict.fromkeys(options[title]))}" for title in _titles(groups) if title in options
    }
    stop_note = "a seed that stopped a task early keeps its last value" if stops else None
    legend(figure, labels, "; ".join(filter(None, [choice_note, _deviation_note(groups, "bands"), stop_note])))


KINDS: dict[str, Callable[[Figure, Sequence[Group], View], None]] = {
    "forgetting": partial(draw_over_option, name="forgetting"),
    "forgetting-by-seed": partial(draw_by_seed, name="forgetting"),
    "accuracy": partial(draw_over_option, name="metric"),
    "accuracy-over-tasks": draw_over_tasks,
    "distance": draw_distance,
    "matrix": draw_matrix,
    "loss": draw_loss,
    "tradeoff": partial(draw_tradeoff, names=("forgetting", "metric")),
    "plasticity": partial(draw_tradeoff, names=("learning_accuracy", "forgetting")),
}


def _challenge_panels(
    figure: Figure,
    groups: Sequence[Group],
    drawable: Sequence[Group],
    width: float,
    height: float,
    panels_each: int = 1,
) -> list[tuple[Axes, list[Group], list[tuple[list[Group], LineStyle]]]]:
    """Make a titled panel per challenge, or `panels_each` beside each other, with space for a legend.

    Returns:
        Each panel with its groups and, for every algorithm, those of its groups that are `drawable` and its style.
    """
    from matplotlib import rcParams

    styles = line_styles((group.algorithm, group.locality) for group in groups)
    parts = split_groups(groups, "challenge")
    per_row = min(len(parts), max(1, int(figure.get_figwidth() / (panels_each * MIN_PANEL_WIDTH))))  # challenges
    columns = per_row * panels_each if figure.get_figwidth() > panels_each * MIN_PANEL_WIDTH else 1
    rows = -(-len(parts) * panels_each // columns)
    width = min(width, figure.get_figwidth() / columns)
    figure.set_size_inches(columns * width + 1.5, rows * height)
    height_of_subtitles = max(len(_subtitle(members)) for members in parts)
    pad = (0.6 + 1.2 * height_of_subtitles) * rcParams["font.size"]
    panels, cells = [], list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in cells[panels_each * len(parts) :]:
        axes.set_visible(False)
    for number, axes in enumerate(cells[: panels_each * len(parts)]):
        members = parts[number // panels_each]
        if number % panels_each == 0:
            title = wrap(members[0].challenge, width - 0.8)
            axes.set_title(title, loc="left", pad=pad, fontweight="bold")
            look: dict[str, Any] = {"color": FAINT, "fontsize": "small", "linespacing": 1.1, "va": "bottom"}
            above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (0, 4)}
            axes.annotate("\n".join(_subtitle(members)), (0, 1), **above, **look)
        lines = split_groups((group for group in members if group in drawable), "title")
        if not lines:
            axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, color=FAINT, ha="center")
        panels.append((axes, members, [(line, styles[line[0].algorithm, line[0].locality]) for line in lines]))
    return panels


def _algorithm_panels(
    figure: Figure, groups: Sequence[Group], width: float, height: float
) -> list[tuple[SubFigure, list[tuple[Axes, list[Group]]]]]:
    """Make a titled section per challenge, one below the other, with a panel per algorithm that has finished runs."""
    for members in split_groups(groups, "challenge"):
        if not any(group.finished for group in members):
            warnings.warn(
                f"all runs of {members[0].challenge} diverged: it has no panels.", GlocalWarning, stacklevel=2
            )
    challenges = [
        split_groups(members, "title") for members in split_groups((g for g in groups if g.finished), "challenge")
    ]
    room = max(1, min(MAX_PANELS_PER_ROW, int((figure.get_figwidth() - 1.1) / (0.8 * width))))
    columns = max(-(-len(algorithms) // -(-len(algorithms) // room)) for algorithms in challenges)
    rows = [-(-len(algorithms) // columns) for algorithms in challenges]
    heights = [n * height + 0.6 for n in rows]
    figure.set_size_inches(max(columns * width + 1.1, 4.2), sum(heights))
    subfigures = figure.subfigures(len(challenges), 1, squeeze=False, height_ratios=heights)[:, 0]
    sections = []
    for subfigure, algorithms, count in zip(subfigures, challenges, rows, strict=True):
        challenge = algorithms[0][0].challenge
        subtitle = "\n".join(_subtitle([group for group in groups if group.challenge == challenge]))
        title = wrap(f"{challenge} · {subtitle}", figure.get_figwidth() - 0.4)
        subfigure.suptitle(title, x=0.012, ha="left", fontweight="bold")
        cells = list(subfigure.subplots(count, columns, squeeze=False).flat)
        for axes in cells[len(algorithms) :]:
            axes.set_visible(False)
        for axes, members in zip(cells, algorithms, strict=False):
            axes.set_title(wrap(members[0].title, width - 0.5), color=TITLE_COLOURS[members[0].locality], loc="left")
        sections.append((subfigure, list(zip(cells, algorithms, strict=False))))
    return sections


def _subtitle(groups: Sequence[Group]) -> list[str]:
    """Describe the groups of a challenge: tasks and seeds, and how many runs diverged."""
    total, diverged = sum(group.seeds for group in groups), sum(group.diverged for group in groups)
    tasks = format_range([max(group.tasks for group in groups)], "task")
    lines = [f"{tasks} · {format_range((group.seeds for group in groups), 'seed')}"]
    return lines + ([f"{diverged} of {total} runs diverged and are left out"] if diverged else [])


def _draw_heat_map(axes: Axes, R: np.ndarray, largest: float, spec: str) -> None:
    tasks = R.shape[1]
    axes.imshow(R, "cividis", vmin=0, vmax=largest, aspect="auto", extent=(0.5, tasks + 0.5, tasks + 0.5, -0.5))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    ticks = [n for n in range(tasks + 1) if tasks <= MAX_ANNOTATED_TASKS or n % 5 == 0 or n == 1]
    axes.set(xticks=[n for n in ticks if n], yticks=ticks, xlabel="task $o$", ylabel="after task $t$")
    axes.tick_params(length=0)
    # The line separates tasks already trained, below it, from tasks to come.
    edges = np.arange(tasks + 1) + 0.5
    axes.step(edges, np.minimum(edges, tasks - 0.5), where="post", color="white", linewidth=1.2)
    if tasks <= MAX_ANNOTATED_TASKS:
        for (t, o), value in np.ndenumerate(R):
            colour = "white" if value < 0.55 * largest else "black"
            if np.isfinite(value):
                axes.text(o + 1, t, f"{value:{spec}}", ha="center", va="center", color=colour, fontsize="small")


def _finite_groups(groups: Sequence[Group], view: View, *names: str) -> list[Group]:
    """Return the groups whose statistics are finite; raise an error if there are none."""
    finite = [g for g in groups if all(np.isfinite(g.statistics(view)[name][0]) for name in names)]
    if not finite:
        text = " and ".join({"metric": "accuracy"}.get(name, name.replace("_", " ")) for name in names)
        raise GlocalError(f"{text} cannot be drawn: undefined for these runs, of one task only or without classes.")
    return finite


def _axis_label(name: str, view: View, group: Group) -> str:
    if name == "metric":
        return r"accuracy  $\mathrm{ACC}(T)$  (%)" if group.metric == "acc" else "average test loss after $T$ tasks"
    if name == "learning_accuracy":
        return "accuracy right after learning (%)"
    tasks = "T - 1" if view.forgetting == "t-1" else "T"
    unit = "points" if metrics.measure_of(group.runs[0], view.measure) == "accuracy" else "test loss"
    return rf"forgetting  $E(T)$  ({unit}, over ${tasks}$ tasks)"


def _titles(groups: Sequence[Group]) -> list[str]:
    entries = {(group.locality, group.title) for group in groups}
    return [title for _, title in sorted(entries, key=lambda entry: (entry[0], natural_order(entry[1])))]


def _deviation_note(groups: Sequence[Group], marks: str) -> str | None:
    return f"{marks}: ± one standard deviation over seeds" if any(len(g.finished) > 1 for g in groups) else None


def _option_name(groups: Sequence[Group]) -> str:
    return "learning rate" if groups[0].over == "lr" else groups[0].over


def _format_x(x: Any) -> str:
    return format_lr(x) if is_number(x) else as_text(x)


def best_group(groups: Sequence[Group], view: View) -> Group:
    """Return the group that is chosen on `choice_split`; see `glocal.selection.choose`."""
    protocol = "all-validation" if groups[0].choice_split == "validation" else ORACLE
    return choose({g: {run.seed: criterion(run, protocol, view.scope) for run in g.runs} for g in groups})
