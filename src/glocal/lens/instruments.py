r"""Every instrument by its name, on any trace: rows of numbers, a table, a figure.

    error         ξ_o after every task, of expansions of order 0, 1 and 2, the Hessian whole and by the forms that the
                  network allows, and the order p of its growth (Eq. taylor-p)
    assumption    the smallest ε for which θ_t ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t (§3.2), and whose error it is
    forgetting    L_o(θ_t) − L_o(θ_o) of every pair, predicted and measured, with the share of each term (Eq.
                  forgetting-quadratic)
    recursion     E(t) predicted and measured, term by term (Eq. eqt:forgetting-rec)
    theorem1      E(t) beside ½ Δ_tᵀ \bar H_{<t} Δ_t, and the theorem's premises
    theorem2      Δ_tᵀ H_o Δ_t and its outer-product and functional parts
    ground-truth  the true label's entry of ∇²_f ℓ (appendix)
    perturbation  the score of eigenvectors beside that of random directions (Eq. score-ptb)
    flatness      λ_max and tr H_o beside the forgetting that followed
    rank          the rank of \bar H_{<t} = (1/t) Σ_{o<t} H_o, a sum over t − 1 tasks, by several definitions
    spectrum      how its eigenvalues are spread

    look(trace, "theorem1").plot("theorem1.png")

Tasks are counted from 0; `learnt` says after how many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from glocal.errors import GlocalError, unknown
from glocal.lens.approximation import Approximation, curves, curves_by, order
from glocal.lens.flatness import flatness
from glocal.lens.forgetting import forgetting, recursion
from glocal.lens.input_checks import twice_differentiable
from glocal.lens.perturbation import Kind, Split, perturbation
from glocal.lens.rank import rank, spectra
from glocal.lens.record import snapshots_of
from glocal.lens.taylor import taylor
from glocal.lens.taylor_full import whole
from glocal.lens.theorem1 import theorem1
from glocal.lens.theorem2 import ground_truth_of, theorem2
from glocal.lens.trace import TrainingTrace
from glocal.precision import full_precision

Row: TypeAlias = dict[str, str | int | float | bool | None]
Rows: TypeAlias = list[Row]


@dataclass(frozen=True)
class Instrument:
    """What it says, how its rows are measured, and what of them is drawn: `lines` over `x`, one for each `by`."""

    title: str
    measure: Callable[[TrainingTrace], Rows]
    x: str
    lines: tuple[str, ...]
    by: str | None = None
    log: bool = False
    """Whether both axes are logarithmic; else numbers of both signs are drawn as they are."""
    joined: bool = True
    """Whether points are joined to lines."""
    counted: bool = False
    """Whether numbers from 1 on are drawn by their logarithms."""
    compared: bool = False
    """Whether panels stand beside each other to be compared, on one axis."""


@dataclass(frozen=True)
class Look:
    """What an instrument found; of a single task those that ask what later ones did have no rows."""

    name: str
    instrument: Instrument
    rows: Rows

    def plot(self, path: str | Path) -> Path:
        """The figure, as PNG, PDF or SVG by the suffix."""
        from glocal.report.instruments import save

        return save(self, path)


@full_precision()
@twice_differentiable()
def look(trace: TrainingTrace, name: str) -> Look:
    """Measure a trace with one of the instruments."""
    if name not in INSTRUMENTS:
        raise unknown("instrument", name, INSTRUMENTS)
    return Look(name, INSTRUMENTS[name], INSTRUMENTS[name].measure(trace))


EXPANSIONS: dict[str, Callable[[TrainingTrace, int], Approximation]] = {
    "order 0": partial(taylor, order=0),
    "order 1": partial(taylor, order=1),
    "order 2": whole,
    "order 2, low-rank": partial(taylor, structure="low-rank"),
    "order 2, kronecker": partial(taylor, structure="kronecker"),
    "order 2, diagonal": partial(taylor, structure="diagonal"),
}


def expansions(trace: TrainingTrace) -> dict[str, list[Approximation]]:
    """All kinds that this network has, one of each for every task that was learnt."""
    made: dict[str, list[Approximation]] = {}
    for name, make in EXPANSIONS.items():
        try:
            made[name] = [make(trace, o) for o in range(trace.num_learned)]
        except GlocalError:
            continue  # a form that this network does not have, or that is longer than it
    return made


SUFFIXES: dict[Split, str] = {"train": "", "test": "_test"}
KINDS: tuple[Kind, ...] = ("eigen", "random")
BINS = 41
"""Parts of the axis of eigenvalues, from the largest magnitude's negative to itself; 0 is in the middle of one."""


