r"""PackNet (§5.1; Mallya & Lazebnik 2018): assign the weights of one network to tasks by pruning. Global."""

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
    r"""Minimise L_t over the weights Θ^t that no finished task owns, with the others frozen:

        f_o(x) = f(x; θ ⊙ [owner ≤ o]).

    After `prune_at` of the epochs, the task keeps the largest free weights of every layer and retrains them; the others
    are set to 0 and left to later tasks. Biases and BatchNorm are trained in the first task only, and BatchNorm then
    uses its running statistics. So \hat L_o(θ) = L_o(θ_o) is exact during training and forgetting is 0. The modified
    gradient uses the current θ, not θ_o: global. Weight decay and optimiser state kept from the task before would move
    frozen weights and are refused.
    """

    name: ClassVar[str] = "packnet"
    freezes_weights: ClassVar[bool] = True
    needs_all_epochs: ClassVar[bool] = True
    memory_contents: ClassVar[str] = "the owner of every weight"
    memory_size: ClassVar[str] = "P"

    keep: float = 0.0
    """Fraction of a layer's free weights that a task keeps; 0: equal parts. The last task keeps all."""
    prune_at: float = 0.5
    """Fraction of a task's epochs before pruning; the remaining ones retrain the kept weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.keep <= 1, f"packnet.keep = {self.keep} was given; it must be from 0 to 1.")
        in_range = 0 < self.prune_at <= 1
        require(in_range, f"packnet.prune_at = {self.prune_at} was given; it must be above 0 and at most 1.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        names = [f"{name}.weight" if name else "weight" for name in named_layers(model.module)]
        owner = {k: torch.zeros_like(params[k], dtype=torch.int16) for k in names if k in params}
        require(bool(owner), "packnet requires linear and convolutional layers with weights; this network has none.")
        # owner: the first task that uses a weight. Until pruning, all free weights belong to the current task.
        return {**super().init(model, params, example), "owner": owner}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        task = current(model, memory)
        if epoch > 0:
            memory = self._prune(model, params, memory, epoch + 0.5 >= self.prune_at * epochs)
        # Free weights start at 0 in every task but the first; weights left to later tasks are 0 after pruning.
        first_zero = task if epoch == 0 and task > 0 else task + 1
        weights = {k: params[k].masked_fill(o >= first_zero, 0) for k, o in memory["owner"].items()}
        return {**params, **weights}, memory

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        task = current(model, memory)
        with frozen_batchnorm(model, task) as network:
            outputs = network.outputs(_task_params(params, memory, task), batch.x)
        return model.criterion.per_sample(outputs, batch.y).mean()

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return super().consolidate(model, params, self._prune(model, params, memory, True), data)

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return model.outputs(_task_params(params, memory, task), x)

    def _prune(self, model: Model, params: Params, memory: Memory, due: Tensor | bool) -> Memory:
        """Leave the smallest free weights to later tasks, if pruning is due and has not been done for this task."""
        task, owner = current(model, memory), memory["owner"]
        remaining = model.tasks - task
        share = torch.as_tensor(self.keep)
        share = torch.ones_like(share) if remaining == 1 else torch.where(share > 0, share, 1 / remaining)
        done = torch.stack([(o > task).any() for o in owner.values()]).any()
        prune = torch.as_tensor(due, device=done.device) & ~done
        pruned = {k: prune & (o == task) & ~_largest(params[k], o == task, share) for k, o in owner.items()}
        return {**memory, "owner": {k: o.masked_fill(pruned[k], task + 1) for k, o in owner.items()}}


def _task_params(params: Params, memory: Memory, task: int) -> Params:
    """Return θ ⊙ [owner ≤ task] with gradients only for the task's own weights and, in task 0, all other parameters."""
    owner = memory["owner"]
    others = {k: p.detach() if task else p for k, p in params.items() if k not in owner}
    frozen = {k: torch.where(o < task, params[k].detach(), 0) for k, o in owner.items()}
    weights = {k: torch.where(o == task, params[k], frozen[k]) for k, o in owner.items()}
    return {**others, **weights}


def _largest(weight: Tensor, free: Tensor, share: Tensor) -> Tensor:
    """Return the mask of the given share of free weights of largest magnitude; ties go to the smallest index."""
    magnitude = torch.where(free, weight.abs(), -1).flatten()
    rank = magnitude.argsort(descending=True, stable=True).argsort()
    count = (share.double() * free.sum()).round()
    return (rank < count).view_as(free) & free
