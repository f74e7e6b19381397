r"""Elastic weight consolidation, EWC (§5.2): Eq. general-opt-local with diagonal Hessians at the solutions. Local.

Online, with the last solution as the only anchor:

    obj_t(θ) = L_t(θ) + (λ/2) Σ_i F_i (θ_i − θ_{t−1,i})²,   F ← γ F + F_{t−1} after every task,

F_o the diagonal of the Fisher matrix of task o at θ_o. At a minimum of obj_{t−1} the gradients of its terms sum to
zero, so a single quadratic around θ_{t−1} can represent all of them. With one anchor per task:

    obj_t(θ) = L_t(θ) + (λ/2) Σ_{o<t} γ^{t−1−o} Σ_i F_{o,i} (θ_i − θ_{o,i})².

`statistics='published'` reproduces a side effect of the published code, which computes per-image gradients in training
mode: each pass moves BatchNorm's running statistics a tenth of the way to those of one image, just before the task is
evaluated. Training uses batch statistics, so only the measured accuracy changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from glocal import rng
from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Bounds, Locality, Memory
from glocal.curvature.diagonal import diagonal, max_chunk_size
from glocal.curvature.layers import chunk_size
from glocal.errors import require
from glocal.losses import Loss
from glocal.networks.batchnorm import BatchNorm2d, per_image_batchnorm
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.tree import Params, total

Statistics: TypeAlias = Literal["kept", "published"]
BATCHNORM_PASSES = 200
"""Images that are passed: the effect of earlier ones would be scaled by 0.9²⁰⁰, below float32 precision."""


def disturb_batchnorm(model: Model, params: Params, x: Tensor) -> None:
    """Update BatchNorm's running statistics by training-mode passes over single images, augmented as in training."""
    model.statistics, x = "every pass", model.prepare(x[-BATCHNORM_PASSES:])
    norms = [part for part in model.module.modules() if isinstance(part, _BatchNorm)]
    if norms and all(type(part) is BatchNorm2d for part in norms):
        module = per_image_batchnorm(model.module, update_statistics=True)
        model.outputs_of(module, params, x)
    elif norms:
        for image in x:
            model.outputs(params, image.unsqueeze(0))


Fisher = Literal["exact", "sampled", "empirical", "published"]


def task_fisher(model: Model, params: Params, data: Batch, variant: Fisher, statistics: Statistics = "kept") -> Params:
    """Return the diagonal F at θ, the solution of a task, over all its data.

    statistics: 'kept': gradients in evaluation mode; 'published': in training mode, one augmented image at a time.
    """
    per_image = statistics == "published" and model.has_batchnorm
    if per_image:
        _require_batchnorm2d(model)
    evaluated, cotangents = model.eval_mode(), partial(_cotangents, variant, model.criterion)
    module = per_image_batchnorm(evaluated.module) if per_image else evaluated.module
    x, y = model.prepare(data.stored) if per_image else data.x, data.y
    if variant == "sampled":  # `_cotangents` draws the labels
        y = rng.uniform(rng.fold_in(data.key, "labels"), y.shape[0])

    risk = Risk(module, params, evaluated.buffers, x, y, model.criterion)
    size = chunk_size(next(risk.chunks(1)), cotangents, max_chunk_size(y.device))
    return risk.mean_over_chunks(size, lambda part: diagonal(replace(part, chunk_size=size), cotangents))


def _require_batchnorm2d(model: Model) -> None:
    """Raise an error if the network has a BatchNorm that cannot compute with one image at a time."""
    norms = {type(part) for part in model.module.modules() if isinstance(part, _BatchNorm)}
    others = ", ".join(kind.__name__ for kind in norms if not issubclass(kind, nn.BatchNorm2d))
    require(not others, f"statistics=published is for nn.BatchNorm2d; the network has {others}: use statistics=kept.")


