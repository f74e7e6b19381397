"""`by_halves` as three kernels: they halve numbers, multiply positions with a matrix, and correlate positions.

What differs from layer to layer is given as numbers, so that few kernels are compiled for many layers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

LEAST = 16
"""Channels that are multiplied at a time, at least."""
NUMBERS = 1024
"""That one program halves."""
POSITIONS, SPLITS = 4096, 256
"""That one program sums over, and the most parts that a sum is made in: where positions are more, it sums over more."""


class Halves(NamedTuple):
    """h and l of a tensor (n, rows, columns, channels), (2, n, rows, columns, channels), and the largest magnitudes, of
    every image or every channel, of which its u is made."""

    parts: Tensor
    largest: Tensor


class Shape(NamedTuple):
    """Of what one program multiplies: rows × columns, `some` products of each at a time."""

    rows: int
    columns: int
    some: int
    num_warps: int
    num_stages: int


def halved(pixels: Tensor, rim: int, units: Literal["image", "channel"]) -> Halves:
    """Images (n, h, w, channels) with a rim of zeros, and with channels of zeros up to a multiple of LEAST."""
    pixels = pixels.contiguous()
    n, h, w, channels = pixels.shape
    wide = triton.cdiv(channels, LEAST) * LEAST
    parts = pixels.new_empty(2, n, h + 2 * rim, w + 2 * rim, wide, dtype=torch.float16)
    largest = torch.linalg.vector_norm(pixels, torch.inf, (1, 2, 3) if units == "image" else (0, 1, 2))
    grid = n * (h + 2 * rim), triton.cdiv((w + 2 * rim) * wide, NUMBERS)
    _halve[grid](pixels, parts, largest, parts.stride(0), h, w, rim, channels, wide, units == "image", NUMBERS)
    return Halves(parts, largest)


def matrix(taps: Tensor) -> Halves:
    """Weights (a, b, from, to), with zeros up to multiples of LEAST."""
    return halved(functional.pad(taps, [0, 0, 0, -taps.shape[2] % LEAST]), 0, "channel")


def multiply(x: Halves, w: Halves, y: Tensor, stride: int, begin: tuple[int, int]) -> None:
    """y[n, i, j] of what x has at w's taps from begin + stride (i, j) on."""
    _, _, height, width, channels = x.parts.shape
    (n, h, v, to), (down, across), wide = y.shape, w.parts.shape[1:3], w.parts.shape[-1]
    shape = multiplied(across * channels, to)
    grid = (triton.cdiv(to, shape.columns) * triton.cdiv(n * h * v, shape.rows),)
    strides = x.parts.stride(0), w.parts.stride(0), *y.stride()[:3]
    measures = h, v, height, width, channels, to, wide, down, across, stride
    first = x.parts[0, 0, begin[0], begin[1]]
    _rows_by_matrix[grid](
        first, w.parts, y, x.largest, w.largest, n * h * v, *strides, *measures, **shape._asdict()
    )  # fmt: skip


def correlate(y: Halves, x: Halves, stride: int, k: int) -> Tensor:
    """Sums over positions, (y's channels, k, k, x's channels)."""
    _, n, h, v, wide = y.parts.shape
    _, _, height, width, channels = x.parts.shape
    shape = correlated(wide, k * channels)
    each = max(POSITIONS, triton.cdiv(triton.cdiv(n * h * v, SPLITS), POSITIONS) * POSITIONS)
    splits = triton.cdiv(n * h * v, each)
    found = y.largest.new_empty(splits, wide, k, k, channels)
    tiles = triton.cdiv(wide, shape.rows), triton.cdiv(k * channels, shape.columns)
    strides = y.parts.stride(0), x.parts.stride(0)
    real = len(y.largest), len(x.largest)
    measures = tiles[0], height, width, wide, channels, *real, k, stride, each, h, v
    _correlate[tiles[0] * tiles[1], k, splits](
        y.parts, x.parts, found, y.largest, x.largest, n * h * v, *strides, *measures, **shape._asdict()
    )
    return found.sum(0)


def multiplied(inner: int, to: int) -> Shape:
    """The fastest of ten for the layers of ResNet-18 on an H200."""
    if to <= 64:
        return Shape(128, 64, min(32, inner & -inner), 4, 3)
    return Shape(128, 128, min(64, inner & -inner), 8, 3)


def correlated(wide: int, across: int) -> Shape:
    """The fastest of nine, likewise."""
    if wide <= 64:
        rows, columns = (min(64, max(LEAST, triton.next_power_of_2(number))) for number in (wide, across))
        return Shape(rows, columns, 64, 4, 3)
    return Shape(128, 128, 32, 8, 3)


