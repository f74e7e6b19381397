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

from typing import Any, ClassVar

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from torch import Tensor

from glocal.lens.forgetting import average, forgetting, measured_forgetting, recursion
from glocal.lens.theorems import theorem1, theorem2
from glocal.lens.trace import TrainingTrace
from glocal.paper.studies import common
from glocal.paper.studies.common import column, distinct, finite_median, group, of_columns
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.paper.table1 import COLUMNS
from glocal.report.style import FAINT, INK, TITLE_COLOURS, legend

EWC = dict(COLUMNS["rotated-mnist"].row("ewc").options)
DEMO_OPTIONS: dict[str, dict[str, Any]] = {
    "optimal-hard": {"rank": 10, "samples": 500},
    "optimal-soft": {"samples": 500},
    **{name: {"slots": 500} for name in ("ogd", "ogd-gtl", "ogd-published")},
}
FULL: WorkItem = common.TABLE1 | {"tasks": 10, "examples": 2_000, "steps": 20}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 3, "epochs": 2, "hidden": [22, 22]}
DEMO |= {"lrs": (0.02, 0.1, 0.5), "seeds": FULL["seeds"][:2], "examples": 300, "steps": 10}
FACTOR = 2.0
"""A prediction counts as correct if it is within this factor of E(t)."""
SIDES = ("quadratic", "measured")


class TheoremStudy:
    """A study of runs of several algorithms that measures some values for every task from the second on."""

    algorithms: ClassVar[dict[str, dict[str, Any]]]  # options by name

    def work_items(self, demo: bool) -> list[WorkItem]:
        if demo:
            options = {a: o | DEMO_OPTIONS.get(a, {}) for a, o in self.algorithms.items()}
            return [{"algorithm": a, "options": o, **DEMO} for a, o in options.items()]
        return common.split_seeds([{"algorithm": a, "options": o, **FULL} for a, o in self.algorithms.items()])

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        rows: list[Row] = []
        for member, trace in common.item_traces(item, context):
            columns, run = self.measure_trace(trace, item["steps"]), common.run_row(member, item["algorithm"])
            rows += [run | {"t": t + 1} | {k: float(v[t]) for k, v in columns.items()} for t in range(1, item["tasks"])]
        return rows

    def measure_trace(self, trace: TrainingTrace, steps: int) -> dict[str, Tensor]:
        """Return columns with one value per task."""
        raise NotImplementedError


class Theorem1Study(TheoremStudy):
    """Both sides of the theorem and its premises."""

    name = "theorem1"
    columns = (
        "algorithm locality lr seed t "
        "measured quadratic second_order condition relative forgotten gradient_norm lowest reach"
    )
    algorithms: ClassVar = {"sgd": {}, "ewc": EWC, "optimal-hard": {}, "optimal-soft": {}, "ogd": {"slots": 500}}

    def measure_trace(self, trace: TrainingTrace, steps: int) -> dict[str, Tensor]:
        sides = theorem1(trace, steps=steps)
        columns = {"measured": sides.measured, "quadratic": sides.quadratic}
        columns |= {"second_order": recursion(forgetting(trace)).predicted}
        columns |= {"condition": sides.condition, "relative": sides.relative}
        columns |= {"forgotten": sides.max_forgetting, "gradient_norm": sides.max_gradient}
        return columns | {"lowest": sides.min_eigenvalue, "reach": sides.max_distance_cubed}

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """A panel for each algorithm: E(t) against the quadratic form."""
        algorithms = rows.partition_by("algorithm", maintain_order=True)
        figure.set_size_inches(2.3 * len(algorithms) + 1.0, 2.9)
        panels, colours = figure.subplots(1, len(algorithms), squeeze=False)[0], common.lr_colours(rows)
        for axes, own in zip(panels, algorithms, strict=True):
            _scatter(axes, own, colours)
        panels[0].legend(loc="lower right", handletextpad=0.1, borderpad=0.2)
        panels[0].set_ylabel(r"forgetting $E(t)$, in loss")
        common.lr_colour_bar(figure, colours, panels, rows)

    def summarize(self, rows: pl.DataFrame) -> Summary:
        known = rows.filter(pl.col("measured").is_finite())
        second, later = known.filter(t=2), known.filter(pl.col("t") != 2)
        table = group(
            second.sort("lr", maintain_order=True),
            ["lr"],
            {
                **of_columns({"E(2)": "measured", "½ Δᵀ H̄ Δ": "quadratic"}),
                "E(2) < 0 (%)": lambda own: 100 * float((column(own, "measured") < 0).mean()),
                f"within a factor of {FACTOR:g} (%)": lambda own: percent_within(own, "quadratic"),
                "second order within it (%)": lambda own: percent_within(own, "second_order"),
                "rank correlation": lambda own: common.rank_correlation(*(column(own, n) for n in SIDES)),
                **of_columns({"largest ‖∇L_o(θ_o)‖": "gradient_norm"}),
                "largest distance of solutions": lambda own: finite_median(own, "reach") ** (1 / 3),
            },
        )
        if second.is_empty():
            return Summary(table, "No run has a finite loss.")
        after = f" (after later tasks {percent_within(later, 'quadratic'):.0f} %)" if len(later) else ""
        verdict = (
            f"The quadratic form of Theorem 4.1 is within a factor of {FACTOR:g} of E(2) in "
            f"{percent_within(second, 'quadratic'):.0f} % of {len(second)} runs{after}."
        )
        return Summary(table, verdict + common.diverged_note(rows, "measured"))


