r"""The approximation error along the whole way of a run, and the locality assumption at every moment of it (§3.2):

    ξ_o(θ) = |\hat L_o(θ) − L_o(θ)|   and   θ ∈ Ω^ε_1 ∩ … ∩ Ω^ε_t,

by the algorithm's own \hat L_o, with its memory as it was at each moment, and by the Taylor expansions at θ_o.

    found = along(open_run("runs/runs/0123456789abcdef").retrace(every_steps=10).run)
    print(found)
    found.plot("along.png")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from glocal.algorithms.partition import Partition
from glocal.errors import require
from glocal.lens.approximation import Curves, curves_by, own_curves, own_loss
from glocal.lens.examination import tenth
from glocal.lens.instruments import Rows, expansions
from glocal.lens.record import RecordedRun
from glocal.lens.region import Assumption, Stay, assumption, positive, stay
from glocal.precision import full_precision

OWN, LEVELLED = "own", "own, from θ_o"
"""\\hat L_o itself, which some algorithms know up to a constant, and what it foretells of forgetting: both it and L_o
counted from their values at θ_o (`approximation`)."""


@dataclass(frozen=True)
class Along:
    """What was seen: for every approximation, by its name, L_o, \\hat L_o and ‖θ − θ_o‖ at all moments."""

    algorithm: str
    epsilon: float
    curves: dict[str, Curves]

    @cached_property
    def assumptions(self) -> dict[str, Assumption]:
        """By each approximation, whether the assumption holds, the smallest ε, and the first break."""
        return {name: assumption(found, self.epsilon) for name, found in self.curves.items()}

    @cached_property
    def stays(self) -> dict[str, Stay]:
        """By each approximation, how far from θ_o its error stayed below ε."""
        return {name: stay(found, self.epsilon) for name, found in self.curves.items()}

    def rows(self) -> Rows:
        """One for every approximation, moment and finished task."""
        rows: Rows = []
        for name, found in self.curves.items():
            for i, (finished, step) in enumerate(zip(found.finished.tolist(), found.step.tolist(), strict=True)):
                for o in range(finished):
                    parts = {k: getattr(found, k) for k in ("true", "approximate", "error", "distance")}
                    numbers = {k: float(part[i, o]) for k, part in parts.items()}
                    rows.append({"approximation": name, "step": step, "learnt": finished, "task": o, **numbers})
        return rows

    def plot(self, path: str | Path) -> Path:
        """The figure, as PNG, PDF or SVG by the suffix."""
        from glocal.report.error_curves import save

        return save(self, path)

    def __str__(self) -> str:
        lines = [f"{self.algorithm}, ε = {self.epsilon:.3g}"]
        for name, found in self.assumptions.items():
            held = f"inside every old task's region, with errors up to {float(found.smallest.max()):.3g}"
            lines.append(f"{name}: {found.first_break or held}")
        return "\n".join(lines)


@full_precision()
def along(
    trajectory: RecordedRun, epsilon: float | None = None, tell: Callable[[int, int, str], None] | None = None
) -> Along:
    """Look at a trajectory. ε is a tenth of what learning a task gains unless given. Expansions are not of networks
    with outputs of their own for every task, nor of forms that a network does not have."""
    trace, moments = trajectory.trace, trajectory.snapshots
    require(len(trace.tasks) > 1, "of a single task there is nothing to say: nothing was learnt after it.")
    chosen = _default(trajectory) if epsilon is None else epsilon
    positive(chosen)
    tell = tell or (lambda done, whole, what: None)
    tell(0, len(moments), OWN)
    seen = {OWN: own_curves(trajectory), LEVELLED: own_curves(trajectory, levelled=True)}
    if not isinstance(trajectory.algorithm, Partition):
        seen |= curves_by(trace, moments, expansions(trace), lambda done: tell(done, len(moments), "expansions"))
    return Along(trajectory.algorithm.name, chosen, seen)


@torch.no_grad()
def _default(trajectory: RecordedRun) -> float:
    """As `examine` has it, of losses as the run itself computes them."""
    ends = {m.finished: m for m in reversed(trajectory.snapshots)}  # the first moment of each number
    gains = []
    for o, data in enumerate(trajectory.trace.tasks):
        before, after = (own_loss(trajectory.algorithm, trajectory.model, ends[t], data, o) for t in (0, o + 1))
        gains.append(before - after)
    return tenth(torch.stack(gains))
