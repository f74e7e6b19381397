r"""The protocol: an algorithm is a small pure object that says how it approximates the losses of finished tasks.

    obj_t(D_t, M_t)(θ) ≈ (1/t) ( \hat L_1(θ) + … + \hat L_{t−1}(θ) + L_t(θ) )

Every method is a function from tensors to tensors for *one* run. The engine maps it over a cohort, captures it in a
CUDA graph, records its operations or calls it as it is; the same lines serve all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Step:
    """What a step did, for `observe`."""

    batch: Batch
    grads: Params
    """The objective's gradient at the old θ."""
    direction: Params
    """What `direction` returned, and the optimiser was given."""
    params: Params
    """θ after the step."""
    aux: Memory = field(default_factory=dict)
    """What `objective` returned beside its value; {} if nothing."""
    descent: Params = field(default_factory=dict)
    """What the optimiser returned: θ has moved by −lr times this, and not at all where a parameter is missing."""
    lr: Tensor | float = 0.0

    @property
    def update(self) -> Params:
        """θ_new − θ_old, computed when it is asked for."""
        return {
            k: self.descent[k] * -self.lr if k in self.descent else torch.zeros_like(p) for k, p in self.params.items()
        }


@dataclass(frozen=True)
class Algorithm:
    r"""Plain SGD, and the defaults of the protocol: nothing is remembered, \hat L_o = 0.

    A subclass is a frozen dataclass. Its `float` fields are scalar hyperparameters: runs that differ only in them train
    together, and inside the methods they are tensors. All other fields are structure, equal within a cohort.
    """

    name: ClassVar[str] = "algorithm"
    family: ClassVar[str] = "baseline"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "nothing"
    """What the memory holds."""
    memory_size: ClassVar[str] = "0"
    """How many numbers that is, in T tasks, P parameters, K outputs and the algorithm's own options."""
    settings: ClassVar[tuple[Setting, ...]] = ("task", "class", "domain")
    """Where it makes sense: a task-incremental algorithm asks at test time which task an input belongs to."""

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        """Return the network that is trained: the given one, or one built around it with columns, gates or dropout."""
        return make

    def uniforms(self, model: Model) -> int:
        """Return how many uniform random numbers a step needs in `batch.random`."""
        return 0

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        """Return M_1, before the first task. `example` is a batch with the shapes of a step."""
        return {}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        """Return θ and the memory at the start of an epoch, e.g. pruned or reset."""
        return params, memory

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """Return stored examples (x, y) that join the task's training set, or None."""
        return None

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Any:
        """Return obj_t on a mini-batch, the scalar whose gradient a step follows.

        It may return (scalar, aux), as with JAX's `has_aux`: `observe` then finds the tensors of `aux` in `step.aux`.
        """
        return model.loss(params, batch.x, batch.y)

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        """Return what to descend instead of the objective's gradient, which must not be changed in place."""
        return grads

    def observe(self, memory: Memory, step: Step) -> Memory:
        """Return the memory after a step. It may be changed in place and returned as it is."""
        return memory

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        """Return M_{t+1}, at the solution θ_t and with all training data of the finished task.

        The engine reads `model.buffers` afterwards: a pass in training mode changes BatchNorm's statistics.
        """
        return memory

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        """Return logits for inputs of a task; only task-incremental algorithms may use its number."""
        return model.outputs(params, x)

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        r"""\hat L_o(θ) of the finished task o = `task`, as a function of the parameters."""
        return lambda params: torch.zeros_like(next(iter(params.values()))).sum()
