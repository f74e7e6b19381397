"""The matrix R[t, o] itself: what is known of every task after every task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glocal.report.groups import Group, View, format_lr, most_accurate
from glocal.report.style import TITLE_COLOURS, sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

MOST_WITH_NUMBERS = 10


def matrix(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """The mean over seeds of the accuracy on task o with θ_t, at each algorithm's most accurate learning rate."""
    from matplotlib import cm
    from matplotlib.colors import Normalize

    size = 2.6 if max(group.tasks for group in groups) > 5 else 2.2
    scale = cm.ScalarMappable(Normalize(0, 100), "cividis")
    for section, cells in sections(figure, groups, width=size, height=size + 0.35):
        for axes, own in cells:
            best = most_accurate(own, view)
            name = f"test_{best.scope(view)}_accuracy"
            _heat(axes, 100 * np.mean([run.arrays[name] for run in best.finished], axis=0), scale)
            colour = TITLE_COLOURS[best.locality]
            axes.set_title(f"{best.title}\nlearning rate {format_lr(best.lr)}", color=colour, loc="left")
        shown = [axes for axes, _ in cells]
        bar = section.colorbar(scale, ax=shown, label="accuracy  $R[t, o]$  (%)", aspect=28, pad=0.02)
        bar.outline.set_visible(False)


def _heat(axes: Axes, R: np.ndarray, scale: ScalarMappable) -> None:
    tasks = R.shape[1]
    axes.imshow(R, cmap=scale.cmap, vmin=0, vmax=100, aspect="auto", extent=(0.5, tasks + 0.5, tasks + 0.5, -0.5))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    ticks = [n for n in range(tasks + 1) if tasks <= MOST_WITH_NUMBERS or n % 5 == 0 or n == 1]
    axes.set_xticks([n for n in ticks if n])
    axes.set_yticks(ticks)
    axes.tick_params(length=0)
    axes.set_xlabel("task $o$")
    axes.set_ylabel("after task $t$")
    # The staircase between what has been learnt, below it, and what is still to come.
    edges = np.arange(tasks + 1) + 0.5
    axes.step(edges, np.minimum(edges, tasks - 0.5), where="post", color="white", linewidth=1.2)
    if tasks <= MOST_WITH_NUMBERS:
        for (t, o), value in np.ndenumerate(R):
            ink = "white" if value < 55 else "black"
            if np.isfinite(value):
                axes.text(o + 1, t, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=8)
