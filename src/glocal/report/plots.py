"""Figures of runs by name. matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from glocal.errors import GlocalError, require_known, unknown
from glocal.metrics import OVER, SCOPES, Over, Scope
from glocal.report.groups import Group, View, by_algorithm, by_challenge, format_lr, most_accurate, require_groups
from glocal.report.style import (
    FAINT,
    TITLE_COLOURS,
    algorithm_panels,
    challenge_panels,
    dark_plasma,
    draw_path,
    legend,
    line_styles,
    log_lr,
    save_figure,
)
from glocal.store.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

ACCURACY_LABEL = r"accuracy  $\mathrm{ACC}(T)$  (%)"
MAX_ANNOTATED_TASKS = 10
SUFFIXES = (".pdf", ".png", ".svg")


def draw(
    runs: Iterable[Run], kind: str, path: str | Path, forgetting: Over = "t-1", scope: Scope | None = None
) -> Path:
    """Draw a figure of the runs and return its path.

    Args:
        runs: the runs to show.
        kind: a name in `KINDS`.
        path: the file to write, PNG, PDF or SVG by its suffix; missing folders are created.
        forgetting: average forgetting over 't-1' or 't' tasks.
        scope: accuracy among the task's classes or among all classes; by default that of the challenge's setting.
    """
    path = Path(path)
    require_known("kind of figure", kind, KINDS)
    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    require_known("forgetting", forgetting, OVER)
    if scope is not None and scope not in SCOPES:
        raise unknown("scope", scope, SCOPES)
    groups = require_groups(runs)
    return save_figure(lambda figure: KINDS[kind][0](figure, groups, View(forgetting, scope)), path)


def draw_forgetting(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw E(T) against the learning rate: the mean over seeds with a band of one standard deviation."""
    _draw_over_lr(figure, groups, view, "forgetting")


