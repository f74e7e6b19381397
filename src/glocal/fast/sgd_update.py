"""The step of gradient descent, in place, for one run or for stacked runs with a learning rate each."""

from __future__ import annotations

from torch import Tensor

from glocal.fast.triton import available

FEW = 1 << 16
"""Numbers up to which torch's own kernel takes no longer."""


def descend(params: Tensor, direction: Tensor, lr: Tensor) -> None:
    """θ ← θ − lr · direction, lr one number, or one number a run shaped to multiply stacked parameters."""
    alike = direction.stride() == params.stride() and direction.dtype == params.dtype
    if alike and params.numel() > FEW and available(params) and _apart(params, lr.numel()):
        from glocal.fast import elementwise_triton

        elementwise_triton.descend(params, direction, lr)
    else:
        params.addcmul_(direction, lr, value=-1)


def _apart(params: Tensor, runs: int) -> bool:
    """Whether the numbers lie side by side without gaps, in whatever order, and one run's after the other's."""
    sizes = sorted((stride, size) for stride, size in zip(params.stride(), params.shape, strict=True) if size > 1)
    dense = 1
    for stride, size in sizes:
        if stride != dense:
            return False
        dense *= size
    return runs == 1 or params.stride(0) == params.numel() // runs
