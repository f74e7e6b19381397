r"""Orthogonal gradient descent, OGD (§5.2, Theorem 5.1, Eq. ogd-constraint). Local.

Steps are projected onto the orthogonal complement of stored output gradients:

    g ← g − Jᵀ (J Jᵀ)⁻¹ J g,   where the rows of J are ∇_θ fᵏ_{θ_o}(x_i) for stored inputs x_i of finished tasks o.

If the residuals are small, the Hessian of a finished task equals its outer-product part (Eq. Hessian-decomp),

    H_o = (1/n) Σ_i ∇f(x_i) [∇²_f ℓ_i] ∇f(x_i)ᵀ,

so Δᵀ H_o Δ = 0 for every Δ orthogonal to J: OGD minimises L_t under the hard constraint of Eq. multi-tasks-obj-2.

`ogd-published` is the procedure behind the paper's OGD row, which is close to plain SGD. In that code each
stored gradient overwrites the previous one of its task, so that only copies of the last one, v_o, remain; and the basis
is divided by its Frobenius norm instead of being orthonormalised. With equally many copies per task, the direction is

    g − Σ_o v_o (v_o·g) / Σ_o ‖v_o‖²,   v_o = ∇_θ f^y_{θ_o}(x), the true class's output for one sample of task o,

which after t tasks removes about 1/t of the component along the v_o.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad

from glocal import rng
from glocal.algorithms import gradient_projection
from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Bounds, Locality, Memory
from glocal.algorithms.ewc import Statistics, disturb_batchnorm
from glocal.curvature.jacobian import (
    FactoredJacobian,
    every_output,
    jacobian,
    jvp_and_vjp,
    label_output,
    mean_output,
    normalize,
)
from glocal.errors import require
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.tree import Params


@dataclass(frozen=True)
class Orthogonal(Algorithm):
    r"""Base class. A variant chooses vectors u in output space; the gradients ∇_θ (u·f) are stored.

    Minimise L_t subject to J (θ − θ_o) = 0. This constraint keeps a quadratic at its minimum, which is the
    implied approximation:

        \hat L_o(θ) = L_o(θ_o) + (1/|S_o|) Σ_{x ∈ S_o} ½ vᵀ [∇²_f ℓ(f_{θ_o}(x))] v,

    where v is the projection of ∇f_{θ_o}(x)ᵀ (θ − θ_o), the first-order change of the outputs, onto the vectors u.
    Only J θ_o is stored, not θ_o. Gradients and ∇²_f ℓ are computed at θ_o: local.

    Under `sgd`, also with momentum, clipping and schedules, steps combine directions of the same task and keep the
    constraint. Under weight decay, Adam or a momentum kept from the task before they do not.
    """

    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = (
        "`slots` gradients, as layer inputs and output gradients where these are much smaller, and their "
        "Gram–Schmidt matrix"
    )
    memory_size: ClassVar[str] = "slots (inputs and outputs of all layers, up to 3 times for convolutions) + slots²"
    at_least: ClassVar[Bounds] = {"slots": 1, "passes": 1}

    cotangents: ClassVar[Any]
    """Function of outputs (n, K) and labels that returns u, (n, C, K): C orthogonal vectors per sample."""

    slots: int = 500
    """Number of stored gradients after the last task, divided equally among the tasks."""
    passes: int = 1
    """Number of times the projection is applied per step; use 2 if the gradients are nearly linearly dependent."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        rows, curvature = self._gradients(model, params, example.x[:1], example.y[:1])
        per_input = curvature.shape[-1]
        required = model.tasks * per_input
        require(
            self.slots >= required,
            f"{self.name} stores {per_input} gradients per input; slots={self.slots} cannot store one input of each "
            f"of {model.tasks} tasks. Use slots of at least {required}.",
        )
        parameter = next(iter(params.values()))
        return {
            "span": gradient_projection.empty(rows, parameter),
            "start": parameter.new_zeros(0, per_input),  # J θ_o
            "curvature": parameter.new_zeros(0, per_input, per_input),  # ∇²_f ℓ in the coordinates u·f
            "task": torch.zeros(0, dtype=torch.long, device=example.y.device),
            "loss_at_solution": parameter.new_zeros(0),  # L_o(θ_o) of the finished tasks
        }

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return gradient_projection.project_out(model.module, memory["span"], grads, self.passes)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        share = self.slots // (model.tasks * memory["start"].shape[1])
        indices = rng.choose(rng.fold_in(data.key, "examples"), data.y.shape[0], share)
        rows, curvature = self._gradients(model, params, data.x[indices], data.y[indices])
        rows, lengths = normalize(model.module, rows)
        start, _ = jvp_and_vjp(model.module, rows, params)
        loss = model.eval_mode().mean_loss(params, data.x, data.y)
        new = {
            "start": start,
            "curvature": lengths.unsqueeze(-1) * curvature * lengths.unsqueeze(-2),
            "task": data.task.expand(indices.shape[0]),
            "loss_at_solution": loss[None],
        }
        return {
            "span": gradient_projection.extend(model.module, memory["span"], rows, self.passes),
            **{k: torch.cat([memory[k], part]) for k, part in new.items()},
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        stored = memory["task"] == task

        def quadratic(params: Mapping[str, Tensor]) -> Tensor:
            change = jvp_and_vjp(model.module, memory["span"]["rows"], params)[0] - memory["start"]
            forms = (change.unsqueeze(-2) @ memory["curvature"] @ change.unsqueeze(-1)).flatten()
            return memory["loss_at_solution"][task] + 0.5 * (forms * stored).sum() / stored.sum()

        return quadratic

    def _gradients(self, model: Model, params: Params, x: Tensor, y: Tensor) -> tuple[FactoredJacobian, Tensor]:
        """Return the gradients to store for some inputs, and ∇²_f ℓ in the coordinates u·f."""
        outputs = model.eval_mode().outputs(params, x)
        u = self.cotangents(outputs, y)
        root = model.criterion.output_hessian_sqrt(outputs) @ (u / u.square().sum(-1, keepdim=True)).mT
        return jacobian(Risk.from_model(model, params, x, y), self.cotangents), root.mT @ root


@dataclass(frozen=True)
class OGD(Orthogonal):
    """Minimise L_t orthogonally to the gradients of all K outputs of every stored input, as in Theorem 5.1."""

    name: ClassVar[str] = "ogd"
    cotangents = staticmethod(every_output)


@dataclass(frozen=True)
class OGDGTL(Orthogonal):
    """Minimise L_t orthogonally to the gradients of the true class's output.

    The true class has the largest entry of ∇²_f ℓ if K ≫ 1 (appendix, "On the validity of OGD-GTL"). One gradient per
    input is stored instead of K, so the same memory holds K times as many inputs.
    """

    name: ClassVar[str] = "ogd-gtl"
    cotangents = staticmethod(label_output)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        _require_labels(self.name, model, example)
        return super().init(model, params, example)


@dataclass(frozen=True)
class OGDAve(Orthogonal):
    r"""Minimise L_t orthogonally to the gradient of the mean output.

    Softmax is invariant to adding a constant to all outputs, so for cross-entropy the curvature in this direction is 0
    and the implied \hat L_o is constant.
    """

    name: ClassVar[str] = "ogd-ave"
    cotangents = staticmethod(mean_output)


@dataclass(frozen=True)
class OGDPublished(Algorithm):
    r"""Follow g − Σ_o v_o (v_o·g) / Σ_o ‖v_o‖², the direction of the published code; `ogd` implements Theorem 5.1.

    The implied approximation is that of `ogd-gtl` with a single sample,

        \hat L_o(θ) = L_o(θ_o) + ½ p_y (1 − p_y) (v_o·(θ − θ_o))²,   p_y the true class's probability at θ_o,

    computed at θ_o: local. Only v_o·θ_o is stored, not θ_o. Gradients are computed in evaluation mode. The published
    code uses training mode; `statistics='published'` reproduces its effect on BatchNorm.
    """

    name: ClassVar[str] = "ogd-published"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "the gradient of one output for one sample per task"
    memory_size: ClassVar[str] = "T P"
    at_least: ClassVar[Bounds] = {"slots": 1}

    slots: int = 500
    """Number of samples drawn over all tasks; only the last sample of a task is used."""
    statistics: Statistics = "kept"
    """BatchNorm statistics after a task: kept, or published (overwritten by passes over the drawn samples)."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        enough = self.slots >= model.tasks
        require(enough, f"{self.name} with slots={self.slots} cannot draw a sample of each of {model.tasks} tasks.")
        _require_labels(self.name, model, example)
        empty = next(iter(params.values())).new_zeros(0)
        return {
            "gradients": {k: p.new_zeros(0, *p.shape) for k, p in params.items()},
            "squares": empty,  # ‖v_o‖²
            "start": empty.clone(),  # v_o·θ_o
            "curvature": empty.clone(),  # p_y (1 − p_y)
            "loss_at_solution": empty.clone(),  # L_o(θ_o)
        }

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        stored = memory["gradients"]
        if memory["start"].shape[0] == 0:
            return grads
        squares = memory["squares"].sum()
        coefficients = overlaps(stored, grads) / torch.where(squares > 0, squares, 1)
        return {k: g - (stored[k] * coefficients.view(-1, *[1] * g.dim())).sum(0) for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        rows = rng.choose(rng.fold_in(data.key, "examples"), data.y.shape[0], self.slots // model.tasks)
        x, y = data.x[rows], data.y[rows]
        evaluated = model.eval_mode()

        def last_true_output(params: Params) -> tuple[Tensor, Tensor]:
            # The forward pass has all samples: a batch of one would round differently alone and in a cohort.
            outputs = evaluated.outputs(params, x)[-1:]
            return outputs.gather(-1, y[-1:].unsqueeze(-1)).sum(), outputs

        gradient, outputs = grad(last_true_output, has_aux=True)(params)
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
            disturb_batchnorm(model, params, data.stored[rows])
        return {"gradients": gradients, **{k: torch.cat([memory[k], part]) for k, part in new.items()}}

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        gradient = {k: v[task : task + 1] for k, v in memory["gradients"].items()}
        start, curvature, loss = (memory[k][task] for k in ("start", "curvature", "loss_at_solution"))
        return lambda params: loss + 0.5 * curvature * (overlaps(gradient, params)[0] - start).square()


def _require_labels(name: str, model: Model, example: Batch) -> None:
    labels = not example.y.is_floating_point()
    require(labels, f"{name} stores gradients of true classes' outputs; {model.criterion.name} tasks have no classes.")


def overlaps(stored: Mapping[str, Tensor], vector: Mapping[str, Tensor]) -> Tensor:
    """Return the inner product of every stored gradient with a vector or, if stacked, with its counterpart, (T,).

    The order of the sums, as in `tree.total`, makes the result bit-equal alone and in a cohort.
    """
    products = [v * vector[k] for k, v in stored.items()]
    parts = [
        p.sum(tuple(range(1, p.dim()))).unsqueeze(1)
        if p.is_cuda
        else p.reshape(p.shape[0], -1, p.shape[-1] if p.dim() > 1 else 1).sum(-1)
        for p in products
    ]
    return torch.cat(parts, 1).sum(-1)
