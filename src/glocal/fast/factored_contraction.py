r"""Contractions with factored Jacobians on a GPU, each in one pass over the δ of all runs (`curvature.jacobian`):

    contract       s = Σ_D δ (z + b), (n, C);
    scale_deltas   c ↦ Σ_C c δ, (D, n), and its sums over the n samples, (D),

for constant δ (D, C, n), z (D, n) and b (D). Each is the transpose of the other, and therefore its derivative in
reverse mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from glocal.fast import supports
from glocal.networks.vmap_utils import Dims, merge_batch_dim

ROWS, COLUMNS = 32, 64
MAX_BLOCK_SIZE = 1024


def contract(deltas: Tensor, responses: Sequence[tuple[Tensor, Tensor | None]]) -> Any:
    """Accelerate `curvature.jacobian.contract`."""
    deltas = deltas.detach()
    if not _supported(deltas):
        return NotImplemented
    flat = [None if t is None else t.unsqueeze(0) for response in responses for t in response]
    return _Contract.apply(deltas.unsqueeze(0), *flat).squeeze(0).mT


def scale_deltas(deltas: Tensor, c: Tensor) -> Any:
    """Accelerate `curvature.jacobian.scale_deltas`."""
    deltas = deltas.detach()
    if not _supported(deltas):
        return NotImplemented
    products, sums = _Scale.apply(deltas.unsqueeze(0), c.mT.unsqueeze(0))
    return products.squeeze(0), sums.squeeze(0)


def _supported(deltas: Tensor) -> bool:
    """Whether the kernels can be used: they take float32 and index the δ of one run by 32 bits."""
    return supports(deltas) and deltas.dtype == torch.float32 and deltas.numel() < 2**31


class _Contract(Function):
    """For stacked runs: δ (runs, D, C, n), then every layer's z (runs, D', n) and b (runs, D') or None."""

    @staticmethod
    def forward(deltas: Tensor, *responses: Tensor | None) -> Tensor:
        deltas = _aligned(deltas)
        total = deltas.new_empty(deltas.shape[0], *deltas.shape[2:])
        for begin, end, z, b in _layers(responses):
            _contract(deltas[:, begin:end], _aligned(z), _aligned(b), total, overwrite=begin == 0)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.layers = [(begin, end, b is not None) for begin, end, _, b in _layers(inputs[1:])]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        products, sums = _Scale.apply(*ctx.saved_tensors, grad)
        grads = ((products[:, i:j], sums[:, i:j] if bias else None) for i, j, bias in ctx.layers)
        return None, *(t for layer in grads for t in layer)

    @staticmethod
    def vmap(info: Any, dims: Dims, *tensors: Tensor | None) -> tuple[Tensor, int]:
        runs = info.batch_size
        merged = [None if t is None else merge_batch_dim(t, d, 0, runs) for t, d in zip(tensors, dims, strict=True)]
        return _Contract.apply(*merged).unflatten(0, (runs, -1)), 0


class _Scale(Function):
    """For stacked runs: δ (runs, D, C, n) and c (runs, C, n)."""

    @staticmethod
    def forward(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return _scale_deltas(_aligned(deltas), c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, products: Tensor, sums: Tensor) -> tuple[None, Tensor]:
        return None, _Contract.apply(*ctx.saved_tensors, products, sums)

    @staticmethod
    def vmap(info: Any, dims: Dims, deltas: Tensor, c: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        runs = info.batch_size
        deltas, c = merge_batch_dim(deltas, dims[0], 0, runs), merge_batch_dim(c, dims[1], 0, runs)
        products, sums = _Scale.apply(deltas, c)
        return (products.unflatten(0, (runs, -1)), sums.unflatten(0, (runs, -1))), (0, 0)


def _layers(responses: Sequence[Any]) -> list[tuple[int, int, Tensor, Tensor | None]]:
    """Return where each layer's δ begin and end, its z and its b."""
    ends = [0]
    for z in responses[::2]:
        ends.append(ends[-1] + z.shape[1])
    return [(i, j, *layer) for (i, j), *layer in zip(pairwise(ends), responses[::2], responses[1::2], strict=True)]


def _aligned(t: Any) -> Any:
    """Make the last axis contiguous, as the kernels require."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _contract(deltas: Tensor, z: Tensor, bias: Tensor | None, total: Tensor, overwrite: bool) -> None:
    """Add Σ_D δ (z + b) to the total, (runs, C, n), or overwrite it."""
    runs, d, c, n = deltas.shape
    shift, bias_run_stride = (z, 0) if bias is None else (bias, bias.stride(0))
    strides = *deltas.stride()[:3], *z.stride()[:2], bias_run_stride
    grid = triton.cdiv(n, COLUMNS), c, runs
    _contract_kernel[grid](deltas, z, shift, total, d, c, n, *strides, overwrite, bias is not None, ROWS, COLUMNS)


def _scale_deltas(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_C c δ, (runs, D, n), and its sums over n, (runs, D)."""
    runs, d, vectors, n = deltas.shape
    products, sums = deltas.new_empty(runs, d, n), deltas.new_empty(runs, d)
    block = min(MAX_BLOCK_SIZE, triton.next_power_of_2(max(1, n)))
    _scale_deltas_kernel[(d, runs)](deltas, c, products, sums, d, vectors, n, *deltas.stride()[:3], *c.stride(), block)
    return products, sums


@triton.jit
def _contract_kernel(
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
def _scale_deltas_kernel(
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
