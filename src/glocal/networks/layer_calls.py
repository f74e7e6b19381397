"""The linear and convolutional layers of a network in the order in which a forward pass calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Call(NamedTuple):
    """A layer's turn in the forward pass, and the shape of its input for one sample."""

    name: str
    layer: Layer
    input_shape: torch.Size


def named_layers(module: nn.Module) -> dict[str, Layer]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LAYERS)}


def layer_calls(module: nn.Module, shape: Sequence[int]) -> list[Call]:
    """It is a matter of the network's structure, so one pass over an input of zeros tells."""
    made: list[Call] = []

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, LAYERS)
            made.append(Call(name, layer, args[0].shape[1:]))

        return hook

    with ExitStack() as hooks, torch.no_grad(), eval_mode(module.modules()):
        for name, layer in named_layers(module).items():
            hooks.enter_context(layer.register_forward_pre_hook(note(name)))
        module(torch.zeros(1, *shape, dtype=dtype_of(module)))
    return made


def dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.get_default_dtype())


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Some modules in evaluation mode, for as long as the context lasts; modules inside them stay as they are."""
    before = [(module, module.training) for module in modules]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training
