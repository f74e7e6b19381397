r"""Flatness of every task's solution, and the forgetting that followed (§4, "flatter local minima").

Under a local quadratic approximation an update Δ forgets ½ Δᵀ H_o Δ: at most ½ λ_max ‖Δ‖², and ½ (tr H_o / P) ‖Δ‖² for
a random direction. So forgetting should grow with λ_max and with the trace as long as learning is local and updates
have one length; over learning rates neither holds. Plain SGD is compared with stable SGD, a regime designed to find
flat solutions, each with the batch size that its authors use for five rotations: 64 and 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from glocal.lens.forgetting import flatness
from glocal.paper.studies.common import (
    column,
    distinct,
    finite,
    group,
    item_traces,
    lr_colours,
    mean,
    of_columns,
    rank_correlation,
    split_seeds,
    training_cost,
    where,
)
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.paper.table1 import SEEDS
from glocal.report.style import FAINT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REGIMES: dict[str, WorkItem] = {
    "sgd": {"algorithm": "sgd", "options": {}, "batch_size": 64},
    "stable-sgd": {"algorithm": "stable-sgd", "options": {"dropout": 0.5, "decay": 0.8}, "batch_size": 16},
}
FULL: WorkItem = {"challenge": "rotated-mnist", "tasks": 5, "epochs": 5, "hidden": [100, 100], "examples": 2_000}
FULL |= {"lrs": [0.001, 0.005, 0.01, 0.05, 0.1], "seeds": sorted(SEEDS), "steps": 30, "probes": 20}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 4, "epochs": 3, "hidden": [50, 50], "examples": 500}
DEMO |= {"lrs": [0.01, 0.05, 0.2], "seeds": sorted(SEEDS[:2]), "steps": 20, "probes": 10}
MEASUREMENTS = ("top", "top_error", "trace", "trace_error", "after_next", "at_end", "moved")


class Sharpness(NamedTuple):
    """A predictor of forgetting."""

    symbol: str
    text: str
    of: Callable[[Sequence[Row]], np.ndarray]


SHARPNESS = (
    Sharpness(r"$\lambda_{\max}(H_o)$", "λ_max", lambda rows: column(rows, "top")),
    Sharpness(r"$\mathrm{tr}\,H_o$", "trace", lambda rows: column(rows, "trace")),
    Sharpness(
        r"$\frac{1}{2}\lambda_{\max}\Vert\theta_T-\theta_o\Vert^2$",
        "½ λ_max ‖θ_T − θ_o‖²",
        lambda rows: column(rows, "top") * column(rows, "moved") ** 2 / 2,
    ),
)


class FlatMinima:
    name = "flatness"
    columns = "challenge algorithm lr seed task top top_error trace trace_error after_next at_end moved"

    def work_items(self, demo: bool) -> list[WorkItem]:
        if demo:
            return [regime | DEMO for regime in REGIMES.values()]
        return split_seeds([regime | FULL for regime in REGIMES.values()])

    def cost(self, demo: bool) -> str:
        item = DEMO if demo else FULL
        solutions = 2 * len(item["lrs"]) * len(item["seeds"]) * item["tasks"]
        products = item["steps"] + 3 * item["probes"] // 2
        return f"{training_cost(item, 2)}; {products} Hessian products at each of {solutions} solutions"

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        rows: list[Row] = []
        for member, trace in item_traces(item, context):
            run: Row = {"challenge": item["challenge"], "algorithm": item["algorithm"]}
            run |= {"lr": member.lr, "seed": member.seed}
            measured = flatness(trace, item["steps"], item["probes"])
            for task in range(len(measured.top)):
                rows.append(run | {"task": task} | {n: float(getattr(measured, n)[task]) for n in MEASUREMENTS})
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """A point for each solution: forgetting after the last task against three predictors."""
        figure.set_size_inches(11.2, 4.4)
        tasks, seeds = len(distinct(rows, "task")), len(distinct(rows, "seed"))
        title = f"{rows[0]['challenge']} · {tasks} tasks · {seeds} seeds · every solution but the last, after all tasks"
        figure.suptitle(title, x=0.012, ha="left", fontweight="bold")
        known = [row for row in rows if len(finite([row], "at_end"))]
        panels = figure.subplots(1, len(SHARPNESS), sharey=True)
        for axes, sharpness in zip(panels, SHARPNESS, strict=True):
            _scatter(axes, known, sharpness)
        panels[0].set_ylabel(r"forgetting  $L_o(\theta_T) - L_o(\theta_o)$")
        handles, labels = panels[0].get_legend_handles_labels()
        if labels:
            note = "regime and\nlearning rate"
            figure.legend(handles, labels, loc="outside right center", title=note, alignment="left")

    def summarize(self, rows: Sequence[Row]) -> Summary:
        medians = of_columns({"λ_max": "top", "forgetting": "at_end", "‖θ_T − θ_o‖": "moved"})
        statistics = {f"ρ with {s.text}": partial(_correlation, sharpness=s) for s in SHARPNESS} | medians
        table = group(rows, "algorithm lr", statistics)
        everything = group([row | {"algorithm": "all", "lr": None} for row in rows], "algorithm lr", statistics)
        pairs = paired(rows)
        flatter, less = (sum(b[name] < a[name] for a, b in pairs) for name in ("top", "at_end"))  # type: ignore[operator]
        agrees = "agrees" if 2 * flatter > len(pairs) and 2 * less > len(pairs) else "does not agree"
        positive = sum(column([row], "ρ with λ_max")[0] > 0 for row in table)
        verdict = (
            f"Sharper solutions forget more (ρ with λ_max > 0) in {positive} of {len(table)} regimes and learning "
            f"rates; stable SGD is flatter than plain SGD in {flatter} of {len(pairs)} pairs and forgets less in "
            f"{less}: {agrees} with the paper on stable SGD."
        )
        return Summary(table + everything, verdict)


STUDIES = (FlatMinima(),)


def paired(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return (plain, stable) solutions of the same learning rate, seed and task whose forgetting is finite."""
    known = [row for row in rows if len(finite([row], "at_end"))]
    stable = {(r["lr"], r["seed"], r["task"]): r for r in where(known, algorithm="stable-sgd")}
    plain = {(r["lr"], r["seed"], r["task"]): r for r in where(known, algorithm="sgd")}
    return [(row, stable[key]) for key, row in plain.items() if key in stable]


def _correlation(rows: Sequence[Row], sharpness: Sharpness) -> float:
    return rank_correlation(sharpness.of(rows), column(rows, "at_end"))


def _scatter(axes: Axes, rows: Sequence[Row], sharpness: Sharpness) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for algorithm, marker in (("sgd", "o"), ("stable-sgd", "X")):
        for lr in distinct(rows, "lr"):
            own = where(rows, algorithm=algorithm, lr=lr)
            x, y = sharpness.of(own), column(own, "at_end")
            shown = np.isfinite(x) & (x > 0)
            style: dict[str, Any] = {"color": [lr_colours(rows).to_rgba(np.array(lr))], "marker": marker, "alpha": 0.8}
            axes.scatter(x[shown], y[shown], s=26, linewidths=0, label=f"{algorithm} {lr:g}", **style)
    if np.nanmax(sharpness.of(rows), initial=0) > 0:  # a logarithmic axis needs a positive value
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    within = mean(group(rows, "algorithm lr", {"rho": lambda own: _correlation(own, sharpness)}), "rho")
    axes.set_title(f"rank correlation {_correlation(rows, sharpness):+.2f}, within rates {within:+.2f}", loc="left")
    axes.set_xlabel(sharpness.symbol)
