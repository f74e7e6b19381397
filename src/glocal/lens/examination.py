r"""Measure how local a training was, from a network, its loss, the tasks' data and checkpoints θ_0, θ_1, …:

    distance    ‖θ_t − θ_o‖ after every later task t, and the radius of Ω^ε_o (§3.2) in the same direction
    error       ξ_o(θ_t) of the second-order expansion with the exact Hessian: θ_t ∈ Ω^ε_o if it is below ε
    forgetting  predicted by Eq. forgetting-quadratic, and measured
    curvature   the largest eigenvalues of H_o and its trace

It recommends no algorithm, as docs/experiments/forecast.md decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glocal.curvature.lanczos import lanczos
from glocal.curvature.network import AnyLoss, explain_missing_derivatives
from glocal.curvature.spectrum import trace as estimate_trace
from glocal.lens.approximation_error import rounding_error
from glocal.lens.checkpoints import TaskData, trace_checkpoints
from glocal.lens.forgetting import Forgetting, forgetting
from glocal.lens.locality_assumption import region_radii, resolve_epsilon
from glocal.lens.perturbation import unit_directions
from glocal.lens.taylor import exact_taylor
from glocal.lens.training_trace import MAX_EXAMPLES, TrainingTrace, require_positive
from glocal.precision import full_precision

NUM_RANDOM_DIRECTIONS = 5
"""Random directions in which the radius of a region is measured."""


@dataclass(frozen=True)
class Examination:
    """Results for N learned tasks, counted from 0: matrices (N, N) are [t, o], NaN where o ≥ t; vectors (N,)."""

    epsilon: float
    parameters: int  # P
    losses: Tensor  # L_o(θ_o)
    updates: Tensor  # ‖θ_t − θ_{t−1}‖
    distance: Tensor  # ‖θ_t − θ_o‖
    radius: Tensor  # how far Ω^ε_o extends from θ_o towards θ_t; inf if no border was found
    eigenvector_radius: Tensor  # along the eigenvector of largest |eigenvalue|, the smaller one of both signs
    random_radius: Tensor  # the median in random directions
    forgetting: Forgetting
    rounding: Tensor  # a bound on the rounding error of ξ_o
    eigenvalues: Tensor  # the largest in magnitude first, (N, k)
    trace: Tensor
    trace_error: Tensor  # the standard error of the trace

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
    def finding(self) -> str:
        """Whether training left the ε-regions of earlier tasks, in one sentence."""
        errors = self.error[self.later]
        if not len(errors):
            radii = f"{self.eigenvector_radius[0]:.3g} along v_1 and {self.random_radius[0]:.3g} in random directions"
            return f"Training moved by {self.updates[0]:.3g}; the ε-region of its task extends {radii}."
        diverged, outside = int((~errors.isfinite()).sum()), int((errors >= self.epsilon).sum())
        if diverged:
            return f"Training diverged: the errors of {diverged} of {len(errors)} pairs of tasks are not finite."
        return f"Training left the ε-region of an earlier task in {outside} of {len(errors)} pairs of tasks."

    @property
    def closing(self) -> list[str]:
        """The finding, and the warning if there is one."""
        return [line for line in (self.finding, self.warning) if line]

    @property
    def warning(self) -> str | None:
        """A warning if BatchNorm statistics alone raised or lowered old losses by ε or more."""
        changes = self.forgetting.statistics[self.later]
        if bool((changes >= self.epsilon).any()):
            return (
                f"BatchNorm's running statistics alone raised old losses by up to {float(changes.max()):.3g}. Freeze "
                "them after the first task, or keep them for each task."
            )
        if bool((-changes >= self.epsilon).any()):
            return (
                f"BatchNorm's running statistics alone lowered old losses by up to {float(-changes.min()):.3g}. The "
                "measured forgetting has this; the expansion, which is one in the parameters alone, does not."
            )
        return None

    @property
    def largest(self) -> Tensor:
        """λ_max of every H_o; NaN if only negative eigenvalues are among the computed ones."""
        largest = self.eigenvalues.amax(1)
        complete = self.eigenvalues.shape[1] == self.parameters
        return largest if complete else torch.where(largest > 0, largest, torch.nan)

    def rows(self) -> list[dict[str, Any]]:
        """Return a table with a row for every task, counted from 1, measured after the last one."""
        columns = {
            "loss": self.losses,
            "largest_eigenvalue": self.largest,
            "trace": self.trace,
            "distance": self.distance[-1],
            "radius": self.radius[-1],
            "eigenvector_radius": self.eigenvector_radius,
            "random_radius": self.random_radius,
            "predicted": self.forgetting.predicted[-1],
            "measured": self.forgetting.measured[-1],
        }
        inside = [*self.inside[-1, :-1].tolist(), None]
        return [
            {"task": o + 1, **{name: float(column[o]) for name, column in columns.items()}, "inside": inside[o]}
            for o in range(len(inside))
        ]

    def __str__(self) -> str:
        from glocal.report.lens_figures import examination_table

        return "\n".join([examination_table(self).text(), "", *self.closing])

    def plot(self, path: str | Path) -> Path:
        """Save the figure as PNG, PDF, SVG or PGF."""
        from glocal.report import figure, lens_figures

        return figure.save_figure(partial(lens_figures.draw_examination, self), path)


@full_precision()
def examine(
    module: nn.Module,
    loss: AnyLoss,
    tasks: Sequence[TaskData],
    checkpoints: Sequence[Mapping[str, Any] | str | Path],
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
        checkpoints: θ_0 (the initialization), θ_1 (after task 1), …: state dicts, or paths of safetensors files. They
            may be in half precision, and may leave out what was not trained: it is as in `module`. θ_1 may equal θ_0,
            a network that was pretrained on the first task.
        epsilon: ε of the ε-regions (default: 0.1 × the mean over tasks of L_o(θ_0) − L_o(θ_o)).
        examples: the largest number of examples per task, evenly spaced, or the first ones of an iterable. Errors and
            radii are estimates from them.
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
    epsilon = resolve_epsilon(epsilon, trace)
    report = on_progress or (lambda done, total, text: None)
    report(0, n, "forgetting")
    pairs = forgetting(trace)
    thetas = torch.stack([trace.theta(t).double() for t in range(-1, n)])
    start, probes = trace.random_start(seed), trace.random_probes(2 * max(2, count), seed)
    distance, radius = torch.full((2, n, n), torch.nan, dtype=torch.float64)
    eigenvector_radius, random_radius = torch.full((2, n), torch.nan, dtype=torch.float64)
    spectra, traces = [], []
    for o in range(n):
        report(o, n, f"solution of task {o + 1}")
        hessian = trace.hessian(o)
        top = lanczos(hessian, start, count)
        spectra.append(top.values.double())
        traces.append(torch.stack(estimate_trace(hessian, probes, trace.hvp_batch_size)))
        moves = {t: thetas[t + 1] - thetas[o + 1] for t in range(o + 1, n)}
        for t, move in moves.items():
            distance[t, o] = move.norm()
        # A task that did not move, or that diverged, has no direction.
        later = [t for t in moves if 0 < distance[t, o] < torch.inf]
        units = [(moves[t] / moves[t].norm()).to(start) for t in later]
        eigenvectors = [top.vectors[0], -top.vectors[0]] if bool(top.values.isfinite().all()) else []  # or it diverged
        directions = torch.stack([*units, *eigenvectors, *unit_directions(trace, o, NUM_RANDOM_DIRECTIONS, seed)])
        radii = region_radii(trace, o, exact_taylor(trace, o, directions), directions, epsilon)
        towards_later, along_top, in_random = radii.split([len(units), len(eigenvectors), NUM_RANDOM_DIRECTIONS])
        radius[later, o] = towards_later
        eigenvector_radius[o] = along_top.min() if eigenvectors else torch.nan
        random_radius[o] = in_random.median() if eigenvectors else torch.nan
    trace_values, trace_errors = torch.stack(traces, 1).cpu()
    with torch.no_grad():
        losses = torch.stack([trace.value(o, trace.solution(o)) for o in range(n)]).double().cpu()
    return Examination(
        epsilon=epsilon,
        parameters=trace.num_params,
        losses=losses,
        updates=thetas.diff(dim=0).norm(dim=1).cpu(),
        distance=distance,
        radius=radius,
        eigenvector_radius=eigenvector_radius,
        random_radius=random_radius,
        forgetting=pairs,
        rounding=rounding_error(trace, losses + pairs.measured, losses + pairs.predicted),
        eigenvalues=torch.stack(spectra).cpu(),
        trace=trace_values,
        trace_error=trace_errors,
    )
