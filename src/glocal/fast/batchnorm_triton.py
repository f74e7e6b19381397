"""BatchNorm with its surroundings as kernels over a matrix x of rows (image, position) and columns (run, channel).

Sums over rows are made in parts, one a program, and the parts are put together in a fixed order: no result depends on
which program was first. Variances are made of differences to a row nearby and put together from centred sums (Chan et
al. 1979), so that little cancels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 32, 64, 2
PROGRAMS, MOST = 4096, 256
"""About so many programs keep a GPU busy; and the most parts that the rows of a column are divided into."""
FEWER = 16
"""Columns of which one program puts the parts together."""

NO_MASK, MASK_FROM_X, MASK_FROM_Y = 0, 1, 2


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, running_mean: Tensor, running_variance: Tensor,
    rectify: bool, eps: float, momentum: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """relu(B(x) + beside), the new running statistics, the means and the variances of the columns."""
    rows = _matrix(x)
    m, k = rows.shape
    parts, each = _parts(m, k)
    means, squares = rows.new_empty(2, parts, k, dtype=torch.float32)
    vectors = rows.new_empty(4, k, dtype=torch.float32).unbind()
    mean, variance = vectors[2:]
    blocks = triton.cdiv(k, COLUMNS)
    _moments[(blocks, parts)](rows, means, squares, m, k, each, ROWS, COLUMNS, num_warps=WARPS)
    old = running_mean, running_variance, momentum
    few = (triton.cdiv(k, FEWER),)
    _together[few](means, squares, *old, *vectors, m, k, each, parts, triton.next_power_of_2(parts), FEWER)
    y = torch.empty_like(rows)
    added = rows if beside is None else _matrix(beside)
    grid = triton.cdiv(m, ROWS), blocks
    read = rows, added, y, mean, variance, weight, bias
    _apply[grid](*read, m, k, eps, beside is not None, rectify, ROWS, COLUMNS, num_warps=WARPS)
    return _images(y, x), *vectors


def slopes(
    dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor,
    beside: bool, rectify: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The slopes in x, the weight, the bias and in what was added beside (an empty tensor where nothing was)."""
    rows, above, after = _matrix(x), _matrix(dy), _matrix(y)
    m, k = rows.shape
    parts, each = _parts(m, k)
    sums = rows.new_empty(2, parts, k, dtype=torch.float32)
    blocks = triton.cdiv(k, COLUMNS)
    mask = NO_MASK if not rectify else MASK_FROM_Y if beside else MASK_FROM_X
    read = rows, above, after, mean, variance, weight, bias
    _slope_sums[(blocks, parts)](*read, sums[0], sums[1], m, k, each, eps, mask, ROWS, COLUMNS, num_warps=WARPS)
    dbias, dweight = rows.new_empty(2, k, dtype=torch.float32)
    few = (triton.cdiv(k, FEWER),)
    _add_up[few](sums[0], sums[1], dbias, dweight, k, parts, triton.next_power_of_2(parts), FEWER)
    dx = torch.empty_like(rows)
    through = torch.empty_like(rows) if beside else dx
    grid = triton.cdiv(m, ROWS), blocks
    _slope_apply[grid](*read, dbias, dweight, dx, through, m, k, eps, mask, beside, ROWS, COLUMNS, num_warps=WARPS)
    dbeside = _images(through, x) if beside else x.new_empty(x.shape[0], x.shape[1], 0, 0)
    return _images(dx, x), dweight, dbias, dbeside


