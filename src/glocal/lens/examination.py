r"""How local is a training? From a network, its loss, the tasks' data and the checkpoints θ_0, θ_1, … between them:

    distance    ‖θ_t − θ_o‖ after every later task t, and the radius of Ω^ε_o (§3.2) on the same way
    error       ξ_o(θ_t), of the second-order expansion with the whole Hessian: θ_t ∈ Ω^ε_o where it is below ε
    forgetting  as Eq. forgetting-quadratic predicts it, and as it is
    curvature   the largest eigenvalues of H_o and its trace

and what follows for the choice of an algorithm (`advice`). Tasks are counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glocal.curvature.lanczos import lanczos
from glocal.curvature.products import Operator
from glocal.curvature.trace import random_signs
from glocal.curvature.trace import trace as estimate_trace
from glocal.errors import require
from glocal.lens.advice import Advice, advise, beside_statistics
from glocal.lens.approximation import floor
from glocal.lens.forgetting import Forgetting, average, forgetting
from glocal.lens.input_checks import twice_differentiable
from glocal.lens.perturbation import unit_directions
from glocal.lens.region import positive, radii
from glocal.lens.task_inputs import AnyLoss, TaskData
from glocal.lens.trace import MAX_EXAMPLES, TrainingTrace, require_positive, trace_checkpoints
from glocal.precision import full_precision
from glocal.tree import to_vector

OF_WHAT_IS_LEARNT = 0.1
"""ε, if not said, as a part of what learning a task gains, L_o(θ_0) − L_o(θ_o), in the mean over the tasks."""
RANDOM = 5
"""Random directions in which regions are measured."""


@dataclass(frozen=True)
class Examination:
    """What was found of N learnt tasks: matrices (N, N) are [t, o] of o < t, NaN elsewhere; vectors (N,)."""

    epsilon: float
    parameters: int
    """P."""
    losses: Tensor
    """L_o(θ_o)."""
    distance_from_init: Tensor
    """‖θ_t − θ_0‖."""
    updates: Tensor
    """‖θ_t − θ_{t−1}‖."""
    distance: Tensor
    """‖θ_t − θ_o‖."""
    radius: Tensor
    """How far the region of task o reaches from θ_o towards θ_t; inf where no border was found."""
    steepest: Tensor
    """Its radius along the eigenvector of largest |eigenvalue|, the smaller of both senses."""
    random: Tensor
    """Its median radius in random directions."""
    forgetting: Forgetting
    rounding: Tensor
    """What rounding of the losses may make of an error."""
    eigenvalues: Tensor
    """The largest in magnitude first, (N, k)."""
    residuals: Tensor
    """‖H_o v − λ v‖, (N, k)."""
    trace: Tensor
    trace_error: Tensor
    """Its standard error."""

    @property
    def later(self) -> Tensor:
        """Which pairs [t, o] have o < t."""
        return torch.ones_like(self.distance, dtype=torch.bool).tril(-1)

    @property
    def error(self) -> Tensor:
        """ξ_o(θ_t), and 0 where it is no more than rounding."""
        found = self.forgetting.error.abs()
        return torch.where(found.isfinite() & (found <= self.rounding), 0.0, found)

    @property
    def inside(self) -> Tensor:
        """Whether θ_t ∈ Ω^ε_o, for pairs with o < t; False elsewhere, and where ξ_o is not a number."""
        return self.later & (self.error < self.epsilon)

    @property
    def advice(self) -> Advice:
        """A family of algorithms, and why."""
        made = advise(
            self.epsilon,
            self.distance[self.later],
            self.radius[self.later],
            self.error[self.later],
            average(self.forgetting.measured, "t"),
            self.eigenvalues,
            self.trace,
            self.parameters,
            (float(self.updates[-1]), float(self.steepest[-1]), float(self.random[-1])),
        )
        return beside_statistics(made, self.epsilon, self.forgetting.statistics[self.later])

    @property
    def largest(self) -> Tensor:
        """λ_max of every H_o: the largest that was found where that is positive, or all were found; else NaN."""
        found = self.eigenvalues.amax(1)
        whole = self.eigenvalues.shape[1] == self.parameters
        return found if whole else torch.where(found > 0, found, torch.nan)

    def rows(self) -> list[dict[str, Any]]:
        """What there is to say of every task, after the last: a table."""
        last = len(self.losses) - 1
        measured, predicted = self.forgetting.measured[last], self.forgetting.predicted[last]
        return [
            {
                "task": o,
                "loss": float(self.losses[o]),
                "largest_eigenvalue": float(self.largest[o]),
                "trace": float(self.trace[o]),
                "distance": float(self.distance[last, o]),
                "radius": float(self.radius[last, o]),
                "steepest_radius": float(self.steepest[o]),
                "random_radius": float(self.random[o]),
                "predicted": float(predicted[o]),
                "measured": float(measured[o]),
                "inside": bool(self.inside[last, o]) if o < last else None,
            }
            for o in range(last + 1)
        ]

    def __str__(self) -> str:
        lines = [f"ε = {self.epsilon:.3g}; after the last task:"]
        lines.append("task   loss  λ_max  trace  distance  radius (steepest, random)  forgetting (predicted)")
        for row in self.rows():
            o, *numbers = (row[k] for k in ("task", "loss", "largest_eigenvalue", "trace"))
            way = (
                f"{row['distance']:8.3g}  {row['radius']:6.3g}" if row["inside"] is not None else f"{'–':>8}  {'–':>6}"
            )
            around = f"({row['steepest_radius']:.3g}, {row['random_radius']:.3g})"
            forgot = f"{row['measured']:.3g} ({row['predicted']:.3g})" if row["inside"] is not None else "–"
            lines.append(f"{o:>4} {''.join(f'{n:>7.3g}' for n in numbers)}  {way} {around:<20} {forgot}")
        return "\n".join([*lines, str(self.advice)])

    def plot(self, path: str | Path) -> Path:
        """The figure, as PNG, PDF or SVG by the suffix."""
        from glocal.report.examination import save

        return save(self, path)


@full_precision()
def examine(
    module: nn.Module,
    loss: AnyLoss,
    tasks: Sequence[TaskData],
    checkpoints: Sequence[Mapping[str, Any]],
    epsilon: float | None = None,
    *,
    examples: int = MAX_EXAMPLES,
    eigenvalues: int = 10,
    seed: int = 0,
) -> Examination:
    """Look at a training of one's own.

    loss: 'cross-entropy', 'squared-error', or any function (outputs, y) that is a mean over samples.
    tasks: for each a pair of tensors, a DataLoader, a Dataset, or whatever else gives batches (x, y); of every one at
    most so many `examples` are taken, evenly spaced ones, or the first where it can only be read from its beginning.
    checkpoints: state dicts θ_0 (the initialisation), θ_1 (after task 0), … The module itself is left as it is.
    """
    trace = trace_checkpoints(module, loss, tasks, checkpoints, examples, complete=True)
    return examine_trace(trace, epsilon, eigenvalues, seed)


@twice_differentiable()
def examine_trace(
    trace: TrainingTrace,
    epsilon: float | None = None,
    eigenvalues: int = 10,
    seed: int = 0,
    tell: Callable[[int, int, str], None] | None = None,
) -> Examination:
    """The same of a trace. `tell` hears how many tasks were looked at, of how many, and what follows."""
    n = trace.num_learned
    require_positive(eigenvalues=eigenvalues)
    count = min(eigenvalues, trace.num_params)
    epsilon = default_epsilon(trace) if epsilon is None else epsilon
    positive(epsilon)
    tell = tell or (lambda done, tasks, following: None)
    tell(0, n, "all pairs of tasks")
    pairs = forgetting(trace)
    points = [to_vector(point.params).double() for point in trace.checkpoints[: n + 1]]
    distance, radius = torch.full((2, n, n), torch.nan, dtype=torch.float64)
    found = []
    for o in range(n):
        tell(o, n, f"around the solution of task {o}")
        ways = {t: points[t + 1] - points[o + 1] for t in range(o + 1, n)}
        for t, way in ways.items():
            distance[t, o] = way.norm()
        # A task that moved nothing, or to where no number is, leads in no direction.
        ways = {t: way for t, way in ways.items() if 0 < way.norm() < torch.inf}
        seen = _around(trace, o, list(ways.values()), epsilon, count, seed)
        found.append(seen)
        for t, far in zip(ways, seen.ways.tolist(), strict=True):
            radius[t, o] = far
    with torch.no_grad():
        losses = torch.stack([trace.value(o, trace.solution(o)) for o in range(n)]).double().cpu()
    moves = torch.stack(points[1:]) - torch.stack(points[:-1])
    return Examination(
        epsilon=epsilon,
        parameters=trace.num_params,
        losses=losses,
        distance_from_init=torch.stack([(point - points[0]).norm() for point in points[1:]]).cpu(),
        updates=moves.norm(dim=1).cpu(),
        distance=distance,
        radius=radius,
        steepest=torch.tensor([seen.steepest for seen in found], dtype=torch.float64),
        random=torch.tensor([seen.random for seen in found], dtype=torch.float64),
        forgetting=pairs,
        rounding=floor(trace, 0, losses + pairs.measured, losses + pairs.predicted),
        eigenvalues=torch.stack([seen.values for seen in found]).double().cpu(),
        residuals=torch.stack([seen.residuals for seen in found]).double().cpu(),
        trace=torch.stack([seen.trace for seen in found]).cpu(),
        trace_error=torch.stack([seen.trace_error for seen in found]).cpu(),
    )


class _Seen(NamedTuple):
    """One task from its solution."""

    ways: Tensor
    steepest: float
    random: float
    values: Tensor
    residuals: Tensor
    trace: Tensor
    trace_error: Tensor


def _around(trace: TrainingTrace, task: int, ways: Sequence[Tensor], epsilon: float, count: int, seed: int) -> _Seen:
    times, slope = trace.hessian(task), trace.gradient(task)
    top = lanczos(times, trace.random_start(seed), count)
    signs = random_signs(2 * max(2, count), trace.num_params, torch.Generator().manual_seed(seed), slope.dtype)
    total = estimate_trace(times, signs.to(slope.device), trace.hvp_batch_size)
    known = bool(top.values.isfinite().all())
    units = [(way / way.norm()).to(slope) for way in ways]
    steep = [top.vectors[0], -top.vectors[0]] if known else []
    drawn = list(unit_directions(trace, task, RANDOM, seed))
    directions = torch.stack([*units, *steep, *drawn])
    far = radii(trace, task, _on_rays(trace, task, directions, times, slope), directions, epsilon).radii
    steepest = float(far[len(units) : len(units) + len(steep)].min()) if steep else math.nan
    random = float(far[len(units) + len(steep) :].median())
    return _Seen(far[: len(units)], steepest, random, top.values, top.residuals, total.value, total.error)


def _on_rays(
    trace: TrainingTrace, task: int, units: Tensor, times: Operator, slope: Tensor
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The second-order expansion of L_o at points θ_o + r u, u one of the units (k, P): one Hessian product each."""
    origin = trace.theta(task)
    with torch.no_grad():
        level = trace.value(task, trace.solution(task))
        rises = units @ slope
        bends = torch.stack([unit @ (times @ unit) for unit in units])

    def value(params: Mapping[str, Tensor]) -> Tensor:
        along = units @ (to_vector(params) - origin)
        r, which = along.max(0)  # no unit has a larger part of r u than u itself
        return level + r * rises.gather(0, which) + r * r * bends.gather(0, which) / 2

    return value


def default_epsilon(trace: TrainingTrace) -> float:
    """A tenth of what learning a task gained, in the mean."""
    with torch.no_grad():
        gains = [
            trace.value(o, trace.checkpoints[0]) - trace.value(o, trace.solution(o)) for o in range(trace.num_learned)
        ]
    return tenth(torch.stack(gains))


def tenth(gains: Tensor) -> float:
    """An ε from L_o(θ_0) − L_o(θ_o) of the tasks."""
    gained = gains.double()[gains.isfinite()]
    mean = float(gained.mean()) if len(gained) else math.nan
    require(mean > 0, f"learning lowered the losses by {mean:.3g} in the mean, from which no ε follows: give epsilon.")
    return OF_WHAT_IS_LEARNT * mean
