r"""Algorithms that split the parameters among the tasks (§5.1): what a finished task uses, no later task changes.

Let Θ^t be the parameters that task t may train. The modified derivative of the paper,

    ∂\tilde L_t/∂θ_i = ∂L_t/∂θ_i  if θ_i ∈ Θ^t,  0 otherwise,

leaves alone all that the outputs for a task o < t are made of. Seen from there \hat L_o(θ) = L_o(θ_o): a constant that
training cannot raise, nor lower.

Progressive neural networks (§5.1; Rusu et al. 2016): a column of its own for every task, Θ^t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.challenges.challenge import Setting
from glocal.networks.layer_calls import eval_mode
from glocal.networks.model import MakeNetwork, Model
from glocal.networks.progressive import ProgressiveNetwork
from glocal.tree import Params


@dataclass(frozen=True)
class Partition(Algorithm):
    r"""What they share: the losses reached, \hat L_o = L_o(θ_o), and the task's number, which they ask for at test.

    The modified derivative is taken at the current state of the network, not at θ_o: the paper calls them global.
    """

    family: ClassVar[str] = "partition"
    locality: ClassVar[Locality] = "global"
    settings: ClassVar[tuple[Setting, ...]] = ("task", "domain")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"loss_at_solution": next(iter(params.values())).new_zeros(0)}  # L_o(θ_o) of every finished task

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        reached = self._mean_loss(model.eval_mode(), params, memory, data, current(model, memory))
        return {**memory, "loss_at_solution": torch.cat([memory["loss_at_solution"], reached[None]])}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda params: memory["loss_at_solution"][task].clone()

    def _mean_loss(
        self, model: Model, params: Params, memory: Memory, data: Batch, task: int, chunk: int = 2000
    ) -> Tensor:
        """L_t(θ) over the task's data, by the outputs for its number."""
        parts = []
        for x, y in zip(data.x.split(chunk), data.y.split(chunk), strict=True):
            parts.append(model.criterion.per_sample(self.predict(model, params, memory, x, task), y).sum())
        return torch.stack(parts).sum() / data.y.shape[0]


def current(model: Model, memory: Memory) -> int:
    """The number of the task in training; after the last one, still the last."""
    return min(memory["loss_at_solution"].shape[0], model.tasks - 1)


@contextmanager
def frozen_batchnorm(model: Model, task: int) -> Iterator[Model]:
    """The network, whose buffers the first task settles: from the second on BatchNorm goes by its running statistics,
    and what else would change is left as it was, for finished tasks."""
    if task == 0:
        yield model
        return
    with eval_mode(m for m in model.module.modules() if isinstance(m, _BatchNorm)):
        yield model.bind(model.buffers, model.training)


@dataclass(frozen=True)
class PNN(Partition):
    r"""Trains the column of task t and the connections that lead into it from all earlier columns, on L_t alone.

    The earlier columns are constants: ∂\tilde L_t/∂θ_i = 0 for θ_i ∉ Θ^t, also where ∂L_t/∂θ_i is not. So
    \hat L_o(θ) = L_o(θ_o) is exact along training, and forgetting is 0. The modified derivative uses the current state
    of the network: global.
    """

    name: ClassVar[str] = "pnn"
    memory_contents: ClassVar[str] = "the columns of finished tasks and their lateral connections, as parameters"
    memory_size: ClassVar[str] = "T P + T (T − 1)/2 Q, Q the weights between two columns"

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: ProgressiveNetwork(make, shape, outputs, tasks)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        outputs = model.outputs(params, batch.x, current(model, memory))
        return model.criterion.per_sample(outputs, batch.y).mean()

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return model.outputs(params, x, task)