@triton.jit
def _unit(largest, INVERSE: tl.constexpr):
    """u, in which the largest has 15 bits before the point, or 1/u; what is not finite has none."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    power = tl.maximum(exponent, 15) - 14
    power = 254 - power if INVERSE else power
    return tl.where(exponent == 255, float("nan"), (power << 23).to(tl.float32, bitcast=True))


@triton.jit
def _halve(
    x, parts, largest, of_part, h, w, rim, C: tl.constexpr, WIDE: tl.constexpr, BY_IMAGE: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Some numbers of a row of an image with its rim."""
    line = tl.program_id(0).to(tl.int64)
    i = line % (h + 2 * rim) - rim
    image = line // (h + 2 * rim)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    j = at // WIDE - rim
    c = at % WIDE
    whole = (w + 2 * rim) * WIDE
    there = at < whole
    end = tl.where((i >= 0) & (i < h), w, 0)  # a row of the rim has no columns
    inside = there & (j >= 0) & (j < end) & (c < C)
    value = tl.load(x + ((image * h + i) * w + j) * C + c, mask=inside, other=0.0)
    most = tl.load(largest + image) if BY_IMAGE else tl.load(largest + c, mask=c < C, other=0.0)
    value = value * _unit(most, True)  # a power of two: no rounding
    high = value.to(tl.float16)
    low = (value - high.to(tl.float32)).to(tl.float16)
    target = parts + line * whole + at
    tl.store(target, high, mask=there)
    tl.store(target + of_part, low, mask=there)


@triton.jit
def _rows_by_matrix(
    x, w, y, x_largest, w_largest, positions, x_of_part, w_of_part, of_image, of_row, of_column,
    gh, gw, h, v, c, to, wide, down, across, s,
    rows: tl.constexpr, columns: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    """Some positions times some of the matrix's columns."""
    tiles = tl.cdiv(to, columns)
    at = tl.program_id(0) // tiles * rows + tl.arange(0, rows)
    f = tl.program_id(0) % tiles * columns + tl.arange(0, columns)
    q = tl.arange(0, some)
    there = at < positions
    at = tl.minimum(at, positions - 1)
    j = at % gw
    i = at // gw % gh
    image = (at // (gw * gh)).to(tl.int64)
    pixels = x + ((image * h + i * s) * v + j * s)[:, None] * c + q[None, :]
    matrix = w + q[:, None] * wide + f[None, :]
    known = (f < wide)[None, :]
    times = across * c // some
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for step in range(down * times):
        row = step // times
        source = pixels + row * (v * c) + (step - row * times) * some
        beside = matrix + step * (some * wide)
        high = tl.load(source)
        low = tl.load(source + x_of_part)
        w_high = tl.load(beside, mask=known, other=0.0)
        w_low = tl.load(beside + w_of_part, mask=known, other=0.0)
        part = tl.dot(low, w_high)
        part = tl.dot(high, w_low, part)
        part = tl.dot(high, w_high, part)
        total += part
    rows_unit = _unit(tl.load(x_largest + image), False)[:, None]
    columns_unit = _unit(tl.load(w_largest + f, mask=f < to, other=0.0), False)[None, :]
    total = total * columns_unit * rows_unit  # images may be large, weights are not: no step is beyond all numbers
    target = y + (image * of_image + i * of_row + j * of_column)[:, None] + f[None, :]
    tl.store(target, total, mask=there[:, None] & (f < to)[None, :])


@triton.jit
def _correlate(
    y, x, found, y_largest, x_largest, positions, y_of_part, x_of_part, tiles, h, v, wide, c, y_real, x_real, k, s,
    each, GH: tl.constexpr, GW: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    """Some of y's channels times some of what x has in row a of the taps, over so many positions."""
    f = tl.program_id(0) % tiles * rows + tl.arange(0, rows)
    q = tl.program_id(0) // tiles * columns + tl.arange(0, columns)
    a = tl.program_id(1)
    split = tl.program_id(2)
    first = (f < wide)[None, :]
    second = (q < k * c)[None, :]
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for step in range(each // some):
        at = split * each + step * some + tl.arange(0, some)
        there = (at < positions)[:, None]
        at = tl.minimum(at, positions - 1)
        j = at % GW
        i = at // GW % GH
        image = (at // (GW * GH)).to(tl.int64)
        slopes = y + at.to(tl.int64)[:, None] * wide + f[None, :]
        pixels = x + ((image * h + i * s + a) * v + j * s)[:, None] * c + q[None, :]
        high = tl.load(slopes, mask=there & first, other=0.0)
        low = tl.load(slopes + y_of_part, mask=there & first, other=0.0)
        x_high = tl.load(pixels, mask=second, other=0.0)
        x_low = tl.load(pixels + x_of_part, mask=second, other=0.0)
        part = tl.dot(tl.trans(low), x_high)
        part = tl.dot(tl.trans(high), x_low, part)
        part = tl.dot(tl.trans(high), x_high, part)
        total += part
    rows_unit = _unit(tl.load(y_largest + f, mask=f < y_real, other=0.0), False)[:, None]
    columns_unit = _unit(tl.load(x_largest + q % c, mask=q % c < x_real, other=0.0), False)[None, :]
    total = total * rows_unit * columns_unit  # slopes first
    target = found + ((split.to(tl.int64) * wide + f) * k + a)[:, None] * (k * c) + q[None, :]
    tl.store(target, total, mask=(f < wide)[:, None] & second)
