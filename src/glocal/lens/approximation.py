r"""The approximation error ξ_o(θ) = |\hat L_o(θ) − L_o(θ)| of finished tasks, along training and along rays (§3.2, §4).

It is measured for Taylor expansions at θ_o (`taylor_curves`), and for the \hat L_o that an algorithm states
(`own_curves`), with its memory M as it was at each moment. Not all of them mean a loss of task o alone:

- er, agem, gem, joint, ogd and its variants, ewc with anchors=each, pnn, packnet, hat: \hat L_o stands for L_o.
- ewc, laplace, optimal-soft, optimal-hard: the memory holds the sum over finished tasks, of which every o has an equal
  share beside its own L_o(θ_o). What such an algorithm approximates is the mean: `Curves.past` is its error. Weights λ
  are in \hat L_o as they are in the objective.
- si: an equal share, and no L_o(θ_o): known up to a constant. der, icarl: a distance to stored answers, which has its
  minimum near θ_o but another value there, and in units of its own; derpp adds to it. sgd, stable-sgd: 0.

Training follows gradients, to which constants are nothing. With `levelled` both are counted from their values at θ_o,

    ξ_o(θ) = | ( \hat L_o(θ) − \hat L_o(θ_o) ) − ( L_o(θ) − L_o(θ_o) ) |,

the error of the forgetting that \hat L_o foretells; for sgd that is forgetting itself.

An error that is not a number, as of losses that are both beyond numbers, counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.algorithm import Algorithm
from glocal.algorithms.hessian_structures import Matrix, Structure
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Data
from glocal.errors import require
from glocal.lens.perturbation import AT_ONCE
from glocal.lens.record import RecordedRun, Snapshot, snapshots_of
from glocal.lens.taylor import taylor
from glocal.lens.trace import MAX_EXAMPLES, Checkpoint, TrainingTrace, distance
from glocal.networks.model import Model
from glocal.tree import from_vector, to_vector

Approximation: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]  # θ ↦ \hat L_o(θ)
RADII = tuple(10.0 ** (exponent / 4) for exponent in range(-8, 1))


@dataclass(frozen=True)
class Curves:
    r"""L_o and \hat L_o at n moments, (n, T) each in float64; NaN where task o is not finished.

    distance[·, o] = ‖θ − θ_o‖₂, NaN where it is not known; finished and step are (n,).
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
        """ξ_o, (n, T); NaN where task o is not finished, and nowhere else."""
        return torch.where(self.known, difference(self.approximate, self.true), torch.nan)

    @property
    def past(self) -> Tensor:
        r"""| (1/t) Σ_o ( \hat L_o − L_o ) | over the t finished tasks, (n,); 0 where there is none."""
        signed = torch.where(self.known, self.approximate - self.true, 0).sum(1)
        return difference(signed, torch.zeros_like(signed)) / self.finished.clamp(min=1)


def difference(approximate: Tensor, true: Tensor) -> Tensor:
    """|\\hat L − L|, inf where it is not a number."""
    return (approximate - true).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def taylor_curves(
    trace: TrainingTrace,
    order: int = 2,
    structure: Structure = "diagonal",
    matrix: Matrix | None = None,
    rank: int = 20,
    snapshots: Sequence[Snapshot] | None = None,
) -> Curves:
    """ξ_o of the expansion of every finished task, at the moments of a trajectory or, if not said, at θ_0, θ_1, …"""
    snapshots = snapshots_of(trace) if snapshots is None else snapshots
    needed = max((s.finished for s in snapshots), default=0)
    return curves(trace, snapshots, [taylor(trace, task, order, structure, matrix, rank) for task in range(needed)])


def curves(trace: TrainingTrace, moments: Sequence[Snapshot], approximations: Sequence[Approximation]) -> Curves:
    r"""ξ_o of any \hat L_o, one for every task that is finished at the last of the moments.

    Both are functions of θ alone: the network's other tensors, BatchNorm's statistics, are those of θ_o.
    """
    return curves_by(trace, moments, {"": approximations})[""]