def _cotangents(variant: Fisher, loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return vectors u in output space with F = mean of Σ_c (Jᵀu_c)², (n, C, K); y is uniform numbers if sampled."""
    if variant == "exact":  # the expectation over labels of the model distribution: the Gauss–Newton matrix
        return loss.output_hessian_sqrt(outputs)
    if variant == "sampled":  # an estimate of that expectation from one sampled label per input
        y = loss.sample_labels(outputs, y)
    gradients = loss.output_gradient(outputs, y)  # empirical: at the data's labels
    if variant == "published":  # the empirical one with each sample weighted by p(y|x), as in the paper's results
        gradients = loss.likelihood(outputs, y).sqrt().unsqueeze(-1) * gradients
    return gradients.unsqueeze(1)


@dataclass(frozen=True)
class EWC(Algorithm):
    r"""Minimise L_t plus diagonal quadratics of the finished tasks.

    Online EWC stores only their sum, so each finished task is assigned an equal share of it:

        \hat L_o(θ) = L_o(θ_o) + (1/(t−1)) (λ/2) Σ_i F_i (θ_i − θ_{t−1,i})²;

    with anchors='each', \hat L_o(θ) = L_o(θ_o) + (λ/2) γ^{t−1−o} Σ_i F_{o,i} (θ_i − θ_{o,i})². F and the anchors are
    computed at the solutions: local. The paper's penalty has no ½: its λ = 0.7 on Rotated-MNIST is
    `penalty=1.4, fisher='published'` here.
    """

    name: ClassVar[str] = "ewc"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "the last solution and F (anchors=each: every solution and its F)"
    memory_size: ClassVar[str] = "2 P (anchors=each: 2 P T)"
    at_least: ClassVar[Bounds] = {"penalty": 0, "decay": 0}

    penalty: float = 1.4
    """λ, the weight of the quadratic penalty."""
    decay: float = 1.0
    """γ, the factor applied to the F of older tasks whenever a task is added."""
    fisher: Fisher = "exact"
    """Estimator of the Fisher diagonal F: exact, sampled, empirical or published."""
    anchors: Literal["last", "each"] = "last"
    """Centre of the quadratics: last (the last solution, online EWC) or each (every task's own solution)."""
    statistics: Statistics = "kept"
    """BatchNorm statistics after a task: kept, or published (overwritten by training-mode passes per image)."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        if self.statistics == "published":
            _require_batchnorm2d(model)
        zeros = {k: torch.zeros_like(p) for k, p in params.items()}
        memory: Memory = {
            "anchor": {k: p.clone() for k, p in params.items()},
            "fisher": zeros,
            "loss_at_solution": next(iter(params.values())).new_zeros(0),  # L_o(θ_o) of the finished tasks
        }
        if self.anchors == "each":
            empty = {k: z[None][:0] for k, z in zeros.items()}
            memory |= {
                "spread": memory["loss_at_solution"].new_zeros(()),
                "anchors": empty,
                "fishers": dict(empty),
            }
        return memory

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        return model.loss(params, batch.x, batch.y) + self._quadratic(memory, params, first_order=True)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        new = task_fisher(model, params, data, self.fisher, self.statistics)
        old = {k: self.decay * f for k, f in memory["fisher"].items()}
        losses = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        updated: Memory = {"anchor": params, "fisher": {k: old[k] + new[k] for k in new}, "loss_at_solution": losses}
        if self.statistics == "published":
            rows = rng.choose(rng.fold_in(data.key, "examples"), data.y.shape[0], BATCHNORM_PASSES)
            disturb_batchnorm(model, params, data.stored[rows])
        return updated | self._add_anchor(memory, old, params, new) if self.anchors == "each" else updated

    def _add_anchor(self, memory: Memory, old: Params, params: Params, new: Params) -> Memory:
        """Add a task's quadratic to the sum, which stays one quadratic, so that a step costs the same as online.

        Σ_o F_o (θ − θ_o)² = F (θ − c)² + Σ_o F_o (θ_o − c)², where F = Σ_o F_o and c = Σ_o F_o θ_o / F; the last term
        is the spread.
        """
        divisor = {k: torch.where(old[k] + new[k] > 0, old[k] + new[k], 1) for k in new}
        weight = {k: torch.where(old[k] > 0, old[k] / divisor[k], 0) for k in new}
        difference = {k: memory["anchor"][k] - params[k] for k in new}
        spread = self.decay * memory["spread"] + total(weight[k] * new[k] * difference[k].square() for k in new)
        return {
            "anchor": {k: params[k] + weight[k] * difference[k] for k in new},
            "spread": spread,
            "anchors": {k: torch.cat([memory["anchors"][k], p[None]]) for k, p in params.items()},
            "fishers": {k: torch.cat([self.decay * memory["fishers"][k], f[None]]) for k, f in new.items()},
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        losses = memory["loss_at_solution"]
        if self.anchors == "last":
            return lambda params: losses[task] + self._quadratic(memory, params) / losses.shape[0]
        fisher, anchor = ({k: v[task] for k, v in memory[name].items()} for name in ("fishers", "anchors"))
        return lambda params: losses[task] + self.penalty / 2 * weighted_square(fisher, params, anchor)

    def _quadratic(self, memory: Memory, params: Mapping[str, Tensor], first_order: bool = False) -> Tensor:
        square = first_order_weighted_square if first_order else weighted_square
        value = square(memory["fisher"], params, memory["anchor"])
        return self.penalty / 2 * (value + memory["spread"] if self.anchors == "each" else value)


def weighted_square(weight: Mapping[str, Tensor], params: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> Tensor:
    """Return Σ_i w_i (θ_i − c_i)²."""
    return total(weight[k] * (params[k] - centre[k]).square() for k in weight)


def first_order_weighted_square(
    weight: Mapping[str, Tensor], params: Mapping[str, Tensor], centre: Mapping[str, Tensor]
) -> Tensor:
    """Return `weighted_square` with the same gradient, 2 w (θ − c), at half the cost; its Hessian is wrong."""
    difference = {k: params[k] - centre[k] for k in weight}
    half = total((weight[k] * difference[k]).detach() * difference[k] for k in weight)
    return 2 * half - half.detach()
