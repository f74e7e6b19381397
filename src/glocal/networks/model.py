r"""A network as pure functions of its parameters: f_θ(x), the loss L(θ; x, y) and its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.errors import require
from glocal.losses import Loss
from glocal.networks.batchnorm import BatchNorm2d
from glocal.networks.layer_calls import hooked, set_eval_mode
from glocal.networks.preprocess import InputTransform
from glocal.networks.randomness import KeyedRandomness
from glocal.precision import Precision
from glocal.rng import fold_in, split
from glocal.tree import Params, Tree, flatten

StatisticsUpdates: TypeAlias = Literal["first pass", "every pass", "kept"]
MakeNetwork: TypeAlias = Callable[[Sequence[int], int], nn.Module]  # input shape, outputs
ATTENTION_UNDER_VMAP = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Under `vmap` on a GPU torch's other kernels for attention fail, or return wrong gradients (torch 2.11)."""


class Model:
    """A network as an algorithm uses it: pure functions of θ.

    Algorithms get inputs as the network takes them. What a buffer has stored, bytes as in the challenge, goes through
    `prepare`, which augments it anew in training; without that, bytes are only scaled to [0, 1] and normalized.

    `buffers` are the network's buffers; the engine carries them from step to step. A pass in training mode updates
    BatchNorm's running statistics there, as `statistics` says: 'first pass' (set in `objective`: the first one whose
    parameters are not from the memory), 'kept' (set in other methods) or 'every pass'. Frozen parameters are the
    module's own, one tensor for all runs, unless `buffers` holds a run's own.

    Args:
        module: The network.
        loss: The loss of one batch of outputs and targets.
        tasks: The number of tasks in all; 0 if a run goes on with more tasks than it was trained for.
        batch_size: The mini-batch size of training.
        vectorised: Whether the model runs under `vmap` over runs.
        classes: Returns the classes of a task.
        transform: The input transform; by default uint8 inputs are scaled to [0, 1].
        precision: The precision of the network's own products.
        draws: Whether the network draws random numbers in training, as dropout does: they come from the key.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        tasks: int = 1,
        batch_size: int = 1,
        *,
        vectorised: bool = False,
        classes: Callable[[int], tuple[int, ...]] | None = None,
        transform: InputTransform | None = None,
        precision: Precision = "fp32",
        draws: bool = False,
    ) -> None:
        self._functions = {
            True: FunctionalModule(module.train()),
            False: FunctionalModule(set_eval_mode(share_parameters(module))),
        }
        self.criterion = loss
        self._tasks = tasks
        self.batch_size = batch_size
        self._classes = cache(classes or (lambda task: ()))  # computing them may load the task
        self.has_batchnorm = any(isinstance(m, _BatchNorm) for m in module.modules())
        self.vectorised = vectorised
        self.transform = transform or InputTransform()
        self.draws = draws
        self.key: Tensor | None = None
        self._draws = count()
        self._numbers_drawn: dict[torch.Size, int] = {}  # in the last pass on inputs of this shape
        self.statistics: StatisticsUpdates = "every pass"
        self._remembered: frozenset[int] = frozenset()
        self.training = True
        self.buffers: Params = {}
        self._mutable_buffers = _mutable_buffers(module)
        self._bf16_params = _bf16_params(module) if precision == "bf16" else frozenset()
        self.frozen = self._cast(frozen_parameters(module))

    @property
    def module(self) -> nn.Module:
        """The network in the model's mode; of the tensors it holds itself, only frozen parameters are used."""
        return self._functions[self.training].module

    def classes(self, task: int | Tensor) -> tuple[int, ...]:
        """Return the classes of a task."""
        return self._classes(int(task))

    @property
    def tasks(self) -> int:
        """The number of tasks in all."""
        message = (
            "the algorithm uses the number of tasks from the start, and the runs to go on from were trained for fewer"
        )
        remedy = "train them again with that number as their horizon, or all tasks from the start"
        require(self._tasks > 0, f"{message}: {remedy}.")
        return self._tasks

    def bind(
        self,
        buffers: Mapping[str, Tensor],
        training: bool = True,
        key: Tensor | None = None,
        purpose: str = "augmentation",
        statistics: StatisticsUpdates | None = None,
        memory: Tree | None = None,
    ) -> Model:
        """Return the model with one run's buffers. The given tensors are not modified.

        Args:
            buffers: The run's buffers, and its frozen parameters where they differ between runs.
            training: Train or evaluation mode.
            key: The step's random key, for augmentation and dropout. Without one, the returned model continues this
                model's sequence of draws.
            purpose: The purpose that is folded into the key.
            statistics: Which passes update running statistics.
            memory: The memory, whose networks do not update them.
        """
        if self.transform.augmentation is None and not self.draws:
            key = None
        if not buffers and training == self.training and key is None:
            return self
        bound = copy.copy(self)
        if key is not None:
            bound.key, bound._draws = fold_in(key, purpose), count()
        bound.buffers = dict(buffers)
        bound.training = training
        bound.statistics = statistics or self.statistics
        if memory is not None:
            bound._remembered = frozenset(map(id, flatten(memory).values()))
        return bound

    def eval_mode(self) -> Model:
        """Return the model in evaluation mode: no augmentation, no dropout, BatchNorm with running statistics."""
        return self.bind(self.buffers, training=False)

    def prepare(self, x: Tensor) -> Tensor:
        """Return stored inputs as the network takes them, in training augmented anew at every call.

        Inputs that are not bytes are changed only by a challenge's own augmentation.
        """
        key = None if self.key is None or not self.training else split(self.key, next(self._draws))
        return self.transform.prepare(x, key)

    def outputs(self, params: Mapping[str, Tensor], x: Tensor, *args: Any) -> Tensor:
        """Return f_θ(x), one row per input. `args` are passed on to the network."""
        return self._call(self._functions[self.training], params, x, *args)

    def outputs_of(self, module: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs of another module that has the same parameters and buffers."""
        return self._call(FunctionalModule(module), params, x)

    def _call(self, function: FunctionalModule, params: Mapping[str, Tensor], x: Tensor, *args: Any) -> Tensor:
        update = self.statistics == "every pass"
        if self.statistics == "first pass" and not any(id(p) in self._remembered for p in params.values()):
            update, self.statistics = True, "kept"
        tensors, x = {**params, **self.buffers}, self.transform.normalize(x)
        mutable_buffers = {k: self.buffers[k].clone() for k in self._mutable_buffers} if self.training else {}
        tensors |= mutable_buffers
        if self._bf16_params:  # cast by hand: torch's autocast fails under vmap
            tensors, x = self._cast(tensors), x.bfloat16() if x.is_floating_point() else x
        key = self.key if self.draws and self.training else None
        with ExitStack() as contexts:
            if key is not None:
                random = KeyedRandomness(split(key, next(self._draws)), self._numbers_drawn.get(x.shape, 0))
                contexts.enter_context(random)
                contexts.callback(lambda: self._numbers_drawn.update({x.shape: random.drawn}))
            if self.vectorised and x.is_cuda:
                contexts.enter_context(sdpa_kernel(ATTENTION_UNDER_VMAP))
            outputs, changed = function({**self.frozen, **tensors}, x, *args)
        if update and (mutable_buffers or changed):
            self.buffers = {**self.buffers, **mutable_buffers, **changed}
        return outputs.float() if self._bf16_params else outputs

    def _cast(self, tensors: Params) -> Params:
        return {k: t.bfloat16() if k in self._bf16_params else t for k, t in tensors.items()}

    def features(self, params: Mapping[str, Tensor], x: Tensor, *args: Any) -> Tensor:
        """Return φ_θ(x), one row per input: the input of the last `nn.Linear` that the forward pass calls."""
        function, last = self._functions[self.training], {}

        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            last["input"] = inputs[0]

        linear = (layer for layer in function.module.modules() if isinstance(layer, nn.Linear))
        with hooked(layer.register_forward_pre_hook(keep) for layer in linear):
            dtype = self._call(function, params, x, *args).dtype
        name = type(function.module).__name__
        require(bool(last), f"Features are the inputs of a network's last nn.Linear layer, but {name} calls none.")
        return last["input"].flatten(1).to(dtype)

    def losses(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return ℓ(f_θ(x_i), y_i), one scalar per input."""
        return self.criterion.per_sample(self.outputs(params, x), y)

    def loss(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return L(θ), the mean over the batch; with weights, the weighted mean (0 if all weights are 0)."""
        losses = self.losses(params, x, y)
        if weight is None:
            return losses.mean()
        total = weight.sum()
        return (weight * losses).sum() / torch.where(total > 0, total, 1)

    def mean_loss(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor, chunk: int = 2000) -> Tensor:
        """Return L(θ) over a data set, computed in chunks."""
        parts = [self.losses(params, a, b).sum() for a, b in zip(x.split(chunk), y.split(chunk), strict=True)]
        return torch.stack(parts).sum() / y.shape[0]

    def grad(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None = None) -> Params:
        """Return ∇L(θ) on a batch; in `objective` it can be differentiated again.

        A batch whose weights are all 0 leaves the network's buffers unchanged.
        """

        def value(params: Mapping[str, Tensor], buffers: Params) -> tuple[Tensor, Params]:
            bound = self.bind(buffers, self.training)
            return bound.loss(params, x, y, weight), bound.buffers

        if self.vectorised:
            grads, buffers = torch.func.grad(value, has_aux=True)(dict(params), self.buffers)
        else:
            graph = torch.is_grad_enabled() and any(p.requires_grad for p in params.values())
            leaves = {k: p if graph and p.requires_grad else p.detach().requires_grad_() for k, p in params.items()}
            inputs = list(leaves.values())
            with torch.enable_grad():
                loss, buffers = value(leaves, self.buffers)
                gradients = torch.autograd.grad(
                    loss, inputs, create_graph=graph, allow_unused=True, materialize_grads=True
                )
            grads = dict(zip(leaves, gradients, strict=True))
        if weight is not None:
            buffers = {k: torch.where(weight.sum() > 0, b, self.buffers[k]) for k, b in buffers.items()}
        self.buffers = buffers
        return grads


def frozen_parameters(module: nn.Module) -> Params:
    """Return the parameters with requires_grad=False."""
    return {k: p.detach() for k, p in module.named_parameters() if not p.requires_grad}


def share_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of a network that holds the same parameters, not copies of them."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


def _bf16_params(module: nn.Module) -> frozenset[str]:
    """Return the parameters that are cast to bf16: all but BatchNorm's, which scale sums over many values."""
    exact = {id(p) for part in module.modules() if isinstance(part, _BatchNorm) for p in part.parameters()}
    return frozenset(k for k, p in module.named_parameters() if id(p) not in exact)


def _mutable_buffers(module: nn.Module) -> frozenset[str]:
    """Return the buffers that a forward pass may modify in place. Our own BatchNorm replaces its buffers instead."""
    replaced = {id(b) for part in module.modules() if isinstance(part, BatchNorm2d) for b in part.buffers()}
    return frozenset(k for k, b in module.named_buffers() if id(b) not in replaced)


class FunctionalModule:
    """`torch.func.functional_call` for one module, with the bookkeeping done once instead of at every call.

    Locating every tensor takes a tenth of a small network's step. Tied tensors are passed once, under their first name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        self._slots = [
            (holder, attribute, names[id(tensor)])
            for part in module.modules()
            for holder in (part._parameters, part._buffers)
            for attribute, tensor in holder.items()
            if tensor is not None
        ]
        buffers = {id(part._buffers) for part in module.modules()}
        self._buffer_slots = [slot for slot in self._slots if id(slot[0]) in buffers]

    def __call__(self, tensors: Mapping[str, Tensor], *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the module with these parameters and buffers.

        Returns:
            The module's output, and the buffers that the module replaced.
        """
        before = [holder[attribute] for holder, attribute, _ in self._slots]
        try:
            for holder, attribute, name in self._slots:
                holder[attribute] = tensors[name]  # type: ignore[assignment]
            output = self.module(*args)
            after = ((name, holder[attribute]) for holder, attribute, name in self._buffer_slots)
            return output, {name: tensor for name, tensor in after if tensor is not tensors[name]}  # type: ignore[misc]
        finally:
            for (holder, attribute, _), tensor in zip(self._slots, before, strict=True):
                holder[attribute] = tensor  # type: ignore[assignment]
