r"""Experience replay, ER (§5.1, Eq. replay-approx): \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ). Global."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal import rng
from glocal.algorithms import buffer
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory, Step
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class ER(Algorithm):
    r"""Minimise the mean loss over the current batch and a batch drawn from a reservoir of all past examples.

    S_o is chosen at random and does not depend on θ_o: global.
    """

    name: ClassVar[str] = "er"
    family: ClassVar[str] = "replay"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples of all tasks, by reservoir sampling"
    memory_size: ClassVar[str] = "slots examples"

    slots: int = 500
    """Number of stored examples."""
    replay: int = 0
    """Number of stored examples drawn per step; 0: the batch size."""

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"er needs slots of at least 1; {self.slots} was given.")
        require(self.replay >= 0, f"er needs a replay of at least 0; {self.replay} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return buffer.empty(self.slots, example)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        key = rng.fold_in(batch.key, "replay")
        replay = buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, key)
        weight = torch.cat([replay.weight.new_ones(batch.y.shape[0]), replay.weight])
        return model.loss(params, torch.cat([batch.x, replay.x]), torch.cat([batch.y, replay.y]), weight)

    def observe(self, memory: Memory, step: Step) -> Memory:
        return buffer.reservoir(memory, step.batch)

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return buffer.task_loss(model, memory, task)
