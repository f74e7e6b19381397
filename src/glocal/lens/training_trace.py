r"""A training trace: the true losses L_1 … L_T of a sequence of tasks and the parameters θ_0, θ_1, … between them.

Arguments and arrays count tasks from 0; tables, figures and messages count them from 1. θ_0 is the initialization, and
θ_o, the solution of task o, is `checkpoints[o + 1]`. Vectors are θ flattened in the order of its dict.

After task t (counted from 0) there are t + 1 tasks, so the paper's average Hessian of the tasks before t,
\bar H_{<t} = (1/t) Σ_{o<t} H_o with t counted from 1, is (1/(t + 1)) Σ_{o<t} H_o here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from glocal import tree
from glocal.challenges.challenge import Data
from glocal.curvature.operators import Operator, hessian_operator
from glocal.curvature.spectrum import random_signs
from glocal.errors import require
from glocal.losses import Loss
from glocal.networks.layer_calls import set_eval_mode
from glocal.risk import Risk, outputs_in_chunks
from glocal.tree import Params, to_vector

MAX_EXAMPLES = 2_000
"""Examples of a task that are used by default, and that pass through the network at once."""
MAX_BATCHED_HVP_PARAMS = 1_000_000
"""Up to this size several Hessian-vector products run as one batch, and all tasks' forward passes are kept."""


class Checkpoint(NamedTuple):
    """The parameters θ and the network's other tensors (BatchNorm statistics) at one moment of training.

    Frozen parameters may be left to the trace's module.
    """

    params: Params
    buffers: Params


@dataclass(frozen=True)
class TrainingTrace:
    """A network in eval mode, its loss, the tasks' data as the network takes them, and θ_0, θ_1, …"""

    module: nn.Module
    loss: Loss
    tasks: Sequence[Data]
    checkpoints: Sequence[Checkpoint]
    tests: Sequence[Data] = ()
    """The test data of every task, if known."""

    def __post_init__(self) -> None:
        set_eval_mode(self.module)
        count, limit = len(self.checkpoints), len(self.tasks) + 1
        message = f"{len(self.tasks)} tasks allow 1 to {limit} checkpoints θ_0, θ_1, …; {count} were given."
        require(1 <= count <= limit, message)

    @property
    def device(self) -> torch.device:
        return next(iter(self.checkpoints[0].params.values())).device

    @property
    def num_params(self) -> int:
        """P, the number of learned parameters."""
        return sum(p.numel() for p in self.checkpoints[0].params.values())

    @property
    def num_learned(self) -> int:
        """N, the number of learned tasks."""
        count = len(self.checkpoints) - 1
        require(count >= 1, "the trace has no learned task; give θ_0 and at least one checkpoint after it.")
        return count

    @property
    def hvp_batch_size(self) -> int:
        """How many Hessian-vector products run as one batch."""
        return 8 if self.num_params <= MAX_BATCHED_HVP_PARAMS else 1

    def solution(self, task: int) -> Checkpoint:
        """Return θ_o."""
        count = len(self.checkpoints) - 1
        require(0 <= task < count, f"the trace has solutions of {count} tasks, counted from 0; {task} was given.")
        return self.checkpoints[task + 1]

    def theta(self, task: int) -> Tensor:
        """Return θ_o as a vector; task −1 is the initialization θ_0."""
        return to_vector(self.checkpoints[task + 1].params)

    def update(self, task: int) -> Tensor:
        """Return Δ_t = θ_t − θ_{t−1} as a vector."""
        return self.theta(task) - self.theta(task - 1)

    def risk(self, task: int, checkpoint: Checkpoint | None = None) -> Risk:
        """Return L_o at θ_o, unless another checkpoint is given."""
        params, buffers = checkpoint or self.solution(task)
        return Risk(self.module, params, buffers, *self.tasks[task], self.loss)

    def outputs(self, checkpoint: Checkpoint, x: Tensor) -> Tensor:
        """Return f_θ(x), computed in chunks."""
        return outputs_in_chunks(self.module, {**checkpoint.params, **checkpoint.buffers}, x)

    def value(self, task: int, checkpoint: Checkpoint) -> Tensor:
        """Return L_o(θ), the mean loss over the task's data, computed in chunks."""
        return self.risk(task, checkpoint).value()

    def gradient(self, task: int) -> Tensor:
        """Return ∇L_o(θ_o) as a vector."""
        return to_vector(self.risk(task).gradient())

    def hessian(self, task: int) -> Operator:
        """Return H_o = ∇²L_o(θ_o) as an operator."""
        return hessian_operator(self.risk(task))

    def average_hessian(self, task: int) -> Operator:
        r"""Return \bar H_{<t} over the tasks o < t as an operator; t may be N, the task that would come next."""
        # The forward passes of a large network fit into memory for one task at a time.
        small = self.num_params <= MAX_BATCHED_HVP_PARAMS
        operators = [self.hessian(o) for o in range(task)] if small else None

        def product(v: Params) -> Params:
            total = {k: torch.zeros_like(part) for k, part in v.items()}
            for o in range(task):
                part = (self.hessian(o) if operators is None else operators[o]) @ v
                total = {k: total[k] + part[k] for k in total}
            return {k: part / (task + 1) for k, part in total.items()}

        return Operator(product, self.checkpoints[0].params)

    def random_start(self, seed: int) -> Tensor:
        """Return a random start vector for Lanczos iterations, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.num_params, dtype=torch.float64, generator=generator).to(self.theta(-1))

    def random_probes(self, count: int, seed: int) -> Tensor:
        """Return random vectors of ±1 for estimates of traces, (count, P), the same on every device."""
        theta = self.theta(-1)
        return random_signs(count, len(theta), torch.Generator().manual_seed(seed), theta.dtype).to(theta.device)

    def to(self, device: torch.device | str) -> TrainingTrace:
        """Return the trace on another device."""
        return self._map(lambda leaf: leaf.to(device), copy.deepcopy(self.module).to(device))

    def double(self) -> TrainingTrace:
        """Return a copy in double precision; integer tensors stay as they are."""
        return self._map(as_double, copy.deepcopy(self.module).double())

    def _map(self, function: Callable[[Tensor], Tensor], module: nn.Module) -> TrainingTrace:
        apply = partial(tree.map_tree, function)
        tasks, tests = ([Data(function(d.x), function(d.y)) for d in part] for part in (self.tasks, self.tests))
        checkpoints = [Checkpoint(apply(c.params), apply(c.buffers)) for c in self.checkpoints]
        return TrainingTrace(module, self.loss, tasks, checkpoints, tests)


def as_double(tensor: Tensor) -> Tensor:
    """Return floating-point numbers in float64, and others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ b, accumulated in double precision."""
    return a.double() @ b.double()


def distance(a: Checkpoint, b: Checkpoint) -> Tensor:
    """Return ‖θ − θ'‖₂ in float64."""
    return tree.total((a.params[k] - p).double().square() for k, p in b.params.items()).sqrt()


def require_positive(**options: int | None) -> None:
    """Raise if one of the named integers is below 1; None is allowed."""
    for name, value in options.items():
        require(value is None or value >= 1, f"{name} = {value} was given; it must be at least 1.")
