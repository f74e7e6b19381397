r"""Optimisers: SGD with momentum, Adam and AdamW, with learning-rate schedules, as `torch.optim` defines them, and the
base class of optimisers of your own.

An optimiser turns gradients into a descent direction d and keeps its own state:

    init(params, hyper) -> state
    update(grads, state, params, hyper) -> d, state

Like optax's `scale_by_*` transformations it does not multiply by the learning rate; `apply_update` does, in place.
An optimiser is a frozen dataclass. Its float fields are scalars of a run: runs that differ only in them train in one
cohort. Inside `update` they are tensors in `hyper`. The learning rates of a schedule are computed by the loader, once
an epoch. An optimiser of your own is written for one run, and mapped over the runs of a cohort; those of this module
are written for one run and for stacked runs, where `hyper` has one value per run.

>>> import torch
>>> params, grads = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -1.0])}
>>> adam, hyper = Adam(), {k: torch.tensor(v) for k, v in (("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8))}
>>> descent, state = adam.update(grads, adam.init(params, hyper), params, hyper)
>>> apply_update(params, descent, lr=torch.tensor(0.1))
>>> params["w"]
tensor([0.9000, 2.1000])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from glocal import hyperparameters, tree
from glocal.errors import require
from glocal.tree import Params, Tree

SCHEDULE = ("schedule", "warmup", "gamma", "step_epochs", "span")
"""Options of the schedule. The loader computes learning rates for every run, so runs of a cohort may differ in them."""


@dataclass(frozen=True)
class Optimizer:
    """Base class: gradient clipping, the learning-rate schedule, and options that all optimisers have.

    Gradients are what the algorithm's `direction` returns. As in `torch.optim`, parameters without a gradient are not
    updated, and do not decay.
    """

    name: ClassVar[str] = "optimizer"
    off_at_zero: ClassVar[tuple[str, ...]] = ("weight_decay", "clip")
    """Scalars that are left out of `hyper` if they are 0 in all runs of a cohort."""
    at_least: ClassVar[Mapping[str, float]] = {
        **dict.fromkeys(("weight_decay", "clip", "momentum", "beta1", "beta2", "warmup", "gamma"), 0)
    }

    weight_decay: float = 0.0
    """Weight decay: added to the gradient (sgd, adam), or decoupled from it (adamw)."""
    clip: float = 0.0
    """Largest norm of a step's gradient over all parameters; longer ones are scaled down to it. 0: no limit."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """Learning rate over time, after the warm-up: constant, step (times gamma every step_epochs) or cosine (to 0)."""
    warmup: float = 0.0
    """Epochs over which the learning rate rises linearly to its full value."""
    gamma: float = 0.1
    """Factor of schedule=step."""
    step_epochs: float = 1.0
    """Epochs between two steps of schedule=step."""
    span: Literal["task", "sequence"] = "task"
    """Whether schedule and warm-up start anew with every task, or extend over the whole sequence of tasks."""
    state: Literal["reset", "kept"] = "reset"
    """What becomes of momentum and averages when a new task begins: reset to 0, or kept."""

    def __post_init__(self) -> None:
        hyperparameters.check(self)
        require(self.step_epochs > 0, f"{self.name}.step_epochs = {self.step_epochs} was given; it must be above 0.")
        if self.schedule != "step":
            unused = self.gamma != 0.1 or self.step_epochs != 1
            require(not unused, f"{self.name}: gamma and step_epochs are options of schedule=step; set schedule too.")
        unused = self.span == "sequence" and not self.scheduled
        require(not unused, f"{self.name}: span=sequence has no effect on a constant rate: set schedule or warmup too.")

    def init(self, params: Params, hyper: Params) -> Tree:
        """Return the state before the first step of training, or of a task if state=reset: a tree of tensors."""
        return {}

    def update(self, grads: Params, state: Tree, params: Params, hyper: Params) -> tuple[Params, Tree]:
        """Return the descent direction and the new state.

        Args:
            grads: gradients; parameters that are not in it stay as they are, and keep their state.
            state: what the last step returned.
            params: parameters before the step.
            hyper: the float fields as tensors, without `weight_decay` and `clip` where they are 0 and those of the
                schedule. `clip_gradients` and `add_weight_decay` apply the two.
        """
        raise NotImplementedError

    def structure(self) -> tuple[Any, ...]:
        """Return what runs of a cohort share: the class, and options that are neither scalars nor of the schedule."""
        kind, excluded = type(self), {*SCHEDULE, *hyperparameters.scalars(self)}
        options = (getattr(self, field.name) for field in fields(self) if field.name not in excluded)
        return kind.__module__, kind.__qualname__, *options

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate changes during training."""
        return self.schedule != "constant" or self.warmup > 0

    def lr_factors(self, task: int, tasks: int, epoch: int, epochs: int, steps: int) -> Tensor:
        """Return the factors of the learning rate at the steps of an epoch; every task counts as equally long."""
        begin, span = (task * epochs, tasks * epochs) if self.span == "sequence" else (0, epochs)
        time = begin + epoch + torch.arange(steps, dtype=torch.float64) / steps  # in epochs
        after = (time - self.warmup).clamp(min=0)
        factors = torch.ones_like(time)
        if self.schedule == "step":
            factors = self.gamma ** (after / self.step_epochs + 1e-9).floor()
        elif self.schedule == "cosine" and span > self.warmup:
            factors = (1 + (math.pi * after / (span - self.warmup)).cos()) / 2
        rising = (time + 1 / steps) / self.warmup if self.warmup else factors
        return torch.where(time < self.warmup - 1e-9, rising.clamp(max=1), factors)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: v ← momentum · v + g and d = v, or d = g + momentum · v with Nesterov's momentum.

    Without options d = g: the plain SGD of the paper, which has no state.
    """

    name: ClassVar[str] = "sgd"
    off_at_zero: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay", "clip")

    momentum: float = 0.0
    """Factor of the previous direction."""
    nesterov: bool = False
    """Use Nesterov's momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.nesterov or self.momentum > 0, "sgd: nesterov=true has no effect without momentum: set it too."
        )

    def init(self, params: Params, hyper: Params) -> Tree:
        return {"velocity": _zeros(params)} if "momentum" in hyper else {}

    def update(self, grads: Params, state: Tree, params: Params, hyper: Params) -> tuple[Params, Tree]:
        grads = add_weight_decay(clip_gradients(grads, hyper), params, hyper)
        if "momentum" not in hyper:
            return grads, state
        momentum = hyper["momentum"]
        velocity = {k: torch.addcmul(g, state["velocity"][k], per_run(momentum, g)) for k, g in grads.items()}
        descent = velocity
        if self.nesterov:
            descent = {k: torch.addcmul(g, velocity[k], per_run(momentum, g)) for k, g in grads.items()}
        return descent, {"velocity": state["velocity"] | velocity}


@dataclass(frozen=True)
class Adam(Optimizer):
    r"""Adam (Kingma & Ba 2015): d = \hat m / (√\hat v + eps), with m and v the running averages of g and g².

    \hat m = m / (1 − beta1ᵗ) and \hat v = v / (1 − beta2ᵗ) correct the averages' start at 0. t counts the steps in
    which a parameter had a gradient.
    """

    name: ClassVar[str] = "adam"

    beta1: float = 0.9
    """Decay rate of the average of gradients."""
    beta2: float = 0.999
    """Decay rate of the average of squared gradients."""
    eps: float = 1e-8
    """Value added to the root of the squares' average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            below = beta < 1 and bool(np.float32(beta) < 1)  # runs compute in single precision
            require(below, f"{self.name}.{name} = {beta} was given; it must be at least 0 and below 1 in float32.")
        require(self.eps > 0, f"{self.name}.eps = {self.eps} was given; it must be above 0.")

    def init(self, params: Params, hyper: Params) -> Tree:
        corrections = hyper["beta1"].new_zeros(*hyper["beta1"].shape, len(params), dtype=torch.float64)
        return {
            "mean": _zeros(params),
            "square": _zeros(params),
            "mean_correction": corrections,  # 1 − betaᵗ of every parameter
            "square_correction": corrections.clone(),
        }

    def update(self, grads: Params, state: Tree, params: Params, hyper: Params) -> tuple[Params, Tree]:
        grads = self._decay_gradient(clip_gradients(grads, hyper), params, hyper)
        rates = {"mean": 1 - hyper["beta1"], "square": 1 - hyper["beta2"]}
        corrections = {k: _next_correction(state[f"{k}_correction"], rates[k], grads, params) for k in rates}
        scales = corrections["mean"] / corrections["square"].sqrt()
        floors = corrections["mean"] * hyper["eps"].unsqueeze(-1)
        mean, square, descent = {}, {}, {}
        index = {k: i for i, k in enumerate(params)}
        for k, g in grads.items():
            scale, floor = (per_run(x[..., index[k]].to(g.dtype), g) for x in (scales, floors))
            mean[k] = state["mean"][k].lerp(g, per_run(rates["mean"].to(g.dtype), g))
            square[k] = state["square"][k].lerp(g * g, per_run(rates["square"].to(g.dtype), g))
            descent[k] = mean[k] / torch.addcmul(floor, square[k].sqrt(), scale)
        new = {"mean": state["mean"] | mean, "square": state["square"] | square}
        return descent, new | {f"{k}_correction": c for k, c in corrections.items()}

    def _decay_gradient(self, grads: Params, params: Params, hyper: Params) -> Params:
        return add_weight_decay(grads, params, hyper)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): weight_decay · θ is added to Adam's d."""

    name: ClassVar[str] = "adamw"

    weight_decay: float = 0.01
    """Weight decay, decoupled from the gradient: θ shrinks by lr · weight_decay in every step."""

    def update(self, grads: Params, state: Tree, params: Params, hyper: Params) -> tuple[Params, Tree]:
        descent, state = super().update(grads, state, params, hyper)
        return add_weight_decay(descent, params, hyper), state

    def _decay_gradient(self, grads: Params, params: Params, hyper: Params) -> Params:
        return grads