def draw_accuracy(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw ACC(T) against the learning rate: the mean over seeds with a band of one standard deviation."""
    _draw_over_lr(figure, groups, view, "acc")


def draw_tradeoff(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw ACC(T) against E(T): a path per algorithm whose points grow with the learning rate."""
    styles = line_styles((group.algorithm, group.locality) for group in groups)
    for axes, members in challenge_panels(figure, groups, 3.9, 3.8):
        lrs = sorted({group.lr for group in members})
        for own in by_algorithm(_defined(members, groups, view, "acc", "forgetting")):
            style = styles[own[0].algorithm, own[0].locality]
            statistics = [group.statistics(view) for group in own]
            x, y = (np.array([s[name] for s in statistics]).T for name in ("forgetting", "acc"))
            sizes = [16 + 64 * lrs.index(group.lr) / max(len(lrs) - 1, 1) for group in own]
            draw_path(axes, x, y, style, sizes, own[0].title)
        axes.text(1, 1.02, "↖ better", transform=axes.transAxes, color=FAINT, fontsize=8, ha="right", va="bottom")
        axes.set_xlabel(_forgetting_label(view))
    figure.axes[0].set_ylabel(ACCURACY_LABEL)
    several = len({group.lr for group in groups}) > 1
    legend(figure, _legend_order(groups), note="points grow with\nthe learning rate\n" if several else None)


def draw_distance(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw ‖θ_t − θ_0‖₂ against the learning rate: a panel per algorithm, a point per seed and task, mean lines."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = dark_plasma(0.93)
    for section, cells in algorithm_panels(figure, groups, width=2.3, height=2.25, sharey=True):
        tasks = max(group.tasks for _, own in cells for group in own)
        scale = ScalarMappable(Normalize(1, max(tasks, 2)), colours)
        lrs = [group.lr for _, own in cells for group in own]
        for axes, own in cells:
            for t in range(1, own[0].tasks + 1):
                colour = colours((t - 1) / max(tasks - 1, 1))
                by_lr = [[run.arrays["distance_from_init"][t - 1] for run in group.finished] for group in own]
                means = [np.mean(distances) for distances in by_lr]
                axes.plot([group.lr for group in own], means, color=colour, linewidth=0.8, alpha=0.7)
                x = np.repeat([group.lr for group in own], [len(distances) for distances in by_lr])
                axes.scatter(x, np.concatenate(by_lr), s=11, color=[colour], linewidths=0, alpha=0.85)
            axes.set_yscale("log", nonpositive="mask")
            log_lr(axes, lrs, crowded=True)
        section.supylabel(r"$\Vert\theta_t - \theta_0\Vert_2$", fontsize=9)
        bar = section.colorbar(scale, ax=[axes for axes, _ in cells], label="task $t$", aspect=28, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.set_yticks(sorted({1, (1 + tasks) // 2, tasks}))


def draw_matrix(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw R[t, o], the mean accuracy on task o with θ_t, at each algorithm's most accurate learning rate."""
    from matplotlib import cm
    from matplotlib.colors import Normalize

    size = 2.6 if max(group.tasks for group in groups) > 5 else 2.2
    scale = cm.ScalarMappable(Normalize(0, 100), "cividis")
    for section, cells in algorithm_panels(figure, groups, width=size, height=size + 0.35):
        for axes, own in cells:
            best = most_accurate(own, view)
            name = f"test_{best.scope(view)}_accuracy"
            _draw_heat_map(axes, 100 * np.mean([run.arrays[name] for run in best.finished], axis=0), scale)
            colour = TITLE_COLOURS[best.locality]
            axes.set_title(f"{best.title}\nlearning rate {format_lr(best.lr)}", color=colour, loc="left")
        panels = [axes for axes, _ in cells]
        bar = section.colorbar(scale, ax=panels, label="accuracy  $R[t, o]$  (%)", aspect=28, pad=0.02)
        bar.outline.set_visible(False)


def draw_loss(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """Draw the mean of obj_t over each epoch at each algorithm's most accurate learning rate."""
    styles = line_styles((group.algorithm, group.locality) for group in groups)
    labels = _loss_labels(groups, view)
    for axes, members in challenge_panels(figure, groups, 4.6, 3.4):
        tasks = max(group.tasks for group in members)
        low, high = np.inf, -np.inf
        for best in _best_groups(members, view):
            style = styles[best.algorithm, best.locality]
            curves = np.stack([run.arrays["epoch_loss"] for run in best.finished])
            _, count, epochs = curves.shape
            x = (np.arange(count)[:, None] + (np.arange(epochs) + 1) / epochs).ravel()
            mean, std = (f(curves, axis=0).ravel() for f in (np.mean, np.std))
            task_ends = {"markevery": (epochs - 1, epochs), "markersize": 4.5, **style.point()}
            axes.plot(x, mean, **style.line(), linewidth=1.2, label=labels[best.title], **task_ends)
            axes.fill_between(x, mean - std, mean + std, color=style.colour, alpha=0.14, linewidth=0)
            low, high = min(low, np.nanmin(mean - std)), max(high, np.nanmax(mean))
        axes.set_xlim(0, tasks)
        every = -(-tasks // 20)
        axes.set_xticks(np.arange(0, tasks + 1))
        axes.set_xticks(np.arange(0, tasks, every) + 0.5, [str(t + 1) for t in range(0, tasks, every)], minor=True)
        axes.tick_params(axis="x", which="major", labelbottom=False)
        axes.tick_params(axis="x", which="minor", length=0)
        axes.grid(False, axis="y")
        if low > 0 and high / low > 20:
            axes.set_yscale("log")
        axes.set_xlabel("task $t$, epoch by epoch")
    figure.axes[0].set_ylabel(r"objective  $\mathrm{obj}_t$")
    legend(figure, list(labels.values()))


Draw: TypeAlias = Callable[["Figure", Sequence[Group], View], None]
KINDS: dict[str, tuple[Draw, str]] = {
    "forgetting": (draw_forgetting, "average forgetting E(T) against the learning rate, a line per algorithm"),
    "accuracy": (draw_accuracy, "average accuracy ACC(T) against the learning rate, a line per algorithm"),
    "distance": (draw_distance, "distance ‖θ_t − θ_0‖ against the learning rate, by task, a panel per algorithm"),
    "matrix": (draw_matrix, "accuracy R[t, o] on every task after every task, at each algorithm's best learning rate"),
    "loss": (draw_loss, "the objective, epoch by epoch, at each algorithm's best learning rate"),
    "tradeoff": (draw_tradeoff, "average accuracy against forgetting, a path over the learning rates per algorithm"),
}


def _draw_over_lr(figure: Figure, groups: Sequence[Group], view: View, name: str) -> None:
    styles = line_styles((group.algorithm, group.locality) for group in groups)
    for axes, members in challenge_panels(figure, groups, 3.9, 3.4):
        for own in by_algorithm(_defined(members, groups, view, name)):
            style = styles[own[0].algorithm, own[0].locality]
            lrs = np.array([group.lr for group in own])
            mean, std = np.array([group.statistics(view)[name] for group in own]).T
            axes.plot(lrs, mean, **style.line(), **style.point(), label=own[0].title)
            if len(own) > 1:
                axes.fill_between(lrs, mean - std, mean + std, color=style.colour, alpha=0.14, linewidth=0)
            else:
                axes.errorbar(lrs, mean, std, fmt="none", ecolor=style.colour, capsize=3)
        log_lr(axes, [group.lr for group in members])
    figure.axes[0].set_ylabel(ACCURACY_LABEL if name == "acc" else _forgetting_label(view))
    legend(figure, _legend_order(groups))


def _draw_heat_map(axes: Axes, R: np.ndarray, scale: ScalarMappable) -> None:
    tasks = R.shape[1]
    axes.imshow(R, cmap=scale.cmap, vmin=0, vmax=100, aspect="auto", extent=(0.5, tasks + 0.5, tasks + 0.5, -0.5))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    ticks = [n for n in range(tasks + 1) if tasks <= MAX_ANNOTATED_TASKS or n % 5 == 0 or n == 1]
    axes.set_xticks([n for n in ticks if n])
    axes.set_yticks(ticks)
    axes.tick_params(length=0)
    axes.set_xlabel("task $o$")
    axes.set_ylabel("after task $t$")
    # The line separates tasks already trained, below it, from tasks to come.
    edges = np.arange(tasks + 1) + 0.5
    axes.step(edges, np.minimum(edges, tasks - 0.5), where="post", color="white", linewidth=1.2)
    if tasks <= MAX_ANNOTATED_TASKS:
        for (t, o), value in np.ndenumerate(R):
            colour = "white" if value < 55 else "black"
            if np.isfinite(value):
                axes.text(o + 1, t, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)


def _defined(members: Sequence[Group], all_groups: Sequence[Group], view: View, *names: str) -> list[Group]:
    """Return the members whose statistics are finite; raise an error if no group of the figure has any."""
    finite = [g for g in all_groups if all(np.isfinite(g.statistics(view)[name][0]) for name in names)]
    if not finite:
        what = " and ".join({"acc": "accuracy"}.get(name, name) for name in names)
        raise GlocalError(f"{what} is undefined for these runs (one task only, or no classes).")
    return [group for group in members if group in finite]


def _forgetting_label(view: View) -> str:
    tasks = "T - 1" if view.over == "t-1" else "T"
    return rf"forgetting  $E(T)$  (points, over ${tasks}$ tasks)"


def _legend_order(groups: Sequence[Group]) -> list[str]:
    return [own[0].title for own in by_algorithm(sorted(groups, key=lambda g: (g.locality, g.algorithm)))]


def _best_groups(groups: Sequence[Group], view: View) -> list[Group]:
    """Return each algorithm at its most accurate learning rate."""
    return [most_accurate(own, view) for own in by_algorithm(group for group in groups if group.finished)]


def _loss_labels(groups: Sequence[Group], view: View) -> dict[str, str]:
    """Label each algorithm with its learning rate, or with one per challenge where they differ."""
    best = [group for members in by_challenge(groups) for group in _best_groups(members, view)]
    labels = {}
    for own in by_algorithm(sorted(best, key=lambda group: (group.locality, group.algorithm))):
        lrs = [format_lr(group.lr) for group in own]
        labels[own[0].title] = f"{own[0].title}, lr {' / '.join(lrs if len(set(lrs)) > 1 else lrs[:1])}"
    return labels
