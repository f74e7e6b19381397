r"""The network as functions of its parameters: f_θ(x), the loss L(θ; x, y) and its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.errors import require
from glocal.losses import Loss
from glocal.networks.batchnorm import BatchNorm2d
from glocal.networks.bf16 import halve
from glocal.networks.functional import Functional
from glocal.networks.preprocess import Door
from glocal.precision import Precision
from glocal.rng import split
from glocal.tree import Params

MakeNetwork: TypeAlias = Callable[[Sequence[int], int], nn.Module]  # input shape, outputs


class Model:
    """What an algorithm sees of the network: pure functions of θ.

    Inputs are as the challenge keeps them: uint8 images are scaled to [0, 1] and normalised here, at the network's
    door, so that buffers stay as small as the data. Inside a step, in training mode, the door also augments: a model
    that is bound to the step's key gives every batch that passes the key's next random numbers. A train-mode forward
    pass of BatchNorm changes the network's buffers; the model it ran through holds the new ones in `buffers`, beside
    the network's frozen parameters, and the engine carries them from step to step with the run.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        tasks: int = 1,
        batch_size: int = 1,
        vectorised: bool = False,
        classes: Callable[[int], Sequence[int]] | None = None,
        door: Door | None = None,
        precision: Precision = "fp32",
    ) -> None:
        self._modes = {True: Functional(module.train()), False: Functional(copy.deepcopy(module).eval())}
        self.criterion = loss
        self.tasks = tasks
        self.batch_size = batch_size
        self._classes = None if classes is None else cache(classes)  # finding them may mean making the task
        self.has_batch_statistics = any(isinstance(m, _BatchNorm) for m in module.modules())
        self.vectorised = vectorised
        self.door = door or Door()
        self.key: Tensor | None = None
        self._passed = count()
        self.training = True
        self.buffers: Params = {}
        self._changing = changed_in_place(module)
        self.precision = precision
        self._halved = halved(module) if precision == "bf16" else frozenset()

    @property
    def module(self) -> nn.Module:
        """The network's structure in the model's mode; its own tensors are never used."""
        return self._modes[self.training].module

    def bind(
        self, buffers: Mapping[str, Tensor], training: bool = True, key: Tensor | None = None, first: int = 0
    ) -> Model:
        """The same network with one run's buffers, which stay untouched: the copies change.

        With a key the batches that pass its door are counted anew, from `first` on; without one it has the same door,
        and all that share a door share the count.
        """
        keyed = key is not None and self.door.augment is not None
        if not buffers and training == self.training and not keyed:
            return self
        bound = copy.copy(self)
        if keyed:
            bound.key, bound._passed = key, count(first)
        changes = self._changing if training else ()
        bound.buffers = {k: b.clone() if k in changes else b for k, b in buffers.items()}
        bound.training = training
        return bound

    def evaluating(self) -> Model:
        """The same network in evaluation mode: no augmentation, no dropout, BatchNorm by its running statistics."""
        return self.bind(self.buffers, training=False)

    def classes(self, task: int) -> tuple[int, ...]:
        """The classes that occur in a task."""
        return () if self._classes is None else tuple(self._classes(task))

    def admit(self, x: Tensor) -> Tensor:
        """Inputs as the network takes them, for whoever needs the very same ones twice: floats pass every door."""
        return self.door.ready(self.vary(x))

    def vary(self, x: Tensor) -> Tensor:
        """Inputs as a training step sees them, augmented, and still as the challenge keeps them."""
        if self.training and self.key is not None and not x.is_floating_point():
            return self.door.varied(x, split(self.key, next(self._passed)))
        return x

    def outputs(self, params: Mapping[str, Tensor], x: Tensor, *args: Any) -> Tensor:
        """f_θ(x), one row an input; a network that an algorithm built may take more than inputs."""
        return self._through(self._modes[self.training], params, x, *args)

    def outputs_through(self, module: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Those of another network with the same tensors. What it puts in its buffers' places is kept."""
        return self._through(Functional(module), params, x)

    def _through(self, function: Functional, params: Mapping[str, Tensor], x: Tensor, *args: Any) -> Tensor:
        """The network in its precision. Mapped over runs torch's own autocast fails: it is done by hand."""
        tensors, x = {**params, **self.buffers}, self.admit(x)
        exact = x.dtype
        if self._halved:
            tensors = {k: halve(t) if k in self._halved else t for k, t in tensors.items()}
            x = x.bfloat16()
        outputs, changed = function(tensors, x, *args)
        if changed:
            self.buffers = {**self.buffers, **changed}
        return outputs.to(exact) if exact.is_floating_point else outputs

    def features(self, params: Mapping[str, Tensor], x: Tensor, *args: Any) -> Tensor:
        """φ_θ(x), one row an input: what the last linear layer that is called makes its outputs from."""
        function, last = self._modes[self.training], {}

        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            last["input"] = inputs[0]

        layers = [layer for layer in function.module.modules() if isinstance(layer, nn.Linear)]
        handles = [layer.register_forward_pre_hook(keep) for layer in layers]
        try:
            given = self._through(function, params, x, *args).dtype
        finally:
            for handle in handles:
                handle.remove()
        name = type(function.module).__name__
        require(bool(last), f"features are the inputs of a network's last nn.Linear layer, and {name} calls none.")
        return last["input"].flatten(1).to(given)

    def losses(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """ℓ(f_θ(x_i), y_i), one number an input."""
        return self.criterion.per_sample(self.outputs(params, x), y)

    def loss(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """L(θ), the mean over the batch; with weights, the weighted mean (0 where all weights are 0)."""
        losses = self.losses(params, x, y)
        if weight is None:
            return losses.mean()
        total = weight.sum()
        return (weight * losses).sum() / torch.where(total > 0, total, 1)

    def mean_loss(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor, chunk: int = 2000) -> Tensor:
        """L(θ) over a whole data set, a bounded number of examples at a time."""
        parts = [self.losses(params, a, b).sum() for a, b in zip(x.split(chunk), y.split(chunk), strict=True)]
        return torch.stack(parts).sum() / y.shape[0]

    def grad(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None = None) -> Params:
        """∇L(θ) on a batch. One whose weights are all 0 is no batch: it leaves the network's buffers alone."""

        def value(params: Mapping[str, Tensor], buffers: Params) -> tuple[Tensor, Params]:
            bound = self.bind(buffers, self.training)
            return bound.loss(params, x, y, weight), bound.buffers

        if self.vectorised:
            grads, buffers = torch.func.grad(value, has_aux=True)(dict(params), self.buffers)
        else:
            leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
            with torch.enable_grad():
                loss, buffers = value(leaves, self.buffers)
                slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            grads = dict(zip(leaves, slopes, strict=True))
        if weight is not None:
            buffers = {k: torch.where(weight.sum() > 0, b, self.buffers[k]) for k, b in buffers.items()}
        self.buffers = buffers
        return grads


def halved(module: nn.Module) -> frozenset[str]:
    """The parameters that bf16 rounds: all but BatchNorm's, whose few numbers stand at sums over many."""
    exact = {id(p) for part in module.modules() if isinstance(part, _BatchNorm) for p in part.parameters()}
    return frozenset(k for k, p in module.named_parameters() if id(p) not in exact)


def changed_in_place(module: nn.Module) -> frozenset[str]:
    """The buffers that a forward pass may write to. Our own BatchNorm puts new ones in their place instead."""
    kept = {id(b) for part in module.modules() if isinstance(part, BatchNorm2d) for b in part.buffers()}
    return frozenset(k for k, b in module.named_buffers() if id(b) not in kept)
