r"""Baselines: plain SGD (§2), stable SGD (appendix; Mirzadeh et al. 2020) and joint training (§2). All are global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal import rng
from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Bounds, Memory
from glocal.algorithms.replay_buffer import take
from glocal.errors import require
from glocal.networks.layer_calls import DropoutNetwork
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params


@dataclass(frozen=True)
class SGD(Algorithm):
    r"""Minimise L_t. \hat L_o(θ) = 0 does not depend on θ_o: global."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class StableSGD(Algorithm):
    r"""Minimise L_t with dropout before every linear layer except the first, at the learning rate lr · decay^t.

    Dropout and small batches find flat minima; the decaying learning rate stays close to them. The batch size is an
    option of the run. On 20 rotations of MNIST the authors use batches of 10, lr 0.1, decay 0.4 to 0.8 and hidden
    layers of 256; their plastic regime is `sgd`. The rate decays by scaling gradients, which Adam would undo: it is
    refused. \hat L_o(θ) = 0 does not depend on θ_o: global.
    """

    name: ClassVar[str] = "stable-sgd"
    scales_gradients: ClassVar[bool] = True
    at_least: ClassVar[Bounds] = {"decay": 0}

    dropout: float = 0.5
    """Dropout probability during training."""
    decay: float = 0.8
    """Factor applied to the learning rate at every new task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = 0 <= self.dropout < 1
        require(allowed, f"stable-sgd.dropout = {self.dropout} was given; it must be at least 0 and below 1.")

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: DropoutNetwork(make(shape, outputs), shape)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        assert isinstance(model.module, DropoutNetwork)
        random = rng.uniform(rng.fold_in(batch.key, "dropout"), batch.y.shape[0] * sum(model.module.widths))
        outputs = model.outputs(params, batch.x, random, self.dropout)
        return model.criterion.per_sample(outputs, batch.y).mean()

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return {k: g * self.decay**batch.task for k, g in grads.items()}


@dataclass(frozen=True)
class Joint(Algorithm):
    r"""Minimise the multi-task loss on all data so far (Eq. multi-task-expected), while tasks still come one by one:

        L^MT_t(θ) = (1/t) ( L_1(θ) + … + L_t(θ) ),   \hat L_o(θ) = L_o(θ).

    A step's estimate is unbiased: (1/t) L_t on the current batch plus ((t−1)/t) the loss on a batch from finished tasks
    drawn with equal probability. Nothing depends on θ_o: global.
    """

    name: ClassVar[str] = "joint"
    memory_contents: ClassVar[str] = "all training data of every task"
    memory_size: ClassVar[str] = "all data"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {
            "x": example.stored[:0].clone(),
            "y": example.y[:0].clone(),
            "ends": torch.zeros(1, dtype=torch.long, device=example.y.device),  # end of every task in x and y
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        finished = memory["ends"].shape[0] - 1
        model.statistics = "every pass"
        loss = model.loss(params, batch.x, batch.y)
        if finished == 0:
            return loss
        words = rng.words(rng.fold_in(batch.key, "replay"), 2 * model.batch_size)
        task = rng.below(finished, words[: model.batch_size])
        begin, end = memory["ends"][task], memory["ends"][task + 1]
        rows = begin + rng.below(end - begin, words[model.batch_size :])
        past = model.loss(params, model.prepare(take(memory["x"], rows)), take(memory["y"], rows))
        return (loss + finished * past) / (finished + 1)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        end = memory["ends"][-1:] + data.y.shape[0]
        return {
            "x": torch.cat([memory["x"], data.stored]),
            "y": torch.cat([memory["y"], data.y]),
            "ends": torch.cat([memory["ends"], end]),
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        begin, end = memory["ends"][task].item(), memory["ends"][task + 1].item()
        return lambda params: model.loss(params, memory["x"][begin:end], memory["y"][begin:end])
