r"""Convolutions and their gradients with fp32 accuracy, computed from fp16 products on tensor cores.

Each number is split into two fp16 numbers, high and low, x = u (h + l), where the unit u is a power of two, and

    x y = u u' (h h' + h l' + l h').    The omitted term l l' is about 2⁻²² of the product.

One u serves a whole image, one channel of all images, or one channel of the weight, so a huge or non-finite value
affects only numbers with the same u. The error of a number is at most 2⁻²² of itself, or 2⁻³⁹ of the largest one with
the same u. Tensor cores compute the three products faster than one in fp32, but truncate their sums. So they sum only a
few products at a time, and these partial sums are added in fp32.

Images are channels-last with a border of zeros. From each image row, an output position then reads one contiguous
piece of memory, indexed by q over taps and channels, and a convolution is a product with the weight as a matrix:

    y[p, f] = Σ_a Σ_q x[address(p, a) + q] w[a, q, f]

The input gradient is the same product with the taps in reverse order. With stride s it consists of s² such products,
each over the positions that are reached by the same taps. Layer sizes are runtime arguments, so that few kernels are
compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from glocal.fast import supports
from glocal.precision import conv_uses_tf32

MIN_PRODUCTS = 1 << 33
"""Number of multiplications from which this is faster than cuDNN on an H200; below it, kernel launches dominate."""
SHARED_MEMORY_BYTES = 200_000
"""Bytes of shared memory that a kernel needs; Hopper GPUs have that much."""
CHANNEL_MULTIPLE = 16
SPLIT_BLOCK = 1024
"""Elements that one program of `_split_kernel` handles."""
POSITIONS, MAX_SPLITS = 4096, 256
"""Positions that one program of the weight gradient sums over, and the largest number of partial sums."""


def is_faster(x: Tensor, products: int) -> bool:
    """Return whether to compute so many multiplications here: not where TF32 is allowed, which is faster."""
    large = products >= MIN_PRODUCTS and x.dtype == torch.float32 and supports(x)
    return large and _has_shared_memory(x.device) and not conv_uses_tf32()


@cache
def _has_shared_memory(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_MEMORY_BYTES


def conv(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """Return y, (n, width, h', w'), for x (n, channels, h, w) and w (width, channels, k, k)."""
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"The input has {x.shape[1]} channels, but the weight takes {w.shape[1]}.")
    k = w.shape[-1]
    height, width = ((side + 2 * padding - k) // stride + 1 for side in x.shape[2:])
    y = x.new_empty(x.shape[0], height, width, w.shape[0])
    multiply(split(_pixels(x), padding, "image"), split_weight(w.permute(2, 3, 1, 0)), y, stride, (0, 0))
    return y.permute(0, 3, 1, 2)


def conv_input_grad(y: Tensor, w: Tensor, stride: int, padding: int, size: tuple[int, int]) -> Tensor:
    """Return the gradient in x, (n, channels, *size)."""
    k = w.shape[-1]
    axes = [[Residue.of(r, k, stride, padding, side) for r in range(stride)] for side in size]
    border = max(residue.border(read) for axis, read in zip(axes, y.shape[2:], strict=True) for residue in axis)
    grads = split(_pixels(y), border, "image")
    mirrored = split_weight(w.permute(2, 3, 0, 1).flip(0, 1))
    x = y.new_empty(y.shape[0], *size, w.shape[1])
    for row in axes[0]:
        for column in axes[1]:
            target = x[:, row.residue :: stride, column.residue :: stride]
            if row.taps and column.taps and target.numel():
                taps = mirrored.parts[:, row.mirrored(k)][:, :, column.mirrored(k)].contiguous()
                start = row.first + border, column.first + border
                multiply(grads, Split(taps, mirrored.largest), target, 1, start)
            else:
                target.zero_()
    return x.permute(0, 3, 1, 2)


def conv_weight_grad(x: Tensor, y: Tensor, stride: int, padding: int, k: int) -> Tensor:
    """Return the gradient in w, (width, channels, k, k)."""
    dw = correlate(split(_pixels(y), 0, "channel"), split(_pixels(x), padding, "channel"), stride, k)
    return dw[: y.shape[1], :, :, : x.shape[1]].permute(0, 3, 1, 2).contiguous()


def _pixels(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


class Residue(NamedTuple):
    """Input positions residue + stride · i along one axis, and which output gradients they receive."""

    residue: int
    positions: int
    taps: range  # the taps that reach these positions, in the order of what they read
    first: int  # what the first tap reads for i = 0

    @classmethod
    def of(cls, residue: int, k: int, stride: int, padding: int, side: int) -> Residue:
        """Position p reads (p + padding − a) / stride for the taps a for which that is an integer."""
        taps = range((residue + padding) % stride, k, stride)[::-1]
        first = (residue + padding - taps[0]) // stride if taps else 0
        return cls(residue, max(0, -(-(side - residue) // stride)), taps, first)

    def mirrored(self, k: int) -> slice:
        """Return the slice of these taps among k taps in reverse order."""
        return slice(k - 1 - self.taps[0], None, -self.taps.step)

    def border(self, length: int) -> int:
        """Return how far the taps read beyond either end of an axis of this length."""
        if not self.taps or not self.positions:
            return 0
        last = self.first + self.positions - 1 + len(self.taps) - 1
        return max(0, -self.first, last - (length - 1))


class Split(NamedTuple):
    """h and l of images (n, rows, columns, channels), and the largest magnitude of each image or channel."""

    parts: Tensor  # (2, n, rows, columns, channels)
    largest: Tensor


class Tile(NamedTuple):
    """The tile that one program computes, and how many products it adds at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def split(pixels: Tensor, border: int, shared: Literal["image", "channel"]) -> Split:
    """Split images (n, h, w, channels), with a border of zeros and channels padded to a multiple of 16."""
    pixels = pixels.contiguous()
    n, h, w, channels = pixels.shape
    padded = triton.cdiv(channels, CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE
    parts = pixels.new_empty(2, n, h + 2 * border, w + 2 * border, padded, dtype=torch.float16)
    largest = torch.linalg.vector_norm(pixels, torch.inf, (1, 2, 3) if shared == "image" else (0, 1, 2))
    grid = n * (h + 2 * border), triton.cdiv((w + 2 * border) * padded, SPLIT_BLOCK)
    _split_kernel[grid](
        pixels, parts, largest, parts.stride(0), h, w, border, channels, padded, shared == "image", SPLIT_BLOCK
    )
    return Split(parts, largest)


def split_weight(taps: Tensor) -> Split:
    """Split weights (a, b, in, out), with in and out padded to multiples of 16."""
    return split(functional.pad(taps, [0, 0, 0, -taps.shape[2] % CHANNEL_MULTIPLE]), 0, "channel")


def multiply(x: Split, w: Split, y: Tensor, stride: int, start: tuple[int, int]) -> None:
    """Write to y[n, i, j] the products of w's taps with x from start + stride (i, j) on."""
    _, _, height, width, channels = x.parts.shape
    (n, h, v, out), (taps_down, taps_across), padded = y.shape, w.parts.shape[1:3], w.parts.shape[-1]
    tile = _multiply_tile(taps_across * channels, out)
    grid = (triton.cdiv(out, tile.columns) * triton.cdiv(n * h * v, tile.rows),)
    strides = x.parts.stride(0), w.parts.stride(0), *y.stride()[:3]
    sizes = h, v, height, width, channels, out, padded, taps_down, taps_across, stride
    first = x.parts[0, 0, start[0], start[1]]
    _multiply_kernel[grid](first, w.parts, y, x.largest, w.largest, n * h * v, *strides, *sizes, **tile._asdict())


def correlate(y: Split, x: Split, stride: int, k: int) -> Tensor:
    """Return the products of y and x summed over positions, (y's channels, k, k, x's channels)."""
    _, n, h, v, padded = y.parts.shape
    _, _, height, width, channels = x.parts.shape
    tile = _correlate_tile(padded, k * channels)
    positions = max(POSITIONS, triton.cdiv(triton.cdiv(n * h * v, MAX_SPLITS), POSITIONS) * POSITIONS)
    splits = triton.cdiv(n * h * v, positions)
    partial = y.largest.new_empty(splits, padded, k, k, channels)
    tiles = triton.cdiv(padded, tile.rows), triton.cdiv(k * channels, tile.columns)
    strides = y.parts.stride(0), x.parts.stride(0)
    true_channels = len(y.largest), len(x.largest)
    sizes = tiles[0], height, width, padded, channels, *true_channels, k, stride, positions, h, v
    _correlate_kernel[tiles[0] * tiles[1], k, splits](
        y.parts, x.parts, partial, y.largest, x.largest, n * h * v, *strides, *sizes, **tile._asdict()
    )
    return partial.sum(0)


def _multiply_tile(inner: int, out: int) -> Tile:
    """Return the tile size that was fastest, of ten tried, for the layers of ResNet-18 on an H200."""
    if out <= 64:
        return Tile(128, 64, min(32, inner & -inner), 4, 3)
    return Tile(128, 128, min(64, inner & -inner), 8, 3)


def _correlate_tile(padded: int, inner: int) -> Tile:
    """Return the tile size that was fastest, of nine tried, likewise."""
    if padded <= 64:
        rows, columns = (min(64, max(CHANNEL_MULTIPLE, triton.next_power_of_2(size))) for size in (padded, inner))
        return Tile(rows, columns, 64, 4, 3)
    return Tile(128, 128, 32, 8, 3)


@triton.jit
def _unit(largest, INVERSE: tl.constexpr):
    """Return u (or 1/u) so that largest / u has 15 bits before the binary point; NaN if it is not finite."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    power = tl.maximum(exponent, 15) - 14
    power = 254 - power if INVERSE else power
    return tl.where(exponent == 255, float("nan"), (power << 23).to(tl.float32, bitcast=True))


@triton.jit
def _split_kernel(
    x, parts, largest, part_stride, h, w, border, C: tl.constexpr, PADDED: tl.constexpr, PER_IMAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Split one block of an image row, border included."""
    line = tl.program_id(0).to(tl.int64)
    i = line % (h + 2 * border) - border
    image = line // (h + 2 * border)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = position // PADDED - border
    c = position % PADDED
    length = (w + 2 * border) * PADDED
    valid = position < length
    end = tl.where((i >= 0) & (i < h), w, 0)  # rows of the border have no columns
    inside = valid & (j >= 0) & (j < end) & (c < C)
    value = tl.load(x + ((image * h + i) * w + j) * C + c, mask=inside, other=0.0)
    scale = tl.load(largest + image) if PER_IMAGE else tl.load(largest + c, mask=c < C, other=0.0)
    value = value * _unit(scale, True)  # a power of two: exact
    high = value.to(tl.float16)
    low = (value - high.to(tl.float32)).to(tl.float16)
    target = parts + line * length + position
    tl.store(target, high, mask=valid)
    tl.store(target + part_stride, low, mask=valid)


@triton.jit
def _multiply_kernel(
    x, w, y, x_largest, w_largest, positions, x_part_stride, w_part_stride, image_stride, row_stride, column_stride,
    gh, gw, h, v, c, out, padded, taps_down, taps_across, s,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y: rows are positions, columns are output channels."""
    tiles = tl.cdiv(out, columns)
    position = tl.program_id(0) // tiles * rows + tl.arange(0, rows)
    f = tl.program_id(0) % tiles * columns + tl.arange(0, columns)
    q = tl.arange(0, depth)
    valid = position < positions
    position = tl.minimum(position, positions - 1)
    j = position % gw
    i = position // gw % gh
    image = (position // (gw * gh)).to(tl.int64)
    pixels = x + ((image * h + i * s) * v + j * s)[:, None] * c + q[None, :]
    matrix = w + q[:, None] * padded + f[None, :]
    w_mask = (f < padded)[None, :]
    steps_per_row = taps_across * c // depth
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for step in range(taps_down * steps_per_row):
        row = step // steps_per_row
        x_source = pixels + row * (v * c) + (step - row * steps_per_row) * depth
        w_source = matrix + step * (depth * padded)
        x_high = tl.load(x_source)
        x_low = tl.load(x_source + x_part_stride)
        w_high = tl.load(w_source, mask=w_mask, other=0.0)
        w_low = tl.load(w_source + w_part_stride, mask=w_mask, other=0.0)
        part = tl.dot(x_low, w_high)
        part = tl.dot(x_high, w_low, part)
        part = tl.dot(x_high, w_high, part)
        total += part
    row_unit = _unit(tl.load(x_largest + image), False)[:, None]
    column_unit = _unit(tl.load(w_largest + f, mask=f < out, other=0.0), False)[None, :]
    total = total * column_unit * row_unit  # weights first: images may be large, and the product must not overflow
    target = y + (image * image_stride + i * row_stride + j * column_stride)[:, None] + f[None, :]
    tl.store(target, total, mask=valid[:, None] & (f < out)[None, :])


@triton.jit
def _correlate_kernel(
    y, x, partial, y_largest, x_largest, positions, y_part_stride, x_part_stride, tiles, h, v, padded, c,
    y_channels, x_channels, k, s, split_positions, GH: tl.constexpr, GW: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the weight gradient for row a of the taps, summed over one split of the positions."""
    f = tl.program_id(0) % tiles * rows + tl.arange(0, rows)
    q = tl.program_id(0) // tiles * columns + tl.arange(0, columns)
    a = tl.program_id(1)
    split = tl.program_id(2)
    y_mask = (f < padded)[None, :]
    x_mask = (q < k * c)[None, :]
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for step in range(split_positions // depth):
        position = split * split_positions + step * depth + tl.arange(0, depth)
        valid = (position < positions)[:, None]
        position = tl.minimum(position, positions - 1)
        j = position % GW
        i = position // GW % GH
        image = (position // (GW * GH)).to(tl.int64)
        y_source = y + position.to(tl.int64)[:, None] * padded + f[None, :]
        x_source = x + ((image * h + i * s + a) * v + j * s)[:, None] * c + q[None, :]
        y_high = tl.load(y_source, mask=valid & y_mask, other=0.0)
        y_low = tl.load(y_source + y_part_stride, mask=valid & y_mask, other=0.0)
        x_high = tl.load(x_source, mask=x_mask, other=0.0)
        x_low = tl.load(x_source + x_part_stride, mask=x_mask, other=0.0)
        part = tl.dot(tl.trans(y_low), x_high)
        part = tl.dot(tl.trans(y_high), x_low, part)
        part = tl.dot(tl.trans(y_high), x_high, part)
        total += part
    row_unit = _unit(tl.load(y_largest + f, mask=f < y_channels, other=0.0), False)[:, None]
    column_unit = _unit(tl.load(x_largest + q % c, mask=q % c < x_channels, other=0.0), False)[None, :]
    total = total * row_unit * column_unit  # gradients first
    target = partial + ((split.to(tl.int64) * padded + f) * k + a)[:, None] * (k * c) + q[None, :]
    tl.store(target, total, mask=(f < padded)[:, None] & x_mask)
