r"""The approximation error ξ_o(θ) = |\hat L_o(θ) − L_o(θ)| of finished tasks, along training and along rays (§3.2, §4).

`error_curves` measures it for any approximation of θ alone, such as Taylor expansions at θ_o, and `own_curves` for the
\hat L_o that an algorithm states (`Algorithm.approximation`), with its memory M at each snapshot. What \hat L_o means
depends on the algorithm:

- er, agem, gem, joint, ogd and its variants, ewc with anchors=each, pnn, packnet, hat: \hat L_o approximates L_o.
- ewc, laplace, optimal-soft, optimal-hard: the memory holds the sum over finished tasks. Every o gets an equal share of
  it plus its own L_o(θ_o), so only the mean over tasks is meaningful: see `ErrorCurves.mean_error`. Penalty weights λ
  are included in \hat L_o as in the objective.
- si: an equal share without L_o(θ_o), so \hat L_o is known up to a constant. der, icarl: a distance to stored outputs,
  with a minimum near θ_o but another value and unit there; derpp adds to it. sgd, stable-sgd: 0.

Training follows gradients, which constants do not change. With `relative_to_solution` both losses are measured from
their values at θ_o,

    ξ_o(θ) = | ( \hat L_o(θ) − \hat L_o(θ_o) ) − ( L_o(θ) − L_o(θ_o) ) |,

the error of the forgetting that \hat L_o predicts; for sgd that is forgetting itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.algorithm import Algorithm, Memory
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Data
from glocal.errors import require
from glocal.lens.record import RecordedRun, Snapshot
from glocal.lens.taylor import Approximation
from glocal.lens.training_trace import MAX_EXAMPLES, Checkpoint, TrainingTrace, distance
from glocal.networks.model import Model
from glocal.tree import Params, from_vector, to_vector

RADII = tuple(10.0 ** (exponent / 4) for exponent in range(-8, 1))
MAX_BATCHED_BYTES = 64 << 20
"""Bytes of perturbed parameters that are evaluated as one batch: many small networks, or a large one at a time."""


@dataclass(frozen=True)
class ErrorCurves:
    r"""L_o and \hat L_o at n snapshots, (n, T) each in float64; NaN where task o is not finished.

    distance[·, o] = ‖θ − θ_o‖₂, NaN where unknown; finished and step are (n,).
    """

    finished: Tensor
    step: Tensor
    true: Tensor
    approximate: Tensor
    distance: Tensor

    @property
    def known(self) -> Tensor:
        """Whether task o is finished, (n, T)."""
        return torch.arange(self.true.shape[1]) < self.finished.unsqueeze(1)

    @property
    def error(self) -> Tensor:
        """ξ_o, (n, T); NaN exactly where task o is not finished."""
        return torch.where(self.known, abs_difference(self.approximate, self.true), torch.nan)

    @property
    def mean_error(self) -> Tensor:
        r"""| (1/t) Σ_o ( \hat L_o − L_o ) | over the t finished tasks, (n,); 0 if there are none."""
        signed = torch.where(self.known, self.approximate - self.true, 0).sum(1)
        return abs_difference(signed, torch.zeros_like(signed)) / self.finished.clamp(min=1)

    def rows(self, *columns: str) -> list[dict[str, Any]]:
        """Return a row for every snapshot and finished task: step, learned, task (from 1) and the columns."""
        tensors = {name: getattr(self, name) for name in columns}
        return [
            {"step": int(self.step[i]), "learned": int(self.finished[i]), "task": int(o) + 1}
            | {name: float(tensor[i, o]) for name, tensor in tensors.items()}
            for i, o in self.known.nonzero()
        ]


def abs_difference(approximate: Tensor, true: Tensor) -> Tensor:
    r"""Return |\hat L − L|, inf where it is NaN, for example of two infinite losses."""
    return (approximate - true).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def error_curves(
    trace: TrainingTrace,
    snapshots: Sequence[Snapshot],
    approximations: Mapping[str, Sequence[Approximation]],
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, ErrorCurves]:
    r"""Measure ξ_o of several kinds of approximations.

    L_o and \hat L_o are functions of θ alone: BatchNorm statistics are those of θ_o.

    Args:
        trace: the training.
        snapshots: where to measure.
        approximations: by name, one approximation for every task that is finished at the last snapshot.
        on_progress: called with the number of snapshots done.
    """

    def measure(snapshot: Snapshot, task: int) -> tuple[Tensor, dict[str, Tensor]]:
        point = Checkpoint(snapshot.checkpoint.params, trace.solution(task).buffers)
        return trace.value(task, point), {name: kind[task](point.params) for name, kind in approximations.items()}

    return _measure_curves(trace, snapshots, list(approximations), measure, on_progress)


def own_curves(run: RecordedRun, relative_to_solution: bool = False) -> ErrorCurves:
    r"""Measure ξ_o of the algorithm's own \hat L_o, with its memory at each snapshot."""
    algorithm, model, trace = run.algorithm, run.model, run.trace

    def measure(snapshot: Snapshot, task: int) -> tuple[Tensor, dict[str, Tensor]]:
        solution = snapshot._replace(checkpoint=trace.solution(task))
        points = (snapshot, solution) if relative_to_solution else (snapshot,)
        true, *true_offset = (own_loss(algorithm, model, point, trace.tasks[task], task) for point in points)
        approximate, *offset = (own_approximation(algorithm, model, point, task) for point in points)
        return true, {"own": approximate - offset[0] + true_offset[0] if relative_to_solution else approximate}

    return _measure_curves(trace, run.snapshots, ["own"], measure)["own"]


