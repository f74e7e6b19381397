r"""How well the losses of finished tasks are approximated while later ones are learnt, at a low and at a high learning
rate: ξ_o(θ) = |\hat L_o(θ) − L_o(θ)| (§3.2) of the algorithms' own \hat L_o, and of Taylor expansions (Eq. taylor-p)
along plain SGD's run.

Some algorithms remember the sum of all old losses and no one of them. What every one approximates is their mean; its
error after task t is

    | (1/(t−1)) Σ_{o<t} ( \hat L_o(θ_t) − L_o(θ_t) ) |   with the memory M_t that task t was learnt with.

Rows of it name no task; those that do are of ξ_o. SI states its \hat L_o up to a constant: it is counted from θ_o.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from glocal.algorithms.hessian_structures import Structure
from glocal.lens.approximation import Approximation, Curves, curves, fit, order, own_approximation, own_curves
from glocal.lens.record import RecordedRun, Snapshot, record
from glocal.lens.taylor import taylor
from glocal.lens.taylor_full import whole, within
from glocal.lens.trace import Checkpoint, TrainingTrace
from glocal.paper.studies.approximation_figure import Series, draw, rates, series_of
from glocal.paper.studies.cohorts import DEMO, FULL, by_seed, challenge_of, cohort_of, cost_of
from glocal.paper.studies.lr_plots import listed
from glocal.paper.studies.row_filters import distinct, median, told, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from glocal.paper.study import Piece, Place, Row

OWN: dict[str, dict[str, Any]] = {
    "ewc": {"penalty": 1.0, "anchors": "each"},
    "laplace": {"penalty": 1.0},
    "ogd-gtl": {"slots": 500},
    "optimal-soft": {"penalty": 1.0, "weighing": "stated"},
    "agem": {"slots": 500},
    "er": {"slots": 500},
    "si": {"penalty": 1.0},
}
"""Quadratics have weight 1: with another they are meant to be other functions than the loss. That the optimal one is
weighed by 1/t in the objective, as Eq. general-opt-local is printed, is no part of its approximation."""
LEVELLED = ("si",)
STRUCTURES: tuple[Structure, ...] = ("diagonal", "kronecker", "low-rank")
FIRST = 3
"""Tasks whose own ξ_o have rows."""
RADII = tuple(10.0 ** (exponent / 4) for exponent in range(-8, 7))
NEAR = 1.0
"""Up to this distance from θ_1 the order of an error is fitted."""


Maker: TypeAlias = Callable[[TrainingTrace, int], Approximation]  # of a task
Made: TypeAlias = Callable[[TrainingTrace], Approximation]  # of a subject's first task


class ApproximationError:
    name = "approximation-error"
    columns = "algorithm approximation locality lr seed learnt task error true approximate distance ray exponent"

    def pieces(self, demo: bool) -> list[Piece]:
        return self._algorithms(demo) if demo else by_seed(self._algorithms(demo))

    def _algorithms(self, demo: bool) -> list[Piece]:
        """All seeds of each."""
        base = DEMO | {"lrs": [0.01, 0.1], "seeds": [0]} if demo else FULL | {"lrs": [0.001, 0.1], "seeds": [0, 1, 2]}
        expansions: Piece = {
            "algorithm": "sgd",
            "options": {},
            "examples": 200 if demo else 2_000,
            "rank": 5 if demo else 20,
            "rays": "double",  # precision: what an expansion of the second order leaves out is small
        }
        # What an algorithm keeps is made with all examples of a task: it is held against all of them.
        own = [{"algorithm": a, "options": o, "examples": 4_000 if demo else 60_000} for a, o in OWN.items()]
        return [piece | base for piece in (expansions, *own)]

    def cost(self, demo: bool) -> str:
        pieces = self._algorithms(demo)
        expansions = (pieces[0]["tasks"] - 1) * len(pieces[0]["lrs"]) * len(pieces[0]["seeds"])
        return f"{cost_of(pieces[0], len(pieces))}; about {60 * expansions:,} Hessian products"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        cohort = cohort_of(piece, place, challenge_of(piece, place))
        rows: list[Row] = []
        for member, seen in zip(cohort.members, record(cohort, piece["epochs"], piece["examples"]), strict=True):
            # The ends of all tasks but the first, each with the memory that the task was learnt with.
            ends = [m for m, after in pairwise(seen.snapshots) if 0 < m.finished < after.finished]
            found = _expansions(seen.trace, ends, piece["rank"]) if "rank" in piece else _own(seen, ends)
            exact = seen.trace.double() if "rank" in piece else seen.trace
            for name, along, approximation in found:
                run: Row = {"algorithm": piece["algorithm"], "approximation": name}
                run |= {"locality": member.algorithm.locality if name == "own" else "local"}
                run |= {"lr": member.lr, "seed": member.seed}
                rows += [run | row for row in (*_training(along), *_ray(exact, approximation(exact)))]
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        draw(rows, figure)

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        low, high = rates(rows)
        errors = {s: (s.average(rows, low), s.average(rows, high)) for s in series_of(rows)}
        seeds = len(distinct(rows, "seed"))
        said = [_thesis(errors, low, high, seeds), _ranking(errors, high), _curvature(errors, low, high), _orders(rows)]
        return [sentence for sentence in said if sentence]


STUDIES = (ApproximationError(),)


def _own(seen: RecordedRun, ends: Sequence[Snapshot]) -> Iterator[tuple[str, Curves, Made]]:
    r"""The algorithm's \hat L_o while later tasks were learnt, and \hat L_1 by its memory after the first."""
    levelled = seen.algorithm.name in LEVELLED
    first = next(m for m in seen.snapshots if m.finished == 1)
    with torch.no_grad():
        missing = seen.trace.value(0, first.checkpoint) if levelled else 0.0

    def approximation(params: Mapping[str, Tensor]) -> Tensor:
        there = first._replace(checkpoint=Checkpoint(dict(params), first.checkpoint.buffers))
        return own_approximation(seen.algorithm, seen.model, there, 0) + missing

    yield "own", own_curves(replace(seen, snapshots=ends), levelled), lambda _: approximation


