"""Train-mode BatchNorm, the residual sum and the ReLU in three passes over the data instead of eight.

The Triton kernels work on a matrix x of rows (image, position) and columns (run, channel): batched over runs, every
run's channels are channels of one larger BatchNorm. Sums over rows are computed in parts, one per program, and the
parts are added in a fixed order, so results are reproducible. Variances are computed from differences to a nearby row
and merged as centred sums (Chan et al. 1979), so that little cancels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from glocal.fast import supports
from glocal.networks.batchnorm import Pair
from glocal.networks.convolution import Dims, merge_batch_dim

ROWS, COLUMNS, WARPS = 32, 64, 2
TARGET_PROGRAMS, MAX_PARTS = 4096, 256
"""The number of programs that keep a GPU busy, and the largest number of parts that the rows are divided into."""
MERGE_COLUMNS = 16
"""Columns whose parts one program merges."""

NO_MASK, MASK_FROM_X, MASK_FROM_Y = 0, 1, 2


def batch_norm(
    x: Tensor, residual: Tensor | None, affine: Pair, running: Pair, *, relu: bool, eps: float, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`glocal.networks.batchnorm.batch_norm` by Triton kernels."""
    if not supports(x):
        return NotImplemented
    return FusedBatchNorm.apply(x, *affine, residual, *running, relu, eps, momentum)[:3]


class FusedBatchNorm(Function):
    """relu(B(x) + residual), the new running statistics, μ and σ²; all but the first are not differentiable."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, running_mean: Tensor,
        running_variance: Tensor, relu: bool, eps: float, momentum: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return relu(B(x) + residual), the new running statistics, and the columns' means and variances."""
        rows = _as_matrix(x)
        m, k = rows.shape
        parts, part_rows = _divide_rows(m, k)
        means, squares = rows.new_empty(2, parts, k, dtype=torch.float32)
        vectors = rows.new_empty(4, k, dtype=torch.float32).unbind()
        mean, variance = vectors[2:]
        blocks = triton.cdiv(k, COLUMNS)
        _moments_kernel[(blocks, parts)](rows, means, squares, m, k, part_rows, ROWS, COLUMNS, num_warps=WARPS)
        _merge_moments_kernel[(triton.cdiv(k, MERGE_COLUMNS),)](
            means, squares, running_mean, running_variance, momentum, *vectors, m, k, part_rows, parts,
            triton.next_power_of_2(parts), MERGE_COLUMNS,
        )  # fmt: skip
        y = torch.empty_like(rows)
        added = rows if residual is None else _as_matrix(residual)
        _normalize_kernel[(triton.cdiv(m, ROWS), blocks)](
            rows, added, y, mean, variance, weight, bias, m, k, eps, residual is not None, relu, ROWS, COLUMNS,
            num_warps=WARPS,
        )  # fmt: skip
        return _as_images(y, x), *vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, residual, _, _, ctx.relu, ctx.eps, _ = inputs
        y, *running, mean, variance = output
        ctx.mark_non_differentiable(*running, mean, variance)
        ctx.set_materialize_grads(False)
        ctx.has_residual = residual is not None
        ctx.save_for_backward(x, y, weight, bias, mean, variance)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        options = ctx.has_residual, ctx.relu, ctx.eps
        dx, dweight, dbias, dresidual = FusedBatchNormGrad.apply(dy, *ctx.saved_tensors, *options)
        return dx, dweight, dbias, dresidual if ctx.has_residual else None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *rest: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        runs = info.batch_size
        x = _merge_into_channels(x, dims[0], runs)
        residual = None if residual is None else _merge_into_channels(residual, dims[3], runs)
        vectors = (weight, bias, *rest[:2])
        weight, bias, *running = (
            merge_batch_dim(t, d, 0, runs) for t, d in zip(vectors, (*dims[1:3], *dims[4:6]), strict=True)
        )
        y, *vectors = FusedBatchNorm.apply(x, weight, bias, residual, *running, *rest[2:])
        return (y.unflatten(1, (runs, -1)), *(v.view(runs, -1) for v in vectors)), (1, 0, 0, 0, 0)


