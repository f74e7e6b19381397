r"""Every instrument by its name, on any trace: rows of numbers, a table, a figure.

    measure(trace, "theorem1").plot("theorem1.png")

Rows count tasks from 1; the column `learned` is the number of learned tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from glocal.curvature.network import explain_missing_derivatives
from glocal.errors import require_known
from glocal.lens.approximation_error import error_curves, error_order
from glocal.lens.forgetting import flatness, forgetting, recursion
from glocal.lens.locality_assumption import Rows
from glocal.lens.perturbation import perturbation
from glocal.lens.rank import rank, spectra
from glocal.lens.record import snapshots_of
from glocal.lens.taylor import EXPANSIONS, exact_taylor, expansions
from glocal.lens.theorems import ground_truth_of, theorem1, theorem2
from glocal.lens.training_trace import TrainingTrace
from glocal.precision import full_precision

NUM_BINS = 41
"""Bins of the eigenvalues, between ± the largest magnitude; 0 is in the middle of one."""


@dataclass(frozen=True)
class Instrument:
    """An instrument: its title, how its rows are measured, and how they are plotted."""

    title: str
    measure: Callable[[TrainingTrace], Rows]
    x: str
    y: tuple[str, ...]
    group: str | None = None  # the column of which every value is a line of its own
    scale: Literal["linear", "log", "symlog"] = "linear"  # log: of both axes; symlog: of the y axis, above 1
    connect: bool = True  # whether points are connected by lines
    share_y: bool = False  # whether all panels have the same y axis


@dataclass(frozen=True)
class Measurement:
    """The rows of an instrument; without rows if it needs more than one task."""

    name: str
    instrument: Instrument
    rows: Rows

    def plot(self, path: str | Path) -> Path:
        """Save the figure as PNG, PDF, SVG or PGF."""
        from glocal.report import figure, lens_figures

        return figure.save_figure(partial(lens_figures.draw_measurement, self), path)


@full_precision()
@explain_missing_derivatives()
def measure(trace: TrainingTrace, name: str) -> Measurement:
    """Measure a trace with one of the instruments."""
    require_known("instrument", name, INSTRUMENTS)
    return Measurement(name, INSTRUMENTS[name], INSTRUMENTS[name].measure(trace))


def _error(trace: TrainingTrace) -> Rows:
    """ξ_o after every task but the first, of expansions of order 0, 1 and 2 with the exact Hessian and those of its
    approximations that the network supports, and the order of its growth from θ_1 towards θ_2 (Eq. taylor-p)."""
    if trace.num_learned < 2:
        return []
    exact = trace.double()
    update = exact.update(1)
    moved = 0 < float(update.norm()) < torch.inf
    rows: Rows = []
    for name, curves in error_curves(trace, snapshots_of(trace)[2:], expansions(trace)).items():
        try:
            p = error_order(exact, 0, EXPANSIONS[name](exact, 0), update).exponent if moved else torch.nan
        except RuntimeError:
            p = torch.nan  # for example a network that creates float32 tensors itself
        for row in curves.rows("distance", "error", "true", "approximate"):
            del row["step"]  # unknown between tasks
            if row["task"] < row["learned"]:
                rows.append({"expansion": name, **row, "order": float(p)})
    return rows


def _assumption(trace: TrainingTrace) -> Rows:
    """The smallest ε for which θ_t ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t (Assumption 3.2) by exact second-order expansions, t > 1, and
    the task that determines it."""
    if trace.num_learned < 2:
        return []
    exact = [exact_taylor(trace, o) for o in range(trace.num_learned)]
    curves = error_curves(trace, snapshots_of(trace)[2:], {"exact": exact})["exact"]
    old = [(t, errors[: t - 1]) for t, errors in zip(curves.finished.tolist(), curves.error, strict=True)]
    return [{"learned": t, "min_epsilon": float(errors.max()), "task": int(errors.argmax()) + 1} for t, errors in old]


def _forgetting(trace: TrainingTrace) -> Rows:
    """L_o(θ_t) − L_o(θ_o) of every pair, predicted and measured, and each term's share (Eq. forgetting-quadratic)."""
    result = forgetting(trace)
    columns = _columns(result, "measured", "predicted", "gradient", "quadratic", "remainder")
    return _pair_rows(columns | {f"{name}_share": part for name, part in result.shares.items()})


def _recursion(trace: TrainingTrace) -> Rows:
    """E(t) predicted and measured, term by term (Eq. eqt:forgetting-rec)."""
    return task_rows(vars(recursion(forgetting(trace))))


def _theorem1(trace: TrainingTrace) -> Rows:
    r"""E(t) and ½ Δ_tᵀ \bar H_{<t} Δ_t, and the premises of Theorem 4.1."""
    return task_rows(vars(theorem1(trace)))


def _theorem2(trace: TrainingTrace) -> Rows:
    """Δ_tᵀ H_o Δ_t and its outer-product and functional parts (Theorem 5.1)."""
    return _pair_rows(_columns(theorem2(trace), "hessian", "outer", "functional", "functional_share", "relative"))