def _expansions(subject: TrainingTrace, ends: Sequence[Snapshot], rank: int) -> Iterator[tuple[str, Curves, Made]]:
    """Of order 0 and 1, and of order 2 by what is kept of the Hessian; and how each is made of the first task."""
    makers: dict[str, Maker] = {f"order {p}": partial(taylor, order=p) for p in (0, 1)}
    makers |= {name: partial(taylor, structure=name, rank=rank) for name in STRUCTURES}
    makers["whole"] = whole
    for name, make in makers.items():
        along = curves(subject, ends, [make(subject, o) for o in range(len(ends))])
        yield name, along, _on_the_ray if name == "whole" else partial(_first, make)


def _first(make: Maker, subject: TrainingTrace) -> Approximation:
    return make(subject, 0)


def _on_the_ray(subject: TrainingTrace) -> Approximation:
    """With the whole Hessian of the first task: on a ray one product tells all that matters of it."""
    direction = _direction(subject)
    return whole(subject, 0) if direction is None else within(subject, 0, direction[None])


def _training(along: Curves) -> Iterator[Row]:
    """The mean over all old tasks, and the first tasks one by one, after every task."""
    for i, finished in enumerate(along.finished.tolist()):
        known = [part[i, :finished] for part in (along.true, along.approximate, along.distance)]
        yield _row(finished + 1, None, float(along.past[i]), *(float(part.mean()) for part in known))
        for o in range(min(finished, FIRST)):
            yield _row(finished + 1, o, float(along.error[i, o]), *(float(part[o]) for part in known))


def _ray(subject: TrainingTrace, approximation: Approximation) -> Iterator[Row]:
    """ξ_1 on the ray from θ_1 through θ_2, and the power of the distance that it grows with at first."""
    direction = _direction(subject)
    errors, exponent = [np.nan] * len(RADII), np.nan
    if direction is not None:
        found = order(subject, 0, approximation, direction, RADII)
        near = found.used & (found.radii <= NEAR * (1 + 1e-9))
        # What is finite and not used is rounding.
        errors = torch.where(found.used | found.errors.isinf(), found.errors, np.nan).tolist()
        exponent = fit(found.radii[near], found.errors[near]).exponent
    for r, error in zip(RADII, errors, strict=True):
        yield _row(1, 0, error, np.nan, np.nan, r) | {"ray": True, "exponent": exponent}


def _direction(subject: TrainingTrace) -> Tensor | None:
    """θ_2 − θ_1, unless the run diverged."""
    update = subject.update(1)
    return update if 0 < float(update.norm()) < np.inf else None


def _row(learnt: int, task: int | None, error: float, true: float, approximate: float, distance: float) -> Row:
    """After so many tasks; the distance is that from θ_o, or their mean. Of rays no losses are kept."""
    row: Row = {"learnt": learnt, "task": task, "error": error, "true": true, "approximate": approximate}
    return row | {"distance": distance, "ray": False, "exponent": np.nan}


