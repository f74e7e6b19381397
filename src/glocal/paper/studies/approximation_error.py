r"""Errors of the approximations of old losses while later tasks are learnt, at a low and a high learning rate.

ξ_o(θ) = |\hat L_o(θ) − L_o(θ)| (§3.2) is measured for the algorithms' own \hat L_o, and for Taylor expansions
(Eq. taylor-p) along a run of plain SGD. Some algorithms remember the sum of the old losses only, so all are compared by
the error of the mean old loss after task t, with the memory M_t that task t was learnt with:

    | (1/(t−1)) Σ_{o<t} ( \hat L_o(θ_t) − L_o(θ_t) ) |

Rows without a task hold this error; rows with a task hold ξ_o. SI states its \hat L_o up to a constant, so its losses
are taken relative to θ_o. Beside each stands the error of the constant L_o(θ_o) on the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from glocal.algorithms.hessian_structures import Structure
from glocal.lens.approximation_error import (
    Approximation,
    ErrorCurves,
    error_curves,
    error_order,
    fit_order,
    own_approximation,
    own_curves,
)
from glocal.lens.record import RecordedRun, Snapshot
from glocal.lens.taylor import exact_taylor, taylor
from glocal.lens.training_trace import Checkpoint, TrainingTrace
from glocal.paper.studies import common
from glocal.paper.studies.common import (
    MeanInterval,
    agreement,
    column,
    finite_median,
    integer_ticks,
    medians_by,
    plot_medians,
)
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import COOL, DASHES, FAINT, MARKERS, WARM, LineStyle

OPTIONS: dict[str, dict[str, Any]] = {
    "ewc": {"penalty": 1.0, "anchors": "each"},
    "laplace": {"penalty": 1.0},
    "ogd-gtl": {"slots": 500},
    "optimal-soft": {"penalty": 1.0, "weighing": "stated"},
    "agem": {"slots": 500},
    "er": {"slots": 500},
    "si": {"penalty": 1.0},
}
"""Quadratic penalties have weight 1: with another weight they approximate another function than the loss. The factor
1/t of optimal-soft's objective (Eq. general-opt-local) is not part of its approximation."""
UP_TO_CONSTANT = ("si",)
STRUCTURES: tuple[Structure, ...] = ("diagonal", "kronecker", "low-rank")
TASKS_WITH_ROWS = 3
RADII = tuple(10.0 ** (exponent / 4) for exponent in range(-8, 7))
VOID = 0.9
"""An approximation whose error is a larger share of the old loss says little more than 0 would."""
FIT_RADIUS = 1.0
"""The exponent of an error is fitted up to this distance from θ_1."""

CONSTANT = "constant"
r"""The approximation \hat L_o = L_o(θ_o), which is also the expansion of order 0."""

MakeApproximation: TypeAlias = Callable[[TrainingTrace], Approximation]  # of the first task