def own_loss(algorithm: Algorithm, model: Model, snapshot: Snapshot, data: Data, task: int) -> Tensor:
    """Return L_o(θ) of the outputs that the run trains: those for task o if parameters are split among tasks.

    iCaRL's nearest-mean classifier is how it predicts, not what its network is trained on.
    """
    (params, buffers), memory = snapshot.checkpoint, snapshot.memory
    bound = model.bind(buffers, training=False)
    split = isinstance(algorithm, Partition)
    outputs = partial(algorithm.predict, bound, params, memory, task=task) if split else partial(bound.outputs, params)
    chunks = zip(data.x.split(MAX_EXAMPLES), data.y.split(MAX_EXAMPLES), strict=True)
    return torch.stack([model.criterion.per_sample(outputs(x), y).sum() for x, y in chunks]).sum() / len(data.y)


def own_approximation(algorithm: Algorithm, model: Model, snapshot: Snapshot, task: int) -> Tensor:
    r"""Return \hat L_o(θ) of the algorithm's memory at the snapshot."""
    params, buffers = snapshot.checkpoint
    return evaluate_approximation(algorithm, model.bind(buffers, training=False), snapshot.memory, task, params)


def evaluate_approximation(algorithm: Algorithm, model: Model, memory: Memory, task: int, params: Params) -> Tensor:
    r"""Return \hat L_o(θ); raise an error unless `approximation` returns a function that returns a scalar tensor."""
    function = algorithm.approximation(model, memory, task)
    message = f"{algorithm.name}.approximation must return a function of the parameters; it returned"
    require(callable(function), f"{message} a {type(function).__name__}.")
    value = function(params)
    kind = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    scalar = isinstance(value, Tensor) and value.dim() == 0
    require(scalar, f"the approximation of {algorithm.name} must return a scalar tensor; it returned {kind}.")
    return value


@torch.no_grad()
def _measure_curves(
    trace: TrainingTrace,
    snapshots: Sequence[Snapshot],
    names: Sequence[str],
    measure: Callable[[Snapshot, int], tuple[Tensor, Mapping[str, Tensor]]],
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, ErrorCurves]:
    r"""Collect L_o and every named \hat L_o at all snapshots."""
    require(bool(snapshots), "no snapshots were given; at least one is needed.")
    blank = torch.full((2 + len(names), len(snapshots), len(trace.tasks)), torch.nan, dtype=torch.float64)
    true, distances, approximate = blank[0], blank[1], dict(zip(names, blank[2:], strict=True))
    for i, snapshot in enumerate(snapshots):
        for o in range(snapshot.finished):
            true[i, o], values = measure(snapshot, o)
            for name, value in values.items():
                approximate[name][i, o] = value
            distances[i, o] = distance(snapshot.checkpoint, trace.checkpoints[o + 1])
        if on_progress is not None:
            on_progress(i + 1)
    finished, step = (torch.tensor([getattr(s, name) for s in snapshots]) for name in ("finished", "step"))
    return {name: ErrorCurves(finished, step, true, values, distances) for name, values in approximate.items()}


