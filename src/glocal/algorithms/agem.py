r"""Averaged gradient episodic memory, A-GEM (§5.1): Eq. GEM-obj with one constraint on the mean past loss. Global."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

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

    def uniforms(self, model: Model) -> int:
        return self.slots

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        enough = self.filling == "batch" or self.slots >= model.tasks
        require(enough, f"agem with slots={self.slots} cannot store an example of each of {model.tasks} tasks.")
        return buffer.empty(self.slots, example)

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        replay = buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, batch.random)
        reference = model.grad(params, replay.x, replay.y, replay.weight)
        overlap, square = inner(grads, reference), inner(reference, reference)
        # During the first task nothing is stored: the reference and the coefficient are 0.
        coefficient = overlap.clamp(max=0) / square.clamp(min=torch.finfo(square.dtype).tiny)
        return {k: g - coefficient * reference[k] for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        memory = {k: v.clone() for k, v in memory.items()}
        if self.filling == "batch":
            rows, random = draw_batch(data.random, model.batch_size)
            return buffer.reservoir(memory, Batch(data.x[rows], data.y[rows], random, data.task), random)
        share = min(self.slots // model.tasks, data.y.shape[0])
        rows = data.random.topk(share).indices
        slot = memory["count"] + torch.arange(share, device=data.y.device)
        examples = Batch(data.x[rows], data.y[rows], data.random, data.task)
        return buffer.write(memory, examples, slot, memory["count"] + share)

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return buffer.task_loss(model, memory, task)


def draw_batch(random: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw `count` examples (or all) and a fresh uniform number for each, from one uniform number per example.

    The examples with the largest numbers are drawn. Given c, the largest number of the others, their numbers are
    independent and uniform in (c, 1), so they can be rescaled and reused. The rows are sorted, because in the order of
    the numbers the two would be dependent.
    """
    n = random.shape[0]
    top = random.topk(min(count + 1, n))
    rows = top.indices[:count].sort().values
    bound = top.values[-1].double() if count < n else 0.0
    return rows, (random[rows].double() - bound) / (1 - bound)