def _ground_truth(trace: TrainingTrace) -> Rows:
    """The true label's entry of ∇²_f ℓ (appendix): medians over a task's examples at its solution; `of_total_trace` is
    over all of them together."""
    return [{"task": o + 1, **ground_truth_of(trace, o).medians()} for o in range(trace.num_learned)]


def _perturbation(trace: TrainingTrace) -> Rows:
    """The median scores of eigenvectors and of random directions (Eq. score-ptb); on test data too if known."""
    rows: Rows = []
    for o in range(trace.num_learned):
        test = trace.tests[o] if trace.tests else None
        result = perturbation(trace, o, test, eigenvectors=min(10, trace.num_params))
        scores = {
            f"{kind}{'_test' if split == 'test' else ''}": result.score(split, kind).nanmedian(0).values
            for split, kinds in result.losses.items()
            for kind in kinds
        }
        for i, r in enumerate(result.radii):
            rows.append({"task": o + 1, "radius": r, **{name: float(score[i]) for name, score in scores.items()}})
    return rows


def _flatness(trace: TrainingTrace) -> Rows:
    """λ_max and tr H_o, and the forgetting that followed."""
    columns = vars(flatness(trace))
    return [{"task": o + 1, **{k: float(v[o]) for k, v in columns.items()}} for o in range(trace.num_learned)]


def _rank(trace: TrainingTrace) -> Rows:
    r"""The rank of \bar H_{<t} = (1/t) Σ_{o<t} H_o, a sum over t − 1 tasks, by several definitions."""
    result = rank(trace)
    ranks = {f"|λ| > {x:g}": estimate for x, estimate in result.absolute.items()}
    ranks |= {f"|λ| > {x:g} of the largest": estimate for x, estimate in result.relative.items()}
    ranks |= {"effective": result.effective, "participation": result.participation}
    return [
        {"tasks": t + 1, "definition": name, "rank": float(value[t]), "error": float(error[t])}
        for t in range(len(result.top))
        for name, (value, error) in ranks.items()
    ]


def _spectrum(trace: TrainingTrace) -> Rows:
    """A histogram of the eigenvalues of the same matrices."""
    rows: Rows = []
    for t, density in enumerate(spectra(trace)):
        radius = float(density.radius)
        if not 0 < radius < torch.inf:
            continue
        bins = ((density.nodes.cpu() / radius + 1) * (NUM_BINS / 2)).long().clamp(max=NUM_BINS - 1)
        counts = torch.zeros(NUM_BINS, dtype=torch.float64)
        counts.index_add_(0, bins.flatten(), density.weights.cpu().flatten().double() / len(bins))
        for i, count in enumerate(counts.tolist()):
            middle = radius * ((2 * i + 1) / NUM_BINS - 1)
            rows.append({"tasks": t + 1, "eigenvalue": middle, "number_of_eigenvalues": count})
    return rows


def _columns(result: Any, *names: str) -> dict[str, Tensor]:
    return {name: getattr(result, name) for name in names}


def task_rows(columns: dict[str, Tensor], key: str = "learned") -> Rows:
    """Return a row for every task from the second on, of columns with one value per task; `key` names the task."""
    n = len(next(iter(columns.values())))
    return [{key: t + 1} | {k: float(v[t]) for k, v in columns.items()} for t in range(1, n)]


def _pair_rows(columns: dict[str, Tensor]) -> Rows:
    """Return a row for every pair o < t."""
    n = len(next(iter(columns.values())))
    pairs = [(t, o) for t in range(1, n) for o in range(t)]
    return [{"learned": t + 1, "task": o + 1} | {k: float(v[t, o]) for k, v in columns.items()} for t, o in pairs]


BOTH = ("measured", "predicted")
INSTRUMENTS: dict[str, Instrument] = {
    "error": Instrument("errors of expansions", _error, "distance", ("error",), "expansion", "log", connect=False),
    "assumption": Instrument("smallest ε of the locality assumption", _assumption, "learned", ("min_epsilon",)),
    "forgetting": Instrument("forgetting of every pair of tasks", _forgetting, "learned", BOTH, "task", share_y=True),
    "recursion": Instrument("forgetting, predicted and measured", _recursion, "learned", BOTH),
    "theorem1": Instrument("Theorem 4.1: E(t) and its quadratic form", _theorem1, "learned", ("measured", "quadratic")),
    "theorem2": Instrument(
        "Theorem 5.1: curvature of old losses along updates", _theorem2, "learned", ("outer", "functional"), "task"
    ),
    "ground-truth": Instrument(
        "true label's entry of the outputs' Hessian", _ground_truth, "task", ("confidence", "of_trace", "of_squares")
    ),
    "perturbation": Instrument(
        "perturbation scores", _perturbation, "radius", ("eigen", "random"), "task", "log", share_y=True
    ),
    "flatness": Instrument("curvature and the forgetting that followed", _flatness, "top", ("at_end",), connect=False),
    "rank": Instrument("rank of the average Hessian, (1/t) Σ_{o<t} H_o", _rank, "tasks", ("rank",), "definition"),
    "spectrum": Instrument(
        "eigenvalues of the average Hessian", _spectrum, "eigenvalue", ("number_of_eigenvalues",), "tasks", "symlog"
    ),
}
