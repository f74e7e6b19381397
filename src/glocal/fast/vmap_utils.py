"""What functions with a way of their own to be mapped over runs have in common."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Dims: TypeAlias = tuple[int | None, ...]


def merge_batch_dim(tensor: Tensor, dim: int | None, target: int, runs: int = 1) -> Tensor:
    """The runs' dimension merged into another one; who has none is seen by all runs."""
    if dim is None:
        tensor, dim = tensor.expand(runs, *tensor.shape), 0
    return tensor.movedim(dim, target).flatten(target, target + 1)


def is_mapped(*tensors: Tensor) -> bool:
    """Whether one of them may stand for several runs' or vectors': `vmap` is at work on it, or `grad` inside that."""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def side_by_side(tensor: Tensor) -> int:
    """How many runs' or vectors' it stands for."""
    whole = tensor
    while is_mapped(whole):
        whole = torch._C._functorch.get_unwrapped(whole)
    return whole.numel() // max(1, tensor.numel())