class ApproximationError(common.RecordedStudy):
    name = "approximation-error"
    columns = "algorithm approximation locality lr seed learnt task error true approximate distance ray exponent"

    def items(self, demo: bool) -> list[WorkItem]:
        base = common.FULL | {"lrs": [0.001, 0.1], "seeds": [0, 1, 2, 3, 4]}
        base = common.DEMO | {"lrs": [0.01, 0.1], "seeds": [0]} if demo else base
        expansions: WorkItem = {"algorithm": "sgd", "options": {}}
        expansions |= {"examples": 200, "rank": 5} if demo else {"examples": 2_000, "rank": 20}
        # Algorithms consolidate on all examples of a task, so their approximation is compared on all of them.
        algorithms = [{"algorithm": a, "options": o, "examples": 4_000 if demo else 60_000} for a, o in OPTIONS.items()]
        return [item | base for item in (expansions, *algorithms)]

    def options(self, item: WorkItem, context: Context) -> dict[str, Any]:
        return {"every_epochs": item["epochs"]}

    def measure_run(self, run: RecordedRun, item: WorkItem) -> Iterator[Row]:
        # The ends of all tasks but the first, each with the memory that the task was learnt with.
        ends = [m for m, successor in pairwise(run.snapshots) if 0 < m.finished < successor.finished]
        expand = "rank" in item
        series = _expansions(run.trace, ends, item["rank"]) if expand else _algorithm_errors(run, ends)
        # Second-order remainders are small: expansions are evaluated in double precision.
        trace = run.trace.double() if expand else run.trace
        for name, errors, make in series:
            base_row: Row = {"approximation": name} | ({"locality": "local"} if expand else {})
            yield from (base_row | row for row in _training_rows(errors))
            if make is not None:
                yield from (base_row | row for row in _ray_rows(trace, make(trace)))

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Errors of the algorithms' own approximations, and of expansions."""
        figure.set_size_inches(10.6, 6.2)
        low, *_, high = common.distinct(rows, "lr")
        titles = {True: r"The algorithms' own approximations $\hat L_o$"}
        titles |= {False: "Taylor expansions of the losses along a run of plain SGD"}
        for section, (is_own, title) in zip(figure.subfigures(2, 1, squeeze=False)[:, 0], titles.items(), strict=True):
            _draw_errors(section, [s for s in series_of(rows) if s.own == is_own], low, high)
            section.suptitle(title, x=0.012, ha="left", fontweight="bold")

    def summarize(self, rows: pl.DataFrame) -> Summary:
        low, *_, high = common.distinct(rows, "lr")
        table: list[Row] = []
        skills = {lr: skill(rows, lr) for lr in (low, high)}
        for s in series_of(rows):
            first, last = (float(s.errors(lr)[1].mean()) for lr in (low, high))
            line: Row = {"approximation": s.label, "locality": s.locality, "own": s.own}
            line |= {f"error at {low:g}": first, f"error at {high:g}": last}
            line |= {"growth": last / first if first > 0 else np.nan}
            line |= {f"error / old loss at {lr:g}": s.relative_error(lr) for lr in (low, high)}
            line |= {
                f"skill at {lr:g}": str(intervals[s.label]) if s.label in intervals else None
                for lr, intervals in skills.items()
            }
            table.append(line | {f"r^p at {lr:g}": s.exponent(lr) for lr in (low, high)})
        algorithms = pl.DataFrame(table).filter(own=True)
        growth, relative = (
            {kind: finite_median(algorithms.filter(locality=kind), name) for kind in ("local", "global")}
            for name in ("growth", f"error / old loss at {high:g}")
        )
        verdict = (
            f"From learning rate {low:g} to {high:g} the error of the mean old loss grows {growth['local']:.2g}-fold "
            f"for local algorithms and {growth['global']:.2g}-fold for global ones (medians)"
        )
        if min(relative.values()) > VOID:
            verdict += (
                f", but at {high:g} it is {100 * relative['local']:.0f} % and {100 * relative['global']:.0f} % of that "
                "loss: the approximations are near 0, so the growth is that of the old loss itself and no evidence "
                "about the approximations."
            )
        else:
            verdict += f": {agreement(growth['local'] > growth['global'])}."
        return Summary(table, verdict + "".join(_skill_sentence(skills[lr], lr) for lr in skills))


def skill(rows: pl.DataFrame, lr: float) -> dict[str, MeanInterval]:
    r"""1 − Σ_t error / Σ_t error of the constant \hat L_o = L_o(θ_o) on the same run, over seeds.

    The constant has skill 0, and an exact approximation 1. Left out if a run diverged.
    """
    means = rows.filter(pl.col("task").is_null(), ray=False, lr=lr)
    keys = ["algorithm", "approximation"]
    totals = means.group_by(*keys, "seed", maintain_order=True).agg(pl.col("error").sum())
    is_constant = pl.col("approximation").is_in([CONSTANT, "order 0"])
    constants = totals.filter(is_constant).select("algorithm", "seed", constant="error")
    pairs = totals.filter(~is_constant).join(constants, ["algorithm", "seed"], maintain_order="left")
    skills = pairs.with_columns(skill=1 - pl.col("error") / pl.col("constant"))
    intervals = {}
    for part in skills.partition_by(keys, maintain_order=True):
        if part["skill"].is_finite().all():
            intervals[_label(*part.row(0)[:2])] = MeanInterval.of(column(part, "skill"))
    return intervals


def _skill_sentence(skills: Mapping[str, MeanInterval], lr: float) -> str:
    groups = skill_groups({name.removeprefix("order 2, "): value for name, value in skills.items()})
    text = "; ".join(f"{kind}: {', '.join(members)}" for kind, members in groups.items())
    return f" Against the constant L_o(θ_o) at {lr:g}, {text}." if text else ""


def skill_groups(skills: Mapping[str, MeanInterval]) -> dict[str, list[str]]:
    """Return the approximations whose interval is above 0, below 0, or neither, and those that equal the constant."""
    groups: dict[str, list[str]] = {"better": [], "worse": [], "not shown to differ": [], "equal": []}
    for name, value in skills.items():
        groups["equal" if value == (0, 0, 0) else value.phrase("better", "worse", "not shown to differ")].append(name)
    return {kind: members for kind, members in groups.items() if members}


