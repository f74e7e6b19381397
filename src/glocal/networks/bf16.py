"""Numbers rounded to bf16 on their way into the network, and their slopes on the way back, a kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from glocal.fast.triton import available


def halve(x: Tensor) -> Tensor:
    """x in bf16; its slope comes back as exact as x is."""
    return Halved.apply(x, x.dtype)


class Halved(Function):
    @staticmethod
    def forward(x: Tensor, exact: torch.dtype) -> Tensor:
        return x.bfloat16()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.exact = inputs[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return Widened.apply(slope, ctx.exact), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], x: Tensor, exact: torch.dtype) -> tuple[Tensor, int]:
        return Halved.apply(x, exact), dims[0]


class Widened(Function):
    @staticmethod
    def forward(x: Tensor, exact: torch.dtype) -> Tensor:
        if available(x) and exact == torch.float32:
            from glocal.fast import elementwise_triton

            return elementwise_triton.widen(x)
        return x.to(exact)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.exact = inputs[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return Halved.apply(slope, ctx.exact), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], x: Tensor, exact: torch.dtype) -> tuple[Tensor, int]:
        return Widened.apply(x, exact), dims[0]