OPTIMIZERS: dict[str, type[Optimizer]] = {kind.name: kind for kind in (SGD, Adam, AdamW)}
PLAIN_SGD = SGD()
"""The default: the optimiser of the paper."""


def is_built_in(optimizer: Optimizer) -> bool:
    """Whether the optimiser's methods take stacked runs; those of a user's optimiser are mapped over the runs."""
    return type(optimizer) in OPTIMIZERS.values()


def step_scalars(optimizers: Sequence[Optimizer]) -> dict[str, list[float]]:
    """Return the scalars that a step of these runs uses, with one value per run.

    Weight decay, clipping and the momentum of SGD are left out if they are 0 in all runs: steps then do without them.
    """
    columns = {name: [getattr(o, name) for o in optimizers] for name in hyperparameters.scalars(optimizers[0])}
    used = {k: v for k, v in columns.items() if k not in SCHEDULE}
    return {k: v for k, v in used.items() if any(v) or k not in optimizers[0].off_at_zero}


def apply_update(params: Params, descent: Params, lr: Tensor) -> None:
    """θ ← θ − lr · d in place; `lr` is a scalar, or has one value per run where `params` are stacked."""
    for name, direction in descent.items():
        p = params[name]
        p.addcmul_(direction, per_run(lr, p), value=-1)


