r"""Theorems 4.1 and 5.1 on trained networks, over learning rates.

Theorem 4.1: E(t) against ½ Δ_tᵀ \bar H_{<t} Δ_t (Eq. 18).

The theorem equates the two where every θ_o is a minimum, the solutions are close to each other, and nothing was
forgotten before. The last premise always holds after the second task, since E(1) = 0. The full second-order expansion
(Eq. forgetting-quadratic) is measured as well: it only needs the solutions to be close. Losses are training losses.

Theorem 5.1: Δ_tᵀ H_o Δ_t and its outer-product part Δ_tᵀ G_o Δ_t.

OGD's constraint makes Δ_tᵀ G_o Δ_t = 0 on the inputs whose gradients it stores, and the proof neglects the functional
part of H_o (Eq. eqt:opt-cond-revisited). Measured is what is left of both on examples that are stored or not, for
algorithms that meet the constraint, approximate it, or ignore it. A longer update has a larger quadratic form in any
direction, so its relative curvature Δᵀ H_o Δ / (‖Δ‖² ‖H_o‖) is measured too; the top eigenvector has 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from glocal.lens.forgetting import average, forgetting, measured_forgetting, recursion
from glocal.lens.theorems import theorem1, theorem2
from glocal.lens.trace import TrainingTrace
from glocal.paper.studies.common import (
    column,
    distinct,
    diverged_note,
    finite,
    finite_median,
    group,
    item_traces,
    label,
    legend_order,
    line_styles,
    log_y,
    lr_colour_bar,
    lr_colours,
    names,
    of_columns,
    plot_over_lr,
    rank_correlation,
    run_row,
    split_seeds,
    where,
)
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.paper.table1 import COLUMNS
from glocal.report.style import FAINT, INK, TITLE_COLOURS, legend, log_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

COLUMN = COLUMNS["rotated-mnist"]
Options: TypeAlias = dict[str, dict[str, Any]]  # by algorithm
THEOREM1_ALGORITHMS: Options = {
    "sgd": {},
    "ewc": dict(COLUMN.row("ewc").options),
    "optimal-hard": {},
    "optimal-soft": {},
    "ogd": {"slots": 500},
}
THEOREM2_ALGORITHMS: Options = {
    "sgd": {},
    "ewc": THEOREM1_ALGORITHMS["ewc"],
    "ogd": {"slots": 2_000},
    "ogd-gtl": {"slots": 2_000},
    "ogd-published": {"slots": 2_000},
    "optimal-hard": {},
}
DEMO_OPTIONS: Options = {"optimal-hard": {"rank": 10, "samples": 500}, "optimal-soft": {"samples": 500}}
DEMO_OPTIONS |= {name: {"slots": 500} for name in ("ogd", "ogd-gtl", "ogd-published")}
FULL: WorkItem = {"challenge": COLUMN.challenge, "angles": "published", "tasks": 10, "epochs": COLUMN.epochs}
FULL |= {"batch_size": COLUMN.batch_size, "hidden": [100, 100], "lrs": COLUMN.lrs, "seeds": COLUMN.seeds}
FULL |= {"examples": 2_000, "steps": 20}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 3, "epochs": 2, "hidden": [22, 22]}
DEMO |= {"lrs": (0.02, 0.1, 0.5), "seeds": COLUMN.seeds[:2], "examples": 300, "steps": 10}
FACTOR = 2.0
"""A prediction counts as correct if it is within this factor of E(t)."""


def make_items(algorithms: Options, demo: bool) -> list[WorkItem]:
    """Return an item per algorithm for the demo, and per algorithm and seed otherwise."""
    if demo:
        return [{"algorithm": a, "options": o | DEMO_OPTIONS.get(a, {}), **DEMO} for a, o in algorithms.items()]
    return split_seeds([{"algorithm": a, "options": o, **FULL} for a, o in algorithms.items()])


def make_cost(algorithms: Options, demo: bool) -> str:
    size = DEMO if demo else FULL
    runs, tasks = len(algorithms) * len(size["lrs"]) * len(size["seeds"]), size["tasks"]
    products = tasks * (tasks - 1 + size["steps"])
    return f"{size['challenge']}: {runs} runs of {tasks} tasks, {products} Hessian products each"


def task_rows(item: WorkItem, context: Context, measure: Callable[[TrainingTrace], dict[str, Tensor]]) -> list[Row]:
    """Return a row for every run and task from the second on, of columns measured with one value per task."""
    rows: list[Row] = []
    for member, trace in item_traces(item, context):
        columns, run = measure(trace), run_row(member, item["algorithm"])
        rows += [run | {"t": t + 1} | {k: float(v[t]) for k, v in columns.items()} for t in range(1, item["tasks"])]
    return rows


class Theorem1Study:
    """Both sides of the theorem and its premises after every task from the second on."""

    name = "theorem1"
    columns = (
        "algorithm locality lr seed t "
        "measured quadratic second_order condition relative forgotten gradient_norm lowest reach"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        return make_items(THEOREM1_ALGORITHMS, demo)

    def cost(self, demo: bool) -> str:
        return make_cost(THEOREM1_ALGORITHMS, demo)

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        def columns(trace: TrainingTrace) -> dict[str, Tensor]:
            sides, expansion = theorem1(trace, steps=item["steps"]), recursion(forgetting(trace))
            return {
                "measured": sides.measured,
                "quadratic": sides.quadratic,
                "second_order": expansion.predicted,
                "condition": sides.condition,
                "relative": sides.relative,
                "forgotten": sides.max_forgetting,
                "gradient_norm": sides.max_gradient,
                "lowest": sides.min_eigenvalue,
                "reach": sides.max_distance_cubed,
            }

        return task_rows(item, context, columns)

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """A panel for each algorithm, E(t) against the quadratic form; and how often they agree."""
        algorithms = names(rows)
        width = -(-(len(algorithms) + 1) // 2)
        figure.set_size_inches(2.7 * width + 1.0, 5.6)
        cells = list(figure.subplots(2, width, squeeze=False).flat)
        for axes in cells[len(algorithms) + 1 :]:
            axes.set_visible(False)
        lowest = finite(rows, "measured").min(initial=0.0)
        highest = float(np.concatenate([finite(rows, n) for n in ("measured", "quadratic")]).max(initial=0.0)) or 1.0
        colours = lr_colours(rows)
        for axes, algorithm in zip(cells, algorithms, strict=False):
            _scatter(axes, where(rows, algorithm=algorithm), colours, lowest, highest)
        cells[0].legend(loc="lower right", handletextpad=0.1, borderpad=0.2)
        for axes in cells[: len(algorithms) : width]:
            axes.set_ylabel(r"forgetting $E(t)$, in loss")
        _draw_agreement(cells[len(algorithms)], rows)
        lr_colour_bar(figure, colours, cells, rows)

    def summarize(self, rows: Sequence[Row]) -> Summary:
        known = [row for row in rows if len(finite([row], "measured"))]
        second = where(known, t=2)
        table = group(
            second,
            "lr",
            {
                **of_columns({"E(2)": "measured", "½ Δᵀ H̄ Δ": "quadratic"}),
                "E(2) < 0 (%)": lambda own: 100 * float((column(own, "measured") < 0).mean()),
                f"within a factor of {FACTOR:g} (%)": lambda own: percent_within(own, "quadratic"),
                "second order within it (%)": lambda own: percent_within(own, "second_order"),
                "rank correlation": lambda own: rank_correlation(column(own, "measured"), column(own, "quadratic")),
                **of_columns({"largest ‖∇L_o(θ_o)‖": "gradient_norm"}),
                "largest distance of solutions": lambda own: finite_median(own, "reach") ** (1 / 3),
            },
        )
        table.sort(key=lambda row: float(row["lr"] or 0))
        if not second:
            return Summary(table, "No run has a finite loss.")
        later = [row for row in known if row["t"] != 2]
        after = f" (after later tasks {percent_within(later, 'quadratic'):.0f} %)" if later else ""
        verdict = (
            f"The quadratic form of Theorem 4.1 is within a factor of {FACTOR:g} of E(2) in "
            f"{percent_within(second, 'quadratic'):.0f} % of {len(second)} runs{after}."
        )
        return Summary(table, verdict + diverged_note(rows, "measured"))


def percent_within(rows: Sequence[Row], name: str) -> float:
    """Return how many percent of E(t) are positive and within FACTOR of a column."""
    measured, predicted = column(rows, "measured"), column(rows, name)
    correct = (measured > 0) & (predicted >= measured / FACTOR) & (predicted <= measured * FACTOR)
    return 100 * float(correct.mean()) if len(correct) else np.nan


def _scatter(axes: Axes, rows: Sequence[Row], colours: ScalarMappable, lowest: float, highest: float) -> None:
    """Symmetric logarithmic axes, since E(t) may be negative; the band is what counts as correct."""
    linear = min(0.1, highest)
    for name in ("x", "y"):
        getattr(axes, f"set_{name}scale")("symlog", linthresh=linear, linscale=0.8)
    axes.set(xlim=(-linear / 5, 1.5 * highest), ylim=(1.5 * lowest - linear / 5, 1.5 * highest))
    diagonal = np.linspace(0, 1.5 * highest, 2_000)  # many points: a straight line is curved on these axes
    axes.plot(diagonal, diagonal, color=FAINT, linewidth=0.9)
    axes.fill_between(diagonal, diagonal / FACTOR, diagonal * FACTOR, color=FAINT, alpha=0.12, linewidth=0)
    axes.axhline(0, color=FAINT, linewidth=0.6)
    later = [row for row in rows if row["t"] != 2]
    for own, text, size, edge in ((later, "$t > 2$", 9, "none"), (where(rows, t=2), "$t = 2$", 22, INK)):
        x, y, lr = (column(own, name) for name in ("quadratic", "measured", "lr"))
        shape: dict[str, Any] = {"s": size, "edgecolors": edge, "linewidths": 0.7, "label": text}
        axes.scatter(x, y, c=colours.to_rgba(lr), alpha=0.85, zorder=3, **shape)
    axes.set_title(label(rows), color=TITLE_COLOURS[str(rows[0]["locality"])], loc="left")
    axes.set_xlabel(r"$\frac{1}{2}\,\Delta_t^\top \bar H_{<t}\,\Delta_t$")


def _draw_agreement(axes: Axes, rows: Sequence[Row]) -> None:
    for algorithm, style in line_styles(rows).items():
        own = [row for row in where(rows, algorithm=algorithm) if len(finite([row], "measured"))]
        lrs = distinct(own, "lr")
        percents = [percent_within(where(own, lr=lr), "quadratic") for lr in lrs]
        axes.plot(lrs, percents, **style.line(), **style.point(), label=algorithm)
    log_lr(axes, distinct(rows, "lr"), crowded=True)
    axes.set_ylim(-4, 104)
    axes.set_title(f"within a factor of {FACTOR:g} (% of all $t$)", loc="left")
    axes.legend(fontsize=7, loc="best", labelspacing=0.3, handlelength=2.4)


PANELS = {
    "hessian": r"$\Delta_t^\top H_o\,\Delta_t$",
    "outer": r"its outer-product part $\Delta_t^\top G_o\,\Delta_t$",
    "functional_share": "its functional part's share (%)",
    "length": r"length $\Vert\Delta_t\Vert$",
    "relative": r"curvature $\Delta_t^\top H_o\,\Delta_t\;/\;\Vert\Delta_t\Vert^2\,\Vert H_o\Vert$",
    "forgetting": "forgetting $E(t)$, in loss",
}
HEADINGS = {"Δᵀ H Δ": "hessian", "Δᵀ G Δ": "outer", "functional part (%)": "functional_share", "‖Δ‖": "length"}
HEADINGS |= {"relative curvature": "relative", "E(t)": "forgetting"}
LINEAR_PANELS = ("functional_share", "forgetting")


class Theorem2Study:
    """The quadratic forms of every update, averaged over the tasks before it, and the forgetting."""

    name = "theorem2"
    columns = (
        "algorithm locality lr seed t hessian outer functional functional_share rayleigh relative length forgetting"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        return make_items(THEOREM2_ALGORITHMS, demo)

    def cost(self, demo: bool) -> str:
        return make_cost(THEOREM2_ALGORITHMS, demo)

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        def columns(trace: TrainingTrace) -> dict[str, Tensor]:
            forms = theorem2(trace, steps=item["steps"])
            return {
                "hessian": _mean_over_old(forms.hessian),
                "outer": _mean_over_old(forms.outer),
                "functional": _mean_over_old(forms.functional),
                "functional_share": 100 * _mean_over_old(forms.functional_share),
                "rayleigh": _mean_over_old(forms.rayleigh),
                "relative": _mean_over_old(forms.relative),
                "length": forms.lengths,
                "forgetting": average(measured_forgetting(trace), "t"),
            }

        return task_rows(item, context, columns)

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Panels over the learning rate: medians over tasks and seeds, bands over seeds."""
        figure.set_size_inches(10.2, 5.4)
        runs, styles = _by_run(rows), line_styles(rows)
        for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            plot_over_lr(axes, runs, name, styles, spread="range")
            axes.set_title(title, loc="left")
            if name not in LINEAR_PANELS:
                log_y(axes)
        legend(figure, legend_order(rows), note="medians over tasks\nand seeds; bands\nover seeds\n")

    def summarize(self, rows: Sequence[Row]) -> Summary:
        runs = _by_run(rows)
        table = group(runs, "algorithm lr", of_columns(HEADINGS))
        lr = max(distinct(runs, "lr"))
        ogd, sgd = (where(runs, algorithm=a, lr=lr) for a in ("ogd", "sgd"))
        if not ogd or not sgd:
            return Summary(table, "Runs of ogd and sgd are needed for a verdict.")
        form, forgetting = (finite_median(ogd, n) / finite_median(sgd, n) for n in ("outer", "forgetting"))
        verdict = (
            f"At learning rate {lr:g} OGD's constraint leaves {form:.2g} of SGD's Δᵀ G Δ on all inputs and "
            f"{forgetting:.2g} of its forgetting; Theorem 5.1 has 0 for both."
        )
        return Summary(table, verdict + diverged_note(rows, "hessian"))


STUDIES = (Theorem1Study(), Theorem2Study())


def _mean_over_old(pairs: Tensor) -> Tensor:
    """The mean over the tasks o < t of a matrix [t, o], for every t; NaN for the first."""
    old = torch.ones_like(pairs, dtype=torch.bool).tril(-1)
    return torch.where(old, pairs, 0.0).sum(1) / old.sum(1)


def _by_run(rows: Sequence[Row]) -> list[Row]:
    """One row per run: the medians over its tasks; NaN if one of them is NaN."""

    def median(own: list[Row], name: str) -> float:
        return float(np.median(column(own, name)))

    medians = of_columns({name: name for name in PANELS}, median)
    return group(rows, "algorithm locality lr seed", medians)