def _error(trace: TrainingTrace) -> Rows:
    """After every task but the first, and the power of its growth on the way from θ_1 to θ_2."""
    if trace.num_learned < 2:
        return []
    exact = trace.double()
    way = exact.update(1)
    rows: Rows = []
    for name, found in curves_by(trace, snapshots_of(trace)[2:], expansions(trace)).items():
        try:
            p = (
                order(exact, 0, EXPANSIONS[name](exact, 0), way).exponent
                if 0 < float(way.norm()) < torch.inf
                else torch.nan
            )
        except RuntimeError:
            p = torch.nan  # of a network that makes tensors in single precision itself
        for i, finished in enumerate(found.finished.tolist()):
            for o in range(finished - 1):
                numbers = {"distance": found.distance[i, o], "error": found.error[i, o], "true": found.true[i, o]}
                numbers |= {"approximate": found.approximate[i, o]}
                row = {"expansion": name, "learnt": finished, "task": o, **_floats(numbers)}
                rows.append({**row, "order": float(p)})
    return rows


def _assumption(trace: TrainingTrace) -> Rows:
    """By the whole second-order expansions, at every θ_t, t > 1, of the tasks before the last."""
    rows: Rows = []
    if trace.num_learned < 2:
        return rows
    found = curves(trace, snapshots_of(trace)[2:], [whole(trace, o) for o in range(trace.num_learned)])
    for i, finished in enumerate(found.finished.tolist()):
        errors = found.error[i, : finished - 1]
        worst = int(errors.argmax())
        rows.append({"learnt": finished, "smallest": float(errors[worst]), "task": worst})
    return rows


def _forgetting(trace: TrainingTrace) -> Rows:
    found = forgetting(trace)
    columns = {name: getattr(found, name) for name in ("measured", "predicted", "gradient", "quadratic", "remainder")}
    columns |= {f"{name}_share": part for name, part in found.shares._asdict().items()}
    return [
        {"learnt": t + 1, "task": o, **_floats({k: v[t, o] for k, v in columns.items()})}
        for t in range(1, len(found.measured))
        for o in range(t)
    ]


def _recursion(trace: TrainingTrace) -> Rows:
    found = recursion(forgetting(trace))
    names = ("measured", "predicted", "before", "gradient", "quadratic", "v")
    columns = {name: getattr(found, name) for name in names}
    return [{"learnt": t + 1, **_floats({k: v[t] for k, v in columns.items()})} for t in range(1, len(found.measured))]


def _theorem1(trace: TrainingTrace) -> Rows:
    found = theorem1(trace)
    columns = {name: getattr(found, name) for name in ("measured", "quadratic", "condition", "relative")}
    columns |= {name: getattr(found.premises, name) for name in ("forgotten", "slope", "lowest", "reach")}
    return [{"learnt": t + 1, **_floats({k: v[t] for k, v in columns.items()})} for t in range(1, len(found.measured))]


def _theorem2(trace: TrainingTrace) -> Rows:
    found = theorem2(trace)
    columns = {
        name: getattr(found, name) for name in ("hessian", "outer", "functional", "functional_share", "relative")
    }
    return [
        {"learnt": t + 1, "task": o, **_floats({k: v[t, o] for k, v in columns.items()})}
        for t in range(1, len(found.lengths))
        for o in range(t)
    ]


def _ground_truth(trace: TrainingTrace) -> Rows:
    """Medians over a task's examples at its solution; the share of the trace also of all of them together."""
    rows: Rows = []
    for o in range(trace.num_learned):
        found = ground_truth_of(trace, o)
        each = {k: getattr(found, k).nanmedian() for k in ("confidence", "dominance", "of_trace", "of_squares")}
        rows.append({"task": o, **_floats(each), "of_total_trace": float(found.of_total_trace)})
    return rows


