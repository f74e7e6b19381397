"""Helpers for functions with their own `vmap` rule, and for code that runs under `vmap`."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Dims: TypeAlias = tuple[int | None, ...]


def merge_batch_dim(tensor: Tensor, dim: int | None, target: int, size: int = 1) -> Tensor:
    """Merge the mapped dimension into dimension `target`; an unmapped tensor is first expanded to `size` copies."""
    if dim is None:
        tensor, dim = tensor.expand(size, *tensor.shape), 0
    return tensor.movedim(dim, target).flatten(target, target + 1)


def is_batched(*tensors: Tensor) -> bool:
    """Return whether a tensor is wrapped by a function transform such as `vmap`, or `grad` inside it."""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def batch_count(tensor: Tensor) -> int:
    """Return how many tensors this one stands for under (nested) `vmap`."""
    storage = tensor
    while is_batched(storage):
        storage = torch._C._functorch.get_unwrapped(storage)
    return storage.numel() // max(1, tensor.numel())