def curves_by(
    trace: TrainingTrace,
    moments: Sequence[Snapshot],
    approximations: Mapping[str, Sequence[Approximation]],
    tell: Callable[[int], None] | None = None,
) -> dict[str, Curves]:
    """The same of several kinds of them, by their names. `tell` hears how many moments are done."""

    def all_of_them(moment: Snapshot, task: int) -> tuple[Tensor, dict[str, Tensor]]:
        there = Checkpoint(moment.checkpoint.params, trace.solution(task).buffers)
        return trace.value(task, there), {name: each[task](there.params) for name, each in approximations.items()}

    return _curves(trace, moments, list(approximations), all_of_them, tell)


def own_curves(trajectory: RecordedRun, levelled: bool = False) -> Curves:
    r"""ξ_o of the algorithm's own \hat L_o, with its memory at each moment; `levelled`, counted from θ_o."""
    algorithm, model, trace = trajectory.algorithm, trajectory.model, trajectory.trace

    def both(moment: Snapshot, task: int) -> tuple[Tensor, Tensor]:
        true = own_loss(algorithm, model, moment, trace.tasks[task], task)
        return true, own_approximation(algorithm, model, moment, task)

    def counted(moment: Snapshot, task: int) -> tuple[Tensor, dict[str, Tensor]]:
        true, approximate = both(moment, task)
        if levelled:
            then_true, then_approximate = both(moment._replace(checkpoint=trace.checkpoints[task + 1]), task)
            approximate = approximate - then_approximate + then_true
        return true, {"own": approximate}

    return _curves(trace, trajectory.snapshots, ["own"], counted)["own"]


def own_loss(algorithm: Algorithm, model: Model, moment: Snapshot, data: Data, task: int) -> Tensor:
    """L_o(θ) as the run itself computes it: of the network's outputs, and where parameters are split among the tasks,
    of its outputs for task o. iCaRL's nearest mean is how it answers, and not what its network is trained by."""
    bound, params = model.bind(moment.checkpoint.buffers, training=False), moment.checkpoint.params

    def outputs(x: Tensor) -> Tensor:
        if isinstance(algorithm, Partition):
            return algorithm.predict(bound, params, moment.memory, x, task)
        return bound.outputs(params, x)

    parts = zip(data.x.split(MAX_EXAMPLES), data.y.split(MAX_EXAMPLES), strict=True)
    return torch.stack([model.criterion.per_sample(outputs(x), y).sum() for x, y in parts]).sum() / len(data.y)


def own_approximation(algorithm: Algorithm, model: Model, moment: Snapshot, task: int) -> Tensor:
    r"""\hat L_o(θ) by the algorithm's memory at the moment."""
    bound = model.bind(moment.checkpoint.buffers, training=False)
    return algorithm.approximation(bound, moment.memory, task)(moment.checkpoint.params)


@torch.no_grad()
def _curves(
    trace: TrainingTrace,
    moments: Sequence[Snapshot],
    names: Sequence[str],
    measure: Callable[[Snapshot, int], tuple[Tensor, Mapping[str, Tensor]]],
    tell: Callable[[int], None] | None = None,
) -> dict[str, Curves]:
    """From L_o at a moment, and every \\hat L_o there by its name."""
    require(bool(moments), "no moment was given; allowed: one and more.")
    found = len(trace.checkpoints) - 1
    latest = max(m.finished for m in moments)
    require(latest <= found, f"a moment with {latest} finished tasks was given; the trace has solutions of {found}.")
    unknown = torch.full((2 + len(names), len(moments), len(trace.tasks)), torch.nan, dtype=torch.float64)
    true, distances, approximate = unknown[0], unknown[1], dict(zip(names, unknown[2:], strict=True))
    for i, moment in enumerate(moments):
        for o in range(moment.finished):
            true[i, o], each = measure(moment, o)
            for name, value in each.items():
                approximate[name][i, o] = value
            distances[i, o] = distance(moment.checkpoint, trace.checkpoints[o + 1])
        if tell is not None:
            tell(i + 1)
    finished, step = (torch.tensor([getattr(m, name) for m in moments]) for name in ("finished", "step"))
    return {name: Curves(finished, step, true, values, distances) for name, values in approximate.items()}


