r"""Averaged gradient episodic memory (§5.1, Eq. GEM-obj, with one constraint on the mean of all finished tasks)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms import buffer
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.errors import require, unknown
from glocal.networks.model import Model
from glocal.tree import Params, inner

Filling = Literal["share", "batch"]
FILLINGS = ("share", "batch")


@dataclass(frozen=True)
class AGEM(Algorithm):
    r"""Minimises L_t without raising, to first order, the mean loss \hat L on the stored examples:

        g ← g − min(0, g·r) / (r·r) r,   r = ∇\hat L(θ) on a batch drawn from the memory.

    \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ). It is linearised at the current θ, not at θ_o: global.
    The paper's numbers were measured with `filling='batch'`.
    """

    name: ClassVar[str] = "agem"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples, an equal share of them for every task"
    memory_size: ClassVar[str] = "slots examples"

    slots: int = 500
    """Examples the memory holds after the last task."""
    replay: int = 0
    """Examples the reference gradient is taken on; 0: as many as a full batch has."""
    filling: Filling = "share"
    """What a finished task leaves: an equal share of the slots, or one batch, by reservoir sampling, as published."""

    def __post_init__(self) -> None:
        if self.filling not in FILLINGS:
            raise unknown("filling", self.filling, FILLINGS)
        require(self.slots >= 1, f"agem needs slots of at least 1; {self.slots} was given.")
        require(self.replay >= 0, f"agem needs a replay of at least 0; {self.replay} was given.")

    def uniforms(self, model: Model) -> int:
        return self.slots

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        enough = self.filling == "batch" or self.slots >= model.tasks
        require(enough, f"agem with slots={self.slots} cannot hold one example of each of {model.tasks} tasks.")
        return buffer.empty(self.slots, example)

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        drawn = buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, batch.random)
        reference = model.grad(params, drawn.x, drawn.y, drawn.weight)
        overlap, length = inner(grads, reference), inner(reference, reference)
        # Before the first task ends nothing is stored: the reference is 0 and so is what is taken away.
        harmful = overlap.clamp(max=0) / length.clamp(min=torch.finfo(length.dtype).tiny)
        return {k: g - harmful * reference[k] for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        own = {k: v.clone() for k, v in memory.items()}
        if self.filling == "batch":
            chosen, random = draw_with_numbers(data.random, model.batch_size)
            return buffer.reservoir(own, Batch(data.x[chosen], data.y[chosen], random, data.task), random)
        share = min(self.slots // model.tasks, data.y.shape[0])
        chosen = data.random.topk(share).indices
        slot = own["seen"] + torch.arange(share, device=data.y.device)
        kept = Batch(data.x[chosen], data.y[chosen], data.random, data.task)
        return buffer.write(own, kept, slot, own["seen"] + share)

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return buffer.task_loss(model, memory, task)


def draw_with_numbers(random: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` examples (or all), drawn by one uniform number each, and a uniform number for each of them that is left.

    Those with the largest numbers are drawn. Given the largest of the others, c, theirs are uniform in (c, 1) and
    independent of each other and of which examples they belong to, as long as these do not stand in the numbers' order.
    """
    n = random.shape[0]
    top = random.topk(min(count + 1, n))
    chosen = top.indices[:count].sort().values
    border = top.values[-1].double() if count < n else 0.0
    return chosen, (random[chosen].double() - border) / (1 - border)
