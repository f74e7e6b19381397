r"""Orthogonal gradient descent (§5.2, Theorem 2): steps orthogonal to the gradients of old outputs, Eq. ogd-constraint.

    g ← g − Jᵀ (J Jᵀ)⁻¹ J g,   the rows of J: ∇_θ fᵏ_{θ_o}(x_i), x_i stored inputs of finished tasks o.

Where the residuals are small the Hessian of a finished task is its outer product, Eq. Hessian-decomp,

    H_o = (1/n) Σ_i ∇f(x_i) [∇²_f ℓ_i] ∇f(x_i)ᵀ,

so Δᵀ H_o Δ = 0 for every Δ orthogonal to J: OGD minimises L_t under the hard constraint of Eq. multi-tasks-obj-2.

The procedure behind the paper's OGD row. It is no projection, and it is plain SGD in all but name.

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

from glocal.algorithms import gradient_projection
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.ewc import Statistics, disturb_batchnorm
from glocal.curvature.jacobian import (
    FactoredJacobian,
    every_output,
    jacobian,
    jvp_and_vjp,
    label_output,
    mean_output,
    normalize,
    shape,
)
from glocal.errors import require
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.tree import Params


@dataclass(frozen=True)
class Orthogonal(Algorithm):
    r"""Base class of the variants, which differ in the vectors u in output space whose gradients ∇_θ u·f are stored.

    The implied approximation is the quadratic that the constraint keeps at its minimum,

        \hat L_o(θ) = L_o(θ_o) + (1/|S_o|) Σ_{x ∈ S_o} ½ vᵀ [∇²_f ℓ(f_{θ_o}(x))] v,

    v being how far the outputs move to first order, as far as the stored gradients tell: the projection of
    ∇f_{θ_o}(x)ᵀ (θ − θ_o) onto the stored directions. It takes no θ_o to evaluate, only the numbers J θ_o. Gradients
    and ∇²_f ℓ are taken at θ_o: local.
    """

    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = (
        "`slots` gradients, as factors (an input and a δ of a layer) where these are far shorter, and their "
        "Gram–Schmidt matrix"
    )
    memory_size: ClassVar[str] = "slots (inputs and outputs of every layer, of convolutions up to 3 times) + slots²"

    slots: int = 500
    """Gradients the memory holds after the last task, an equal share of them for every task."""
    passes: int = 1
    """How often the projection is applied in a step; twice is enough for gradients that nearly depend on each other."""

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"{self.name} needs slots of at least 1; {self.slots} was given.")
        require(self.passes >= 1, f"{self.name} needs passes of at least 1; {self.passes} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        rows, _ = self._gradients(model, params, example.x[:1], example.y[:1])
        _, each = shape(rows)
        smallest = model.tasks * each
        require(
            self.slots >= smallest,
            f"{self.name} stores {each} gradients for every input: with slots={self.slots} it cannot hold one input of "
            f"each of {model.tasks} tasks. The smallest slots that can: {smallest}.",
        )
        number = next(iter(params.values()))
        return {
            "span": gradient_projection.empty(rows, number),
            "start": number.new_zeros(0, each),  # J θ_o
            "curvature": number.new_zeros(0, each, each),  # ∇²_f ℓ in the stored directions
            "task": torch.zeros(0, dtype=torch.long, device=example.y.device),
            "loss_at_solution": number.new_zeros(0),  # L_o(θ_o) of every finished task
        }

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return gradient_projection.project_out(model.module, memory["span"], grads, self.passes)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        share = min(self.slots // (model.tasks * memory["start"].shape[1]), data.y.shape[0])
        chosen = data.random.topk(share).indices
        rows, curvature = self._gradients(model, params, data.x[chosen], data.y[chosen])
        rows, lengths = normalize(model.module, rows)
        start, _ = jvp_and_vjp(model.module, rows, params)
        reached = model.eval_mode().mean_loss(params, data.x, data.y)
        new = {
            "start": start,
            "curvature": lengths.unsqueeze(-1) * curvature * lengths.unsqueeze(-2),
            "task": data.task.expand(share),
            "loss_at_solution": reached[None],
        }
        return {
            "span": gradient_projection.extend(model.module, memory["span"], rows, self.passes),
            **{k: torch.cat([memory[k], part]) for k, part in new.items()},
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        own = memory["task"] == task

        def quadratic(params: Mapping[str, Tensor]) -> Tensor:
            moved = jvp_and_vjp(model.module, memory["span"]["rows"], params)[0] - memory["start"]
            bent = (moved.unsqueeze(-2) @ memory["curvature"] @ moved.unsqueeze(-1)).flatten()
            return memory["loss_at_solution"][task] + 0.5 * (bent * own).sum() / own.sum()

        return quadratic

    def _gradients(self, model: Model, params: Params, x: Tensor, y: Tensor) -> tuple[FactoredJacobian, Tensor]:
        """Return the gradients to store of some inputs, and ∇²_f ℓ there in the coordinates u·f."""
        outputs = model.eval_mode().outputs(params, x)
        u = self.cotangents(outputs, y)
        root = model.criterion.output_hessian_sqrt(outputs) @ (u / u.square().sum(-1, keepdim=True)).mT
        return jacobian(Risk.from_model(model, params, x, y), self.cotangents), root.mT @ root

    def cotangents(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the vectors u for outputs (n, K) and labels, (n, C, K), orthogonal to each other."""
        raise NotImplementedError


@dataclass(frozen=True)
class OGD(Orthogonal):
    """Stores the gradient of every output: what Theorem 2 is about. K gradients an input."""

    name: ClassVar[str] = "ogd"

    def cotangents(self, outputs: Tensor, y: Tensor) -> Tensor:
        return every_output(outputs, y)


@dataclass(frozen=True)
class OGDGTL(Orthogonal):
    """Stores the gradient of the true class's output alone, whose entry of ∇²_f ℓ is the largest when K ≫ 1 (appendix,
    "On the validity of OGD-GTL"): K times as many inputs in the same memory."""

    name: ClassVar[str] = "ogd-gtl"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        classes = not example.y.is_floating_point()
        require(classes, f"{self.name} stores the true class's gradients, and {model.criterion.name} tasks have none.")
        return super().init(model, params, example)

    def cotangents(self, outputs: Tensor, y: Tensor) -> Tensor:
        return label_output(outputs, y)


@dataclass(frozen=True)
class OGDAve(Orthogonal):
    r"""Stores the gradient of the mean of all outputs. Adding one number to all of them changes no softmax: in this
    direction the cross-entropy has no curvature, and there the implied \hat L_o is flat."""

    name: ClassVar[str] = "ogd-ave"

    def cotangents(self, outputs: Tensor, y: Tensor) -> Tensor:
        return mean_output(outputs, y)


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
    memory_contents: ClassVar[str] = "the gradient of one output on one sample of every task"
    memory_size: ClassVar[str] = "T P"

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
            "loss_at_solution": none.clone(),  # L_o(θ_o)
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
            "loss_at_solution": evaluated.mean_loss(params, data.x, data.y)[None],
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
        start, curvature, reached = (memory[k][task] for k in ("start", "curvature", "loss_at_solution"))
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
