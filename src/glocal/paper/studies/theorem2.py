r"""Theorem 2 on trained networks: Δ_tᵀ H_o Δ_t and its outer-product part Δ_tᵀ G_o Δ_t, over learning rates.

OGD's constraint makes Δ_tᵀ G_o Δ_t = 0 on the inputs whose gradients it stores, and the proof takes the functional part
of H_o for negligible (Eq. eqt:opt-cond-revisited). Measured here is what is left of both on examples that are stored or
not, for algorithms that meet the constraint, approximate it, or know nothing of it. Since a longer update has a larger
quadratic in any direction, its curvature Δᵀ H_o Δ / (‖Δ‖² ‖H_o‖) stands beside it: that of the steepest direction is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from glocal.lens.forgetting import average, measured
from glocal.lens.theorem2 import theorem2
from glocal.paper.studies import theorem1
from glocal.paper.studies.lr_plots import finite, listed, log_y, lost, names, order, over_lr, pens
from glocal.paper.studies.row_filters import column, distinct, told, where
from glocal.paper.studies.trained_runs import after_tasks, rotations, watched
from glocal.paper.study import Piece, Place, Row
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
SMALLER = theorem1.SMALLER | {name: {"slots": 500} for name in ("ogd", "ogd-gtl", "ogd-published")}
PANELS = {
    "hessian": r"$\Delta_t^\top H_o\,\Delta_t$",
    "outer": r"its outer-product part $\Delta_t^\top G_o\,\Delta_t$",
    "functional_share": "its functional part's share (%)",
    "length": r"length $\Vert\Delta_t\Vert$",
    "relative": r"curvature $\Delta_t^\top H_o\,\Delta_t\;/\;\Vert\Delta_t\Vert^2\,\Vert H_o\Vert$",
    "forgetting": "forgetting $E(t)$, in loss",
}
LINEAR = ("functional_share", "forgetting")


class Constraint:
    """The three quadratics of every update, averaged over the tasks before it, and the forgetting beside them."""

    name = "theorem2"
    columns = (
        "algorithm locality lr seed t hessian outer functional functional_share rayleigh relative length forgetting"
    )

    def pieces(self, demo: bool) -> list[Piece]:
        return theorem1.cut(ALGORITHMS, SMALLER, demo)

    def cost(self, demo: bool) -> str:
        return theorem1.told_cost(ALGORITHMS, demo)

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        rows: list[Row] = []
        for member, subject, _ in watched(piece, rotations(piece, place), place.device):
            found, forgotten = theorem2(subject, steps=piece["steps"]), average(measured(subject), "t")
            columns = {
                "hessian": _over_old(found.hessian),
                "outer": _over_old(found.outer),
                "functional": _over_old(found.functional),
                "functional_share": 100 * _over_old(found.functional_share),
                "rayleigh": _over_old(found.rayleigh),
                "relative": _over_old(found.relative),
                "length": found.lengths,
                "forgetting": forgotten,
            }
            rows += after_tasks(piece, member, columns)
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Panels over the learning rate: medians over tasks and seeds, bands from the least seed to the largest."""
        figure.set_size_inches(10.2, 5.4)
        by_run, styles = _of_runs(rows), pens(rows)
        for axes, (name, label) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            over_lr(axes, by_run, name, styles, spread="range")
            axes.set_title(label, loc="left")
            if name not in LINEAR:
                log_y(axes)
        legend(figure, order(rows), note="medians over tasks\nand seeds; bands\nover seeds\n")

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        by_run = [row for row in _of_runs(rows) if np.isfinite(column([row], "hessian"))[0]]
        if not by_run:
            return ["Theorem 2 cannot be looked at: no run has a finite loss."]
        lrs = distinct(by_run, "lr")
        ends = list(dict.fromkeys((lrs[0], lrs[-1])))
        others = [a for a in names(by_run) if a != "sgd"]
        said = [
            "Theorem 2 says that updates orthogonal to the gradients of old outputs have Δᵀ G_o Δ = 0, and with it "
            "Δᵀ H_o Δ ≈ 0 and no forgetting, for a functional part that does not count."
        ]
        if others and "sgd" in names(by_run):
            said += [_beside_sgd(by_run, others, lr) for lr in ends]
        share = {lr: _median(where(by_run, lr=lr), "functional_share") for lr in ends}
        said.append(
            "The functional part has "
            + listed([f"{told(share[lr])} % of Δᵀ H_o Δ at {lr:g}" for lr in ends])
            + ", by magnitude (medians)."
        )
        if len(ends) > 1:
            grown = {
                a: _ratio(where(by_run, algorithm=a, lr=ends[1]), where(by_run, algorithm=a, lr=ends[0]), "hessian")
                for a in names(by_run)
            }
            said.append(
                "From the lowest learning rate to the highest, Δᵀ H_o Δ grows by a factor of "
                + listed([f"{told(factor)} ({a})" for a, factor in grown.items()])
                + "."
            )
        return said + _verdict(by_run, lrs[-1]) + lost(rows, "hessian")


def _over_old(pairs: torch.Tensor) -> torch.Tensor:
    """The mean over the tasks o < t of a matrix [t, o], after every task t; NaN before the second."""
    old = torch.ones_like(pairs, dtype=torch.bool).tril(-1)
    return torch.where(old, pairs, 0.0).sum(1) / old.sum(1)


def _of_runs(rows: Sequence[Row]) -> list[Row]:
    """One row a run: the medians over its tasks; NaN where one of them is none."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(row[k] for k in ("algorithm", "locality", "lr", "seed")), []).append(row)
    made: list[Row] = []
    for (algorithm, locality, lr, seed), own in runs.items():
        whose: Row = {"algorithm": algorithm, "locality": locality, "lr": lr, "seed": seed}
        made.append(whose | {name: float(np.median(column(own, name))) for name in PANELS})
    return made


def _median(rows: Sequence[Row], name: str) -> float:
    found = finite(rows, name)
    return float(np.median(found)) if found.size else np.nan


def _beside_sgd(by_run: Sequence[Row], others: Sequence[str], lr: float) -> str:
    """Everybody's quadratic, curvature and forgetting as parts of those of plain SGD at one learning rate."""
    at = where(by_run, lr=lr)
    sgd = where(at, algorithm="sgd")

    def part(name: str) -> str:
        return listed([f"{told(_ratio(where(at, algorithm=a), sgd, name))} ({a})" for a in others])

    return (
        f"At a learning rate of {lr:g}, Δᵀ G_o Δ is, in units of plain SGD's, {part('outer')}; E(t) is "
        f"{part('forgetting')}."
    )


def _verdict(by_run: Sequence[Row], lr: float) -> list[str]:
    """Whether full OGD's forgetting follows its quadratic down, at the highest learning rate."""
    at = where(by_run, lr=lr)
    sgd, ogd = (where(at, algorithm=a) for a in ("sgd", "ogd"))
    if not sgd or not ogd:
        return []
    quadratic, forgotten = (_ratio(ogd, sgd, name) for name in ("outer", "forgetting"))
    how = "as far as" if forgotten <= quadratic else "less far than"
    return [
        f"So at {lr:g} the constraint, which holds on stored inputs, leaves {told(quadratic)} of Δᵀ G_o Δ on all of "
        f"them, beside SGD on its own way, and OGD's forgetting falls {how} its quadratic: {told(forgotten)} of it is "
        "left."
    ]


def _ratio(rows: Sequence[Row], others: Sequence[Row], name: str) -> float:
    """Of their medians; NaN where the second is 0."""
    whole = _median(others, name)
    return _median(rows, name) / whole if whole else np.nan


STUDIES = (Constraint(),)
