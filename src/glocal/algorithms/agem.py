r"""Averaged gradient episodic memory, A-GEM (§5.1): Eq. GEM-obj with one constraint on the mean past loss. Global."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal import rng
from glocal.algorithms import buffer
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.errors import require, require_known
from glocal.networks.model import Model
from glocal.tree import Params, inner

Filling = Literal["share", "batch"]
FILLINGS = ("share", "batch")


@dataclass(frozen=True)
class AGEM(Algorithm):
    r"""Minimise L_t without increasing, to first order, the mean loss on the stored examples:

        g ← g − min(0, g·r) / (r·r) r,   r = ∇\hat L(θ) on a batch drawn from the memory.

    \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ) is linearised at the current θ, not at θ_o: global.
    The paper's results use `filling='batch'`.
    """

    name: ClassVar[str] = "agem"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples, equally many per task"
    memory_size: ClassVar[str] = "slots examples"

    slots: int = 500
    """Number of stored examples after the last task."""
    replay: int = 0
    """Number of stored examples per step for the reference gradient; 0: the batch size."""
    filling: Filling = "share"
    """Examples stored per task: share (slots / tasks) or batch (one batch, by reservoir sampling, as published)."""

    def __post_init__(self) -> None:
        require_known("filling", self.filling, FILLINGS)
        require(self.slots >= 1, f"agem needs slots of at least 1; {self.slots} was given.")
        require(self.replay >= 0, f"agem needs a replay of at least 0; {self.replay} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        enough = self.filling == "batch" or self.slots >= model.tasks
        require(enough, f"agem with slots={self.slots} cannot store an example of each of {model.tasks} tasks.")
        return buffer.empty(self.slots, example)

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        key = rng.fold_in(batch.key, "replay")
        replay = buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, key)
        reference = model.grad(params, replay.x, replay.y, replay.weight)
        overlap, square = inner(grads, reference), inner(reference, reference)
        # During the first task nothing is stored: the reference and the coefficient are 0.
        coefficient = overlap.clamp(max=0) / square.clamp(min=torch.finfo(square.dtype).tiny)
        return {k: g - coefficient * reference[k] for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        memory = {k: v.clone() for k, v in memory.items()}
        count = model.batch_size if self.filling == "batch" else self.slots // model.tasks
        rows = rng.choose(rng.fold_in(data.key, "examples"), data.y.shape[0], count)
        examples = data._replace(x=data.x[rows], y=data.y[rows])
        if self.filling == "batch":
            return buffer.reservoir(memory, examples)
        slot = memory["count"] + torch.arange(rows.shape[0], device=rows.device)
        return buffer.write(memory, examples, slot, memory["count"] + rows.shape[0])

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return buffer.task_loss(model, memory, task)
