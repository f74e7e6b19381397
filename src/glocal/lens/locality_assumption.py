r"""The ε-region of an approximation, Ω^ε_o = {θ : ξ_o(θ) < ε}, and Assumption 3.2 (the locality assumption),

    θ ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t   while task t + 1 is learned.

`region_radii` measures how far from θ_o the error stays below ε along rays, `locality_assumption` whether the
assumption holds along training, and `training_errors` checks it for a recorded run by the algorithm's own \hat L_o and
by the Taylor expansions at θ_o:

    errors = training_errors(open_run("runs/runs/0123456789abcdef").retrace(every_steps=10).run)
    print(errors)
    errors.plot("errors.png")
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from glocal.algorithms.partition import Partition
from glocal.errors import require
from glocal.lens.approximation_error import ErrorCurves, error_curves, errors_on_rays, own_curves, own_loss
from glocal.lens.record import RecordedRun
from glocal.lens.taylor import Approximation, expansions
from glocal.lens.training_trace import TrainingTrace, distance
from glocal.precision import full_precision

Rows: TypeAlias = list[dict[str, str | int | float | bool | None]]
GRID = tuple(10.0 ** (exponent / 4) for exponent in range(-16, 17))
"""Radii that are tried first: 10⁻⁴ to 10⁴, four per decade."""
REFINE_FROM, REFINE_STEPS = 0.1, 8
"""An interval of the grid with an error of REFINE_FROM · ε or more at an end is divided at REFINE_STEPS radii."""
ZERO_RADIUS = 1e-30
"""A radius below this counts as 0."""
DEFAULT_EPSILON_FRACTION = 0.1
"""The default ε is this fraction of L_o(θ_0) − L_o(θ_o), averaged over the tasks."""


def region_radii(
    trace: TrainingTrace,
    task: int,
    approximation: Approximation,
    directions: Tensor,
    epsilon: float,
    grid: tuple[float, ...] = GRID,
    *,
    tolerance: float = 1e-4,
) -> Tensor:
    r"""Return how far ξ_o stays below ε along directions: the largest radius before the first crossing, (k,).

    It is 0 where ξ_o(θ_o) is not below ε, and inf where no radius of the grid has an error of ε or more. The first
    radius of the grid with such an error is found, and the crossing before it by bisection. The grid is refined where
    errors are near ε; a region that is left and reentered within a refined interval is missed.

    Args:
        trace: the training.
        task: o, counted from 0.
        approximation: \hat L_o.
        directions: rows (k, P), scaled to length 1.
        epsilon: ε.
        grid: increasing radii.
        tolerance: the relative precision of the radii.
    """
    require_epsilon(epsilon)
    require(0 < tolerance < 1, f"tolerance = {tolerance} was given; it must be between 0 and 1.")
    increasing = len(grid) > 0 and all(a < b for a, b in zip((0.0, *grid), grid, strict=False)) and grid[-1] < torch.inf
    require(increasing, f"grid = {grid} was given; it must be increasing radii above 0.")
    lengths = directions.norm(dim=-1, keepdim=True)
    require(bool(((lengths > 0) & lengths.isfinite()).all()), "directions must have finite lengths above 0.")
    units = directions / lengths

    def errors(rows: Tensor, radii: Tensor) -> Tensor:
        """ξ_o along some of the directions, at radii (rows, m)."""
        error, rounding = errors_on_rays(trace, task, approximation, units[rows.to(units.device)], radii)
        # The rounding of large losses is not an error and ends no region.
        return torch.where(error.isfinite() & (error <= rounding), 0.0, error)

    previous = errors(torch.arange(len(units)), torch.zeros(len(units), 1, dtype=torch.float64))[:, 0]
    inner = torch.zeros(len(units), dtype=torch.float64)
    outer = torch.where(previous < epsilon, torch.inf, inner)
    for low, high in pairwise((0.0, *grid)):
        active = outer.isinf().nonzero().flatten()
        if not len(active):
            break
        current = errors(active, torch.full((len(active), 1), high, dtype=torch.float64))[:, 0]
        candidates = active[~(torch.maximum(previous[active], current) < REFINE_FROM * epsilon)]
        previous[active], inner[active] = current, high
        if len(candidates):
            finer = torch.linspace(low, high, REFINE_STEPS + 2, dtype=torch.float64)
            above = ~(errors(candidates, finer[1:].expand(len(candidates), -1)) < epsilon)
            crossed, index = candidates[above.any(1)], above.long().argmax(1)[above.any(1)]
            inner[crossed], outer[crossed] = finer[index], finer[index + 1]
    while True:
        unknown = outer.isfinite() & (outer - inner > tolerance * outer.clamp(min=ZERO_RADIUS))
        if not unknown.any():
            return torch.where(outer.isfinite(), inner, torch.inf)
        wide = unknown.nonzero().flatten()
        middle = (inner[wide] + outer[wide]) / 2
        below = errors(wide, middle.unsqueeze(-1))[:, 0] < epsilon
        inner[wide] = torch.where(below, middle, inner[wide])
        outer[wide] = torch.where(below, outer[wide], middle)


class TrajectoryRadii(NamedTuple):
    """How far training moved within Ω^ε_o after task o, as seen at the snapshots, (T,) each.

    last_inside: the largest ‖θ − θ_o‖ before Ω^ε_o was first left; NaN if never measured or never inside.
    first_outside: ‖θ − θ_o‖ where it was first left; inf if never left, NaN if never measured.
    """

    last_inside: Tensor
    first_outside: Tensor


def trajectory_radii(curves: ErrorCurves, epsilon: float) -> TrajectoryRadii:
    """Measure the radius of every Ω^ε_o along training."""
    require_epsilon(epsilon)
    known = curves.known
    exited = (known & ~(curves.error < epsilon)).long().cumsum(0) > 0
    before = torch.where(known & ~exited, curves.distance, -torch.inf).amax(0)
    exit_distance = curves.distance.gather(0, (exited & known).long().argmax(0, keepdim=True))[0]
    no_exit = torch.where(known.any(0), torch.inf, torch.nan)
    return TrajectoryRadii(
        torch.where(before.isinf(), torch.nan, before), torch.where(exited.any(0), exit_distance, no_exit)
    )


class LocalityViolation(NamedTuple):
    """The first snapshot at which the locality assumption does not hold."""

    snapshot: int  # its index
    task: int  # the task in training, which is the number of finished ones
    step: int
    tasks: tuple[int, ...]  # the finished tasks whose Ω^ε was left, counted from 0
    error: float  # the largest of their ξ
    last_step_inside: int = -1  # the step of the snapshot before; −1: unknown

    def __str__(self) -> str:
        tasks = f"task{'s' if len(self.tasks) > 1 else ''} {', '.join(str(o + 1) for o in self.tasks)}"
        finished = f"{self.task} task{'s' if self.task > 1 else ''} finished"
        step = f"at step {self.step}" if self.step >= 0 else f"at snapshot {self.snapshot}"
        if 0 <= self.last_step_inside < self.step - 1:
            step = f"between steps {self.last_step_inside} and {self.step}"
        return f"the locality assumption is violated {step}, with {finished}: the error on {tasks} is {self.error:.3g}"


class LocalityAssumption(NamedTuple):
    """Whether θ ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t at every snapshot, (n,). It would hold for every ε above `min_epsilon`, (n,), which
    is 0 without finished tasks."""

    epsilon: float
    holds: Tensor
    min_epsilon: Tensor
    first_violation: LocalityViolation | None

    def __str__(self) -> str:
        if self.first_violation is not None:
            return str(self.first_violation)
        largest = float(self.min_epsilon.max()) if len(self.min_epsilon) else 0.0
        return f"the locality assumption holds; the largest error is {largest:.3g}"


def locality_assumption(curves: ErrorCurves, epsilon: float) -> LocalityAssumption:
    """Check Assumption 3.2 along training."""
    require_epsilon(epsilon)
    errors = torch.where(curves.known, curves.error, 0)
    min_epsilon = errors.amax(1)
    holds = min_epsilon < epsilon
    first = None
    if not bool(holds.all()):
        i = int((~holds).long().argmax())
        tasks = tuple((~(errors[i] < epsilon)).nonzero().flatten().tolist())
        before = int(curves.step[i - 1]) if i else -1
        first = LocalityViolation(i, int(curves.finished[i]), int(curves.step[i]), tasks, float(min_epsilon[i]), before)
    return LocalityAssumption(epsilon, holds, min_epsilon, first)


OWN, OWN_RELATIVE = "own", "own, from θ_o"
r"""\hat L_o itself, which some algorithms know up to a constant, and the forgetting that it predicts: \hat L_o and L_o
relative to their values at θ_o."""


@dataclass(frozen=True)
class TrainingErrors:
    r"""L_o, \hat L_o and ‖θ − θ_o‖ along a recorded run, by the name of the approximation."""

    algorithm: str
    epsilon: float
    curves: dict[str, ErrorCurves]

    @cached_property
    def assumptions(self) -> dict[str, LocalityAssumption]:
        """Whether the locality assumption holds by each approximation."""
        return {name: locality_assumption(curves, self.epsilon) for name, curves in self.curves.items()}

    @cached_property
    def radii(self) -> dict[str, TrajectoryRadii]:
        """How far from θ_o the error of each approximation stayed below ε."""
        return {name: trajectory_radii(curves, self.epsilon) for name, curves in self.curves.items()}

    def rows(self) -> Rows:
        """Return a row for every approximation, snapshot and finished task."""
        columns = ("true", "approximate", "error", "distance")
        return [{"approximation": name} | row for name, curves in self.curves.items() for row in curves.rows(*columns)]

    def plot(self, path: str | Path) -> Path:
        """Save the figure as PNG, PDF, SVG or PGF."""
        from glocal.report import figure, lens_figures

        return figure.save_figure(partial(lens_figures.draw_errors, self), path)

    def __str__(self) -> str:
        title = f"{self.algorithm}, ε = {self.epsilon:.3g}"
        return "\n".join([title, *(f"{name}: {check}" for name, check in self.assumptions.items())])


@full_precision()
def training_errors(
    run: RecordedRun, epsilon: float | None = None, on_progress: Callable[[int, int, str], None] | None = None
) -> TrainingErrors:
    """Check the locality assumption at every snapshot of a recorded run.

    Args:
        run: the run. If its outputs are split among the tasks, Taylor expansions are left out.
        epsilon: ε (default: 0.1 × the mean over tasks of L_o(θ_0) − L_o(θ_o)).
        on_progress: called with the number of snapshots done, their total and what is measured.
    """
    trace, snapshots = run.trace, run.snapshots
    require(len(trace.tasks) > 1, "the run has a single task: there is no forgetting to measure.")
    epsilon = resolve_epsilon(epsilon, trace, run)
    report = on_progress or (lambda done, total, text: None)
    total = len(snapshots)
    report(0, total, OWN)
    curves = {OWN: own_curves(run), OWN_RELATIVE: own_curves(run, relative_to_solution=True)}
    if not isinstance(run.algorithm, Partition):
        curves |= error_curves(trace, snapshots, expansions(trace), lambda done: report(done, total, "expansions"))
    return TrainingErrors(run.algorithm.name, epsilon, curves)


@torch.no_grad()
def resolve_epsilon(epsilon: float | None, trace: TrainingTrace, run: RecordedRun | None = None) -> float:
    """Return ε, by default 0.1 × the mean decrease L_o(θ_0) − L_o(θ_o), with the losses as a run computes them.

    A task whose solution is θ_0, as after pretraining on it, is left out.
    """
    if epsilon is not None:
        require_epsilon(epsilon)
        return epsilon
    first = {s.finished: s for s in reversed(run.snapshots)} if run else {}  # the first one after so many tasks

    def loss(o: int, finished: int) -> Tensor:
        if run is None:
            return trace.value(o, trace.checkpoints[finished])
        return own_loss(run.algorithm, run.model, first[finished], trace.tasks[o], o)

    trained = [o for o in range(trace.num_learned) if distance(trace.solution(o), trace.checkpoints[0]) != 0]
    decreases = torch.tensor([float(loss(o, 0) - loss(o, o + 1)) for o in trained], dtype=torch.float64)
    finite = decreases[decreases.isfinite()]
    mean = float(finite.mean()) if len(finite) else math.nan
    require(mean > 0, f"training lowered the losses by {mean:.3g} on average, so there is no default ε: give epsilon.")
    return DEFAULT_EPSILON_FRACTION * mean


def require_epsilon(epsilon: float) -> None:
    """Raise unless ε is finite and positive."""
    require(0 < epsilon < torch.inf, f"epsilon = {epsilon} was given; it must be finite and above 0.")
