r"""Joint training (§2, Eq. multi-task-expected): \hat L_o(θ) = L_o(θ), the exact multi-task loss. Global."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal import rng
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.buffer import take
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class Joint(Algorithm):
    r"""Minimise the multi-task loss on all data so far, the upper bound of continual learning:

        L^MT_t(θ) = (1/t) ( L_1(θ) + … + L_t(θ) ).

    A step's estimate is unbiased: (1/t) L_t on the current batch plus ((t−1)/t) the loss on a batch from finished tasks
    drawn with equal probability. Nothing depends on θ_o: global.
    """

    name: ClassVar[str] = "joint"
    family: ClassVar[str] = "baseline"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "all training data of every task"
    memory_size: ClassVar[str] = "all data"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {
            "x": example.x[:0].clone(),
            "y": example.y[:0].clone(),
            "ends": torch.zeros(1, dtype=torch.long, device=example.y.device),  # end of every task in x and y
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        finished = memory["ends"].shape[0] - 1
        loss = model.loss(params, batch.x, batch.y)
        if finished == 0:
            return loss
        words = rng.words(rng.fold_in(batch.key, "replay"), 2 * model.batch_size)
        task = rng.below(finished, words[: model.batch_size])
        begin, end = memory["ends"][task], memory["ends"][task + 1]
        rows = begin + rng.below(end - begin, words[model.batch_size :])
        past = model.loss(params, take(memory["x"], rows), take(memory["y"], rows))
        return (loss + finished * past) / (finished + 1)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        end = memory["ends"][-1:] + data.y.shape[0]
        return {
            "x": torch.cat([memory["x"], data.x]),
            "y": torch.cat([memory["y"], data.y]),
            "ends": torch.cat([memory["ends"], end]),
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        begin, end = memory["ends"][task].item(), memory["ends"][task + 1].item()
        return lambda params: model.loss(params, memory["x"][begin:end], memory["y"][begin:end])