def per_run(scalar: Tensor, like: Tensor) -> Tensor:
    """Return a scalar as it is, and one value per run so that it multiplies stacked tensors."""
    return scalar.view(-1, *[1] * (like.dim() - 1)) if scalar.dim() else scalar


def _zeros(params: Params) -> Params:
    return {k: torch.zeros_like(p) for k, p in params.items()}


def clip_gradients(grads: Params, hyper: Params) -> Params:
    """Scale gradients whose norm over all parameters exceeds `clip`, as `torch.nn.utils.clip_grad_norm_` does."""
    if "clip" not in hyper:
        return grads
    clip = hyper["clip"]
    norm = vmap(tree.norm)(grads) if clip.dim() else tree.norm(grads)
    scale = torch.where(clip > 0, (clip / (norm + 1e-6)).clamp(max=1), 1)
    return {k: g * per_run(scale.to(g.dtype), g) for k, g in grads.items()}


def add_weight_decay(grads: Params, params: Params, hyper: Params) -> Params:
    """Add weight_decay · θ."""
    if "weight_decay" not in hyper:
        return grads
    return {k: torch.addcmul(g, params[k], per_run(hyper["weight_decay"], g)) for k, g in grads.items()}


def _next_correction(last: Tensor, rate: Tensor, grads: Params, params: Params) -> Tensor:
    """Return 1 − betaᵗ after one more step, of which parameters without a gradient take no part."""
    new = last + rate.double().unsqueeze(-1) * (1 - last)
    if len(grads) == len(params):
        return new
    return torch.stack([(new if k in grads else last)[..., i] for i, k in enumerate(params)], -1)
