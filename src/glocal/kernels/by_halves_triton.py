"""`by_halves` as three kernels: they halve numbers, multiply positions with a matrix, and correlate positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

LEAST = 16
"""Channels that are multiplied at a time, at least."""
NUMBERS = 1024
"""That one program halves."""
POSITIONS = 4096
"""That one program sums over."""


class Halves(NamedTuple):
    """h and l of images, (2, n, height, width, channels), and u."""

    parts: Tensor
    unit: Tensor


class Shape(NamedTuple):
    """Of what one program multiplies: rows × columns, `some` products of each at a time."""

    rows: int
    columns: int
    some: int
    num_warps: int
    num_stages: int


def halved(pixels: Tensor, rim: int) -> Halves:
    """Images (n, h, w, channels) with a rim of zeros, and with channels of zeros up to a multiple of LEAST."""
    pixels = pixels.contiguous()
    n, h, w, channels = pixels.shape
    wide = triton.cdiv(channels, LEAST) * LEAST
    parts = pixels.new_empty(2, n, h + 2 * rim, w + 2 * rim, wide, dtype=torch.float16)
    unit = _unit(pixels)
    grid = n, triton.cdiv(parts.stride(1), NUMBERS)
    _halve[grid](pixels, parts, unit, parts.stride(0), h, w, channels, wide, rim, NUMBERS)
    return Halves(parts, unit)


def matrix(taps: Tensor) -> Halves:
    """Weights (a, b, from, to) as (2, 1, 1, a · b · from, to)."""
    filled = functional.pad(taps, [0, 0, 0, -taps.shape[2] % LEAST])
    return halved(filled.reshape(1, 1, -1, taps.shape[3]), 0)


def multiply(x: Halves, w: Halves, y: Tensor, taps: tuple[int, int], stride: int, begin: tuple[int, int]) -> None:
    """y[n, i, j] of what x has at taps from begin + stride (i, j) on."""
    _, _, height, width, channels = x.parts.shape
    (n, h, v, to), (down, across), wide = y.shape, taps, w.parts.shape[-1]
    shape = multiplied(across * channels, to)
    grid = (triton.cdiv(to, shape.columns) * triton.cdiv(n * h * v, shape.rows),)
    strides = x.parts.stride(0), w.parts.stride(0), *y.stride()[:3]
    measures = h, v, height, width, channels, to, wide, down, across, stride, *begin
    _rows_by_matrix[grid](x.parts, w.parts, y, x.unit, w.unit, n * h * v, *strides, *measures, **shape._asdict())


def correlate(y: Halves, x: Halves, stride: int, k: int) -> Tensor:
    """Sums over positions, (y's channels, k, k, x's channels)."""
    _, n, h, v, wide = y.parts.shape
    _, _, height, width, channels = x.parts.shape
    shape = correlated(wide, k * channels)
    splits = triton.cdiv(n * h * v, POSITIONS)
    found = y.unit.new_empty(splits, wide, k, k, channels)
    grid = triton.cdiv(wide, shape.rows) * triton.cdiv(k * channels, shape.columns), k, splits
    strides = y.parts.stride(0), x.parts.stride(0)
    measures = h, v, height, width, wide, channels, k, stride, POSITIONS
    _correlate[grid](y.parts, x.parts, found, y.unit, x.unit, n * h * v, *strides, *measures, **shape._asdict())
    return found.sum(0)


def multiplied(inner: int, to: int) -> Shape:
    some = min(64, inner & -inner)
    return Shape(128, 64, some, 4, 3) if to <= 64 else Shape(128, 128, some, 8, 3)


def correlated(wide: int, across: int) -> Shape:
    rows, columns = (min(128, max(LEAST, triton.next_power_of_2(number))) for number in (wide, across))
    return Shape(rows, columns, 64, 8 if rows * columns > 128 * 64 else 4, 3)


def _unit(x: Tensor) -> Tensor:
    """The largest of x, in this unit, has 15 bits before the point; a tensor that is not finite has no unit."""
    largest = torch.linalg.vector_norm(x, torch.inf)
    _, exponent = torch.frexp(largest)
    unit = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-100) - 15)
    return torch.where(largest.isfinite(), unit, torch.nan)


@triton.jit
def _halve(
    x, parts, unit, of_part, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, RIM: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Some numbers of an image with its rim."""
    whole: tl.constexpr = (H + 2 * RIM) * (W + 2 * RIM) * WIDE
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    image = tl.program_id(0).to(tl.int64)
    c = at % WIDE
    j = at // WIDE % (W + 2 * RIM) - RIM
    i = at // (WIDE * (W + 2 * RIM)) - RIM
    there = at < whole
    inside = there & (i >= 0) & (i < H) & (j >= 0) & (j < W) & (c < C)
    value = tl.load(x + image * (H * W * C) + (i * W + j) * C + c, mask=inside, other=0.0)
    value = value / tl.load(unit)  # by a power of two: no rounding
    high = value.to(tl.float16)
    low = (value - high.to(tl.float32)).to(tl.float16)
    target = parts + image * whole + at
    tl.store(target, high, mask=there)
    tl.store(target + of_part, low, mask=there)


