r"""The procedure behind the paper's OGD row. It is no projection, and it is plain SGD in all but name.

In the code that the numbers were measured with, every gradient a task stores is a view of one buffer that the next one
overwrites: what remains of a task is the gradient v_o of its last stored sample, as many times as samples were drawn.
The basis, all tasks together, is then divided by its Frobenius norm instead of being made orthonormal. With equally
many copies for every task, a step follows

    g − Σ_o v_o (v_o·g) / Σ_o ‖v_o‖²,   v_o = ∇_θ f^y_{θ_o}(x), the true class's output for one sample of task o,

which after t tasks takes away about the t-th part of what lies along the v_o, and nothing of what does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.batchnorm_side_effect import Statistics, disturb_batchnorm
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class OGDPublished(Algorithm):
    r"""One gradient a task, shrunk a little and not removed. Theorem 2's algorithm is `ogd`, and OGD-GTL is `ogd-gtl`.

    What it protects, as far as it does, is the quadratic of `ogd-gtl` with a single sample,

        \hat L_o(θ) = L_o(θ_o) + ½ p_y (1 − p_y) (v_o·(θ − θ_o))²,   p_y the true class's probability at θ_o,

    taken at θ_o: local. It is evaluated from v_o·θ_o, without θ_o. Gradients are taken in evaluation mode; the
    published code takes them in training mode (`single_images`).
    """

    name: ClassVar[str] = "ogd-published"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "local"
    remembers: ClassVar[str] = "the gradient of one output on one sample of every task"
    grows: ClassVar[str] = "T P"

    slots: int = 500
    """Samples drawn for all tasks together; of a task's share the last one is what remains."""
    statistics: Statistics = "kept"
    """BatchNorm's after a task: kept, or overwritten by these samples one by one, as in the published numbers."""

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"{self.name} needs slots of at least 1; {self.slots} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        enough = self.slots >= model.tasks
        require(enough, f"{self.name} with slots={self.slots} cannot draw a sample of each of {model.tasks} tasks.")
        classes = not example.y.is_floating_point()
        require(classes, f"{self.name} stores the true class's gradient, and {model.criterion.name} tasks have none.")
        none = next(iter(params.values())).new_zeros(0)
        return {
            "gradients": {k: p.new_zeros(0, *p.shape) for k, p in params.items()},
            "squares": none,  # ‖v_o‖²
            "start": none.clone(),  # v_o·θ_o
            "curvature": none.clone(),  # p_y (1 − p_y)
            "reached": none.clone(),  # L_o(θ_o)
        }

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        stored = memory["gradients"]
        if memory["start"].shape[0] == 0:
            return grads
        squares = memory["squares"].sum()
        share = overlaps(stored, grads) / torch.where(squares > 0, squares, 1)
        return {k: g - (stored[k] * share.view(-1, *[1] * g.dim())).sum(0) for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        drawn = self._drawn(model, data)
        x, y = data.x[drawn], data.y[drawn]
        evaluated = model.eval_mode()

        def last_of_the_true(params: Params) -> tuple[Tensor, Tensor]:
            # All go through the network: a batch of one would round differently alone and in a cohort.
            outputs = evaluated.outputs(params, x)[-1:]
            return outputs.gather(-1, y[-1:].unsqueeze(-1)).sum(), outputs

        gradient, outputs = grad(last_of_the_true, has_aux=True)(params)
        stored = {k: v.unsqueeze(0) for k, v in gradient.items()}
        likelihood = model.criterion.likelihood(outputs, y[-1:])
        new = {
            "squares": overlaps(stored, stored),
            "start": overlaps(stored, params),
            "curvature": likelihood * (1 - likelihood),
            "reached": evaluated.mean_loss(params, data.x, data.y)[None],
        }
        gradients = {k: torch.cat([memory["gradients"][k], v]) for k, v in stored.items()}
        if self.statistics == "published":
            disturb_batchnorm(model, params, x)
        return {"gradients": gradients, **{k: torch.cat([memory[k], part]) for k, part in new.items()}}

    def _drawn(self, model: Model, data: Batch) -> Tensor:
        """Which of the task's samples are looked at, in this order."""
        return data.random.topk(min(self.slots // model.tasks, data.y.shape[0])).indices

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        one = {k: v[task : task + 1] for k, v in memory["gradients"].items()}
        start, curvature, reached = (memory[k][task] for k in ("start", "curvature", "reached"))
        return lambda params: reached + 0.5 * curvature * (overlaps(one, params)[0] - start).square()


def overlaps(stored: Mapping[str, Tensor], vector: Mapping[str, Tensor]) -> Tensor:
    """The inner product of every stored gradient with a vector, or with itself, (T,). In this order of sums, as in
    `tree.total`, it is the same alone and in a cohort."""
    products = [v * vector[k] for k, v in stored.items()]
    parts = [
        p.sum(tuple(range(1, p.dim()))).unsqueeze(1)
        if p.is_cuda
        else p.reshape(p.shape[0], -1, p.shape[-1] if p.dim() > 1 else 1).sum(-1)
        for p in products
    ]
    return torch.cat(parts, 1).sum(-1)