def _thesis(errors: Mapping[Series, tuple[float, float]], low: float, high: float, seeds: int) -> str:
    """Local against global ones, each side by its median algorithm, those aside that diverged."""
    own = {s: pair for s, pair in errors.items() if s.own}
    kept = {s: pair for s, pair in own.items() if np.isfinite(pair).all()}
    sides = {name: [s for s in kept if s.locality == name] for name in ("local", "global")}
    diverged = [s.label for s in own if s not in kept]
    aside = f" Left out, for half of the runs or more diverged at a rate: {listed(diverged)}." if diverged else ""
    if not all(sides.values()):
        return aside.strip()
    found, growth = {}, {}
    for name, members in sides.items():
        a, b = (median([kept[s][i] for s in members]) for i in (0, 1))
        growth[name] = _grown((a, b))
        named = listed([f"{s.label} {told(_grown(kept[s]))}" for s in members])
        found[name] = f"{told(a)} to {told(b)} with {name} ones, {told(growth[name])} times as much (each: {named})"
    verdict = "the rows agree" if growth["local"] > growth["global"] else "the rows do not agree"
    return (
        "The paper says that local approximations are good near the old solutions alone, and so at low learning rates: "
        f"{verdict}. From learning rate {low:g} to {high:g} the error of the mean old loss, averaged over tasks, grows "
        f"from {found['local']}, and from {found['global']}: medians over {len(sides['local'])} and "
        f"{len(sides['global'])} algorithms, of {seeds} seeds. Quadratics have a weight of 1 here, which is not "
        f"Table 1's.{aside}"
    )


def _grown(ends: tuple[float, float]) -> float:
    return ends[1] / ends[0] if ends[0] > 0 else np.nan


def _ranking(errors: Mapping[Series, tuple[float, float]], high: float) -> str:
    ranked = sorted((e[1], s) for s, e in errors.items() if s.own and not np.isnan(e[1]))
    named = ", ".join(f"{s.label} ({s.locality}) {told(error)}" for error, s in ranked)
    return f"At {high:g}, from the smallest error on: {named}." if ranked else ""


def _curvature(errors: Mapping[Series, tuple[float, float]], low: float, high: float) -> str:
    """What the second order is worth."""
    by_name = {s.approximation: e for s, e in errors.items() if not s.own}
    if not {"order 0", "whole"} <= by_name.keys():
        return ""
    constant, second = by_name["order 0"], by_name["whole"]
    worth = [c / s if s > 0 else np.inf for c, s in zip(constant, second, strict=True)]
    verdict = "more than" if worth[0] > worth[1] else "no more than"
    return (
        "Along plain SGD's run the expansion of order 2 with the whole Hessian errs by "
        f"{told(second[0])} at {low:g} and by {told(second[1])} at {high:g}, where a constant errs by "
        f"{told(constant[0])} and {told(constant[1])}: gradient and curvature divide the error by {told(worth[0])} at "
        f"the low rate, {verdict} the {told(worth[1])} at the high one."
    )


def _orders(rows: Sequence[Row]) -> str:
    """How errors grow with the distance, beside the paper's bound C rᵖ, at the lowest and the highest rate."""
    orders = {"order 0": 0, "order 1": 1, "whole": 2}
    powers: list[str] = []
    bounds: list[str] = []
    for rate in rates(rows):
        at = where(rows, lr=rate)
        known = [s for s in series_of(at) if s.approximation in orders and np.isfinite(s.exponent(at))]
        if known:
            powers.append(f"at {rate:g} " + ", ".join(f"{s.label} as r^{s.exponent(at):.2f}" for s in known))
            within = [f"{told(s.bound(at, orders[s.approximation], NEAR))} for {s.label}" for s in known]
            bounds.append(f"{listed(within)} at {rate:g}")
    if not powers:
        return ""
    others = ", ".join(f"{s.label} as r^{s.exponent(rows):.2f}" for s in series_of(rows) if s.own)
    return (
        f"Up to a distance of {NEAR:g} from θ_1 the errors of expansions grow, {'; '.join(powers)} (medians over "
        "seeds). Smooth losses leave one power more than the order; a rectifier's kinks, of which the longer way "
        "crosses more, r². The paper's bound C rᵖ, which does not ask that errors grow evenly, holds there with a C of "
        f"{', and of '.join(bounds)}." + (f" The algorithms' own, at both rates: {others}." if others else "")
    )
