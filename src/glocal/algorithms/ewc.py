r"""Elastic weight consolidation (§5.2): diagonal quadratics at the solutions, Eq. general-opt-local.

Online, with one anchor, the last solution:

    obj_t(θ) = L_t(θ) + (λ/2) Σ_i F_i (θ_i − θ_{t−1,i})²,   F = γ F + F_{t−1} after every task,

F_o the diagonal of the Fisher matrix of task o at its solution θ_o. At a minimum of obj the gradients of the old losses
cancel and one anchor carries the sum of all old quadratics. With one anchor for each task:

    obj_t(θ) = L_t(θ) + (λ/2) Σ_{o<t} γ^{t−1−o} Σ_i F_{o,i} (θ_i − θ_{o,i})².

What the published code does to BatchNorm, beside what it means to do: a side effect that published numbers have.

It takes the gradients of single images with the network in training mode. Every such pass moves the running statistics
a tenth of the way to those of one image, just before the task is evaluated, and a few dozen passes leave nothing of
the statistics of batches. Training goes by the batch's own statistics, so that only what is measured changes. And no
image's pass depends on those before it: where BatchNorm is ours they are made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.curvature.diagonal import diagonal, max_chunk_size
from glocal.curvature.layers import Cotangents, chunk_size
from glocal.errors import require, unknown
from glocal.losses import Loss
from glocal.networks.batchnorm import BatchNorm2d, SequentialBatchNorm2d, per_image_batchnorm
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.tree import Params, total

Statistics: TypeAlias = Literal["kept", "published"]
LAST = 200
"""Passes that count: of what was there before them 0.9²⁰⁰ is left, less than a number in fp32 can show."""


def disturb_batchnorm(model: Model, params: Params, x: Tensor) -> None:
    """Update the model's buffers by a pass in training mode over every image by itself, augmented as in training."""
    norms = [part for part in model.module.modules() if isinstance(part, _BatchNorm)]
    if norms and all(type(part) is BatchNorm2d for part in norms):
        model.outputs_of(per_image_batchnorm(model.module, SequentialBatchNorm2d), params, x[-LAST:])
    elif norms:
        for image in x[-LAST:]:
            model.outputs(params, image.unsqueeze(0))


Fisher = Literal["exact", "sampled", "empirical", "published"]


