r"""The trace of a symmetric matrix A known by its products alone, by Hutch++ (Meyer, Musco, Musco & Woodruff, 2021).

Half of the random vectors find the range in which most of A lies, Q = orth(A S); there the trace is taken as it is, and
what is left is estimated from the other half,

    tr A = tr QᵀAQ + tr (I − QQᵀ) A (I − QQᵀ) ≈ tr QᵀAQ + mean_i g_iᵀ (I − QQᵀ) A (I − QQᵀ) g_i.

For k vectors in each half it takes 3k products. A matrix of rank up to k leaves nothing over, and its trace is exact;
otherwise the value is unbiased, and the spread of the terms tells its standard error. A matrix of 3k rows or fewer is
multiplied with the unit vectors instead, and is exact too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap


class Trace(NamedTuple):
    """tr A and its standard error, both NaN where the matrix is not finite."""

    value: Tensor
    error: Tensor


def trace(matvec: Callable[[Tensor], Tensor], probes: Tensor, block: int = 1) -> Trace:
    """The trace from `probes` (2k, P), rows of random signs, k ≥ 2 (`random_signs`).

    `matvec` multiplies flat vectors; `block` of them at a time, mapped, if more than one.
    """
    count = probes.shape[0]
    if count < 4 or count % 2:
        raise ValueError(f"{count} random vectors were given; allowed are even numbers from 4 on.")
    size = probes.shape[1]
    with torch.no_grad():
        if size <= count // 2 * 3:
            units = torch.eye(size, dtype=probes.dtype, device=probes.device)
            whole = (units * _products(matvec, units, block)).sum(dtype=torch.float64)
            return Trace(whole, 0 * whole.abs())
        sketch, queries = probes.chunk(2)
        q, _ = torch.linalg.qr(_products(matvec, sketch, block).mT)
        inside = (q.mT * _products(matvec, q.mT, block)).sum(1, dtype=torch.float64)
        for _ in range(2):
            queries = queries - (queries @ q) @ q.mT
        outside = (queries * _products(matvec, queries, block)).sum(1, dtype=torch.float64)
        return Trace(inside.sum() + outside.mean(), outside.std() / len(outside) ** 0.5)


def random_signs(count: int, size: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Vectors of ±1 as rows, on the generator's device."""
    drawn = torch.randint(2, (count, size), dtype=torch.int8, device=generator.device, generator=generator)
    return drawn.to(dtype).mul_(2).sub_(1)


def _products(matvec: Callable[[Tensor], Tensor], rows: Tensor, block: int) -> Tensor:
    if block == 1:
        return torch.stack([matvec(row) for row in rows])
    return vmap(matvec, chunk_size=block)(rows)
