r"""The three contractions of a convolution in groups, on plain tensors: the output, its input's and its weight's slope.

On a GPU a convolution in many groups is fast where the library has a kernel for it: stride one, up to 256 channels. The
others are a product for every group: the input's patches, gathered as rows, times the weight as a matrix. One large
convolution in single precision is made of products in half precision (`by_halves`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from glocal.fast import fp32_from_fp16
from glocal.fast.patches import Patches, gather, scatter

NARROWEST, FEW, WIDEST = 8, 64, 256
"""Channels of a group from which and up to which a 3 × 3 convolution of stride one is left to the library. Fewer than
the least are filled up with zeros: products want numbers by eights."""


def output(x: Tensor, w: Tensor, stride: int, padding: int, groups: int) -> Tensor:
    """y: (n, groups · width, h', w') of x (n, groups · channels, h, w) and w (groups · width, channels, k, k)."""
    if groups == 1 and fp32_from_fp16.suits(x, x.numel() // stride**2 * w.shape[0] * w.shape[-1] ** 2):
        return fp32_from_fp16.output(x, w, stride, padding)
    if by_library(x, w.shape[1], w.shape[0] // groups, w.shape[-1], stride, groups):
        x = last(x, groups)
        return torch.conv2d(x, w, None, stride, padding, 1, groups)
    x, w = filled(x, groups), filled(w, 1)
    of = Patches(x.shape[0], groups, w.shape[1], x.shape[2], x.shape[3], w.shape[-1], stride, padding)
    rows = gather(x, of)
    y = x.new_empty(rows.shape[1], groups, w.shape[0] // groups)
    torch.bmm(rows, matrix(w, groups).mT, out=y.transpose(0, 1))
    return y.view(x.shape[0], *of.size, -1).permute(0, 3, 1, 2)


def input(y: Tensor, w: Tensor, stride: int, padding: int, groups: int, size: tuple[int, int]) -> Tensor:
    """The slope in x, (n, groups · channels, *size)."""
    channels = w.shape[1]
    if groups == 1 and fp32_from_fp16.suits(y, y.numel() * channels * w.shape[-1] ** 2):
        return fp32_from_fp16.input(y, w, stride, padding, size)
    if by_library(y, channels, w.shape[0] // groups, w.shape[-1], stride, groups):
        y = last(y, groups)
        if y.is_cuda and groups > 1 and stride == 1 and channels <= FEW:
            # Of few channels and few groups the library takes the slopes group by group, but not the outputs.
            return torch.conv2d(y, mirrored(w, groups), None, 1, w.shape[-1] - 1 - padding, 1, groups)
        x = unwritten((y.shape[0], groups * channels, *size), y)
        return _backward(y, x, w, stride, padding, groups, 0)
    rows = torch.bmm(as_rows(y, groups), matrix(w, groups))
    return scatter(rows, Patches(y.shape[0], groups, channels, *size, w.shape[-1], stride, padding))


def weight(x: Tensor, y: Tensor, stride: int, padding: int, groups: int, k: int) -> Tensor:
    """The slope in w, (groups · width, channels, k, k)."""
    channels, width = x.shape[1] // groups, y.shape[1] // groups
    if groups == 1 and fp32_from_fp16.suits(x, y.numel() * channels * k * k):
        return fp32_from_fp16.weight(x, y, stride, padding, k)
    if by_library(x, channels, width, k, stride, groups):
        x, y = last(x, groups), last(y, groups)
        w = unwritten((groups * width, channels, k, k), x)
        return _backward(y, x, w, stride, padding, groups, 1)
    x = filled(x, groups)
    rows = gather(x, Patches(x.shape[0], groups, x.shape[1] // groups, x.shape[2], x.shape[3], k, stride, padding))
    dw = torch.bmm(as_rows(y, groups).mT, rows)
    return dw.view(groups * width, k, k, -1)[..., :channels].permute(0, 3, 1, 2)


def by_library(x: Tensor, channels: int, width: int, k: int, stride: int, groups: int) -> bool:
    known = k == 3 and stride == 1 and NARROWEST <= channels <= WIDEST and width <= WIDEST
    return not x.is_cuda or groups == 1 or known


def mirrored(w: Tensor, groups: int) -> Tensor:
    """The weight with which the slope in x is a convolution of the slope in y, for stride one."""
    swapped = w.unflatten(0, (groups, -1)).transpose(1, 2).flip(-2, -1)
    return swapped.flatten(0, 1).contiguous(memory_format=torch.channels_last)


def filled(x: Tensor, groups: int) -> Tensor:
    """Groups of fewer channels than NARROWEST with channels of zeros beside them."""
    channels = x.shape[1] // groups
    if channels >= NARROWEST:
        return x
    some = x.unflatten(1, (groups, channels))
    return functional.pad(some, [0, 0, 0, 0, 0, NARROWEST - channels]).flatten(1, 2)


def last(x: Tensor, groups: int) -> Tensor:
    """Channels last in memory on a GPU: there the library's kernels for many groups ask for it."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and groups > 1 else x


def unwritten(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of which the library reads the shape and the order in memory, and nothing else."""
    form = torch.channels_last if like.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=form)


def as_rows(y: Tensor, groups: int) -> Tensor:
    """(n, groups · width, h, w) as (groups, n · h · w, width): a view where channels are last in memory."""
    return y.permute(0, 2, 3, 1).reshape(-1, groups, y.shape[1] // groups).transpose(0, 1)


def matrix(w: Tensor, groups: int) -> Tensor:
    """(groups · width, channels, k, k) as (groups, width, k · k · channels): a view where channels are last."""
    return w.permute(0, 2, 3, 1).reshape(groups, w.shape[0] // groups, -1)


def _backward(y: Tensor, x: Tensor, w: Tensor, stride: int, padding: int, groups: int, which: int) -> Tensor:
    mask = [which == 0, which == 1, False]
    numbers = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups
    return torch.ops.aten.convolution_backward(y, x, w, None, *numbers, mask)[which]
