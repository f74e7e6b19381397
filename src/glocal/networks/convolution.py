r"""A 2-d convolution that stays fast when it is batched over runs with their own weights.

A convolution is a trilinear form Σ y · C(x, w), so its derivatives are the form's other two contractions, and so are
theirs:

    y = C(x, w)    ∂x = D(y, w)    ∂w = W(x, y)

Each contraction is an autograd function here, differentiable any number of times. Under `vmap` over weights each
becomes one convolution with a group per run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from glocal.accelerate import accelerated

Dims: TypeAlias = tuple[int | None, ...]
"""The mapped dimensions of the arguments of a `vmap` rule; None for an argument that is not mapped."""


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` by the contractions of this file; options that they do not support are left to torch."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        options = self.stride, self.padding, self.dilation, self.groups
        y = _conv2d_if_supported(input, weight, bias, *options) if self.padding_mode == "zeros" else None
        return super()._conv_forward(input, weight, bias) if y is None else y


class ReplaceConv2d(TorchFunctionMode):
    """Replace `torch.conv2d` by the contractions of this file where they support its options.

    Their outputs may have another memory format, so `Tensor.view` becomes `reshape`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and (y := _conv2d_if_supported(*args, **kwargs)) is not None:
            return y
        if func is Tensor.view and not any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            return args[0].reshape(*args[1:], *kwargs.values())
        return func(*args, **kwargs)


def _conv2d_if_supported(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return the convolution, or None unless its kernel is square and its options are the same in both directions."""
    if isinstance(padding, str) or groups != 1 or input.dim() != 4 or weight.shape[-1] != weight.shape[-2]:
        return None
    if not input.is_floating_point() or input.dtype != weight.dtype or torch.is_autocast_enabled(input.device.type):
        return None
    strides, paddings, dilations = _pair(stride), _pair(padding), _pair(dilation)
    if strides[0] != strides[1] or paddings[0] != paddings[1] or dilations != (1, 1):
        return None
    y = Conv.apply(input, weight, strides[0], paddings[0], 1)
    return y if bias is None else y + bias.view(-1, 1, 1)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


@accelerated("layers.conv")
def conv(x: Tensor, w: Tensor, stride: int, padding: int, groups: int) -> Tensor:
    """y = C(x, w) for x (n, groups · channels, h, w) and w (groups · width, channels, k, k)."""
    return torch.conv2d(x, w, None, stride, padding, 1, groups)


@accelerated("layers.conv_input_grad")
def conv_input_grad(y: Tensor, w: Tensor, stride: int, padding: int, groups: int, size: tuple[int, int]) -> Tensor:
    """∂x = D(y, w), (n, groups · channels, *size)."""
    x = shape_only((y.shape[0], groups * w.shape[1], *size), y)
    return convolution_backward(y, x, w, stride, padding, groups, index=0)


@accelerated("layers.conv_weight_grad")
def conv_weight_grad(x: Tensor, y: Tensor, stride: int, padding: int, groups: int, k: int) -> Tensor:
    """∂w = W(x, y), (groups · width, channels, k, k)."""
    w = shape_only((y.shape[1], x.shape[1] // groups, k, k), x)
    return convolution_backward(y, x, w, stride, padding, groups, index=1)


def shape_only(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an uninitialized tensor, of which torch reads only the shape and the memory format."""
    last = like.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def convolution_backward(
    y: Tensor, x: Tensor, w: Tensor, stride: int, padding: int, groups: int, *, index: int
) -> Tensor:
    """Return the gradient in x (index 0) or in w (index 1)."""
    mask = [index == 0, index == 1, False]
    options = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups
    return torch.ops.aten.convolution_backward(y, x, w, None, *options, mask)[index]


def merge_batch_dim(tensor: Tensor, dim: int | None, target: int, size: int = 1) -> Tensor:
    """Merge the mapped dimension into dimension `target`; an unmapped tensor is first expanded to `size` copies."""
    if dim is None:
        tensor, dim = tensor.expand(size, *tensor.shape), 0
    return tensor.movedim(dim, target).flatten(target, target + 1)


def _vmap_images(
    function: type[Function], info: Any, dims: Dims, images: Tensor, w: Tensor, options: Sequence[Any]
) -> tuple[Tensor, int]:
    """Apply C or D to the images of all runs: as more images if they share a weight, otherwise as more groups."""
    runs, (stride, padding, groups, *size) = info.batch_size, options
    if dims[1] is None:
        result = function.apply(merge_batch_dim(images, dims[0], 0), w, stride, padding, groups, *size)
        return result.unflatten(0, (runs, -1)), 0
    images, w = merge_batch_dim(images, dims[0], 1, runs), merge_batch_dim(w, dims[1], 0)
    return function.apply(images, w, stride, padding, groups * runs, *size).unflatten(1, (runs, -1)), 1


class _Contraction(Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, *ctx.options = inputs
        ctx.save_for_backward(a, b)


class Conv(_Contraction):
    """y = C(x, w)."""

    forward = staticmethod(conv)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        dx = ConvInputGrad.apply(dy, w, *ctx.options, x.shape[-2:]) if ctx.needs_input_grad[0] else None
        dw = ConvWeightGrad.apply(x, dy, *ctx.options, w.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Dims, x: Tensor, w: Tensor, *options: int) -> tuple[Tensor, int]:
        if dims[0] is None and options[-1] == 1:  # runs with the same input are output channels of one convolution
            y = Conv.apply(x, merge_batch_dim(w, dims[1], 0), *options)
            return y.unflatten(1, (info.batch_size, -1)), 1
        return _vmap_images(Conv, info, dims, x, w, options)


class ConvInputGrad(_Contraction):
    """∂x = D(y, w)."""

    forward = staticmethod(conv_input_grad)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        y, w = ctx.saved_tensors
        *options, _ = ctx.options
        dy = Conv.apply(dx, w, *options) if ctx.needs_input_grad[0] else None
        dw = ConvWeightGrad.apply(dx, y, *options, w.shape[-1]) if ctx.needs_input_grad[1] else None
        return dy, dw, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Dims, y: Tensor, w: Tensor, *options: Any) -> tuple[Tensor, int]:
        return _vmap_images(ConvInputGrad, info, dims, y, w, options)


class ConvWeightGrad(_Contraction):
    """∂w = W(x, y)."""

    forward = staticmethod(conv_weight_grad)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        *options, _ = ctx.options
        dx = ConvInputGrad.apply(y, dw, *options, x.shape[-2:]) if ctx.needs_input_grad[0] else None
        dy = Conv.apply(x, dw, *options) if ctx.needs_input_grad[1] else None
        return dx, dy, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Dims, x: Tensor, y: Tensor, *options: int) -> tuple[Tensor, int]:
        runs, (stride, padding, groups, k) = info.batch_size, options
        x, y = merge_batch_dim(x, dims[0], 1, runs), merge_batch_dim(y, dims[1], 1, runs)
        return ConvWeightGrad.apply(x, y, stride, padding, groups * runs, k).unflatten(0, (runs, -1)), 0