@triton.jit
def _rows_by_matrix(
    x, w, y, x_unit, w_unit, positions, x_of_part, w_of_part, of_image, of_row, of_column,
    GH: tl.constexpr, GW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, TO: tl.constexpr,
    WIDE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, S: tl.constexpr, R0: tl.constexpr, C0: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    """Some positions times some of the matrix's columns."""
    tiles: tl.constexpr = (TO + columns - 1) // columns
    at = tl.program_id(0) // tiles * rows + tl.arange(0, rows)
    f = tl.program_id(0) % tiles * columns + tl.arange(0, columns)
    q = tl.arange(0, some)
    there = at < positions
    at = tl.minimum(at, positions - 1)
    j = at % GW
    i = at // GW % GH
    image = (at // (GW * GH)).to(tl.int64)
    pixels = x + ((image * H + i * S + R0) * W + j * S + C0)[:, None] * C + q[None, :]
    matrix = w + q[:, None] * WIDE + f[None, :]
    known = (f < WIDE)[None, :]
    times: tl.constexpr = ACROSS * C // some
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for step in range(DOWN * times):
        row = step // times
        source = pixels + row * (W * C) + (step - row * times) * some
        beside = matrix + step * (some * WIDE)
        high = tl.load(source)
        low = tl.load(source + x_of_part)
        w_high = tl.load(beside, mask=known, other=0.0)
        w_low = tl.load(beside + w_of_part, mask=known, other=0.0)
        part = tl.dot(low, w_high)
        part = tl.dot(high, w_low, part)
        part = tl.dot(high, w_high, part)
        total += part
    total = total * tl.load(x_unit) * tl.load(w_unit)
    target = y + (image * of_image + i * of_row + j * of_column)[:, None] + f[None, :]
    tl.store(target, total, mask=there[:, None] & (f < TO)[None, :])


@triton.jit
def _correlate(
    y, x, found, y_unit, x_unit, positions, y_of_part, x_of_part,
    GH: tl.constexpr, GW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, FROM: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, each: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    some: tl.constexpr,
):  # fmt: skip
    """Some of y's channels times some of what x has in row a of the taps, over so many positions."""
    down: tl.constexpr = (FROM + rows - 1) // rows
    f = tl.program_id(0) % down * rows + tl.arange(0, rows)
    q = tl.program_id(0) // down * columns + tl.arange(0, columns)
    a = tl.program_id(1)
    split = tl.program_id(2)
    first = (f < FROM)[None, :]
    second = (q < K * C)[None, :]
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for step in range(each // some):
        at = split * each + step * some + tl.arange(0, some)
        there = (at < positions)[:, None]
        at = tl.minimum(at, positions - 1)
        j = at % GW
        i = at // GW % GH
        image = (at // (GW * GH)).to(tl.int64)
        slopes = y + at.to(tl.int64)[:, None] * FROM + f[None, :]
        pixels = x + ((image * H + i * S + a) * W + j * S)[:, None] * C + q[None, :]
        high = tl.load(slopes, mask=there & first, other=0.0)
        low = tl.load(slopes + y_of_part, mask=there & first, other=0.0)
        x_high = tl.load(pixels, mask=second, other=0.0)
        x_low = tl.load(pixels + x_of_part, mask=second, other=0.0)
        part = tl.dot(tl.trans(low), x_high)
        part = tl.dot(tl.trans(high), x_low, part)
        part = tl.dot(tl.trans(high), x_high, part)
        total += part
    total = total * tl.load(y_unit) * tl.load(x_unit)
    target = found + ((split.to(tl.int64) * FROM + f) * K + a)[:, None] * (K * C) + q[None, :]
    tl.store(target, total, mask=(f < FROM)[:, None] & second)
