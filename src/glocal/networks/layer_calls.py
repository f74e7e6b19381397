"""The linear and convolutional layers of a network, and the order in which a forward pass calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

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

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, LAYER_TYPES)
            calls.append(LayerCall(name, layer, args[0].shape[1:]))

        return hook

    with ExitStack() as hooks, torch.no_grad(), eval_mode(module.modules()):
        for name, layer in named_layers(module).items():
            hooks.enter_context(layer.register_forward_pre_hook(record(name)))
        module(torch.zeros(1, *shape, dtype=dtype_of(module)))
    return calls


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
