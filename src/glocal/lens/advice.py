r"""Which family of algorithms a training asks for, by what the paper says of each (§3.2, §4, §5).

1. A local approximation needs the locality assumption, θ ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t. Where some θ_t was found outside the
   region of an older task, expansions at solutions do not hold: replay, whose \hat L_o is global.
2. Where all are inside, a quadratic holds, as a penalty (ewc, laplace, optimal-soft) or as a constraint (ogd,
   optimal-hard). Theorem 1 asks that nothing was forgotten before, |E(t)| < ε, and a constraint leaves room to learn
   where few directions bend: the k largest eigenvalues, of 2k or more, have half of the trace or more. Then a
   constraint; else a penalty. It also assumes minima: where the largest eigenvalues' magnitudes are more than the
   trace, curvature is negative elsewhere or among them, and a penalty is all that is said.
3. Of a single task nobody knows where the next one leads. If it goes as far as the last one did: inside in all
   directions if that is less than the steepest radius; otherwise replay is the safe choice.

A rule of thumb with numbers in it, and not a theorem: what costs a user most (memory, privacy, time) it does not know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Locality

Family: TypeAlias = Literal["quadratic", "constraint", "replay"]
CALLED = {
    "quadratic": "a local quadratic penalty",
    "constraint": "a local orthogonal constraint",
    "replay": "replay, which is global",
}
EXAMPLES = {
    "quadratic": ("ewc", "laplace", "optimal-soft"),
    "constraint": ("ogd", "ogd-gtl", "optimal-hard"),
    "replay": ("er", "agem", "gem"),
}
CONCENTRATED = 0.5
"""The share of the trace from which on its largest eigenvalues are most of a Hessian."""
DOWNWARDS = 1.05
"""The share that no Hessian at a minimum has; a trace is estimated."""


@dataclass(frozen=True)
class Advice:
    """A family of algorithms, those of it that have a name here, and the reason in words."""

    family: Family
    locality: Locality
    reason: str

    @property
    def algorithms(self) -> tuple[str, ...]:
        return EXAMPLES[self.family]

    def __str__(self) -> str:
        return f"Recommended: {CALLED[self.family]} ({', '.join(self.algorithms)}). {self.reason}"


def advise(
    epsilon: float,
    distance: Tensor,
    radius: Tensor,
    error: Tensor,
    forgotten: Tensor,
    eigenvalues: Tensor,
    trace: Tensor,
    parameters: int,
    following: tuple[float, float, float],
) -> Advice:
    """From all pairs o < t: ‖θ_t − θ_o‖, the radius on that way, ξ_o(θ_t), (n,) each; E(t), (N,); the top of every
    spectrum, (N, k), and the traces, (N,); the number of parameters; and for a task that is to follow, how far the
    last one went beside the steepest radius and a random one."""
    if not len(error):
        return _first(epsilon, following)
    outside = ~(error.abs() < epsilon)
    count, total = int(outside.sum()), len(error)
    if count:
        worst = int(torch.where(outside, error.abs().nan_to_num(nan=torch.inf), -1).argmax())
        if not bool(error[worst].isfinite()):
            return Advice(
                "replay",
                "global",
                f"The losses of {int((~error.isfinite()).sum())} of {total} pairs of a task and a later solution, or "
                "their expansions, are not finite: training diverged. Lower the learning rate first.",
            )
        pairs = "pair" if total == 1 else "pairs"
        return Advice(
            "replay",
            "global",
            f"Training left the ε-region (ε = {epsilon:.3g}) in {count} of {total} {pairs} of a task and a later "
            "solution: "
            f"the worst is {float(distance[worst]):.3g} away, where on that way the region reaches "
            f"{_far(float(radius[worst]))} and the expansion is wrong by {float(error[worst].abs()):.3g}. "
            "What is built at old solutions does not hold there.",
        )
    nearest = float((radius / distance).nan_to_num(nan=torch.inf, posinf=torch.inf).min())
    known = f"whose radius is {nearest:.3g} times the way or more"
    reach = known if nearest < math.inf else "of which no border was found"
    begin = f"Every later solution is inside the ε-region (ε = {epsilon:.3g}) of every earlier task, {reach}. "
    share = float((eigenvalues.abs().sum(1) / trace).median())
    part = f"the {eigenvalues.shape[1]} largest eigenvalues are {100 * share:.0f} % of the trace"
    most = float(forgotten[forgotten.abs().argmax()])
    if not abs(most) < epsilon:
        then = "can lead back" if most > 0 else "can follow the slopes that are left"
        told = f"But E(t) came to {most:.3g}, where Theorem 1 assumes 0: a penalty {then}."
        return Advice("quadratic", "local", begin + told)
    if not 0 <= share <= DOWNWARDS and not math.isnan(share):
        why = "the trace is below 0" if share < 0 else part
        return Advice(
            "quadratic",
            "local",
            f"{begin}But some directions bend downwards: {why}, of which Theorem 1, at minima, says nothing.",
        )
    if not CONCENTRATED <= share < torch.inf:
        return Advice(
            "quadratic", "local", f"{begin}Curvature is spread out: {part}; a constraint would take them all."
        )
    if 2 * eigenvalues.shape[1] > parameters:
        few = f"{begin}The network has {parameters} parameters: a constraint would leave few directions free."
        return Advice("quadratic", "local", few)
    return Advice("constraint", "local", f"{begin}Few directions bend: {part}, and all others are free (Theorem 1).")


def beside_statistics(made: Advice, epsilon: float, statistics: Tensor) -> Advice:
    """With a word on what BatchNorm's statistics did to the losses of all pairs, (n,), where that is much."""
    if not bool((statistics.abs() >= epsilon).any()):
        return made
    most = float(statistics[statistics.abs().argmax()])
    told = (
        f" Apart from θ, normalisation's running statistics changed old losses, by {most:+.3g} at most: what keeps θ "
        "does not keep them. Freeze them after the first task, or keep them for each."
    )
    return replace(made, reason=made.reason + told)


def _first(epsilon: float, following: tuple[float, float, float]) -> Advice:
    far, steepest, random = following
    told = (
        f"One task was learnt. Its ε-region (ε = {epsilon:.3g}) reaches {_far(steepest)} in the steepest direction and "
        f"{_far(random)} in a random one; the task itself went {far:.3g} far. "
    )
    if far < steepest:
        return Advice("quadratic", "local", told + "Another such task stays inside, wherever it goes.")
    if far < random:
        return Advice("replay", "global", told + "Another such task may stay inside or not: replay is the safe choice.")
    return Advice("replay", "global", told + "Another such task leaves it.")


def _far(radius: float) -> str:
    return "farther than was looked" if radius == float("inf") else f"{radius:.3g}"
