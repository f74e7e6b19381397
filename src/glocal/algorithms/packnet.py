r"""PackNet (§5.1; Mallya & Lazebnik 2018): the weights of one network, dealt out to the tasks by pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.partition import Partition, current, frozen_batchnorm
from glocal.errors import require
from glocal.networks.layer_calls import named_layers
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class PackNet(Partition):
    r"""Trains the weights that no finished task owns, Θ^t, with those of finished tasks in place; then the largest of
    them, layer by layer, become the task's own and are trained on, the others are set to 0 and left to later tasks:

        f_o(x) = f(x; θ ⊙ [owner ≤ o]).

    All but the weights of linear and convolutional layers (biases, BatchNorm) is trained in the first task alone;
    BatchNorm goes by its running statistics from then on. So \hat L_o(θ) = L_o(θ_o) is exact along training, and
    forgetting is 0. The modified derivative uses the current state of the network: global.
    """

    name: ClassVar[str] = "packnet"
    memory_contents: ClassVar[str] = "the owner of every weight"
    memory_size: ClassVar[str] = "P"

    keep: float = 0.0
    """Share of the free weights of a layer that a task keeps; 0: an equal part for every task. The last keeps all."""
    prune_at: float = 0.5
    """Share of a task's epochs before pruning; the rest retrain. With a single epoch there is no retraining."""

    def __post_init__(self) -> None:
        require(0 <= self.keep <= 1, f"packnet needs a keep between 0 and 1; {self.keep} was given.")
        in_range = 0 < self.prune_at <= 1
        require(in_range, f"packnet needs a prune_at above 0 and at most 1; {self.prune_at} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        names = [f"{name}.weight" if name else "weight" for name in named_layers(model.module)]
        owner = {k: torch.zeros_like(params[k], dtype=torch.int16) for k in names if k in params}
        require(bool(owner), "packnet deals out weights of linear and convolutional layers; this network has none.")
        # The task from which on a weight is there. Free weights are those of the current task until it is pruned.
        return {**super().init(model, params, example), "owner": owner}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        task = current(model, memory)
        if epoch > 0:
            memory = self._pruned(model, params, memory, epoch + 0.5 >= self.prune_at * epochs)
        # What earlier tasks left is 0 when a task begins; what the task itself passes on is 0 from then on.
        others = task if epoch == 0 and task > 0 else task + 1
        emptied = {k: params[k].masked_fill(o >= others, 0) for k, o in memory["owner"].items()}
        return {**params, **emptied}, memory

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        task = current(model, memory)
        with frozen_batchnorm(model, task) as network:
            outputs = network.outputs(_of_task(params, memory, task), batch.x)
        return model.criterion.per_sample(outputs, batch.y).mean()

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return super().consolidate(model, params, self._pruned(model, params, memory, True), data)

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return model.outputs(_of_task(params, memory, task), x)

    def _pruned(self, model: Model, params: Params, memory: Memory, due: Tensor | bool) -> Memory:
        """The task's part of its free weights, dealt out once: where some weights are left to later tasks, it was."""
        task, owner = current(model, memory), memory["owner"]
        left = model.tasks - task
        share = torch.as_tensor(self.keep)
        share = torch.ones_like(share) if left == 1 else torch.where(share > 0, share, 1 / left)
        done = torch.stack([(o > task).any() for o in owner.values()]).any()
        now = torch.as_tensor(due, device=done.device) & ~done
        passed_on = {k: now & (o == task) & ~_largest(params[k], o == task, share) for k, o in owner.items()}
        return {**memory, "owner": {k: o.masked_fill(passed_on[k], task + 1) for k, o in owner.items()}}


def _of_task(params: Params, memory: Memory, task: int) -> Params:
    """θ ⊙ [owner ≤ task], through which gradients reach the task's own weights alone, and the rest in task 0 alone."""
    owner = memory["owner"]
    frozen = {k: p.detach() if task else p for k, p in params.items() if k not in owner}
    held = {k: torch.where(o < task, params[k].detach(), 0) for k, o in owner.items()}
    weights = {k: torch.where(o == task, params[k], held[k]) for k, o in owner.items()}
    return {**frozen, **weights}


def _largest(weight: Tensor, free: Tensor, share: Tensor) -> Tensor:
    """The given share of the free weights, those of largest magnitude; of equal ones the first."""
    size = torch.where(free, weight.abs(), -1).flatten()
    rank = size.argsort(descending=True, stable=True).argsort()
    kept = (share.double() * free.sum()).round()
    return (rank < kept).view_as(free) & free
