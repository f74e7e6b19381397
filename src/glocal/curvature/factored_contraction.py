r"""Answers z to stored inputs paired with the δ stored beside them, and back:

    s = Σ_D δ (z + b),  (n, C),        c ↦ c δ and its sums over the n inputs, (D, n) and (D).

δ is (D, C, n) and a constant, z (D, n) and b (D). Each of the two is the other's transpose, and so its derivative, in
reverse mode. On a GPU each is one pass over the numbers, for all runs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from glocal.fast.triton import available
from glocal.networks.vmap_utils import Dims, merge_batch_dim

Answer: TypeAlias = tuple[Tensor, Tensor | None]
"""One layer's z, and b where it is not yet in z."""


def paired(deltas: Tensor, answers: Sequence[Answer]) -> Tensor:
    """s for the answers of one layer after the other."""
    deltas = deltas.detach()
    if _fused(deltas):
        flat = [None if t is None else t.unsqueeze(0) for answer in answers for t in answer]
        return _Paired.apply(deltas.unsqueeze(0), *flat).squeeze(0).mT
    parts = zip(deltas.split([z.shape[0] for z, _ in answers]), answers, strict=True)
    return reduce(torch.add, (_pair(delta, *answer) for delta, answer in parts))


def weighted(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor | None]:
    """c δ for c (n, C), and its sums where they cost nothing."""
    deltas = deltas.detach()
    if _fused(deltas):
        products, sums = _Weighted.apply(deltas.unsqueeze(0), c.mT.unsqueeze(0))
        return products.squeeze(0), sums.squeeze(0)
    products = deltas * c.mT
    return products.squeeze(1) if deltas.shape[1] == 1 else products.sum(1), None


def _pair(deltas: Tensor, z: Tensor, b: Tensor | None) -> Tensor:
    z = z if b is None else z + b.unsqueeze(1)
    return (deltas * z.unsqueeze(1)).sum(0).mT


def _fused(deltas: Tensor) -> bool:
    """Whether there are kernels for one run's δ: they find a number by 32 bits."""
    return available(deltas) and deltas.dtype == torch.float32 and deltas.numel() < 2**31


class _Paired(Function):
    """Of stacked runs: δ (runs, D, C, n), then every layer's z (runs, D', n) and b (runs, D') or None."""

    @staticmethod
    def forward(deltas: Tensor, *answers: Tensor | None) -> Tensor:
        from glocal.fast import factored_contraction_triton

        deltas = _aligned(deltas)
        total = deltas.new_empty(deltas.shape[0], *deltas.shape[2:])
        for begin, end, z, b in _layers(answers):
            factored_contraction_triton.overlap(deltas[:, begin:end], _aligned(z), _aligned(b), total, first=begin == 0)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.layers = [(begin, end, b is not None) for begin, end, _, b in _layers(inputs[1:])]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        products, sums = _Weighted.apply(*ctx.saved_tensors, slope)
        each = ((products[:, i:j], sums[:, i:j] if bias else None) for i, j, bias in ctx.layers)
        return None, *(t for layer in each for t in layer)

    @staticmethod
    def vmap(info: Any, dims: Dims, *given: Tensor | None) -> tuple[Tensor, int]:
        runs = info.batch_size
        stacked = [None if t is None else merge_batch_dim(t, dim, 0, runs) for t, dim in zip(given, dims, strict=True)]
        return _Paired.apply(*stacked).unflatten(0, (runs, -1)), 0


class _Weighted(Function):
    """Of stacked runs: δ (runs, D, C, n) and c (runs, C, n)."""

    @staticmethod
    def forward(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        from glocal.fast import factored_contraction_triton

        return factored_contraction_triton.weighted(_aligned(deltas), c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, products: Tensor, sums: Tensor) -> tuple[None, Tensor]:
        return None, _Paired.apply(*ctx.saved_tensors, products, sums)

    @staticmethod
    def vmap(info: Any, dims: Dims, deltas: Tensor, c: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        runs = info.batch_size
        products, sums = _Weighted.apply(
            merge_batch_dim(deltas, dims[0], 0, runs), merge_batch_dim(c, dims[1], 0, runs)
        )
        return (products.unflatten(0, (runs, -1)), sums.unflatten(0, (runs, -1))), (0, 0)


def _layers(answers: Sequence[Any]) -> list[tuple[int, int, Tensor, Tensor | None]]:
    """Where each layer's δ begin and end, its z and its b."""
    ends = [0]
    for z in answers[::2]:
        ends.append(ends[-1] + z.shape[1])
    return [(i, j, *layer) for (i, j), *layer in zip(pairwise(ends), answers[::2], answers[1::2], strict=True)]


def _aligned(t: Any) -> Any:
    """With the last numbers side by side in memory, as the kernels take them."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()
