r"""Joint training: \hat L_o(θ) = L_o(θ), the multi-task loss itself (§2, Eq. multi-task-expected)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.buffer import take
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class Joint(Algorithm):
    r"""The upper bound: everything is remembered, and a step follows an unbiased gradient of

        L^MT_t(θ) = (1/t) ( L_1(θ) + … + L_t(θ) ),

    estimated as (1/t) L_t on the stream's batch plus ((t−1)/t) the loss of examples drawn from all finished tasks, each
    task equally likely. Nothing is approximated, so nothing depends on θ_o: global.
    """

    name: ClassVar[str] = "joint"
    family: ClassVar[str] = "baseline"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "all training data of every task"
    memory_size: ClassVar[str] = "all data"

    def uniforms(self, model: Model) -> int:
        return 2 * model.batch_size

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {
            "x": example.x[:0].clone(),
            "y": example.y[:0].clone(),
            "ends": torch.zeros(1, dtype=torch.long, device=example.y.device),  # where each task ends in x and y
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        finished = memory["ends"].shape[0] - 1
        stream = model.loss(params, batch.x, batch.y)
        if finished == 0:
            return stream
        which, where = batch.random.chunk(2)
        task = (which * finished).long().clamp(max=finished - 1)
        begin, end = memory["ends"][task], memory["ends"][task + 1]
        chosen = begin + (where.double() * (end - begin)).long()
        past = model.loss(params, take(memory["x"], chosen), take(memory["y"], chosen))
        return (stream + finished * past) / (finished + 1)

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