class FusedBatchNormGrad(Function):
    """The gradients of `FusedBatchNorm` in x, γ, β and the residual; not differentiable again."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor,
        has_residual: bool, relu: bool, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients in x, weight, bias and the residual (an empty tensor without one)."""
        rows = _as_matrix(x)
        m, k = rows.shape
        parts, part_rows = _divide_rows(m, k)
        sums = rows.new_empty(2, parts, k, dtype=torch.float32)
        blocks = triton.cdiv(k, COLUMNS)
        mask = NO_MASK if not relu else MASK_FROM_Y if has_residual else MASK_FROM_X
        inputs = rows, _as_matrix(dy), _as_matrix(y), mean, variance, weight, bias
        _grad_sums_kernel[(blocks, parts)](
            *inputs, sums[0], sums[1], m, k, part_rows, eps, mask, ROWS, COLUMNS, num_warps=WARPS
        )
        dbias, dweight = rows.new_empty(2, k, dtype=torch.float32)
        _merge_sums_kernel[(triton.cdiv(k, MERGE_COLUMNS),)](
            sums[0], sums[1], dbias, dweight, k, parts, triton.next_power_of_2(parts), MERGE_COLUMNS
        )
        dx = torch.empty_like(rows)
        dresidual = torch.empty_like(rows) if has_residual else dx
        _grad_kernel[(triton.cdiv(m, ROWS), blocks)](
            *inputs, dbias, dweight, dx, dresidual, m, k, eps, mask, has_residual, ROWS, COLUMNS, num_warps=WARPS
        )
        empty = x.new_empty(x.shape[0], x.shape[1], 0, 0)
        return _as_images(dx, x), dweight, dbias, _as_images(dresidual, x) if has_residual else empty

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("Curvature needs BatchNorm in evaluation mode.")

    @staticmethod
    def vmap(info: Any, dims: Dims, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        runs = info.batch_size
        images = [_merge_into_channels(t, d, runs) for t, d in zip(args[:3], dims[:3], strict=True)]
        vectors = [merge_batch_dim(t, d, 0, runs) for t, d in zip(args[3:7], dims[3:7], strict=True)]
        dx, dweight, dbias, dresidual = FusedBatchNormGrad.apply(*images, *vectors, *args[7:])
        dx, dresidual = (t.unflatten(1, (runs, -1)) for t in (dx, dresidual))
        return (dx, dweight.view(runs, -1), dbias.view(runs, -1), dresidual), (1, 0, 0, 1)


def _merge_into_channels(x: Tensor, dim: int | None, runs: int) -> Tensor:
    return merge_batch_dim(x, dim, 1, runs).contiguous(memory_format=torch.channels_last)


def _as_matrix(x: Tensor) -> Tensor:
    """Return (image, position) × channel, contiguous: a reshape alone may be a view with other strides."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).contiguous()


def _as_images(rows: Tensor, like: Tensor) -> Tensor:
    n, k, h, w = like.shape
    return rows.view(n, h, w, k).permute(0, 3, 1, 2)


def _divide_rows(m: int, k: int) -> tuple[int, int]:
    """Return the number of parts that m rows are divided into, and the rows of each."""
    parts = min(triton.cdiv(TARGET_PROGRAMS, triton.cdiv(k, COLUMNS)), MAX_PARTS)
    part_rows = triton.cdiv(triton.cdiv(m, parts), ROWS) * ROWS
    return triton.cdiv(m, part_rows), part_rows


@triton.jit
def _moments_kernel(x, means, squares, m, k, part_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and centred sum of squares of one part of the rows, from differences to its first row."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    start = part * part_rows
    end = tl.minimum(start + part_rows, m)
    pivot = tl.load(x + start.to(tl.int64) * k + c, mask=c < k, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    square_sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(start, end, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & (c < k)[None, :]
        tile = tl.load(x + r.to(tl.int64)[:, None] * k + c[None, :], mask=inside, other=0.0).to(tl.float32)
        delta = tl.where(inside, tile - pivot[None, :], 0.0)
        sums += delta
        square_sums += delta * delta
    n = (end - start).to(tl.float32)
    shift = tl.sum(sums, 0) / n
    tl.store(means + part * k + c, pivot + shift, mask=c < k)
    tl.store(squares + part * k + c, tl.maximum(tl.sum(square_sums, 0) - n * shift * shift, 0.0), mask=c < k)


@triton.jit
def _merge_moments_kernel(
    means, squares, old_mean, old_variance, momentum, new_mean, new_variance, mean_out, variance_out,
    m, k, part_rows, parts, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the parts' moments into the columns' means and variances, and update the running ones."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, PARTS)
    inside = (p < parts)[:, None] & (c < k)[None, :]
    offset = p[:, None] * k + c[None, :]
    n = tl.minimum(tl.maximum(m - p * part_rows, 0), part_rows).to(tl.float32)[:, None]
    part_means = tl.load(means + offset, mask=inside, other=0.0)
    mean = tl.sum(part_means * n, 0) / m
    shift = part_means - mean[None, :]
    square = tl.load(squares + offset, mask=inside, other=0.0) + n * shift * shift
    total = tl.sum(square, 0)
    tl.store(mean_out + c, mean, mask=c < k)
    tl.store(variance_out + c, total / m, mask=c < k)
    previous_mean = tl.load(old_mean + c, mask=c < k)
    previous_variance = tl.load(old_variance + c, mask=c < k)
    tl.store(new_mean + c, previous_mean + momentum * (mean - previous_mean), mask=c < k)
    tl.store(new_variance + c, previous_variance + momentum * (total / (m - 1) - previous_variance), mask=c < k)


@triton.jit
def _normalize_kernel(
    x, residual, y, mean, variance, weight, bias, m, k, eps, ADD: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < m)[:, None] & (c < k)[None, :]
    offset = r.to(tl.int64)[:, None] * k + c[None, :]
    scale = tl.load(weight + c, mask=c < k) * tl.rsqrt(tl.load(variance + c, mask=c < k, other=1.0) + eps)
    centre = tl.load(mean + c, mask=c < k)
    shift = tl.load(bias + c, mask=c < k)
    z = (tl.load(x + offset, mask=inside).to(tl.float32) - centre[None, :]) * scale[None, :] + shift[None, :]
    if ADD:
        z += tl.load(residual + offset, mask=inside).to(tl.float32)
    if RELU:
        z = tl.where(z < 0, 0.0, z)  # keeps NaN, so that a diverged run stays visible
    tl.store(y + offset, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _grad_tile(x, dy, y, mean, rstd, weight, bias, offset, inside, MASK: tl.constexpr):
    """The gradient g before the ReLU and the normalized input x̂, of one tile."""
    g = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
    xhat = (tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    if MASK == 1:
        g = tl.where(xhat * weight[None, :] + bias[None, :] > 0, g, 0.0)
    if MASK == 2:
        g = tl.where(tl.load(y + offset, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
    return g, xhat


@triton.jit
def _grad_sums_kernel(
    x, dy, y, mean, variance, weight, bias, sums, products, m, k, part_rows, eps, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g x̂ over one part of the rows."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    start = part * part_rows
    end = tl.minimum(start + part_rows, m)
    centre = tl.load(mean + c, mask=c < k)
    rstd = tl.rsqrt(tl.load(variance + c, mask=c < k, other=1.0) + eps)
    scale = tl.load(weight + c, mask=c < k)
    shift = tl.load(bias + c, mask=c < k)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(start, end, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & (c < k)[None, :]
        offset = r.to(tl.int64)[:, None] * k + c[None, :]
        g, xhat = _grad_tile(x, dy, y, centre, rstd, scale, shift, offset, inside, MASK)
        total += g
        product += tl.where(inside, g * xhat, 0.0)
    tl.store(sums + part * k + c, tl.sum(total, 0), mask=c < k)
    tl.store(products + part * k + c, tl.sum(product, 0), mask=c < k)


@triton.jit
def _merge_sums_kernel(sums, products, sum_out, product_out, k, parts, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, PARTS)
    inside = (p < parts)[:, None] & (c < k)[None, :]
    offset = p[:, None] * k + c[None, :]
    tl.store(sum_out + c, tl.sum(tl.load(sums + offset, mask=inside, other=0.0), 0), mask=c < k)
    tl.store(product_out + c, tl.sum(tl.load(products + offset, mask=inside, other=0.0), 0), mask=c < k)


@triton.jit
def _grad_kernel(
    x, dy, y, mean, variance, weight, bias, dbias, dweight, dx, dresidual, m, k, eps, MASK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < m)[:, None] & (c < k)[None, :]
    offset = r.to(tl.int64)[:, None] * k + c[None, :]
    centre = tl.load(mean + c, mask=c < k)
    rstd = tl.rsqrt(tl.load(variance + c, mask=c < k, other=1.0) + eps)
    scale = tl.load(weight + c, mask=c < k)
    shift = tl.load(bias + c, mask=c < k)
    g, xhat = _grad_tile(x, dy, y, centre, rstd, scale, shift, offset, inside, MASK)
    total = tl.load(dbias + c, mask=c < k) / m
    product = tl.load(dweight + c, mask=c < k) / m
    gradient = (scale * rstd)[None, :] * (g - total[None, :] - xhat * product[None, :])
    tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=inside)
    if HAS_RESIDUAL:
        tl.store(dresidual + offset, g.to(dresidual.dtype.element_ty), mask=inside)
