r"""Algorithms that partition the parameters among tasks (§5.1), and progressive neural networks, PNN. Global.

Let Θ^t be the parameters that task t may train. The paper's modified gradient,

    ∂\tilde L_t/∂θ_i = ∂L_t/∂θ_i  if θ_i ∈ Θ^t,  0 otherwise,

is followed in place of the gradient. Parameters that the outputs of a finished task depend on therefore never change,
and \hat L_o(θ) = L_o(θ_o) is constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Locality, Memory
from glocal.challenges.challenge import Setting
from glocal.networks.layer_calls import eval_mode
from glocal.networks.model import MakeNetwork, Model
from glocal.networks.progressive import ProgressiveNetwork
from glocal.risk import MAX_CHUNK_SIZE
from glocal.tree import Params


@dataclass(frozen=True)
class Partition(Algorithm):
    r"""Base class: \hat L_o = L_o(θ_o), and predictions that require the task's index at test time.

    The paper calls these algorithms global because the modified gradient is computed at the current θ, not at θ_o.
    Parameters without a gradient, as PNN's finished columns, stay fixed under every optimiser. `freezes_weights` is for
    algorithms that freeze entries of trained tensors by gradients of 0.
    """

    family: ClassVar[str] = "partition"
    locality: ClassVar[Locality] = "global"
    settings: ClassVar[tuple[Setting, ...]] = ("task", "domain")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"loss_at_solution": next(iter(params.values())).new_zeros(0)}  # L_o(θ_o) of the finished tasks

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        evaluated, task, sums = model.eval_mode(), current(model, memory), []
        for x, y in zip(data.x.split(MAX_CHUNK_SIZE), data.y.split(MAX_CHUNK_SIZE), strict=True):
            sums.append(model.criterion.per_sample(self.predict(evaluated, params, memory, x, task), y).sum())
        loss = torch.stack(sums).sum() / data.y.shape[0]
        return {**memory, "loss_at_solution": torch.cat([memory["loss_at_solution"], loss[None]])}

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        return lambda params: memory["loss_at_solution"][task].clone()


def current(model: Model, memory: Memory) -> int:
    """Return the index of the task in training; after the last task, the last index."""
    return min(memory["loss_at_solution"].shape[0], model.tasks - 1)


@contextmanager
def frozen_batchnorm(model: Model, task: int) -> Iterator[Model]:
    """Yield a model that updates BatchNorm's running statistics in the first task only, and uses them afterwards."""
    if task == 0:
        yield model
        return
    with eval_mode(m for m in model.module.modules() if isinstance(m, _BatchNorm)):
        yield model.bind(model.buffers, model.training)


@dataclass(frozen=True)
class PNN(Partition):
    r"""Minimise L_t over Θ^t, the column of task t and its lateral connections from earlier columns (Rusu et al. 2016).

    Earlier columns are frozen, so \hat L_o(θ) = L_o(θ_o) is exact during training and forgetting is 0. The modified
    gradient uses the current θ, not θ_o: global.
    """

    name: ClassVar[str] = "pnn"
    memory_contents: ClassVar[str] = "columns and lateral connections of finished tasks, as parameters"
    memory_size: ClassVar[str] = "T P + T (T − 1)/2 Q for Q weights between two columns"

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: ProgressiveNetwork(make, shape, outputs, tasks)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        outputs = model.outputs(params, batch.x, current(model, memory))
        return model.criterion.per_sample(outputs, batch.y).mean()

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return model.outputs(params, x, task)
