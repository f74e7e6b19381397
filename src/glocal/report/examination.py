"""What the lens found of a training, in one figure: where it went, what it forgot, how its losses bend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.errors import unknown
from glocal.lens.advice import CALLED
from glocal.report.style import FAINT, INK, TITLE_COLOURS, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from glocal.lens.examination import Examination

SUFFIXES = (".pdf", ".png", ".svg")


def save(found: Examination, path: str | Path) -> Path:
    """The figure as a file. Missing folders are made."""
    return save_figure(lambda figure: draw(found, figure), require_figure(path))


def require_figure(path: str | Path) -> Path:
    """A path whose suffix names a kind of figure."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    return path


def draw(found: Examination, figure: Figure) -> None:
    """Three panels, and the recommendation above them."""
    advice = found.advice
    figure.set_size_inches(11.4, 3.7)
    title = f"Recommended: {CALLED[advice.family]} ({', '.join(advice.algorithms)})"
    figure.suptitle(title, x=0.008, ha="left", fontweight="bold", color=TITLE_COLOURS[advice.locality])
    where, forgot, bend = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    hues = colours(len(found.losses))
    _where(where, found, hues)
    _forgotten(forgot, found, hues)
    _curvature(bend, found)


def _where(axes: Axes, found: Examination, colours: list[Any]) -> None:
    """Above every task how far later ones went, and how far its region reaches there."""
    n = len(found.losses)
    bounds = _finite([found.distance, found.radius, found.steepest, found.random, found.updates])
    low, high = (bounds.min() / 2, bounds.max() * 2) if len(bounds) else (0.1, 10.0)
    for o in range(n):
        reach = [float(found.steepest[o]), float(found.random[o])]
        ends = [min(max(r, low), high) for r in reach if not np.isnan(r)]
        if ends:
            axes.bar(o, max(ends) - min(ends), 0.56, min(ends), color="#E4E4E4", zorder=1)
        for t in range(o + 1, n):
            x = o + 0.56 * ((t - o) / (n - o) - 0.5)
            far, border = float(found.distance[t, o]), float(found.radius[t, o])
            if not np.isnan(border):
                axes.plot([x, x], [low, min(border, high)], color=colours[t], linewidth=1.1, alpha=0.55, zorder=2)
                mark = "_" if border < np.inf else "^"
                axes.plot(x, min(border, high), mark, color=colours[t], markersize=8, zorder=2)
            face = colours[t] if bool(found.inside[t, o]) else "white"
            if 0 < far < np.inf:
                axes.plot(x, far, "o", color=colours[t], markerfacecolor=face, markeredgewidth=1.4, zorder=3)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.6, n - 0.4)
    axes.set_xticks(range(n))
    axes.set_xlabel("task $o$")
    axes.set_ylabel(r"distance from $\theta_o$")
    axes.set_title("Where training went", loc="left", pad=18)
    _subtitle(
        axes, r"● $\theta_t$ inside $\Omega^\epsilon_o$   ○ outside   — its border that way   ▒ steepest to random"
    )


def _forgotten(axes: Axes, found: Examination, colours: list[Any]) -> None:
    """Predicted against measured forgetting, a point for every pair."""
    n = len(found.losses)
    measured, predicted = found.forgetting.measured, found.forgetting.predicted
    shown = [(t, o) for t in range(n) for o in range(t) if bool((measured[t, o] + predicted[t, o]).isfinite())]
    left_out = n * (n - 1) // 2 - len(shown)
    values = np.array([[float(predicted[p]), float(measured[p])] for p in shown]).reshape(-1, 2)
    low, high = min(values.min(initial=0), 0), max(values.max(initial=0), found.epsilon)
    margin = 0.07 * (high - low)
    ends = np.array([low - margin, high + margin])
    axes.fill_between(ends, ends - found.epsilon, ends + found.epsilon, color="#E4E4E4", linewidth=0)
    axes.plot(ends, ends, color=FAINT, linewidth=0.8)
    for (t, o), (x, y) in zip(shown, values, strict=True):
        face = colours[t] if bool(found.inside[t, o]) else "white"
        axes.plot(x, y, "o", color=colours[t], markerfacecolor=face, markeredgewidth=1.4)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("forgetting predicted to the second order")
    axes.set_ylabel("forgetting measured")
    axes.set_title("What was forgotten", loc="left", pad=18)
    note = f"; {left_out} beyond numbers" if left_out else ""
    _subtitle(
        axes, "one later task" if n == 2 else "nothing learnt after it" if n < 2 else rf"grey: within $\epsilon${note}"
    )
    if n > 1:
        for t in range(1, n) if n <= 7 else (1, n - 1):  # the colours between them go from the one to the other
            axes.plot([], [], "o", color=colours[t], label=f"after task {t}")
        axes.legend(loc="best", handletextpad=0.1)


def _curvature(axes: Axes, found: Examination) -> None:
    """The largest eigenvalues of every task's Hessian beside its trace."""
    values, trace = found.eigenvalues.abs().numpy(), found.trace.numpy()
    for o, row in enumerate(values):
        negative = found.eigenvalues[o].numpy() < 0
        for below, face in ((False, INK), (True, "white")):
            chosen = row[negative == below]
            axes.plot([o] * len(chosen), chosen, "o", color=INK, markersize=4, markerfacecolor=face)
        if trace[o] > 0:
            axes.plot(o, trace[o], "_", color=TITLE_COLOURS["local"], markersize=16, markeredgewidth=2)
    axes.set_yscale("log", nonpositive="mask")
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.set_xticks(range(len(values)))
    axes.set_xlabel("task $o$")
    axes.set_ylabel(r"$|\lambda|$ of $H_o$ at $\theta_o$")
    axes.set_title("How the losses bend", loc="left", pad=18)
    _subtitle(axes, f"red: trace   ● the {values.shape[1]} largest eigenvalues   ○ negative")


def _subtitle(axes: Axes, text: str) -> None:
    axes.text(0, 1.02, text, transform=axes.transAxes, color=FAINT, fontsize=7.5, va="bottom")


def colours(tasks: int) -> list[Any]:
    """The brighter the later."""
    import matplotlib

    return list(matplotlib.colormaps["plasma"](np.linspace(0.0, 0.85, max(tasks, 2))))


def _finite(parts: list[Any]) -> np.ndarray:
    values = np.concatenate([part.numpy().reshape(-1) for part in parts])
    return values[np.isfinite(values) & (values > 0)]
