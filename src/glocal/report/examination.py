"""The table and the figure of `glocal lens`: distances and radii, forgetting, and curvature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.errors import unknown
from glocal.lens.advice import DESCRIPTIONS
from glocal.report.style import FAINT, INK, TITLE_COLOURS, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from glocal.lens.examination import Examination

SUFFIXES = (".pdf", ".png", ".svg")


def save(result: Examination, path: str | Path) -> Path:
    """Save the figure."""
    return save_figure(lambda figure: draw(result, figure), require_figure(path))


def require_figure(path: str | Path) -> Path:
    """Raise unless the suffix of the path is that of a figure."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    return path


def draw(result: Examination, figure: Figure) -> None:
    """Draw three panels below the recommendation."""
    advice = result.advice
    figure.set_size_inches(11.4, 3.7)
    title = f"Recommended: {DESCRIPTIONS[advice.family]} ({', '.join(advice.algorithms)})"
    figure.suptitle(title, x=0.008, ha="left", fontweight="bold", color=TITLE_COLOURS[advice.locality])
    distances, forgetting, curvature = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    hues = colours(len(result.losses))
    _draw_distances(distances, result, hues)
    _draw_forgetting(forgetting, result, hues)
    _draw_curvature(curvature, result)


def _draw_distances(axes: Axes, result: Examination, colours: list[Any]) -> None:
    """Draw the distances of later solutions over every task, and the radius of its region in their directions."""
    n = len(result.losses)
    bounds = _finite([result.distance, result.radius, result.steepest, result.random, result.updates])
    low, high = (bounds.min() / 2, bounds.max() * 2) if len(bounds) else (0.1, 10.0)
    for o in range(n):
        reach = [float(result.steepest[o]), float(result.random[o])]
        ends = [min(max(r, low), high) for r in reach if not np.isnan(r)]
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
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.6, n - 0.4)
    axes.set_xticks(range(n))
    axes.set_xlabel("task $o$")
    axes.set_ylabel(r"distance from $\theta_o$")
    axes.set_title("Distances and ε-regions", loc="left", pad=18)
    _subtitle(axes, r"● $\theta_t$ inside $\Omega^\epsilon_o$   ○ outside   — radius towards it   ▒ steepest to random")


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
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("forgetting predicted to the second order")
    axes.set_ylabel("forgetting measured")
    axes.set_title("Forgetting", loc="left", pad=18)
    note = f"; {left_out} not finite" if left_out else ""
    _subtitle(axes, "one later task" if n == 2 else "no later task" if n < 2 else rf"grey: within $\epsilon${note}")
    if n > 1:
        for t in range(1, n) if n <= 7 else (1, n - 1):
            axes.plot([], [], "o", color=colours[t], label=f"after task {t}")
        axes.legend(loc="best", handletextpad=0.1)


def _draw_curvature(axes: Axes, result: Examination) -> None:
    """Draw the largest eigenvalues of every task's Hessian and its trace."""
    values, trace = result.eigenvalues.abs().numpy(), result.trace.numpy()
    for o, row in enumerate(values):
        negative = result.eigenvalues[o].numpy() < 0
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
    axes.set_title("Curvature", loc="left", pad=18)
    _subtitle(axes, f"red: trace   ● the {values.shape[1]} largest eigenvalues   ○ negative")


def _subtitle(axes: Axes, text: str) -> None:
    axes.text(0, 1.02, text, transform=axes.transAxes, color=FAINT, fontsize=7.5, va="bottom")


def colours(tasks: int) -> list[Any]:
    """Return a color for every task, brighter for later ones."""
    import matplotlib

    return list(matplotlib.colormaps["plasma"](np.linspace(0.0, 0.85, max(tasks, 2))))


def _finite(parts: list[Any]) -> np.ndarray:
    values = np.concatenate([part.numpy().reshape(-1) for part in parts])
    return values[np.isfinite(values) & (values > 0)]


def table(result: Examination) -> Table:
    """Return a row for every task, measured after the last one."""
    from rich import box
    from rich.table import Table

    title = f"After the last task, ε = {result.epsilon:.3g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("task", "loss", "λ_max", "trace", "distance", "radius", "steepest\n– random"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("forgetting\n(predicted)", justify="right", overflow="fold")
    table.add_column("inside", overflow="fold")
    for row in result.rows():
        values = [f"{row[k]:.3g}" for k in ("loss", "largest_eigenvalue", "trace")]
        radii = f"{row['steepest_radius']:.2g} – {row['random_radius']:.2g}"
        if row["inside"] is None:  # the last task
            table.add_row(str(row["task"]), *values, "", "", radii, "", "")
            continue
        distances = [f"{row[k]:.3g}" for k in ("distance", "radius")]
        forgetting = f"{row['measured']:.2g} ({row['predicted']:.2g})"
        inside = "[green]yes[/]" if row["inside"] else "[red]no[/]"
        table.add_row(str(row["task"]), *values, *distances, radii, forgetting, inside)
    return table
