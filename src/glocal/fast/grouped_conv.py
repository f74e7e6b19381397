r"""Grouped convolutions on a GPU, one group per run, and their gradients.

cuDNN is fast at many groups only for 3 × 3 kernels of stride one and up to 256 channels. All others are one matrix
product per group, of the input's patches as rows and the weight as a matrix:

    rows[g, (n, i, j), (a, b, c)] = x[n, g · C + c, i s + a − p, j s + b − p]      (0 outside of the image)

with stride s and padding p. Images and rows are channels-last in memory; a Triton kernel gathers the rows, and another
one scatters them back. One large fp32 convolution is computed from fp16 products (`fp32_from_fp16`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from glocal.fast import fp32_from_fp16, supports
from glocal.networks.convolution import convolution_backward, shape_only

MIN_CHANNELS, MAX_CHANNELS = 8, 256
"""Channels per group that cuDNN is fast at, for a 3 × 3 kernel of stride one. Fewer are padded with zeros: the units
for matrix products take multiples of eight."""
MAX_MIRRORED_CHANNELS = 64
"""Up to this many channels, cuDNN is faster at the convolution with the mirrored weight than at the input gradient."""
BLOCK = 2048
"""About as many elements as one program moves."""


def conv(x: Tensor, w: Tensor, stride: int, padding: int, groups: int) -> Tensor:
    """`glocal.networks.convolution.conv` on a GPU."""
    if groups == 1:
        large = fp32_from_fp16.is_faster(x, x.numel() // stride**2 * w.shape[0] * w.shape[-1] ** 2)
        return fp32_from_fp16.conv(x, w, stride, padding) if large else NotImplemented
    if not supports(x):
        return NotImplemented
    if cudnn_is_fast(w.shape[1], w.shape[0] // groups, w.shape[-1], stride):
        return torch.conv2d(_channels_last(x), w, None, stride, padding, 1, groups)
    x, w = _pad_channels(x, groups), _pad_channels(w, 1)
    patches = Patches(x.shape[0], groups, w.shape[1], x.shape[2], x.shape[3], w.shape[-1], stride, padding)
    rows = gather(x, patches)
    y = x.new_empty(rows.shape[1], groups, w.shape[0] // groups)
    torch.bmm(rows, _as_matrices(w, groups).mT, out=y.transpose(0, 1))
    return y.view(x.shape[0], *patches.output_size, -1).permute(0, 3, 1, 2)


def conv_input_grad(y: Tensor, w: Tensor, stride: int, padding: int, groups: int, size: tuple[int, int]) -> Tensor:
    """`glocal.networks.convolution.conv_input_grad` on a GPU."""
    channels, k = w.shape[1], w.shape[-1]
    if groups == 1:
        large = fp32_from_fp16.is_faster(y, y.numel() * channels * k**2)
        return fp32_from_fp16.conv_input_grad(y, w, stride, padding, size) if large else NotImplemented
    if not supports(y):
        return NotImplemented
    if cudnn_is_fast(channels, w.shape[0] // groups, k, stride):
        y = _channels_last(y)
        if stride == 1 and channels <= MAX_MIRRORED_CHANNELS:
            return torch.conv2d(y, _mirrored(w, groups), None, 1, k - 1 - padding, 1, groups)
        x = shape_only((y.shape[0], groups * channels, *size), y)
        return convolution_backward(y, x, w, stride, padding, groups, index=0)
    rows = torch.bmm(_as_rows(y, groups), _as_matrices(w, groups))
    return scatter(rows, Patches(y.shape[0], groups, channels, *size, k, stride, padding))


def conv_weight_grad(x: Tensor, y: Tensor, stride: int, padding: int, groups: int, k: int) -> Tensor:
    """`glocal.networks.convolution.conv_weight_grad` on a GPU."""
    channels, width = x.shape[1] // groups, y.shape[1] // groups
    if groups == 1:
        large = fp32_from_fp16.is_faster(x, y.numel() * channels * k * k)
        return fp32_from_fp16.conv_weight_grad(x, y, stride, padding, k) if large else NotImplemented
    if not supports(x):
        return NotImplemented
    if cudnn_is_fast(channels, width, k, stride):
        x, y = _channels_last(x), _channels_last(y)
        w = shape_only((groups * width, channels, k, k), x)
        return convolution_backward(y, x, w, stride, padding, groups, index=1)
    x = _pad_channels(x, groups)
    rows = gather(x, Patches(x.shape[0], groups, x.shape[1] // groups, x.shape[2], x.shape[3], k, stride, padding))
    dw = torch.bmm(_as_rows(y, groups).mT, rows)
    return dw.view(groups * width, k, k, -1)[..., :channels].permute(0, 3, 1, 2)


def cudnn_is_fast(channels: int, width: int, k: int, stride: int) -> bool:
    return k == 3 and stride == 1 and MIN_CHANNELS <= channels <= MAX_CHANNELS and width <= MAX_CHANNELS


def _mirrored(w: Tensor, groups: int) -> Tensor:
    """Return the weight with which the input gradient is a convolution of the output gradient, for stride one."""
    swapped = w.unflatten(0, (groups, -1)).transpose(1, 2).flip(-2, -1)
    return _channels_last(swapped.flatten(0, 1))


def _pad_channels(x: Tensor, groups: int) -> Tensor:
    """Pad every group to at least MIN_CHANNELS channels."""
    channels = x.shape[1] // groups
    if channels >= MIN_CHANNELS:
        return x
    grouped = x.unflatten(1, (groups, channels))
    return functional.pad(grouped, [0, 0, 0, 0, 0, MIN_CHANNELS - channels]).flatten(1, 2)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _as_rows(y: Tensor, groups: int) -> Tensor:
    """(n, groups · width, h, w) as (groups, n · h · w, width): a view if channels are last in memory."""
    return y.permute(0, 2, 3, 1).reshape(-1, groups, y.shape[1] // groups).transpose(0, 1)


def _as_matrices(w: Tensor, groups: int) -> Tensor:
    """(groups · width, channels, k, k) as (groups, width, k · k · channels): a view if channels are last in memory."""
    return w.permute(0, 2, 3, 1).reshape(groups, w.shape[0] // groups, -1)


class Patches(NamedTuple):
    """The patches of a grouped convolution."""

    images: int
    groups: int
    channels: int
    height: int
    width: int
    k: int
    stride: int
    padding: int

    @property
    def output_size(self) -> tuple[int, int]:
        margin = 2 * self.padding - self.k
        return (self.height + margin) // self.stride + 1, (self.width + margin) // self.stride + 1


def gather(x: Tensor, patches: Patches) -> Tensor:
    """Return the rows of x (n, groups · C, h, w), shape (groups, n · h' · w', k · k · C)."""
    pixels = x.permute(0, 2, 3, 1).contiguous()
    (h, w), k = patches.output_size, patches.k
    rows = pixels.new_empty(patches.groups, patches.images * h * w, k * k * patches.channels)
    _launch(_gather_kernel, h * w * k * k, pixels, rows, patches)
    return rows


def scatter(rows: Tensor, patches: Patches) -> Tensor:
    """Apply the transpose of `gather`: add the rows to the pixels that they come from, (n, groups · C, h, w)."""
    _, groups, channels, height, width, *_ = patches
    pixels = rows.new_empty(patches.images, height, width, groups * channels)
    _launch(_scatter_kernel, height * width, rows.contiguous(), pixels, patches)
    return pixels.permute(0, 3, 1, 2)


def _launch(kernel, positions: int, source: Tensor, target: Tensor, patches: Patches) -> None:
    """Launch programs that each move some positions of one image and group, with all channels."""
    images, groups, channels, height, width, k, stride, padding = patches
    channel_block = triton.next_power_of_2(channels)
    block = max(1, min(BLOCK // channel_block, triton.next_power_of_2(positions)))
    # Sizes are compile-time constants: the kernels divide by them to locate a position.
    sizes = channels, height, width, *patches.output_size, k, stride, padding
    grid = triton.cdiv(positions, block), images, groups
    kernel[grid](source, target, images, groups, positions, *sizes, block, channel_block)


@triton.jit
def _gather_kernel(
    x, rows, images, groups, positions: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Positions are (i, j, a, b) of the rows."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = tl.program_id(1)
    group = tl.program_id(2)
    c = tl.arange(0, CHANNELS)
    b = position % K
    a = position // K % K
    j = position // (K * K) % OW
    i = position // (K * K * OW)
    row = i * S + a - P
    column = j * S + b - P
    valid = position < positions
    inside = valid & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    source = x + (image.to(tl.int64) * (H * W) * groups + group) * C + (row * W + column) * groups * C
    target = rows + (group.to(tl.int64) * images + image) * (positions * C) + position * C
    load_mask = inside[:, None]
    store_mask = valid[:, None]
    if C != CHANNELS:
        load_mask = load_mask & (c < C)[None, :]
        store_mask = store_mask & (c < C)[None, :]
    values = tl.load(source[:, None] + c[None, :], mask=load_mask, other=0.0)
    tl.store(target[:, None] + c[None, :], values, mask=store_mask)


@triton.jit
def _scatter_kernel(
    rows, x, images, groups, positions: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Positions are (row, column) of the images; each is the sum of its entries in the rows."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = tl.program_id(1)
    group = tl.program_id(2)
    c = tl.arange(0, CHANNELS)
    column = position % W
    row = position // W
    valid = position < positions
    first = rows + (group.to(tl.int64) * images + image) * (OH * OW * K * K * C)
    total = tl.zeros([BLOCK, CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(K * K):
        up = row + P - tap // K
        left = column + P - tap % K
        i = up // S
        j = left // S
        used = valid & (up >= 0) & (left >= 0) & (i < OH) & (j < OW) & (up % S == 0) & (left % S == 0)
        source = first + ((i * OW + j) * (K * K) + tap) * C
        load_mask = used[:, None]
        if C != CHANNELS:
            load_mask = load_mask & (c < C)[None, :]
        total += tl.load(source[:, None] + c[None, :], mask=load_mask, other=0.0).to(tl.float32)
    target = x + (image.to(tl.int64) * (H * W) * groups + group) * C + position * groups * C
    store_mask = valid[:, None]
    if C != CHANNELS:
        store_mask = store_mask & (c < C)[None, :]
    tl.store(target[:, None] + c[None, :], total.to(x.dtype.element_ty), mask=store_mask)
