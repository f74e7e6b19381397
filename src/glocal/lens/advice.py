r"""Recommend a family of algorithms for a training, by what the paper says of each (§3.2, §4, §5).

1. A local approximation needs Assumption 3.2, θ ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t. If some θ_t is outside the ε-region of an older
   task, expansions at solutions do not hold: use replay, whose \hat L_o is global.
2. If all are inside, a quadratic holds, as a penalty (ewc, laplace, optimal-soft) or as a constraint (ogd,
   optimal-hard). Theorem 4.1 assumes that nothing was forgotten before, |E(t)| < ε, and a constraint leaves room to
   learn if few directions are curved: the k largest eigenvalues, of 2k or more, have half of the trace or more. Then
   use a constraint, else a penalty. The theorem also assumes minima: if the magnitudes of the largest eigenvalues sum
   to more than the trace, some curvature is negative, and a penalty is recommended.
3. After a single task the next one is unknown. If it moves as far as the first one did, it stays inside in every
   direction if that is less than the radius along the top eigenvector; otherwise replay is the safe choice.

This is a rule of thumb, not a theorem, and it ignores costs such as memory, privacy and time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from glocal.algorithms.algorithm import Locality

Family: TypeAlias = Literal["quadratic", "constraint", "replay"]
DESCRIPTIONS = {
    "quadratic": "a local quadratic penalty",
    "constraint": "a local orthogonal constraint",
    "replay": "replay, which is global",
}
EXAMPLES = {
    "quadratic": ("ewc", "laplace", "optimal-soft"),
    "constraint": ("ogd", "ogd-gtl", "optimal-hard"),
    "replay": ("er", "agem", "gem"),
}
MIN_TRACE_SHARE = 0.5
"""From this share of the trace on, the largest eigenvalues count as most of the Hessian."""
MAX_TRACE_SHARE = 1.05
"""A larger share means negative curvature; the margin is for the estimated trace."""


@dataclass(frozen=True)
class Advice:
    """A family of algorithms and one sentence why."""

    family: Family
    reason: str

    @property
    def locality(self) -> Locality:
        return "global" if self.family == "replay" else "local"

    @property
    def algorithms(self) -> tuple[str, ...]:
        return EXAMPLES[self.family]

    def __str__(self) -> str:
        return f"Recommended: {DESCRIPTIONS[self.family]} ({', '.join(self.algorithms)}). {self.reason}"


class NextTask(NamedTuple):
    """How far the last task moved, and the radii of its region along the top eigenvector and a random direction."""

    distance: float
    steepest_radius: float
    random_radius: float


def advise(
    epsilon: float,
    errors: Tensor,
    average_forgetting: Tensor,
    eigenvalues: Tensor,
    trace: Tensor,
    *,
    parameters: int,
    next_task: NextTask,
) -> Advice:
    """Recommend a family of algorithms.

    Args:
        epsilon: ε.
        errors: ξ_o(θ_t) of all pairs o < t, (n,).
        average_forgetting: E(t) after every task, (N,).
        eigenvalues: the largest of every Hessian, (N, k).
        trace: of every Hessian, (N,).
        parameters: P.
        next_task: used if a single task was learned.
    """
    if not len(errors):
        return _advise_first_task(next_task)
    finite = errors.isfinite()
    if not bool(finite.all()):
        diverged = f"Training diverged: the errors of {int((~finite).sum())} of {len(errors)} pairs are not finite."
        return Advice("replay", f"{diverged} Lower the learning rate first.")
    outside = int((errors.abs() >= epsilon).sum())
    if outside:
        return Advice("replay", f"Training left the ε-region in {outside} of {len(errors)} pairs of tasks.")
    share = float((eigenvalues.abs().sum(1) / trace).median())
    largest = float(average_forgetting[average_forgetting.abs().argmax()])
    inside = "All later solutions are inside the ε-regions of earlier tasks"
    top = f"the {eigenvalues.shape[1]} largest eigenvalues are {100 * share:.0f} % of the trace"
    if not abs(largest) < epsilon:
        return Advice("quadratic", f"{inside}, but E(t) reaches {largest:.3g}, where Theorem 4.1 assumes 0.")
    if not 0 <= share <= MAX_TRACE_SHARE and not math.isnan(share):
        return Advice("quadratic", f"{inside}, but some curvature is negative, where Theorem 4.1 assumes minima.")
    if not MIN_TRACE_SHARE <= share < math.inf:
        return Advice("quadratic", f"{inside}, but many directions are curved: {top}.")
    if 2 * eigenvalues.shape[1] > parameters:
        return Advice("quadratic", f"{inside}, but {parameters} parameters leave few directions free.")
    return Advice("constraint", f"{inside}, and few directions are curved: {top}.")


def _advise_first_task(task: NextTask) -> Advice:
    if task.distance < task.steepest_radius:
        return Advice("quadratic", "Another task that moves as far as the first stays inside its ε-region.")
    if task.distance < task.random_radius:
        return Advice("replay", "Another task that moves as far as the first may leave its ε-region.")
    return Advice("replay", "Another task that moves as far as the first leaves its ε-region.")
