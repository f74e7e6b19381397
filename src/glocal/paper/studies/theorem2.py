r"""Theorem 5.1 on trained networks: Δ_tᵀ H_o Δ_t and its outer-product part Δ_tᵀ G_o Δ_t, over learning rates.

OGD's constraint makes Δ_tᵀ G_o Δ_t = 0 on the inputs whose gradients it stores, and the proof neglects the functional
part of H_o (Eq. eqt:opt-cond-revisited). Measured is what is left of both on examples that are stored or not, for
algorithms that meet the constraint, approximate it, or ignore it. A longer update has a larger quadratic form in any
direction, so its relative curvature Δᵀ H_o Δ / (‖Δ‖² ‖H_o‖) is measured too; the top eigenvector has 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from glocal.lens.forgetting import average, measured_forgetting
from glocal.lens.theorem2 import theorem2
from glocal.paper.studies import theorem1
from glocal.paper.studies.common import (
    column,
    distinct,
    diverged_note,
    finite_median,
    group,
    item_traces,
    legend_order,
    line_styles,
    log_y,
    of_columns,
    plot_over_lr,
    where,
)
from glocal.paper.study import Context, Summary, WorkItem
from glocal.paper.tables import Row
from glocal.report.style import legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALGORITHMS: theorem1.Options = {
    "sgd": {},
    "ewc": theorem1.ALGORITHMS["ewc"],
    "ogd": {"slots": 2_000},
    "ogd-gtl": {"slots": 2_000},
    "ogd-published": {"slots": 2_000},
    "optimal-hard": {},
}
DEMO_OPTIONS = theorem1.DEMO_OPTIONS | {name: {"slots": 500} for name in ("ogd", "ogd-gtl", "ogd-published")}
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
        return theorem1.make_items(ALGORITHMS, DEMO_OPTIONS, demo)

    def cost(self, demo: bool) -> str:
        return theorem1.make_cost(ALGORITHMS, demo)

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        rows: list[Row] = []
        for member, trace in item_traces(item, context):
            forms = theorem2(trace, steps=item["steps"])
            columns = {
                "hessian": _mean_over_old(forms.hessian),
                "outer": _mean_over_old(forms.outer),
                "functional": _mean_over_old(forms.functional),
                "functional_share": 100 * _mean_over_old(forms.functional_share),
                "rayleigh": _mean_over_old(forms.rayleigh),
                "relative": _mean_over_old(forms.relative),
                "length": forms.lengths,
                "forgetting": average(measured_forgetting(trace), "t"),
            }
            rows += theorem1.task_rows(item, member, columns)
        return rows

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


STUDIES = (Theorem2Study(),)


def _mean_over_old(pairs: torch.Tensor) -> torch.Tensor:
    """The mean over the tasks o < t of a matrix [t, o], for every t; NaN for the first."""
    old = torch.ones_like(pairs, dtype=torch.bool).tril(-1)
    return torch.where(old, pairs, 0.0).sum(1) / old.sum(1)


def _by_run(rows: Sequence[Row]) -> list[Row]:
    """One row per run: the medians over its tasks; NaN if one of them is NaN."""

    def median(own: list[Row], name: str) -> float:
        return float(np.median(column(own, name)))

    medians = of_columns({name: name for name in PANELS}, median)
    return group(rows, "algorithm locality lr seed", medians)
