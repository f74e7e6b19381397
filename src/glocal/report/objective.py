"""What the steps minimise: the objective, epoch by epoch, through all tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glocal.report.groups import Group, View, by_algorithm, by_challenge, format_lr, most_accurate
from glocal.report.style import legend, pens, side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """The mean of obj_t over each epoch, at each algorithm's most accurate learning rate; tasks between the lines."""
    styles = pens(groups)
    labels = _labels(groups, view)
    for axes, members in side_by_side(figure, groups, 4.6, 3.4):
        tasks = max(group.tasks for group in members)
        low, high = np.inf, -np.inf
        for best in _shown(members, view):
            pen = styles[best.algorithm, best.locality]
            curves = np.stack([run.arrays["epoch_loss"] for run in best.finished])
            _, count, epochs = curves.shape
            x = (np.arange(count)[:, None] + (np.arange(epochs) + 1) / epochs).ravel()
            mean, std = (f(curves, axis=0).ravel() for f in (np.mean, np.std))
            ends = {"markevery": (epochs - 1, epochs), "markersize": 4.5, **pen.point()}
            axes.plot(x, mean, **pen.line(), linewidth=1.2, label=labels[best.title], **ends)
            axes.fill_between(x, mean - std, mean + std, color=pen.colour, alpha=0.14, linewidth=0)
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


def _shown(groups: Sequence[Group], view: View) -> list[Group]:
    """Each algorithm at its most accurate learning rate."""
    return [most_accurate(own, view) for own in by_algorithm(group for group in groups if group.finished)]


def _labels(groups: Sequence[Group], view: View) -> dict[str, str]:
    """Each algorithm with its learning rate, or with one for each challenge where they differ."""
    best = [group for members in by_challenge(groups) for group in _shown(members, view)]
    labels = {}
    for own in by_algorithm(sorted(best, key=lambda group: (group.locality, group.algorithm))):
        rates = [format_lr(group.lr) for group in own]
        labels[own[0].title] = f"{own[0].title}, lr {' / '.join(rates if len(set(rates)) > 1 else rates[:1])}"
    return labels