STUDIES = (ApproximationError(),)


def _algorithm_errors(
    trajectory: RecordedRun, ends: Sequence[Snapshot]
) -> Iterator[tuple[str, ErrorCurves, MakeApproximation | None]]:
    r"""The algorithm's \hat L_o while later tasks were learnt, \hat L_1 with its memory after the first task, and the
    constant L_o(θ_o)."""
    up_to_constant = trajectory.algorithm.name in UP_TO_CONSTANT
    first = next(m for m in trajectory.snapshots if m.finished == 1)
    with torch.no_grad():
        constant = trajectory.trace.value(0, first.checkpoint) if up_to_constant else 0.0

    def approximation(params: Mapping[str, Tensor]) -> Tensor:
        moment = first._replace(checkpoint=Checkpoint(dict(params), first.checkpoint.buffers))
        return own_approximation(trajectory.algorithm, trajectory.model, moment, 0) + constant

    errors = own_curves(replace(trajectory, snapshots=ends), up_to_constant)
    yield "own", errors, lambda _: approximation
    losses = torch.full_like(errors.true[0], torch.nan)
    with torch.no_grad():
        for o in range(len(ends)):
            losses[o] = trajectory.trace.value(o, trajectory.trace.solution(o))
    yield CONSTANT, replace(errors, approximate=losses.expand_as(errors.true)), None


def _expansions(
    trace: TrainingTrace, ends: Sequence[Snapshot], rank: int
) -> Iterator[tuple[str, ErrorCurves, MakeApproximation | None]]:
    """Expansions of order 0 and 1, and of order 2 with each structure of the Hessian."""
    makers: dict[str, Callable[..., Approximation]] = {f"order {p}": partial(taylor, order=p) for p in (0, 1)}
    makers |= {name: partial(taylor, structure=name, rank=rank) for name in STRUCTURES}
    makers["whole"] = exact_taylor
    for name, make in makers.items():
        errors = error_curves(trace, ends, {"": [make(trace, o) for o in range(len(ends))]})[""]
        yield name, errors, partial(make, task=0)


def _training_rows(errors: ErrorCurves) -> Iterator[Row]:
    """After every task: the mean over all old tasks, and the first tasks one by one. Distances are from θ_o."""
    for i, finished in enumerate(errors.finished.tolist()):
        columns = {name: getattr(errors, name)[i, :finished] for name in ("error", "true", "approximate", "distance")}
        row: Row = {"learnt": finished + 1, "ray": False, "exponent": np.nan}
        means = {name: float(values.mean()) for name, values in columns.items()}
        yield row | means | {"error": float(errors.mean_error[i])}
        for o in range(min(finished, TASKS_WITH_ROWS)):
            yield row | {"task": o} | {name: float(values[o]) for name, values in columns.items()}


def _ray_rows(trace: TrainingTrace, approximation: Approximation) -> Iterator[Row]:
    """ξ_1 on the ray from θ_1 through θ_2, and the power of the distance that it grows with."""
    direction = trace.update(1)
    errors, exponent = [np.nan] * len(RADII), np.nan
    if 0 < float(direction.norm()) < np.inf:  # the run did not diverge
        measured = error_order(trace, 0, approximation, direction, RADII)
        fit_mask = measured.used & (measured.radii <= FIT_RADIUS * (1 + 1e-9))
        # Finite errors that are not used are rounding.
        errors = torch.where(measured.used | measured.errors.isinf(), measured.errors, np.nan).tolist()
        exponent = fit_order(measured.radii[fit_mask], measured.errors[fit_mask]).exponent
    row: Row = {"learnt": 1, "task": 0, "true": np.nan, "approximate": np.nan, "ray": True, "exponent": exponent}
    yield from (row | {"error": error, "distance": r} for r, error in zip(RADII, errors, strict=True))


class Series(NamedTuple):
    """A line of the figure: an algorithm or an expansion, with its rows."""

    label: str
    locality: str
    own: bool
    style: LineStyle
    rows: pl.DataFrame

    def errors(self, lr: float, name: str = "error") -> tuple[np.ndarray, np.ndarray]:
        """The number of tasks learnt, and the error of the mean old loss: medians over seeds."""
        return medians_by(self.rows.filter(pl.col("task").is_null(), ray=False, lr=lr), "learnt", name)

    def relative_error(self, lr: float) -> float:
        r"""The error as a share of the mean old loss, which is 1 for \hat L_o = 0; NaN if half of the runs diverged."""
        error, true = (float(self.errors(lr, name)[1].mean()) for name in ("error", "true"))
        return error / true if np.isfinite(error) else np.nan

    def exponent(self, lr: float) -> float:
        """p of an error that grows as rᵖ: the median over the runs where it is known."""
        return finite_median(self.rows.filter(ray=True, lr=lr), "exponent")


