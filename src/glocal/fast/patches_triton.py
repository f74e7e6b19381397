"""`patches` as two kernels: a program moves some positions of one image and group, each with all its channels.

An image's measures are constants to the compiler: a position is found by many divisions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glocal.fast.patches import Patches

NUMBERS = 2048
"""That one program moves, about."""


def gather(pixels: Tensor, of: Patches) -> Tensor:
    h, w = of.size
    rows = pixels.new_empty(of.groups, of.images * h * w, of.k * of.k * of.channels)
    _launch(_gather, h * w * of.k * of.k, pixels.contiguous(), rows, of)
    return rows


def scatter(rows: Tensor, of: Patches) -> Tensor:
    pixels = rows.new_empty(of.images, of.height, of.width, of.groups * of.channels)
    _launch(_scatter, of.height * of.width, rows.contiguous(), pixels, of)
    return pixels


def _launch(kernel, positions: int, read: Tensor, written: Tensor, of: Patches) -> None:
    wide = triton.next_power_of_2(of.channels)
    some = max(1, min(NUMBERS // wide, triton.next_power_of_2(positions)))
    measures = of.channels, of.height, of.width, *of.size, of.k, of.stride, of.padding
    grid = triton.cdiv(positions, some), of.images, of.groups
    kernel[grid](read, written, of.images, of.groups, positions, *measures, some, wide)


@triton.jit
def _gather(
    x, rows, images, groups, positions: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    SOME: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Positions (i, j, a, b) of the rows."""
    at = tl.program_id(0) * SOME + tl.arange(0, SOME)
    image = tl.program_id(1)
    group = tl.program_id(2)
    c = tl.arange(0, WIDE)
    b = at % K
    a = at // K % K
    j = at // (K * K) % OW
    i = at // (K * K * OW)
    row = i * S + a - P
    column = j * S + b - P
    there = at < positions
    inside = there & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    source = x + (image.to(tl.int64) * (H * W) * groups + group) * C + (row * W + column) * groups * C
    target = rows + (group.to(tl.int64) * images + image) * (positions * C) + at * C
    read = inside[:, None]
    written = there[:, None]
    if C != WIDE:
        read = read & (c < C)[None, :]
        written = written & (c < C)[None, :]
    values = tl.load(source[:, None] + c[None, :], mask=read, other=0.0)
    tl.store(target[:, None] + c[None, :], values, mask=written)


@triton.jit
def _scatter(
    rows, x, images, groups, positions: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    SOME: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Positions (row, column) of the images; each is the sum of its places in the rows."""
    at = tl.program_id(0) * SOME + tl.arange(0, SOME)
    image = tl.program_id(1)
    group = tl.program_id(2)
    c = tl.arange(0, WIDE)
    column = at % W
    row = at // W
    there = at < positions
    begin = rows + (group.to(tl.int64) * images + image) * (OH * OW * K * K * C)
    total = tl.zeros([SOME, WIDE], dtype=tl.float32)
    for tap in tl.static_range(K * K):
        up = row + P - tap // K
        left = column + P - tap % K
        i = up // S
        j = left // S
        taken = there & (up >= 0) & (left >= 0) & (i < OH) & (j < OW) & (up % S == 0) & (left % S == 0)
        source = begin + ((i * OW + j) * (K * K) + tap) * C
        read = taken[:, None]
        if C != WIDE:
            read = read & (c < C)[None, :]
        total += tl.load(source[:, None] + c[None, :], mask=read, other=0.0).to(tl.float32)
    target = x + (image.to(tl.int64) * (H * W) * groups + group) * C + at * groups * C
    written = there[:, None]
    if C != WIDE:
        written = written & (c < C)[None, :]
    tl.store(target[:, None] + c[None, :], total.to(x.dtype.element_ty), mask=written)
