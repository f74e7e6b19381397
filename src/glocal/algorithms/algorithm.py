r"""The algorithm protocol: pure functions of tensors that define how the losses of finished tasks are approximated.

    obj_t(D_t, M_t)(θ) ≈ (1/t) ( \hat L_1(θ) + … + \hat L_{t−1}(θ) + L_t(θ) )

Every method handles *one* run. The engine calls it directly, maps it over a cohort with `vmap` or captures it in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from glocal import hyperparameters
from glocal.challenges.challenge import Setting
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params

Memory: TypeAlias = dict[str, Any]  # M_t: tensors and dicts of tensors, all that is stored about finished tasks
Locality: TypeAlias = Literal["local", "global"]
Bounds: TypeAlias = Mapping[str, float]  # options and their smallest values
Approximation: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]  # \hat L_o as a function of θ


class Batch(NamedTuple):
    """Examples of the current task, and the key of all random numbers that a method may use (`glocal.rng`)."""

    x: Tensor  # as the network takes them; in a training step augmented, once for all its passes
    y: Tensor
    task: Tensor  # index of the task, from 0
    key: Tensor  # random key of the run, task, epoch and step; `consolidate` has its own
    progress: Tensor = torch.ones(())  # through the epoch: 0 at the first step, 1 at the last and in `consolidate`
    raw: Tensor | None = None  # the inputs as the challenge stores them; None: x itself
    lr: Tensor | None = None  # learning rate of the training step; None where there is none

    @property
    def stored(self) -> Tensor:
        """The inputs as the challenge stores them, for buffers: bytes, which `model.prepare` augments anew."""
        return self.x if self.raw is None else self.raw

    def with_inputs(self, x: Tensor) -> Batch:
        """Return the batch with its inputs as the network takes them; `stored` stays as it is."""
        return self._replace(x=x, raw=self.stored)


class Step(NamedTuple):
    """The result of one training step, passed to `observe`."""

    batch: Batch
    grads: Params  # gradient of the objective at θ before the step
    direction: Params  # output of `direction`, the optimiser's input
    params: Params  # θ after the step
    aux: Memory  # auxiliary output of `objective`; {} if it has none
    descent: Params  # output of the optimiser: θ changed by −lr times this; missing parameters did not change
    lr: Tensor

    @property
    def update(self) -> Params:
        """Return θ_new − θ_old."""
        return {
            k: self.descent[k] * -self.lr if k in self.descent else torch.zeros_like(p) for k, p in self.params.items()
        }


@dataclass(frozen=True)
class Algorithm:
    r"""Base class, and the defaults of the protocol: plain SGD without a memory, \hat L_o = 0.

    A subclass is a frozen dataclass. Its `float` fields are hyperparameters: runs that differ only in them train in one
    cohort, and inside the methods they are scalar tensors. All other fields are equal within a cohort.
    """

    name: ClassVar[str] = "algorithm"
    family: ClassVar[str] = "baseline"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "nothing"
    """What the memory stores."""
    memory_size: ClassVar[str] = "0"
    """Its size in terms of T tasks, P parameters, K outputs and the algorithm's options."""
    settings: ClassVar[tuple[Setting, ...]] = ("task", "class", "domain")
    """Settings it supports; algorithms that need the task's index at test time leave out 'class'."""
    scales_gradients: ClassVar[bool] = False
    """Whether `direction` scales gradients in a way that Adam would undo: the optimiser must then be sgd."""
    freezes_weights: ClassVar[bool] = False
    """Whether weights with gradient 0 must not move: the optimiser must then not decay weights or keep its state."""
    needs_all_epochs: ClassVar[bool] = False
    """Whether a task must not end early: predictions change only at its end, or `before_epoch` has something to do."""
    at_least: ClassVar[Bounds] = {}
    """Smallest values of its options, as in {"slots": 1}."""

    def __post_init__(self) -> None:
        """Check options with a Literal type against its values, and numbers against `at_least`."""
        hyperparameters.check(self)

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        """Return the factory of the trained network, which may wrap the user's in columns, gates or dropout."""
        return make

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        """Return M_1, the memory before the first task. `example` is a batch with the shapes of a step."""
        return {}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        """Return θ and the memory at the start of an epoch, e.g. pruned or reset."""
        return params, memory

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """Return stored examples (x, y) that join the task's training set, with x from `batch.stored`, or None."""
        return None

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Any:
        """Return obj_t on a mini-batch, the scalar whose gradient a step follows.

        It may return (scalar, aux) as with JAX's `has_aux`; `observe` then receives `aux` as `step.aux`.
        """
        return model.loss(params, batch.x, batch.y)

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        """Return the direction that replaces the objective's gradient. `grads` must not be modified in place."""
        return grads

    def observe(self, memory: Memory, step: Step) -> Memory:
        """Return the memory after a step; it may be modified in place."""
        return memory

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        """Return M_{t+1}, given the solution θ_t and all training data of the finished task.

        The engine keeps `model.buffers` as they are afterwards, so a training-mode pass updates BatchNorm's statistics.
        """
        return memory

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        """Return the logits for inputs of a task; only task-incremental algorithms may use its index."""
        return model.outputs(params, x)

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        r"""Return \hat L_o(θ) of the finished task o = `task` as a function of the parameters."""
        return lambda params: torch.zeros_like(next(iter(params.values()))).sum()