def series_of(rows: pl.DataFrame) -> list[Series]:
    """All lines: expansions first, then algorithms by locality and name; cool and solid if global, warm if local."""
    series: list[Series] = []
    is_own = pl.col("approximation") == "own"
    sorted_rows = rows.filter(pl.col("approximation") != CONSTANT).sort(
        is_own, pl.when(is_own).then("locality"), pl.when(is_own).then("algorithm"), maintain_order=True
    )
    for part in sorted_rows.partition_by("algorithm", "approximation", maintain_order=True):
        algorithm, name, locality = part.row(0)[:3]
        index = sum((s.own, s.locality) == (name == "own", locality) for s in series)
        hue = (COOL if locality == "global" else WARM)[index]
        style = LineStyle(hue, DASHES[locality], MARKERS[locality][index])
        series.append(Series(_label(algorithm, name), locality, name == "own", style, part))
    return series


def _label(algorithm: str, approximation: str) -> str:
    if approximation == "own":
        return algorithm
    return approximation if approximation.startswith("order") else f"order 2, {approximation}"


def _draw_errors(section: SubFigure, series: Sequence[Series], low: float, high: float) -> None:
    """Over tasks at the lowest and highest learning rate, and against the distance from θ_1."""
    left, middle, distance, legend = section.subplots(1, 4, width_ratios=(3, 3, 3, 2))
    left.sharey(middle)
    for axes, lr, word in ((left, low, "low"), (middle, high, "high")):
        _draw_over_tasks(axes, series, lr)
        axes.set_title(f"{word} learning rate, {lr:g}")
    left.set_ylabel("error of the mean old loss")
    _draw_over_distance(distance, series, high)
    legend.axis("off")
    spacing: dict[str, Any] = {"handlelength": 3, "labelspacing": 0.7, "borderpad": 0}
    note = "growth of the error\nup to $r = 1$\n"
    legend.legend(*distance.get_legend_handles_labels(), loc="center left", title=note, alignment="left", **spacing)


def _draw_over_tasks(axes: Axes, series: Sequence[Series], lr: float) -> None:
    """Against the tasks learnt. A line ends where half of the runs have diverged, with a marker at the top."""
    axes.set_xlabel("tasks learnt")
    for line in series:
        tasks, errors = line.errors(lr)
        axes.plot(*common.drop_nonfinite(tasks, errors), **line.style.line(), **line.style.point())
        if not np.isfinite(errors).all():
            end = tasks[~np.isfinite(errors)][0]
            axes.plot(end, 0.97, transform=axes.get_xaxis_transform(), color=line.style.colour, **line.style.point())
            axes.set_xlabel("tasks learnt  (at the top: diverged)")
    axes.set_yscale("log")
    integer_ticks(axes)


def _draw_over_distance(axes: Axes, series: Sequence[Series], lr: float) -> None:
    """ξ_1 against the distance from θ_1, and the distance of θ_2."""
    for line in series:
        p = line.exponent(lr)
        label = f"{line.label}   $r^{{{round(p, 1) + 0:g}}}$" if np.isfinite(p) else line.label
        style: dict[str, Any] = {**line.style.line(), **line.style.point(), "markersize": 3.5}
        plot_medians(axes, line.rows.filter(lr=lr, ray=True), "distance", "error", **style, label=label)
    distances = [column(line.rows.filter(lr=lr, ray=False, task=0, learnt=2), "distance") for line in series]
    if np.isfinite(next_solution := common.median(np.concatenate(distances))):
        axes.axvline(next_solution, color=FAINT, linewidth=0.9, linestyle=":")
        axes.text(next_solution, 0.02, r" $\theta_2$", transform=axes.get_xaxis_transform(), color=FAINT, va="bottom")
    axes.set(xlabel=r"distance  $r = \Vert\theta - \theta_1\Vert_2$", ylabel=r"$\xi_1(\theta)$")
    axes.set(title=rf"from $\theta_1$ towards $\theta_2$, rate {lr:g}", xscale="log", yscale="log")