def _perturbation(trace: TrainingTrace) -> Rows:
    """The median scores over directions, at every task's solution; on test data too, where they are known."""
    rows: Rows = []
    for o in range(trace.num_learned):
        count = min(10, trace.num_params)
        found = perturbation(trace, o, trace.tests[o] if trace.tests else None, eigenvectors=count)
        scores = {
            f"{kind}{suffix}": found.score(split, kind).nanmedian(0).values
            for split, suffix in SUFFIXES.items()
            if split in found.losses
            for kind in KINDS
        }
        for i, r in enumerate(found.radii):
            rows.append({"task": o, "radius": r, **_floats({name: score[i] for name, score in scores.items()})})
    return rows


def _flatness(trace: TrainingTrace) -> Rows:
    found = flatness(trace)
    names = ("top", "top_error", "trace", "trace_error", "after_next", "at_end", "moved")
    columns = {name: getattr(found, name) for name in names}
    return [{"task": o, **_floats({k: v[o] for k, v in columns.items()})} for o in range(len(found.top))]


def _rank(trace: TrainingTrace) -> Rows:
    """With standard errors, which are 0 where all eigenvalues are known."""
    rows: Rows = []
    found = rank(trace)
    absolute, relative = (list(enumerate(x)) for x in (found.absolute_thresholds, found.relative_thresholds))
    for t in range(len(found.top)):
        both = {
            **{f"|λ| > {x:g}": (found.absolute[t, i], found.absolute_errors[t, i]) for i, x in absolute},
            **{f"|λ| > {x:g} of the largest": (found.relative[t, i], found.relative_errors[t, i]) for i, x in relative},
            "effective": (found.effective[t], found.effective_errors[t]),
            "participation": (found.participation[t], found.participation_errors[t]),
        }
        for kind, (number, error) in both.items():
            rows.append({"tasks": t + 1, "definition": kind, "rank": float(number), "error": float(error)})
    return rows


def _spectrum(trace: TrainingTrace) -> Rows:
    """How many eigenvalues are in each part of their axis."""
    rows: Rows = []
    for t, density in enumerate(spectra(trace)):
        radius = float(density.radius)
        if not 0 < radius < torch.inf:
            continue
        bins = ((density.nodes.cpu() / radius + 1) * (BINS / 2)).long().clamp(max=BINS - 1)
        counts = torch.zeros(BINS, dtype=torch.float64)
        counts.index_add_(0, bins.flatten(), density.weights.cpu().flatten().double() / len(bins))
        for i, count in enumerate(counts.tolist()):
            middle = radius * ((2 * i + 1) / BINS - 1)
            rows.append({"tasks": t + 1, "eigenvalue": middle, "eigenvalues": count})
    return rows


def _floats(numbers: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(number) for name, number in numbers.items()}


INSTRUMENTS: dict[str, Instrument] = {
    "error": Instrument(
        "how far expansions err as tasks are learnt", _error, "distance", ("error",), "expansion", True, False
    ),
    "assumption": Instrument("the smallest ε of the locality assumption", _assumption, "learnt", ("smallest",)),
    "forgetting": Instrument(
        "forgetting of every pair, predicted and measured",
        _forgetting,
        "learnt",
        ("measured", "predicted"),
        "task",
        compared=True,
    ),
    "recursion": Instrument("forgetting, predicted and measured", _recursion, "learnt", ("measured", "predicted")),
    "theorem1": Instrument("Theorem 1: E(t) beside its quadratic", _theorem1, "learnt", ("measured", "quadratic")),
    "theorem2": Instrument(
        "Theorem 2: the curvature of old losses along updates", _theorem2, "learnt", ("outer", "functional"), "task"
    ),
    "ground-truth": Instrument(
        "the true label's entry of the outputs' Hessian",
        _ground_truth,
        "task",
        ("confidence", "of_trace", "of_squares"),
    ),
    "perturbation": Instrument(
        "perturbation scores", _perturbation, "radius", ("eigen", "random"), "task", True, compared=True
    ),
    "flatness": Instrument("curvature, and the forgetting that followed", _flatness, "top", ("at_end",), joined=False),
    "rank": Instrument(
        "the rank of the average Hessian, (1/t) Σ H_o of t − 1 tasks", _rank, "tasks", ("rank",), "definition"
    ),
    "spectrum": Instrument(
        "eigenvalues of the average Hessian, (1/t) Σ H_o of t − 1 tasks",
        _spectrum,
        "eigenvalue",
        ("eigenvalues",),
        "tasks",
        counted=True,
    ),
}
