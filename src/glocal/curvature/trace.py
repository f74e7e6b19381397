r"""The trace of a symmetric matrix A that is given by its products, by Hutch++ (Meyer, Musco, Musco & Woodruff, 2021).

Half of the random vectors find the range in which most of A lies, Q = orth(A S). There the trace is computed exactly,
and the rest is estimated from the other half,

    tr A = tr QᵀAQ + tr (I − QQᵀ) A (I − QQᵀ) ≈ tr QᵀAQ + mean_i g_iᵀ (I − QQᵀ) A (I − QQᵀ) g_i.

With k vectors in each half it takes 3k products. The trace of a matrix of rank up to k is exact; otherwise the estimate
is unbiased, and the spread of its terms gives the standard error. A matrix of 3k rows or fewer is multiplied with the
unit vectors instead, which is exact too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from glocal.curvature.products import SymmetricMatrix


class Trace(NamedTuple):
    """tr A and its standard error, both NaN if the matrix is not finite."""

    value: Tensor
    error: Tensor


def trace(matrix: SymmetricMatrix, probes: Tensor, block_size: int = 1) -> Trace:
    """Estimate the trace.

    Args:
        matrix: The matrix, or anything that multiplies vectors by `matrix @ v`.
        probes: Random signs (`random_signs`), (2k, P) with k ≥ 2.
        block_size: How many products are computed together by `vmap`.
    """
    count, size = probes.shape
    if count < 4 or count % 2:
        raise ValueError(f"the number of random vectors must be even and at least 4; got {count}.")
    with torch.no_grad():
        if size <= count // 2 * 3:
            units = torch.eye(size, dtype=probes.dtype, device=probes.device)
            exact = (units * _products(matrix, units, block_size)).sum(dtype=torch.float64)
            return Trace(exact, 0 * exact.abs())
        sketch, queries = probes.chunk(2)
        q, _ = torch.linalg.qr(_products(matrix, sketch, block_size).mT)
        inside = (q.mT * _products(matrix, q.mT, block_size)).sum(1, dtype=torch.float64)
        for _ in range(2):
            queries = queries - (queries @ q) @ q.mT
        outside = (queries * _products(matrix, queries, block_size)).sum(1, dtype=torch.float64)
        return Trace(inside.sum() + outside.mean(), outside.std() / len(outside) ** 0.5)


def random_signs(count: int, size: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return vectors of ±1 as rows, on the generator's device."""
    bits = torch.randint(2, (count, size), dtype=torch.int8, device=generator.device, generator=generator)
    return bits.to(dtype).mul_(2).sub_(1)


def _products(matrix: SymmetricMatrix, rows: Tensor, block_size: int) -> Tensor:
    if block_size == 1:
        return torch.stack([matrix @ row for row in rows])
    return vmap(lambda row: matrix @ row, chunk_size=block_size)(rows)
