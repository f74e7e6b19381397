"""`patches` as two kernels: a program moves some positions, each with all its channels, which lie side by side."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glocal.kernels.patches import Patches

POSITIONS = 32


def gather(pixels: Tensor, of: Patches) -> Tensor:
    h, w = of.size
    rows = pixels.new_empty(of.groups, of.images * h * w, of.k * of.k * of.channels)
    return _launched(_gather, pixels, rows, of)


def scatter(rows: Tensor, of: Patches) -> Tensor:
    pixels = rows.new_empty(of.images, of.height, of.width, of.groups * of.channels)
    return _launched(_scatter, rows, pixels, of)


def _launched(kernel, read: Tensor, written: Tensor, of: Patches) -> Tensor:
    positions = written.numel() // of.channels
    wide = triton.next_power_of_2(of.channels)
    kernel[(triton.cdiv(positions, POSITIONS),)](read, written, positions, *of, *of.size, POSITIONS, wide)
    return written


@triton.jit
def _gather(
    x, rows, positions, images, groups, C: tl.constexpr, h, w, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    oh, ow, POSITIONS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Positions (group, image, i, j, a, b) of the rows."""
    at = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    c = tl.arange(0, WIDE)
    b = at % K
    a = at // K % K
    j = at // (K * K) % ow
    i = at // (K * K * ow) % oh
    image = at // (K * K * ow * oh) % images
    group = at // (K * K * ow * oh * images)
    row = i * S + a - P
    column = j * S + b - P
    inside = (at < positions) & (row >= 0) & (row < h) & (column >= 0) & (column < w)
    source = ((image * h + row) * w + column).to(tl.int64) * groups + group
    read = inside[:, None]
    written = (at < positions)[:, None]
    if C != WIDE:  # where all channels are there, a mask that does not speak of them lets them be moved many at once
        read = read & (c < C)[None, :]
        written = written & (c < C)[None, :]
    values = tl.load(x + source[:, None] * C + c[None, :], mask=read, other=0.0)
    tl.store(rows + at.to(tl.int64)[:, None] * C + c[None, :], values, mask=written)


@triton.jit
def _scatter(
    rows, x, positions, images, groups, C: tl.constexpr, h, w, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    oh, ow, POSITIONS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Positions (image, row, column, group) of the images; each is the sum of its places in the rows."""
    at = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    c = tl.arange(0, WIDE)
    group = at % groups
    column = at // groups % w
    row = at // (groups * w) % h
    image = at // (groups * w * h)
    total = tl.zeros([POSITIONS, WIDE], dtype=tl.float32)
    for tap in tl.static_range(K * K):
        up = row + P - tap // K
        left = column + P - tap % K
        i = up // S
        j = left // S
        taken = (at < positions) & (up >= 0) & (left >= 0) & (i < oh) & (j < ow) & (up % S == 0) & (left % S == 0)
        source = (((group * images + image) * oh + i) * ow + j).to(tl.int64) * (K * K) + tap
        read = taken[:, None]
        if C != WIDE:
            read = read & (c < C)[None, :]
        total += tl.load(rows + source[:, None] * C + c[None, :], mask=read, other=0.0).to(tl.float32)
    written = (at < positions)[:, None]
    if C != WIDE:
        written = written & (c < C)[None, :]
    target = x + at.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(target, total.to(x.dtype.element_ty), mask=written)
