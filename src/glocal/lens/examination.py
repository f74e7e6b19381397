r"""Measure how local a training was, from a network, its loss, the tasks' data and checkpoints θ_0, θ_1, …:

    distance    ‖θ_t − θ_o‖ after every later task t, and the radius of Ω^ε_o (§3.2) in the same direction
    error       ξ_o(θ_t) of the second-order expansion with the exact Hessian: θ_t ∈ Ω^ε_o if it is below ε
    forgetting  predicted by Eq. forgetting-quadratic, and measured
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
from glocal.curvature.spectrum import random_signs
from glocal.curvature.spectrum import trace as estimate_trace
from glocal.lens.advice import Advice, NextTask, advise
from glocal.lens.approximation import rounding_error
from glocal.lens.forgetting import Forgetting, average, forgetting
from glocal.lens.inputs import AnyLoss, TaskData, explain_missing_derivatives
from glocal.lens.locality_assumption import default_epsilon, region_radii, require_epsilon
from glocal.lens.perturbation import unit_directions
from glocal.lens.taylor import exact_taylor
from glocal.lens.trace import MAX_EXAMPLES, TrainingTrace, require_positive, trace_checkpoints
from glocal.precision import full_precision
from glocal.tree import to_vector

NUM_RANDOM_DIRECTIONS = 5
"""Random directions in which the radius of a region is measured."""


@dataclass(frozen=True)
class Examination:
    """Results for N learned tasks: matrices (N, N) are [t, o] for o < t, NaN elsewhere; vectors (N,)."""

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
    """How far Ω^ε_o extends from θ_o towards θ_t; inf if no border was found."""
    steepest: Tensor
    """Its radius along the eigenvector of largest |eigenvalue|, the smaller one of both signs."""
    random: Tensor
    """Its median radius in random directions."""
    forgetting: Forgetting
    rounding: Tensor
    """A bound on the rounding error of ξ_o."""
    eigenvalues: Tensor
    """The largest in magnitude first, (N, k)."""
    residuals: Tensor
    """‖H_o v − λ v‖, (N, k)."""
    trace: Tensor
    trace_error: Tensor
    """The standard error of the trace."""

    @property
    def later(self) -> Tensor:
        """Which pairs [t, o] have o < t."""
        return torch.ones_like(self.distance, dtype=torch.bool).tril(-1)

    @property
    def error(self) -> Tensor:
        """ξ_o(θ_t), 0 where it is within rounding."""
        error = self.forgetting.error.abs()
        return torch.where(error.isfinite() & (error <= self.rounding), 0.0, error)

    @property
    def inside(self) -> Tensor:
        """Whether θ_t ∈ Ω^ε_o for pairs with o < t; False elsewhere and where ξ_o is NaN."""
        return self.later & (self.error < self.epsilon)

    @property
    def advice(self) -> Advice:
        """The recommended family of algorithms."""
        return advise(
            self.epsilon,
            self.error[self.later],
            average(self.forgetting.measured, "t"),
            self.eigenvalues,
            self.trace,
            parameters=self.parameters,
            next_task=NextTask(float(self.updates[-1]), float(self.steepest[-1]), float(self.random[-1])),
        )

    @property
    def warning(self) -> str | None:
        """A warning if BatchNorm statistics alone changed old losses by ε or more."""
        changes = self.forgetting.statistics[self.later]
        if not bool((changes.abs() >= self.epsilon).any()):
            return None
        largest = float(changes[changes.abs().argmax()])
        return (
            f"BatchNorm's running statistics alone changed old losses by up to {largest:+.3g}. Freeze them after the "
            "first task, or keep them for each task."
        )

    @property
    def largest(self) -> Tensor:
        """λ_max of every H_o; NaN if only negative eigenvalues are among the computed ones."""
        largest = self.eigenvalues.amax(1)
        complete = self.eigenvalues.shape[1] == self.parameters
        return largest if complete else torch.where(largest > 0, largest, torch.nan)

    def rows(self) -> list[dict[str, Any]]:
        """Return a table with a row for every task, measured after the last one."""
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
        rows = self.rows()
        cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
        names = [name.replace("_", " ") for name in rows[0]]
        widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in (names, *cells)]
        closing = [str(self.advice), *([self.warning] if self.warning else [])]
        return "\n".join([f"After the last task, ε = {self.epsilon:.3g}", *lines, *closing])

    def plot(self, path: str | Path) -> Path:
        """Save the figure as PNG, PDF or SVG."""
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
    """Examine your own training.

    Args:
        module: the network; it is not changed.
        loss: 'cross-entropy', 'squared-error', or a function (outputs, y) that returns the mean over samples.
        tasks: for every task a pair of tensors, a DataLoader, a Dataset, or an iterable of batches (x, y).
        checkpoints: state dicts θ_0 (the initialization), θ_1 (after task 0), …
        epsilon: ε of the ε-regions (default: 0.1 × the mean decrease of a task's loss during its training).
        examples: the largest number of examples per task, evenly spaced, or the first ones of an iterable.
        eigenvalues: how many eigenvalues of each Hessian.
        seed: of the random directions.
    """
    trace = trace_checkpoints(module, loss, tasks, checkpoints, examples, complete=True)
    return examine_trace(trace, epsilon, eigenvalues, seed)


@explain_missing_derivatives()
def examine_trace(
    trace: TrainingTrace,
    epsilon: float | None = None,
    eigenvalues: int = 10,
    seed: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Examination:
    """Examine a trace; `on_progress` is called with the number of tasks done, their total and what comes next."""
    n = trace.num_learned
    require_positive(eigenvalues=eigenvalues)
    count = min(eigenvalues, trace.num_params)
    epsilon = default_epsilon(trace) if epsilon is None else epsilon
    require_epsilon(epsilon)
    report = on_progress or (lambda done, total, what: None)
    report(0, n, "forgetting")
    pairs = forgetting(trace)
    thetas = [to_vector(checkpoint.params).double() for checkpoint in trace.checkpoints]
    distance, radius = torch.full((2, n, n), torch.nan, dtype=torch.float64)
    results = []
    for o in range(n):
        report(o, n, f"solution of task {o}")
        moves = {t: thetas[t + 1] - thetas[o + 1] for t in range(o + 1, n)}
        for t, move in moves.items():
            distance[t, o] = move.norm()
        # A task that did not move, or that diverged, has no direction.
        moves = {t: move for t, move in moves.items() if 0 < move.norm() < torch.inf}
        result = _measure_solution(trace, o, list(moves.values()), epsilon, count, seed)
        results.append(result)
        for t, value in zip(moves, result.radii.tolist(), strict=True):
            radius[t, o] = value
    with torch.no_grad():
        losses = torch.stack([trace.value(o, trace.solution(o)) for o in range(n)]).double().cpu()
    updates = torch.stack(thetas[1:]) - torch.stack(thetas[:-1])
    return Examination(
        epsilon=epsilon,
        parameters=trace.num_params,
        losses=losses,
        distance_from_init=torch.stack([(theta - thetas[0]).norm() for theta in thetas[1:]]).cpu(),
        updates=updates.norm(dim=1).cpu(),
        distance=distance,
        radius=radius,
        steepest=torch.tensor([result.steepest for result in results], dtype=torch.float64),
        random=torch.tensor([result.random for result in results], dtype=torch.float64),
        forgetting=pairs,
        rounding=rounding_error(trace, losses + pairs.measured, losses + pairs.predicted),
        eigenvalues=torch.stack([result.eigenvalues for result in results]).double().cpu(),
        residuals=torch.stack([result.residuals for result in results]).double().cpu(),
        trace=torch.stack([result.trace for result in results]).cpu(),
        trace_error=torch.stack([result.trace_error for result in results]).cpu(),
    )


class _Solution(NamedTuple):
    """The region and the curvature at one solution."""

    radii: Tensor
    steepest: float
    random: float
    eigenvalues: Tensor
    residuals: Tensor
    trace: Tensor
    trace_error: Tensor


def _measure_solution(
    trace: TrainingTrace, task: int, moves: Sequence[Tensor], epsilon: float, count: int, seed: int
) -> _Solution:
    product, start = trace.hessian(task), trace.random_start(seed)
    top = lanczos(product, start, count)
    signs = random_signs(2 * max(2, count), trace.num_params, torch.Generator().manual_seed(seed), start.dtype)
    total = estimate_trace(product, signs.to(start.device), trace.hvp_batch_size)
    units = [(move / move.norm()).to(start) for move in moves]
    steep = [top.vectors[0], -top.vectors[0]] if bool(top.values.isfinite().all()) else []
    directions = torch.stack([*units, *steep, *unit_directions(trace, task, NUM_RANDOM_DIRECTIONS, seed)])
    expansion = exact_taylor(trace, task, directions)
    radii = region_radii(trace, task, expansion, directions, epsilon).radii
    along_moves, along_top, random = radii.split([len(units), len(steep), NUM_RANDOM_DIRECTIONS])
    steepest = float(along_top.min()) if steep else math.nan
    return _Solution(along_moves, steepest, float(random.median()), top.values, top.residuals, total.value, total.error)