def percent_within(rows: pl.DataFrame, name: str) -> float:
    """Return how many percent of E(t) are positive and within FACTOR of a column."""
    measured, predicted = column(rows, "measured"), column(rows, name)
    correct = (measured > 0) & (predicted >= measured / FACTOR) & (predicted <= measured * FACTOR)
    return 100 * float(correct.mean())


def _scatter(axes: Axes, rows: pl.DataFrame, colours: ScalarMappable) -> None:
    """Both sides of the theorem: the band is what counts as correct, points with a border are of t = 2."""
    _, highest = common.plot_agreement(axes, rows, *SIDES, colours)
    diagonal = np.linspace(0, highest, 2_000)  # many points: these lines are curved on these axes
    axes.fill_between(diagonal, diagonal / FACTOR, diagonal * FACTOR, color=FAINT, alpha=0.12, linewidth=0)
    x, y = (column(rows.filter(t=2), name) for name in SIDES)
    axes.scatter(x, y, s=22, facecolors="none", edgecolors=INK, linewidths=0.7, label="$t = 2$")
    axes.set_xlim(left=-highest / 1_000)
    axes.set_title(common.label(rows), color=TITLE_COLOURS[rows["locality"][0]], loc="left")
    axes.set_xlabel(r"$\frac{1}{2}\,\Delta_t^\top \bar H_{<t}\,\Delta_t$")


PANELS = {
    "hessian": r"$\Delta_t^\top H_o\,\Delta_t$",
    "outer": r"its outer-product part $\Delta_t^\top G_o\,\Delta_t$",
    "functional_share": "its functional part's share (%)",
    "length": r"length $\Vert\Delta_t\Vert$",
    "relative": r"curvature $\Delta_t^\top H_o\,\Delta_t\;/\;\Vert\Delta_t\Vert^2\,\Vert H_o\Vert$",
    "forgetting": "forgetting $E(t)$, in loss",
}
HEADINGS = ("Δᵀ H Δ", "Δᵀ G Δ", "functional part (%)", "‖Δ‖", "relative curvature", "E(t)")


class Theorem2Study(TheoremStudy):
    """The quadratic forms of every update, averaged over the tasks before it, and the forgetting."""

    name = "theorem2"
    columns = (
        "algorithm locality lr seed t hessian outer functional functional_share rayleigh relative length forgetting"
    )
    algorithms: ClassVar = {
        "sgd": {},
        "ewc": EWC,
        **{name: {"slots": 2_000} for name in ("ogd", "ogd-gtl", "ogd-published")},
        "optimal-hard": {},
    }

    def measure_trace(self, trace: TrainingTrace, steps: int) -> dict[str, Tensor]:
        forms = theorem2(trace, steps=steps)
        means = ("hessian", "outer", "functional", "functional_share", "rayleigh", "relative")
        columns = {name: _mean_over_old(getattr(forms, name)) for name in means}
        columns["functional_share"] *= 100
        return columns | {"length": forms.lengths, "forgetting": average(measured_forgetting(trace), "t")}

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Panels over the learning rate: medians over tasks and seeds, bands over seeds."""
        figure.set_size_inches(10.2, 5.4)
        runs = _by_run(rows)
        for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            common.plot_over_lr(axes, runs, name, common.median_range)
            axes.set_title(title, loc="left")
            if name not in ("functional_share", "forgetting"):
                common.log_axis(axes)
        legend(figure, common.legend_order(rows), note="medians over tasks\nand seeds; bands\nover seeds\n")

    def summarize(self, rows: pl.DataFrame) -> Summary:
        runs = _by_run(rows)
        table = group(runs, ["algorithm", "lr"], of_columns(dict(zip(HEADINGS, PANELS, strict=True))))
        lr = max(distinct(runs, "lr"))
        ogd, sgd = (runs.filter(algorithm=a, lr=lr) for a in ("ogd", "sgd"))
        if ogd.is_empty() or sgd.is_empty():
            return Summary(table, "Runs of ogd and sgd are needed for a verdict.")
        form, forgetting = (finite_median(ogd, n) / finite_median(sgd, n) for n in ("outer", "forgetting"))
        verdict = (
            f"At learning rate {lr:g} OGD's constraint leaves {form:.2g} of SGD's Δᵀ G Δ on all inputs and "
            f"{forgetting:.2g} of its forgetting; Theorem 5.1 has 0 for both."
        )
        return Summary(table, verdict + common.diverged_note(rows, "hessian"))


STUDIES = (Theorem1Study(), Theorem2Study())


def _mean_over_old(pairs: Tensor) -> Tensor:
    """The mean over the tasks o < t of a matrix [t, o], for every t; NaN for the first."""
    old = torch.ones_like(pairs, dtype=torch.bool).tril(-1)
    return torch.where(old, pairs, 0.0).sum(1) / old.sum(1)


def _by_run(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per run: the medians over its tasks; NaN if one of them is NaN."""
    medians = [pl.when(~pl.col(n).is_nan().any()).then(pl.col(n).median()).otherwise(np.nan).alias(n) for n in PANELS]
    return rows.group_by("algorithm", "locality", "lr", "seed", maintain_order=True).agg(medians)
