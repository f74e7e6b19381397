"""Triton kernels of `factored_contraction`, for δ (runs, D, C, n) whose last axis is contiguous."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 64
MAX_BLOCK_SIZE = 1024


def contract(deltas: Tensor, z: Tensor, bias: Tensor | None, total: Tensor, overwrite: bool) -> None:
    """Add Σ_D δ (z + b) to the total, (runs, C, n), or overwrite it."""
    runs, d, c, n = deltas.shape
    shift, bias_run_stride = (z, 0) if bias is None else (bias, bias.stride(0))
    strides = *deltas.stride()[:3], *z.stride()[:2], bias_run_stride
    grid = triton.cdiv(n, COLUMNS), c, runs
    _contract[grid](deltas, z, shift, total, d, c, n, *strides, overwrite, bias is not None, ROWS, COLUMNS)


def scale_deltas(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_C c δ, (runs, D, n), and its sums over n, (runs, D)."""
    runs, d, vectors, n = deltas.shape
    products, sums = deltas.new_empty(runs, d, n), deltas.new_empty(runs, d)
    block = min(MAX_BLOCK_SIZE, triton.next_power_of_2(max(1, n)))
    _scale_deltas[(d, runs)](deltas, c, products, sums, d, vectors, n, *deltas.stride()[:3], *c.stride(), block)
    return products, sums


@triton.jit
def _contract(
    deltas, z, bias, total, d, vectors, n, run_stride, row_stride, vector_stride,
    z_run_stride, z_row_stride, b_run_stride,
    OVERWRITE: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    vector, run = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < n
    deltas += run * run_stride + vector * vector_stride
    z += run * z_run_stride
    total += (run * vectors + vector) * n
    acc = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, d, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < d)[:, None] & mask[None, :]
        response = tl.load(z + row[:, None] * z_row_stride + column[None, :], mask=inside, other=0.0)
        if BIAS:
            response += tl.load(bias + run * b_run_stride + row, mask=row < d, other=0.0)[:, None]
        delta = tl.load(deltas + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
        acc += tl.sum(delta * response, 0)
    if not OVERWRITE:
        acc += tl.load(total + column, mask=mask)
    tl.store(total + column, acc, mask=mask)


@triton.jit
def _scale_deltas(
    deltas, c, products, sums, d, vectors, n, run_stride, row_stride, vector_stride,
    c_run_stride, c_vector_stride, c_sample_stride,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    deltas += run * run_stride + row * row_stride
    c += run * c_run_stride
    products += (run * d + row) * n
    acc = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, n, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = column < n
        part = tl.zeros((COLUMNS,), tl.float32)
        for i in range(vectors):
            factor = tl.load(c + i * c_vector_stride + column * c_sample_stride, mask=mask, other=0.0)
            part += factor * tl.load(deltas + i * vector_stride + column, mask=mask, other=0.0)
        tl.store(products + column, part, mask=mask)
        acc += part
    tl.store(sums + run * d + row, tl.sum(acc, 0))