@torch.no_grad()
def on_rays(
    trace: TrainingTrace, task: int, approximation: Approximation, directions: Tensor, radii: Tensor
) -> tuple[Tensor, Tensor]:
    r"""L_o and \hat L_o at θ_o + r u for unit vectors u, (k, P), and radii r, (k, m) or (m,): (k, m) each, in float64.

    Many small networks are evaluated side by side; large ones, and those that cannot be mapped, one after the other.
    """
    point = trace.solution(task)
    origin = to_vector(point.params)
    units = directions.to(origin)
    radii = radii.to(origin).expand(len(units), -1)

    def one(unit: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        params = from_vector(origin + radius * unit, point.params)
        return trace.value(task, Checkpoint(params, point.buffers)), approximation(params)

    rows = torch.arange(len(units), device=origin.device).repeat_interleave(radii.shape[1])
    together = min(32, max(1, AT_ONCE // (origin.element_size() * origin.numel())))
    found: list[tuple[Tensor, Tensor]] = []
    for some, r in zip(rows.split(together), radii.reshape(-1).split(together), strict=True):
        if together > 1:
            try:
                found.append(vmap(one)(units[some], r))
                continue
            except RuntimeError:
                together = 1  # a network or an approximation that cannot be mapped
        each = [one(units[i], radius) for i, radius in zip(some.tolist(), r, strict=True)]
        found.append((torch.stack([a for a, _ in each]), torch.stack([b for _, b in each])))
    true, approximate = (torch.cat(parts).double().view(radii.shape).cpu() for parts in zip(*found, strict=True))
    return true, approximate


@dataclass(frozen=True)
class Order:
    """ξ ≈ C rᵖ along a ray: p with its standard error, fitted to log ξ against log r where `used`. NaN: not known."""

    exponent: float
    standard_error: float
    radii: Tensor
    errors: Tensor
    used: Tensor


def order(
    trace: TrainingTrace, task: int, approximation: Approximation, direction: Tensor, radii: Sequence[float] = RADII
) -> Order:
    """How ξ_o grows with the distance from θ_o, along the ray θ_o + r u, u the direction (P,) scaled to length 1.

    The paper bounds the error of an expansion of order p by O(rᵖ); where the loss is smooth, and r small, the first
    term that is left out makes it r^{p+1}. Errors that are no more than rounding of the losses are left out of the fit.
    In single precision rounding hides what is of higher order: take `trace.double()` and an approximation of it.
    """
    length = direction.norm()
    require(bool(0 < length < torch.inf), f"a ray's direction has a finite length above 0; {float(length)} was given.")
    at = torch.tensor(radii, dtype=torch.float64)
    require(len(at) > 0 and bool(((at > 0) & (at < torch.inf)).all()), f"radii are positive; {radii} were given.")
    true, approximate = (rows[0] for rows in on_rays(trace, task, approximation, (direction / length)[None], at))
    return fit(at, difference(approximate, true), floor(trace, task, true, approximate))


def floor(trace: TrainingTrace, task: int, true: Tensor, approximate: Tensor) -> Tensor:
    """What rounding of the two losses may make of their difference."""
    rounding = torch.finfo(to_vector(trace.checkpoints[task + 1].params).dtype).eps
    return 100 * rounding * torch.maximum(true.abs(), approximate.abs())


def fit(radii: Tensor, errors: Tensor, least: Tensor | float = 0.0) -> Order:
    """Least squares of log ξ = log C + p log r over finite errors above the least: two give p, three its error."""
    used = (errors > least) & (errors > 0) & errors.isfinite()
    x, y = radii[used].double().log(), errors[used].double().log()
    spread = float((x - x.mean()).square().sum()) if len(x) else 0.0
    if spread == 0:
        return Order(math.nan, math.nan, radii, errors, used)
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    left = float((y - y.mean() - slope * (x - x.mean())).square().sum())
    deviation = math.sqrt(left / (len(x) - 2) / spread) if len(x) > 2 else math.nan
    return Order(slope, deviation, radii, errors, used)
