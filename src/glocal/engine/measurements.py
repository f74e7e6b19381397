"""Measurements of a cohort: the matrices R[t, o] that all metrics derive from, distances, losses and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

MEASURES = tuple(
    f"{split}_{scope}_{what}"
    for split in ("train", "test")
    for scope in ("class", "task")
    for what in ("accuracy", "loss")
)
"""'class': among all classes. 'task': among the task's own (task-incremental; the same where tasks share classes)."""

VECTORS = ("distance_from_init", "update_norm", "epoch_loss", "memory_bytes")


@dataclass
class Record:
    """Arrays with the runs along the first axis.

    matrices[m][run, t, o]: measure m on task o with θ_t, the parameters after t tasks; t = 0 is the initialisation.
    distance_from_init[run, t − 1] = ‖θ_t − θ_0‖₂ and update_norm[run, t − 1] = ‖θ_t − θ_{t−1}‖₂ for t = 1…T.
    epoch_loss[run, t, e]: the mean objective over epoch e of task t.
    memory_bytes[run, t]: the size of the algorithm's memory after t + 1 tasks.
    epoch_step_seconds: seconds per step and run, one value per epoch; a task's first epoch is left out, because it
    includes start-up, unless it is the only one.
    """

    matrices: dict[str, Tensor]
    distance_from_init: Tensor
    update_norm: Tensor
    epoch_loss: Tensor
    memory_bytes: Tensor
    seconds: float = 0.0
    epoch_step_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def blank(cls, runs: int, tasks: int, epochs: int) -> Record:
        unknown = lambda *shape: torch.full(shape, torch.nan, dtype=torch.float64)  # noqa: E731
        return cls(
            matrices={m: unknown(runs, tasks + 1, tasks) for m in MEASURES},
            distance_from_init=unknown(runs, tasks),
            update_norm=unknown(runs, tasks),
            epoch_loss=unknown(runs, tasks, epochs),
            memory_bytes=torch.zeros(runs, tasks, dtype=torch.long),
        )

    def arrays(self) -> dict[str, Tensor]:
        return {**self.matrices, **{k: getattr(self, k) for k in VECTORS}}

    @property
    def step_seconds(self) -> float | None:
        """Return the median seconds of one run's step, without start-up, consolidation and evaluation, or None."""
        return median(self.epoch_step_seconds) if self.epoch_step_seconds else None

    def select(self, runs: Sequence[int]) -> Record:
        """Return the record of some runs, with their share of the seconds; epoch_step_seconds is per run already."""
        part = replace(self, matrices={k: m[runs] for k, m in self.matrices.items()})
        for name in VECTORS:
            setattr(part, name, getattr(self, name)[runs])
        part.epoch_step_seconds = list(self.epoch_step_seconds)
        part.seconds = self.seconds * len(runs) / self.memory_bytes.shape[0]
        return part

    def load(self, arrays: dict[str, Tensor]) -> None:
        for name, held in self.arrays().items():
            held.copy_(arrays[name])