@torch.no_grad()
def map_rays(
    function: Callable[[Tensor], tuple[Tensor, ...]], origin: Tensor, directions: Tensor, radii: Tensor
) -> tuple[Tensor, ...]:
    """Evaluate scalars at θ + r v for directions v (k, P) and radii r (k, m) or (m,): (k, m) each in float64, on CPU.

    Small networks are evaluated as a batch; large ones, and functions that `vmap` does not support, one at a time.
    """
    directions, radii = directions.to(origin), radii.to(origin).expand(len(directions), -1)
    rows = torch.arange(len(directions), device=origin.device).repeat_interleave(radii.shape[1])
    batch_size = min(32, max(1, MAX_BATCHED_BYTES // (origin.element_size() * origin.numel())))
    values: list[tuple[Tensor, ...]] = []
    for row, radius in zip(rows.split(batch_size), radii.reshape(-1).split(batch_size), strict=True):
        points = origin + radius.unsqueeze(1) * directions[row]
        if batch_size > 1 and len(points) > 1:
            try:
                values.append(vmap(function)(points))
                continue
            except RuntimeError:
                batch_size = 1  # not supported by vmap
        single = [function(point) for point in points]
        values.append(tuple(torch.stack(column) for column in zip(*single, strict=True)))
    return tuple(torch.cat(column).double().view(radii.shape).cpu() for column in zip(*values, strict=True))


def errors_on_rays(
    trace: TrainingTrace, task: int, approximation: Approximation, directions: Tensor, radii: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ξ_o at θ_o + r u, unit vectors u (k, P), radii r (k, m) or (m,), and a bound on its rounding error."""
    params, buffers = trace.solution(task)

    def both(theta: Tensor) -> tuple[Tensor, Tensor]:
        point = from_vector(theta, params)
        return trace.value(task, Checkpoint(point, buffers)), approximation(point)

    true, approximate = map_rays(both, to_vector(params), directions, radii)
    return abs_difference(approximate, true), rounding_error(trace, true, approximate)


@dataclass(frozen=True)
class ErrorOrder:
    """ξ ≈ C rᵖ along a ray: p and its standard error, fitted to log ξ over log r where `used`. NaN: unknown."""

    exponent: float
    standard_error: float
    radii: Tensor
    errors: Tensor
    used: Tensor


def error_order(
    trace: TrainingTrace, task: int, approximation: Approximation, direction: Tensor, radii: Sequence[float] = RADII
) -> ErrorOrder:
    """Measure how ξ_o grows with r along the ray θ_o + r u, u the direction (P,) scaled to length 1.

    The paper bounds the error of an expansion of order p by O(rᵖ); for a smooth loss and small r the first omitted term
    gives r^{p+1}. Errors within the rounding of the losses are not fitted. In single precision rounding hides high
    orders: use `trace.double()` and an approximation of it.
    """
    length, grid = direction.norm(), torch.tensor(radii, dtype=torch.float64)
    require(bool(0 < length < torch.inf), f"the direction has length {float(length)}; it must be finite and above 0.")
    positive = len(grid) > 0 and bool(((grid > 0) & (grid < torch.inf)).all())
    require(positive, f"radii = {radii} was given; they must be positive and finite.")
    errors, rounding = errors_on_rays(trace, task, approximation, (direction / length)[None], grid)
    return fit_order(grid, errors[0], rounding[0])


def rounding_error(trace: TrainingTrace, true: Tensor, approximate: Tensor) -> Tensor:
    """Return a bound on the rounding error of the difference of two losses."""
    return 100 * torch.finfo(trace.theta(-1).dtype).eps * torch.maximum(true.abs(), approximate.abs())


def fit_order(radii: Tensor, errors: Tensor, threshold: Tensor | float = 0.0) -> ErrorOrder:
    """Fit log ξ = log C + p log r by least squares to finite errors above the threshold.

    Two errors determine p, three its standard error.
    """
    from scipy.stats import linregress

    used = (errors > threshold) & (errors > 0) & errors.isfinite()
    x, y = radii[used].double().log(), errors[used].double().log()
    if len(x.unique()) < 2:
        return ErrorOrder(math.nan, math.nan, radii, errors, used)
    line = linregress(x, y)
    return ErrorOrder(float(line.slope), float(line.stderr) if len(x) > 2 else math.nan, radii, errors, used)
