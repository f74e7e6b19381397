r"""A convolution whose form for many runs at once is chosen by what is fast, and not by what is general.

A convolution is a trilinear form Σ y · C(x, w) in its output, its input and its weight, with C linear in each of its
two. Its derivatives are the form's other two contractions, and so are theirs:

    y = C(x, w)    ∂x = D(y, w)    ∂w = W(x, y)

for any x, w, y of the right shapes. Each is a function here, differentiable as often as one likes; mapped over runs
that have weights of their own, each becomes one convolution with as many groups as there are runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from glocal.fast import grouped_conv
from glocal.networks.vmap_utils import Dims, merge_batch_dim


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`. What is particular about it is left to torch: dilation, groups, padding by other than zeros."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made = None
        if self.padding_mode == "zeros":
            made = _common(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return super()._conv_forward(input, weight, bias) if made is None else made


class ReplaceConv2d(TorchFunctionMode):
    """While it lasts torch's convolutions are those of this file, but for what is particular. These may order their
    numbers in another way, so that a view of them is a copy where it must be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and (made := _common(*args, **kwargs)) is not None:
            return made
        if func is Tensor.view and not any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            return args[0].reshape(*args[1:], *kwargs.values())
        return func(*args, **kwargs)


def _common(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution, if it is by squares, alike in both directions."""
    if isinstance(padding, str) or groups != 1 or input.dim() != 4 or weight.shape[-1] != weight.shape[-2]:
        return None
    if not input.is_floating_point() or input.dtype != weight.dtype or torch.is_autocast_enabled(input.device.type):
        return None
    (stride, across), (padding, aside), far = _pair(stride), _pair(padding), _pair(dilation)
    if stride != across or padding != aside or far != (1, 1):
        return None
    z = convolve(input, weight, stride, padding)
    return z if bias is None else z + bias.view(-1, 1, 1)


def _pair(number: Any) -> tuple[int, int]:
    return (number, number) if isinstance(number, int) else tuple(number) * (2 // len(number))


def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """C(x, w): x (n, channels, h, w), w (width, channels, k, k)."""
    return Output.apply(x, weight, stride, padding, 1)


class _Contraction(Function):
    """Two tensors and the convolution's numbers give a third tensor."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, *ctx.numbers = inputs
        ctx.save_for_backward(a, b)


class Output(_Contraction):
    """y = C(x, w)."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: int, groups: int) -> Tensor:
        return grouped_conv.output(x, w, stride, padding, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        dx = Input.apply(dy, w, *ctx.numbers, x.shape[-2:]) if ctx.needs_input_grad[0] else None
        dw = Weight.apply(x, dy, *ctx.numbers, w.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Dims, x: Tensor, w: Tensor, stride: int, padding: int, groups: int) -> tuple[Tensor, int]:
        runs = info.batch_size
        if dims[1] is None:
            y = Output.apply(merge_batch_dim(x, dims[0], 0), w, stride, padding, groups)
            return y.unflatten(0, (runs, -1)), 0
        if dims[0] is None and groups == 1:  # the same input for all: their outputs are channels of one convolution
            y = Output.apply(x, merge_batch_dim(w, dims[1], 0), stride, padding, 1)
        else:
            y = Output.apply(
                merge_batch_dim(x, dims[0], 1, runs), merge_batch_dim(w, dims[1], 0), stride, padding, groups * runs
            )
        return y.unflatten(1, (runs, -1)), 1


class Input(_Contraction):
    """∂x = D(y, w), for inputs of the given size."""

    @staticmethod
    def forward(y: Tensor, w: Tensor, stride: int, padding: int, groups: int, size: tuple[int, int]) -> Tensor:
        return grouped_conv.input(y, w, stride, padding, groups, size)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        y, w = ctx.saved_tensors
        numbers = ctx.numbers[:3]
        dy = Output.apply(dx, w, *numbers) if ctx.needs_input_grad[0] else None
        dw = Weight.apply(dx, y, *numbers, w.shape[-1]) if ctx.needs_input_grad[1] else None
        return dy, dw, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Dims, y: Tensor, w: Tensor, stride: int, padding: int, groups: int, size: tuple[int, int]
    ) -> tuple[Tensor, int]:
        runs = info.batch_size
        if dims[1] is None:
            x = Input.apply(merge_batch_dim(y, dims[0], 0), w, stride, padding, groups, size)
            return x.unflatten(0, (runs, -1)), 0
        x = Input.apply(
            merge_batch_dim(y, dims[0], 1, runs), merge_batch_dim(w, dims[1], 0), stride, padding, groups * runs, size
        )
        return x.unflatten(1, (runs, -1)), 1


class Weight(_Contraction):
    """∂w = W(x, y), for weights k × k."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, stride: int, padding: int, groups: int, k: int) -> Tensor:
        return grouped_conv.weight(x, y, stride, padding, groups, k)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        numbers = ctx.numbers[:3]
        dx = Input.apply(y, dw, *numbers, x.shape[-2:]) if ctx.needs_input_grad[0] else None
        dy = Output.apply(x, dw, *numbers) if ctx.needs_input_grad[1] else None
        return dx, dy, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Dims, x: Tensor, y: Tensor, stride: int, padding: int, groups: int, k: int
    ) -> tuple[Tensor, int]:
        runs = info.batch_size
        x, y = merge_batch_dim(x, dims[0], 1, runs), merge_batch_dim(y, dims[1], 1, runs)
        return Weight.apply(x, y, stride, padding, groups * runs, k).unflatten(0, (runs, -1)), 0