def _exact(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """The expectation over the network's own labels, in closed form: the Gauss–Newton matrix."""
    return loss.output_hessian_sqrt(outputs)


def _sampled(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """The same expectation from one label drawn for every input."""
    return loss.output_gradient(outputs, loss.sample_labels(outputs, random)).unsqueeze(1)


def _empirical(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """Squared gradients at the data's labels, which vanish where the network fits them."""
    return loss.output_gradient(outputs, y).unsqueeze(1)


def _published(loss: Loss, outputs: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """What the paper's numbers were measured with: the empirical one, each sample weighted by p(y|x)."""
    return (loss.likelihood(outputs, y).sqrt().unsqueeze(-1) * loss.output_gradient(outputs, y)).unsqueeze(1)


FISHERS = {"exact": _exact, "sampled": _sampled, "empirical": _empirical, "published": _published}


def task_fisher(
    model: Model,
    params: Params,
    data: Batch,
    variant: str,
    statistics: Statistics = "kept",
    chunk: int | None = None,
) -> Params:
    """F at θ over a task's data, a bounded number of examples at a time: few on a CPU, whose cache is small.

    In evaluation mode; with published statistics as in training, image by image and augmented.
    """
    evaluated = model.eval_mode()
    alone = statistics == "published" and model.has_batchnorm
    module = per_image_batchnorm(evaluated.module) if alone else evaluated.module
    inputs = model.augment(data.x) if alone else data.x
    if chunk is None:
        first = replace(Risk.from_model(model, params, data.x[:1], data.y[:1]), module=module)
        chunk = chunk_size(first, _cotangents(variant, model.criterion, data.random[:1]), max_chunk_size(data.y.device))
    fisher = {k: torch.zeros_like(p) for k, p in params.items()}
    for x, y, random in zip(inputs.split(chunk), data.y.split(chunk), data.random.split(chunk), strict=True):
        risk = replace(Risk.from_model(model, params, x, y), module=module, chunk_size=len(y))
        part = diagonal(risk, _cotangents(variant, model.criterion, random))
        fisher = {k: fisher[k] + part[k] * (y.shape[0] / data.y.shape[0]) for k in fisher}
    return fisher


def _cotangents(variant: str, loss: Loss, random: Tensor) -> Cotangents:
    return lambda outputs, y: FISHERS[variant](loss, outputs, y, random)


@dataclass(frozen=True)
class EWC(Algorithm):
    r"""Minimises L_t plus the diagonal quadratics of the finished tasks. Online they are one, and each has its share:

        \hat L_o(θ) = L_o(θ_o) + (1/(t−1)) (λ/2) Σ_i F_i (θ_i − θ_{t−1,i})²,

    and with anchors='each' \hat L_o(θ) = L_o(θ_o) + (λ/2) Σ_i F_{o,i} (θ_i − θ_{o,i})². F and its centre are taken at
    the solutions: local. The paper's λ (0.7 on rotated digits) goes with no ½ and the 'published' Fisher:
    `penalty=1.4, fisher='published'`.
    """

    name: ClassVar[str] = "ewc"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "the last solution and F (anchors=each: every solution and its F)"
    memory_size: ClassVar[str] = "2 P (anchors=each: 2 P T)"

    penalty: float = 1.4
    """λ, the weight of the quadratic."""
    decay: float = 1.0
    """γ, how much of the older tasks' F is kept when a task is added."""
    fisher: Fisher = "exact"
    """Which F: exact, sampled, empirical or published."""
    anchors: Literal["last", "each"] = "last"
    """Where the quadratics are centred: all at the last solution, or each at its own."""

    statistics: Statistics = "kept"
    """BatchNorm's: kept, or published: F of images one by one in training mode, which overwrites them after a task."""

    def __post_init__(self) -> None:
        if self.fisher not in FISHERS:
            raise unknown("fisher variant", self.fisher, FISHERS)
        require(self.penalty >= 0, f"ewc needs a penalty of at least 0; {self.penalty} was given.")
        require(self.decay >= 0, f"ewc needs a decay of at least 0; {self.decay} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        zeros = {k: torch.zeros_like(p) for k, p in params.items()}
        memory: Memory = {
            "anchor": {k: p.clone() for k, p in params.items()},
            "fisher": zeros,
            "loss_at_solution": next(iter(params.values())).new_zeros(0),  # L_o(θ_o) of every finished task
        }
        if self.anchors == "each":
            none = {k: z[None][:0] for k, z in zeros.items()}
            memory |= {
                "spread": memory["loss_at_solution"].new_zeros(()),
                "each_anchor": none,
                "each_fisher": dict(none),
            }
        return memory

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        return model.loss(params, batch.x, batch.y) + self._quadratic(memory, params, to_step=True)

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        new = task_fisher(model, params, data, self.fisher, self.statistics)
        kept = {k: self.decay * f for k, f in memory["fisher"].items()}
        reached = torch.cat([memory["loss_at_solution"], model.eval_mode().mean_loss(params, data.x, data.y)[None]])
        together: Memory = {"anchor": params, "fisher": {k: kept[k] + new[k] for k in new}, "loss_at_solution": reached}
        if self.statistics == "published":
            disturb_batchnorm(model, params, data.x[data.random.topk(min(LAST, len(data.y))).indices])
        return together | self._add_anchor(memory, kept, params, new) if self.anchors == "each" else together

    def _add_anchor(self, memory: Memory, kept: Params, params: Params, new: Params) -> Memory:
        """One more quadratic. Their sum is one again, F = Σ_o F_o around the mean of the θ_o weighted by F_o, and the
        spread Σ_o F_o (θ_o − mean)²: a step costs what it costs online."""
        whole = {k: torch.where(kept[k] + new[k] > 0, kept[k] + new[k], 1) for k in new}
        weight = {k: torch.where(kept[k] > 0, kept[k] / whole[k], 0) for k in new}
        apart = {k: memory["anchor"][k] - params[k] for k in new}
        spread = self.decay * memory["spread"] + total(weight[k] * new[k] * apart[k].square() for k in new)
        return {
            "anchor": {k: params[k] + weight[k] * apart[k] for k in new},
            "spread": spread,
            "each_anchor": {k: torch.cat([memory["each_anchor"][k], p[None]]) for k, p in params.items()},
            "each_fisher": {k: torch.cat([self.decay * memory["each_fisher"][k], f[None]]) for k, f in new.items()},
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        reached = memory["loss_at_solution"]
        if self.anchors == "last":
            return lambda params: reached[task] + self._quadratic(memory, params) / reached.shape[0]
        fisher, anchor = ({k: v[task] for k, v in memory[name].items()} for name in ("each_fisher", "each_anchor"))
        return lambda params: reached[task] + self.penalty / 2 * weighted_square(fisher, params, anchor)

    def _quadratic(self, memory: Memory, params: Mapping[str, Tensor], to_step: bool = False) -> Tensor:
        square = weighted_square_to_step if to_step else weighted_square
        value = square(memory["fisher"], params, memory["anchor"])
        return self.penalty / 2 * (value + memory["spread"] if self.anchors == "each" else value)


def weighted_square(weight: Mapping[str, Tensor], params: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> Tensor:
    """Σ_i w_i (θ_i − c_i)²."""
    return total(weight[k] * (params[k] - centre[k]).square() for k in weight)


def weighted_square_to_step(
    weight: Mapping[str, Tensor], params: Mapping[str, Tensor], centre: Mapping[str, Tensor]
) -> Tensor:
    """The same value and the same gradient, 2 w (θ − c), in half of the passes over the numbers; its second derivative
    is not that of the square."""
    apart = {k: params[k] - centre[k] for k in weight}
    half = total((weight[k] * apart[k]).detach() * apart[k] for k in weight)
    return 2 * half - half.detach()
