r"""Projection onto the orthogonal complement of stored gradients: g − Jᵀ (J Jᵀ)⁻¹ J g.

J has unit rows, stored as factors (`curvature.jacobian`). A lower triangular S with S J Jᵀ Sᵀ = I makes the rows of S J
the Gram–Schmidt basis of the span, so a step needs a few products and no dense basis:

    s = J g,    g ← g − Jᵀ Sᵀ S s.

S is computed in float64 from the same factors.

A row whose distance to the span of earlier rows is below the tolerance τ is dropped (a zero row in S). Rows that remain
amplify rounding errors ε by up to 1/τ. In the worst case, p passes leave a cosine of max(τ, (ε/τ)^p) with a stored
gradient, which τ = ε^(p/(p+1)) minimises: 3e-4 for one pass in float32, 2e-5 for two. If the smallest singular value of
J is σ ≫ τ, the cosine after one pass is ε/σ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glocal.algorithms.algorithm import Memory
from glocal.curvature.jacobian import (
    FactoredJacobian,
    batch_invariant_matmul,
    batch_invariant_matvec,
    concatenate,
    empty_like,
    gram,
    jvp_and_vjp,
)
from glocal.tree import Params

MIN_TOLERANCE = 1e-6
"""Smallest distance to a span that a Gram matrix in float64 can resolve."""


def empty(rows: FactoredJacobian, like: Tensor) -> Memory:
    """Return the empty span, for rows of this shape."""
    return {"rows": empty_like(rows), "whitening": like.new_zeros(0, 0)}


def extend(module: nn.Module, span: Memory, rows: FactoredJacobian, passes: int) -> Memory:
    """Add unit rows to a span."""
    all_rows = concatenate(span["rows"], rows)
    dtype = span["whitening"].dtype
    tolerance = max(torch.finfo(dtype).eps ** (passes / (passes + 1)), MIN_TOLERANCE)
    return {"rows": all_rows, "whitening": whiten(gram(module, all_rows), tolerance).to(dtype)}


def project_out(module: nn.Module, span: Memory, vector: Params, passes: int) -> Params:
    """Remove a vector's component in the span, `passes` times for accuracy."""
    if span["whitening"].shape[0] == 0:
        return vector
    whitening = span["whitening"]
    for _ in range(passes):
        overlap, vjp = jvp_and_vjp(module, span["rows"], vector)
        coordinates = -batch_invariant_matvec(whitening, overlap.flatten())
        correction = vjp(batch_invariant_matvec(whitening.mT, coordinates).view(overlap.shape))
        vector = {k: v + correction[k] for k, v in vector.items()}
    return vector


def whiten(gram: Tensor, tolerance: float, block: int = 32) -> Tensor:
    """Return a lower triangular S with S G Sᵀ = I, except for zero rows where G is numerically singular.

    S is the inverse of a Cholesky factor, computed in blocks of rows. The components along finished rows are removed by
    matrix products; the rest is eliminated row by row, each pivot being a row's squared distance to earlier rows.
    """
    whitening = gram.new_zeros(0, 0)
    for begin in range(0, gram.shape[0], block):
        rows = slice(begin, min(begin + block, gram.shape[0]))
        overlap = batch_invariant_matmul(gram[rows, :begin], whitening.mT)
        diagonal = _inverse_cholesky(gram[rows, rows] - batch_invariant_matmul(overlap, overlap.mT), tolerance)
        left = -batch_invariant_matmul(batch_invariant_matmul(diagonal, overlap), whitening)
        above = torch.cat([whitening, whitening.new_zeros(begin, diagonal.shape[0])], 1)
        whitening = torch.cat([above, torch.cat([left, diagonal], 1)])
    return whitening


def _inverse_cholesky(gram: Tensor, tolerance: float) -> Tensor:
    """Return the inverse Cholesky factor of one block by Gaussian elimination."""
    n = gram.shape[0]
    augmented = torch.cat([gram, torch.eye(n, dtype=gram.dtype, device=gram.device)], 1)
    rows = []
    for i in range(n):
        pivot = augmented[i, i]
        row = augmented[i] * torch.where(pivot > tolerance**2, pivot, torch.inf).rsqrt()
        rows.append(row[n:])
        augmented = augmented - row[:n].unsqueeze(1) * row
    return torch.stack(rows)
