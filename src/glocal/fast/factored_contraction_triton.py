"""⟨δ, z + b⟩ and its transpose, each in one pass over the δ of all runs: (runs, D, C, n), n side by side in memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 64
MOST = 1024


def overlap(deltas: Tensor, z: Tensor, bias: Tensor | None, total: Tensor, first: bool) -> None:
    """To the total, (runs, C, n), of which nothing is read the `first` time."""
    runs, d, c, n = deltas.shape
    shift, of_run = (z, 0) if bias is None else (bias, bias.stride(0))
    strides = *deltas.stride()[:3], *z.stride()[:2], of_run
    grid = triton.cdiv(n, COLUMNS), c, runs
    _overlap[grid](deltas, z, shift, total, d, c, n, *strides, first, bias is not None, ROWS, COLUMNS)


def weighted(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_C c δ, (runs, D, n), and its sums over n, (runs, D)."""
    runs, d, each, n = deltas.shape
    products, sums = deltas.new_empty(runs, d, n), deltas.new_empty(runs, d)
    block = min(MOST, triton.next_power_of_2(max(1, n)))
    _weighted[(d, runs)](deltas, c, products, sums, d, each, n, *deltas.stride()[:3], *c.stride(), block)
    return products, sums


@triton.jit
def _overlap(
    deltas, z, bias, total, d, each, n, of_run, of_row, of_each, z_of_run, z_of_row, b_of_run,
    FIRST: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which, run = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = at < n
    deltas += run * of_run + which * of_each
    z += run * z_of_run
    total += (run * each + which) * n
    found = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, d, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < d)[:, None] & there[None, :]
        answer = tl.load(z + row[:, None] * z_of_row + at[None, :], mask=inside, other=0.0)
        if BIAS:
            answer += tl.load(bias + run * b_of_run + row, mask=row < d, other=0.0)[:, None]
        delta = tl.load(deltas + row[:, None] * of_row + at[None, :], mask=inside, other=0.0)
        found += tl.sum(delta * answer, 0)
    if not FIRST:
        found += tl.load(total + at, mask=there)
    tl.store(total + at, found, mask=there)


@triton.jit
def _weighted(
    deltas, c, products, sums, d, each, n, of_run, of_row, of_each, c_of_run, c_of_each, c_of_input,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    deltas += run * of_run + row * of_row
    c += run * c_of_run
    products += (run * d + row) * n
    found = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, n, COLUMNS):
        at = begin + tl.arange(0, COLUMNS)
        there = at < n
        part = tl.zeros((COLUMNS,), tl.float32)
        for i in range(each):
            factor = tl.load(c + i * c_of_each + at * c_of_input, mask=there, other=0.0)
            part += factor * tl.load(deltas + i * of_each + at, mask=there, other=0.0)
        tl.store(products + at, part, mask=there)
        found += part
    tl.store(sums + run * d + row, tl.sum(found, 0))
