r"""The protocol: an algorithm is a small pure object that says how it approximates the losses of finished tasks.

    obj_t(D_t, M_t)(θ) ≈ (1/t) ( \hat L_1(θ) + … + \hat L_{t−1}(θ) + L_t(θ) )

Every method is a function from tensors to tensors for *one* run. The engine maps it over a cohort, captures it in a
CUDA graph, records its operations or calls it as it is; the same lines serve all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from glocal.challenges.challenge import Setting
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params

Memory: TypeAlias = dict[str, Any]  # str -> Tensor or dict of tensors: M_t, all that is kept of finished tasks
Locality: TypeAlias = Literal["local", "global"]


class Batch(NamedTuple):
    """Examples of the current task. A method draws nothing itself: `random` brings uniforms from the run's stream."""

    x: Tensor
    y: Tensor
    random: Tensor  # in a step: `uniforms` numbers; in `consolidate`: one number an example
    task: Tensor  # the task's number, counted from 0
    progress: Tensor = torch.ones(())  # through the epoch: 0 at its first step, 1 at its last and after it
    key: Tensor = torch.zeros((), dtype=torch.long)  # the random key of augmentation


class Step(NamedTuple):
    """What just happened: the batch and, for an algorithm that `watches`, the objective's gradient at the old θ, the
    direction that was followed, the move, and the new θ; and what the objective noted of its forward pass."""

    batch: Batch
    grads: Params
    followed: Params
    moved: Params
    params: Params
    notes: Memory = {}  # noqa: RUF012 - nobody writes to it


@dataclass(frozen=True)
class Algorithm:
    r"""Plain SGD, and the defaults of the protocol: nothing is remembered, \hat L_o = 0.

    A subclass is a frozen dataclass. Its `float` fields are scalar hyperparameters: runs that differ only in them train
    together, and inside the methods they are tensors. All other fields are structure, equal within a cohort.
    """

    name: ClassVar[str] = "algorithm"
    family: ClassVar[str] = "baseline"
    locality: ClassVar[Locality] = "global"
    remembers: ClassVar[str] = "nothing"
    """What the memory holds."""
    grows: ClassVar[str] = "0"
    """How many numbers that is, in T tasks, P parameters, K outputs and the algorithm's own options."""
    settings: ClassVar[tuple[Setting, ...]] = ("task", "class", "domain")
    """Where it makes sense: a task-incremental algorithm asks at test time which task an input belongs to."""
    watches: ClassVar[bool] = False
    """Whether `observe` looks at the step's gradient and move, and not at its batch alone."""

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        """The network that is trained: the given one, or one built around it with columns, gates, dropout."""
        return make

    def uniforms(self, model: Model) -> int:
        """How many uniform random numbers one step needs."""
        return 0

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        """M_1: nothing remembered yet. `example` is a batch as the first step will see it, for its shapes."""
        return {}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        """Before epoch number `epoch` of the task's `epochs`: where parameters are pruned or reset."""
        return params, memory

    def replayed(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """Stored examples (x, y) that join the task's own training set: batches are drawn from both alike."""
        return None

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        """obj_t on a mini-batch: the scalar whose gradient a step follows."""
        return model.loss(params, batch.x, batch.y)

    def objective_and_notes(self, model: Model, params: Params, memory: Memory, batch: Batch) -> tuple[Tensor, Memory]:
        """The objective, and what of its forward pass, at the old θ, `observe` is to find in `step.notes`."""
        return self.objective(model, params, memory, batch), {}

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        """What to follow instead of the objective's gradient: the projection of the algorithms that constrain. Unless
        `watches`, `grads` may be overwritten."""
        return grads

    def observe(self, memory: Memory, step: Step) -> Memory:
        """After every step. The memory is the algorithm's own: it may be changed in place."""
        return memory

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        """After the task, at its solution θ_t, with all its training data: M_{t+1}."""
        return memory

    def buffers_after(self, model: Model, params: Params, data: Batch) -> Params:
        """After consolidation, what becomes of the network's buffers (BatchNorm's statistics): as a rule, nothing."""
        return model.buffers

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        """Logits for inputs of a task; only task-incremental algorithms may use its number."""
        return model.outputs(params, x)

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        r"""\hat L_o(θ) of the finished task o = `task`, as a function of the parameters."""
        return lambda params: torch.zeros_like(next(iter(params.values()))).sum()
