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
from torch import Tensor
from torch.autograd import Function

from glocal.fast import supports
from glocal.networks.vmap_utils import Dims, merge_batch_dim


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
        from glocal.fast import factored_contraction_triton

        deltas = _aligned(deltas)
        total = deltas.new_empty(deltas.shape[0], *deltas.shape[2:])
        for begin, end, z, b in _layers(responses):
            factored_contraction_triton.contract(
                deltas[:, begin:end], _aligned(z), _aligned(b), total, overwrite=begin == 0
            )
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
        from glocal.fast import factored_contraction_triton

        return factored_contraction_triton.scale_deltas(_aligned(deltas), c)

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
