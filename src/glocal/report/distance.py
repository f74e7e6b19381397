r"""How far training travels: ‖θ_t − θ_0‖₂ against the learning rate, coloured by task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glocal.report.groups import Group, View
from glocal.report.style import log_lr, sections

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def distance(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """A panel for each algorithm; a point for each seed and task, the brighter the later; lines through the means."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    # The brightest end of the map would vanish on white paper.
    colours = ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.0, 0.93, 256)))
    for section, cells in sections(figure, groups, width=2.3, height=2.25, sharey=True):
        tasks = max(group.tasks for _, own in cells for group in own)
        scale = ScalarMappable(Normalize(1, max(tasks, 2)), colours)
        lrs = [group.lr for _, own in cells for group in own]
        for axes, own in cells:
            for t in range(1, own[0].tasks + 1):
                colour = colours((t - 1) / max(tasks - 1, 1))
                travelled = [
                    np.array([run.arrays["distance_from_init"][t - 1] for run in group.finished]) for group in own
                ]
                axes.plot([g.lr for g in own], [x.mean() for x in travelled], color=colour, linewidth=0.8, alpha=0.7)
                x = np.concatenate([np.full(points.shape, g.lr) for g, points in zip(own, travelled, strict=True)])
                axes.scatter(x, np.concatenate(travelled), s=11, color=[colour], linewidths=0, alpha=0.85)
            axes.set_yscale("log", nonpositive="mask")
            log_lr(axes, lrs, crowded=True)
        section.supylabel(r"$\Vert\theta_t - \theta_0\Vert_2$", fontsize=9)
        bar = section.colorbar(scale, ax=[axes for axes, _ in cells], label="task $t$", aspect=28, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.set_yticks(sorted({1, (1 + tasks) // 2, tasks}))
