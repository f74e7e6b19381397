r"""Experience replay (§5.1): \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ), Eq. replay-approx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.algorithms import buffer
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory, Step
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class ER(Algorithm):
    r"""Minimises the mean loss over the stream's batch and a batch drawn from a reservoir of all examples seen.

    S_o is chosen by chance, never by θ_o: global.
    """

    name: ClassVar[str] = "er"
    family: ClassVar[str] = "replay"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples of all tasks, by reservoir sampling"
    memory_size: ClassVar[str] = "slots examples"

    slots: int = 500
    """Examples the reservoir holds."""
    replay: int = 0
    """Examples drawn at every step; 0: as many as a full batch has."""

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"er needs slots of at least 1; {self.slots} was given.")
        require(self.replay >= 0, f"er needs a replay of at least 0; {self.replay} was given.")

    def uniforms(self, model: Model) -> int:
        return model.batch_size + self.slots

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return buffer.empty(self.slots, example)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        drawn = buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, batch.random[-self.slots :])
        weight = torch.cat([torch.ones_like(batch.random[: batch.y.shape[0]]), drawn.weight])
        return model.loss(params, torch.cat([batch.x, drawn.x]), torch.cat([batch.y, drawn.y]), weight)

    def observe(self, memory: Memory, step: Step) -> Memory:
        return buffer.reservoir(memory, step.batch, step.batch.random[: step.batch.y.shape[0]])

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return buffer.task_loss(model, memory, task)
