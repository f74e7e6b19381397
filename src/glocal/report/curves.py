"""Forgetting and accuracy over the learning rates, and one against the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.errors import GlocalError
from glocal.report.groups import Group, View, by_algorithm
from glocal.report.style import FAINT, legend, log_lr, pens, side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = r"accuracy  $\mathrm{ACC}(T)$  (%)"


def forgetting(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """E(T) against the learning rate: mean over seeds, and a band of one standard deviation on either side."""
    _over_lr(figure, groups, view, "forgetting")


def accuracy(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """ACC(T) against the learning rate, likewise."""
    _over_lr(figure, groups, view, "acc")


def tradeoff(figure: Figure, groups: Sequence[Group], view: View) -> None:
    """ACC(T) against E(T): each algorithm's path from its lowest learning rate to its highest, in growing points."""
    styles = pens(groups)
    for axes, members in side_by_side(figure, groups, 3.9, 3.8):
        rates = sorted({group.lr for group in members})
        for own in by_algorithm(_defined(members, groups, view, "acc", "forgetting")):
            pen = styles[own[0].algorithm, own[0].locality]
            found = [group.statistics(view) for group in own]
            (x, dx), (y, dy) = (np.array([s[name] for s in found]).T for name in ("forgetting", "acc"))
            axes.errorbar(x, y, dy, dx, fmt="none", ecolor=pen.colour, elinewidth=0.7, alpha=0.35)
            axes.plot(x, y, **pen.line(), linewidth=1.1, alpha=0.8)
            sizes = [16 + 64 * rates.index(group.lr) / max(len(rates) - 1, 1) for group in own]
            points: dict[str, Any] = {
                "color": pen.colour,
                "marker": pen.marker,
                "edgecolors": "white",
                "linewidths": 0.6,
            }
            axes.scatter(x, y, s=sizes, **points, zorder=3)
            axes.plot([], [], **pen.line(), **pen.point(), label=own[0].title)
        axes.text(1, 1.02, "↖ better", transform=axes.transAxes, color=FAINT, fontsize=8, ha="right", va="bottom")
        axes.set_xlabel(_forgetting(view))
    figure.axes[0].set_ylabel(ACCURACY)
    several = len({group.lr for group in groups}) > 1
    legend(figure, _order(groups), note="points grow with\nthe learning rate\n" if several else None)


def _over_lr(figure: Figure, groups: Sequence[Group], view: View, name: str) -> None:
    styles = pens(groups)
    for axes, members in side_by_side(figure, groups, 3.9, 3.4):
        for own in by_algorithm(_defined(members, groups, view, name)):
            pen = styles[own[0].algorithm, own[0].locality]
            lrs = np.array([group.lr for group in own])
            mean, std = np.array([group.statistics(view)[name] for group in own]).T
            axes.plot(lrs, mean, **pen.line(), **pen.point(), label=own[0].title)
            if len(own) > 1:
                axes.fill_between(lrs, mean - std, mean + std, color=pen.colour, alpha=0.14, linewidth=0)
            else:
                axes.errorbar(lrs, mean, std, fmt="none", ecolor=pen.colour, capsize=3)
        log_lr(axes, [group.lr for group in members])
    figure.axes[0].set_ylabel(ACCURACY if name == "acc" else _forgetting(view))
    legend(figure, _order(groups))


def _defined(members: Sequence[Group], all_groups: Sequence[Group], view: View, *names: str) -> list[Group]:
    """The members whose numbers of these names are finite; an error if no group has any."""
    finite = [g for g in all_groups if all(np.isfinite(g.statistics(view)[name][0]) for name in names)]
    if not finite:
        what = " and ".join({"acc": "accuracy"}.get(name, name) for name in names)
        raise GlocalError(f"{what} of these runs: undefined (one task only, or no classes); nothing to draw.")
    return [group for group in members if group in finite]


def _forgetting(view: View) -> str:
    tasks = "T - 1" if view.over == "t-1" else "T"
    return rf"forgetting  $E(T)$  (points, over ${tasks}$ tasks)"


def _order(groups: Sequence[Group]) -> list[str]:
    return [own[0].title for own in by_algorithm(sorted(groups, key=lambda g: (g.locality, g.algorithm)))]