def _matrix(x: Tensor) -> Tensor:
    """Row by row in memory, for that is how the kernels walk; a reshape alone may be a view in another order."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).contiguous()


def _images(rows: Tensor, like: Tensor) -> Tensor:
    n, k, h, w = like.shape
    return rows.view(n, h, w, k).permute(0, 3, 1, 2)


def _parts(m: int, k: int) -> tuple[int, int]:
    """Into how many parts the rows are divided, and the rows of each."""
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(k, COLUMNS))
    each = triton.cdiv(triton.cdiv(m, min(wanted, MOST)), ROWS) * ROWS
    return triton.cdiv(m, each), each


@triton.jit
def _moments(x, means, squares, m, k, each, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The mean and the centred sum of squares of a part of the rows, from differences to the part's first row."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    start = part * each
    end = tl.minimum(start + each, m)
    pivot = tl.load(x + start.to(tl.int64) * k + c, mask=c < k, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squared = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(start, end, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & (c < k)[None, :]
        tile = tl.load(x + r.to(tl.int64)[:, None] * k + c[None, :], mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, tile - pivot[None, :], 0.0)
        sums += apart
        squared += apart * apart
    n = (end - start).to(tl.float32)
    shift = tl.sum(sums, 0) / n
    tl.store(means + part * k + c, pivot + shift, mask=c < k)
    tl.store(squares + part * k + c, tl.maximum(tl.sum(squared, 0) - n * shift * shift, 0.0), mask=c < k)


@triton.jit
def _together(
    means, squares, old_mean, old_variance, momentum, new_mean, new_variance, mean_out, variance_out,
    m, k, each, parts, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The columns' means and variances from those of the parts, and what they make of the running ones."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, PARTS)
    inside = (p < parts)[:, None] & (c < k)[None, :]
    where = p[:, None] * k + c[None, :]
    n = tl.minimum(tl.maximum(m - p * each, 0), each).to(tl.float32)[:, None]
    part_means = tl.load(means + where, mask=inside, other=0.0)
    mean = tl.sum(part_means * n, 0) / m
    shift = part_means - mean[None, :]
    square = tl.load(squares + where, mask=inside, other=0.0) + n * shift * shift
    whole = tl.sum(square, 0)
    tl.store(mean_out + c, mean, mask=c < k)
    tl.store(variance_out + c, whole / m, mask=c < k)
    before_mean = tl.load(old_mean + c, mask=c < k)
    before_variance = tl.load(old_variance + c, mask=c < k)
    tl.store(new_mean + c, before_mean + momentum * (mean - before_mean), mask=c < k)
    tl.store(new_variance + c, before_variance + momentum * (whole / (m - 1) - before_variance), mask=c < k)


@triton.jit
def _apply(
    x, beside, y, mean, variance, weight, bias, m, k, eps, ADD: tl.constexpr, RECTIFY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < m)[:, None] & (c < k)[None, :]
    where = r.to(tl.int64)[:, None] * k + c[None, :]
    scale = tl.load(weight + c, mask=c < k) * tl.rsqrt(tl.load(variance + c, mask=c < k, other=1.0) + eps)
    centre = tl.load(mean + c, mask=c < k)
    shift = tl.load(bias + c, mask=c < k)
    z = (tl.load(x + where, mask=inside).to(tl.float32) - centre[None, :]) * scale[None, :] + shift[None, :]
    if ADD:
        z += tl.load(beside + where, mask=inside).to(tl.float32)
    if RECTIFY:
        z = tl.where(z < 0, 0.0, z)  # NaN stays NaN: a run that diverges must show it
    tl.store(y + where, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _slope_tile(
    x, dy, y, mean, rstd, weight, bias, where, inside, MASK: tl.constexpr,
):  # fmt: skip
    """The slope behind the relu, and the normalised x, of one tile."""
    g = tl.load(dy + where, mask=inside, other=0.0).to(tl.float32)
    normal = (tl.load(x + where, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    if MASK == 1:
        g = tl.where(normal * weight[None, :] + bias[None, :] > 0, g, 0.0)
    if MASK == 2:
        g = tl.where(tl.load(y + where, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
    return g, normal


@triton.jit
def _slope_sums(
    x, dy, y, mean, variance, weight, bias, sums, products, m, k, each, eps, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g x̂ over a part of the rows."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    start = part * each
    end = tl.minimum(start + each, m)
    centre = tl.load(mean + c, mask=c < k)
    rstd = tl.rsqrt(tl.load(variance + c, mask=c < k, other=1.0) + eps)
    scale = tl.load(weight + c, mask=c < k)
    shift = tl.load(bias + c, mask=c < k)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(start, end, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & (c < k)[None, :]
        where = r.to(tl.int64)[:, None] * k + c[None, :]
        g, normal = _slope_tile(x, dy, y, centre, rstd, scale, shift, where, inside, MASK)
        total += g
        product += tl.where(inside, g * normal, 0.0)
    tl.store(sums + part * k + c, tl.sum(total, 0), mask=c < k)
    tl.store(products + part * k + c, tl.sum(product, 0), mask=c < k)


@triton.jit
def _add_up(
    sums, products, sum_out, product_out, k, parts, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, PARTS)
    inside = (p < parts)[:, None] & (c < k)[None, :]
    where = p[:, None] * k + c[None, :]
    tl.store(sum_out + c, tl.sum(tl.load(sums + where, mask=inside, other=0.0), 0), mask=c < k)
    tl.store(product_out + c, tl.sum(tl.load(products + where, mask=inside, other=0.0), 0), mask=c < k)


@triton.jit
def _slope_apply(
    x, dy, y, mean, variance, weight, bias, dbias, dweight, dx, through, m, k, eps, MASK: tl.constexpr,
    BESIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < m)[:, None] & (c < k)[None, :]
    where = r.to(tl.int64)[:, None] * k + c[None, :]
    centre = tl.load(mean + c, mask=c < k)
    rstd = tl.rsqrt(tl.load(variance + c, mask=c < k, other=1.0) + eps)
    scale = tl.load(weight + c, mask=c < k)
    shift = tl.load(bias + c, mask=c < k)
    g, normal = _slope_tile(x, dy, y, centre, rstd, scale, shift, where, inside, MASK)
    total = tl.load(dbias + c, mask=c < k) / m
    product = tl.load(dweight + c, mask=c < k) / m
    slope = (scale * rstd)[None, :] * (g - total[None, :] - normal * product[None, :])
    tl.store(dx + where, slope.to(dx.dtype.element_ty), mask=inside)
    if BESIDE:
        tl.store(through + where, g.to(through.dtype.element_ty), mask=inside)
