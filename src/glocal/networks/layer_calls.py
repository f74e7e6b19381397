"""The linear and convolutional layers of any network, the order of their calls, and dropout of their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.utils.hooks import RemovableHandle

Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LayerCall(NamedTuple):
    """One call of a layer in the forward pass."""

    name: str
    layer: Layer
    input_shape: torch.Size  # of one sample


def named_layers(module: nn.Module) -> dict[str, Layer]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LAYER_TYPES)}


def layer_calls(module: nn.Module, shape: Sequence[int]) -> list[LayerCall]:
    """Return the calls of a network's layers, from one forward pass over an input of zeros."""
    calls: list[LayerCall] = []

    def record(name: str, layer: Layer, args: tuple[Tensor, ...]) -> None:
        calls.append(LayerCall(name, layer, args[0].shape[1:]))

    hooks = (layer.register_forward_pre_hook(partial(record, name)) for name, layer in named_layers(module).items())
    with hooked(hooks), torch.no_grad(), eval_mode(module.modules()), unfused_encoders():
        zeros = torch.zeros(1, *shape, dtype=dtype_of(module))
        try:
            module(zeros)
        except RuntimeError:  # embeddings take integers only
            calls.clear()
            module(zeros.long())
    return calls


@contextmanager
def unfused_encoders() -> Iterator[None]:
    """Run nn.TransformerEncoderLayer in evaluation mode as in training.

    The fused operation that it has there has no derivative, and no rule for `vmap`.
    """
    enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(enabled)


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register the forward hooks that this generator registers, and remove them afterwards."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


def dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.get_default_dtype())


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Set these modules, but not their children, to evaluation mode, and restore their modes afterwards."""
    modes = [(module, module.training) for module in modules]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def set_eval_mode(module: nn.Module) -> nn.Module:
    """Set a network to evaluation mode, and return it.

    Recurrent layers without dropout stay in training mode: they compute the same, and cuDNN differentiates them there
    only.
    """
    for part in module.eval().modules():
        if isinstance(part, nn.RNNBase) and part.dropout == 0:
            part.training = True
    return module


class DropoutNetwork(nn.Module):
    """Drop inputs of every linear layer, except where it is the network's first layer: pixels are never dropped.

    A layer that is called several times has its own masks at every call.
    """

    def __init__(self, network: nn.Module, shape: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        calls = layer_calls(network, shape)
        self.skipped = int(bool(calls) and isinstance(calls[0].layer, nn.Linear))
        self.widths = [math.prod(call.input_shape) for call in calls[1:] if isinstance(call.layer, nn.Linear)]

    def forward(self, x: Tensor, random: Tensor | None = None, rate: Tensor | float = 0.0) -> Tensor:
        """Call the network. Dropped inputs are 0 and others are divided by 1 − rate, so that their mean stays.

        Args:
            x: The inputs.
            random: One uniform number in [0, 1) per droppable input, flat. Without them nothing is dropped.
            rate: The probability that an input is dropped.
        """
        if random is None or not self.widths:
            return self.network(x)
        n, width = x.shape[0], sum(self.widths)
        factors = ((random[: n * width].view(n, width) >= rate) / (1 - rate)).split(self.widths, 1)
        masks: Iterator[Tensor | None] = iter([*[None] * self.skipped, *factors])

        def drop(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mask = next(masks)
            return args if mask is None else (args[0] * mask.to(args[0].dtype).view_as(args[0]), *args[1:])

        linear = (layer for layer in named_layers(self.network).values() if isinstance(layer, nn.Linear))
        with hooked(layer.register_forward_pre_hook(drop) for layer in linear):
            return self.network(x)
