r"""The ε-region of an approximation, Ω^ε_o = {θ : ξ_o(θ) < ε}, and the locality assumption (§3.2),

    θ ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t   while task t + 1 is learnt:

how far from θ_o the error stays below ε, along rays and along the way that training took, and when it no longer does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.errors import require
from glocal.lens.approximation import Approximation, Curves, difference, floor, on_rays
from glocal.lens.perturbation import principal, unit_directions
from glocal.lens.trace import MAX_EXAMPLES, TrainingTrace

GRID = tuple(10.0 ** (exponent / 4) for exponent in range(-16, 17))
"""Radii that are looked at first: 10⁻⁴ to 10⁴, four a decade."""
NEAR, FINER = 0.1, 8
"""Between two radii, one of which has an error of NEAR · ε or more, the border is looked for at FINER more."""
SMALLEST = 1e-30
"""Below it a radius is as good as 0."""


@dataclass(frozen=True)
class Radii:
    """How far ξ_o stays below ε along unit vectors (k, P): the largest radius before the first crossing, (k,).

    0 where ξ_o(θ_o) itself is not below ε; inf where no radius up to `largest` has an error of ε or more.
    """

    epsilon: float
    directions: Tensor
    radii: Tensor
    largest: float


def radii(
    trace: TrainingTrace,
    task: int,
    approximation: Approximation,
    directions: Tensor,
    epsilon: float,
    grid: tuple[float, ...] = GRID,
    tolerance: float = 1e-4,
) -> Radii:
    """The radius of Ω^ε_o along every direction, which is scaled to length 1.

    The first radius of a grid with an error of ε or more is found, and between it and the one before the crossing, by
    bisection, to within `tolerance` of itself. The grid is made finer where errors are near ε; a region that is left
    and entered again between two radii of the finer one is still missed.
    """
    positive(epsilon)
    require(0 < tolerance < 1, f"a tolerance is between 0 and 1; {tolerance} was given.")
    rising = len(grid) > 0 and all(a < b for a, b in zip((0.0, *grid), grid, strict=False)) and grid[-1] < torch.inf
    require(rising, f"a grid is of rising radii above 0; {grid} was given.")
    lengths = directions.norm(dim=-1, keepdim=True)
    allowed = directions.dim() == 2 and bool(((lengths > 0) & lengths.isfinite()).all())
    require(allowed, "directions are rows of P numbers, of finite lengths above 0; others were given.")
    units = directions / lengths

    def errors(which: Tensor, at: Tensor) -> Tensor:
        """Along some of the directions, at radii (directions, m)."""
        true, approximate = on_rays(trace, task, approximation, units[which.to(units.device)], at)
        found = difference(approximate, true)
        # What is no more than rounding of large losses is no error, and ends no region.
        rounded = found.isfinite() & (found <= floor(trace, task, true, approximate))
        return torch.where(rounded, 0.0, found)

    everywhere = torch.arange(len(units))
    before = errors(everywhere, torch.zeros(len(units), 1, dtype=torch.float64))[:, 0]
    last = torch.zeros(len(units), dtype=torch.float64)
    first = torch.where(before < epsilon, torch.inf, last)
    for low, high in pairwise((0.0, *grid)):
        walking = first.isinf().nonzero().flatten()
        if not len(walking):
            break
        here = errors(walking, torch.full((len(walking), 1), high, dtype=torch.float64))[:, 0]
        near = walking[~(torch.maximum(before[walking], here) < NEAR * epsilon)]
        before[walking], last[walking] = here, high
        if len(near):
            finer = torch.linspace(low, high, FINER + 2, dtype=torch.float64)
            out = ~(errors(near, finer[1:].expand(len(near), -1)) < epsilon)
            crossed, at = near[out.any(1)], out.long().argmax(1)[out.any(1)]
            last[crossed], first[crossed] = finer[at], finer[at + 1]
    while len(wide := (first.isfinite() & (first - last > tolerance * first.clamp(min=SMALLEST))).nonzero().flatten()):
        middle = (last[wide] + first[wide]) / 2
        holds = errors(wide, middle.unsqueeze(-1))[:, 0] < epsilon
        last[wide] = torch.where(holds, middle, last[wide])
        first[wide] = torch.where(holds, first[wide], middle)
    return Radii(epsilon, units, torch.where(first.isfinite(), last, torch.inf), grid[-1])


def principal_directions(
    trace: TrainingTrace, task: int, count: int = 10, samples: int = MAX_EXAMPLES, seed: int = 0
) -> Tensor:
    """v_1, …, v_k, −v_1, …, −v_k: the eigenvectors of H_o at θ_o of largest |eigenvalue|, in both senses, (2k, P)."""
    found = principal(trace, task, count, samples, seed).vectors
    return torch.cat([found, -found])


def random_directions(trace: TrainingTrace, task: int, count: int = 10, seed: int = 0) -> Tensor:
    """Uniform on the unit sphere, (count, P)."""
    return unit_directions(trace, task, count, seed)


class Stay(NamedTuple):
    """How long training stayed in Ω^ε_o after task o, (T,) each. Moments are all that is known of its way.

    inside: the largest ‖θ − θ_o‖ before it was first left; NaN where task o was never looked at, or never inside.
    outside: ‖θ − θ_o‖ where it was first seen outside; inf where it never was, NaN where o was never looked at.
    """

    inside: Tensor
    outside: Tensor


def stay(curves: Curves, epsilon: float) -> Stay:
    """The radius of every Ω^ε_o along the trajectory."""
    positive(epsilon)
    known, out = curves.known, ~(curves.error < epsilon)
    left = (known & out).long().cumsum(0) > 0
    before = torch.where(known & ~left, curves.distance, -torch.inf).amax(0)
    inside = torch.where(before.isinf(), torch.nan, before)
    first = (left & known).long().argmax(0)
    at_first = curves.distance.gather(0, first.unsqueeze(0))[0]
    outside = torch.where(left.any(0), at_first, torch.where(known.any(0), torch.inf, torch.nan))
    return Stay(inside, outside)


class Break(NamedTuple):
    """The first moment at which the locality assumption does not hold."""

    moment: int
    task: int  # the task in training, which is the number of finished ones
    step: int
    broken: tuple[int, ...]  # the finished tasks whose Ω^ε was left
    error: float  # the largest of their ξ
    after: int = -1  # the step of the moment before, at which it still held; −1: not known

    def __str__(self) -> str:
        tasks = f"task{'s' if len(self.broken) > 1 else ''} {', '.join(map(str, self.broken))}"
        done = f"{self.task} task{'s' if self.task > 1 else ''} finished"
        when = f"at step {self.step}" if self.step >= 0 else f"at moment {self.moment}"
        if 0 <= self.after < self.step - 1:
            when = f"between steps {self.after} and {self.step}"
        return f"locality broke {when}, with {done}: the error on {tasks} reached {self.error:.3g}"


@dataclass(frozen=True)
class Assumption:
    """Whether θ ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t at every moment, (n,); `smallest`, (n,): it does for every ε above. Without a
    finished task it always does, and `smallest` is 0."""

    epsilon: float
    holds: Tensor
    smallest: Tensor
    first_break: Break | None


def assumption(curves: Curves, epsilon: float) -> Assumption:
    """The locality assumption along a trajectory."""
    positive(epsilon)
    errors = torch.where(curves.known, curves.error, 0)
    smallest = errors.amax(1)
    holds = smallest < epsilon
    if bool(holds.all()):
        return Assumption(epsilon, holds, smallest, None)
    i = int((~holds).long().argmax())
    broken = tuple((~(errors[i] < epsilon)).nonzero().flatten().tolist())
    after = int(curves.step[i - 1]) if i else -1
    found = Break(i, int(curves.finished[i]), int(curves.step[i]), broken, float(smallest[i]), after)
    return Assumption(epsilon, holds, smallest, found)


def positive(epsilon: float) -> None:
    """Refuse an ε that no region has."""
    require(0 < epsilon < torch.inf, f"an ε-region has a finite ε above 0; {epsilon} was given.")
