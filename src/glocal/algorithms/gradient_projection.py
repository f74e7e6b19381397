r"""The span of stored gradients, and what is left of a vector outside it: g − Jᵀ (J Jᵀ)⁻¹ J g.

J is kept by its factors (`curvature.jacobian`), its rows scaled to length 1, and beside it a triangular S with
S J Jᵀ Sᵀ = 1: the rows of S J are the Gram–Schmidt basis of the span, so that a step takes a few products,

    s = J g,    g ← g − Jᵀ Sᵀ S s,

and no basis of P numbers a gradient. S is computed in float64 from the very factors a step will use.

A row that earlier ones explain but for a part of length τ is left out (a row of zeros in S). What is kept may be
amplified by 1/τ, and rounding errors ε with it. One application therefore leaves, in the worst of directions, a
cosine of about max(τ, ε/τ) with a stored gradient, and p of them max(τ, (ε/τ)^p): τ = ε^(p/(p+1)) is the best choice,
3e-4 for one application in float32, 2e-5 for two. Where the smallest singular value of J is σ ≫ τ it is ε/σ.
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

FLOOR = 1e-6
"""The shortest part that a Gram matrix in float64 can tell from nothing."""


def empty(rows: FactoredJacobian, like: Tensor) -> Memory:
    """The span of nothing, for rows of this form."""
    return {"rows": empty_like(rows), "whitening": like.new_zeros(0, 0)}


def extended(module: nn.Module, span: Memory, rows: FactoredJacobian, passes: int) -> Memory:
    """The span with more rows, of length 1, in it."""
    together = concatenate(span["rows"], rows)
    dtype = span["whitening"].dtype
    tolerance = max(torch.finfo(dtype).eps ** (passes / (passes + 1)), FLOOR)
    return {"rows": together, "whitening": whiten(gram(module, together), tolerance).to(dtype)}


def outside(module: nn.Module, span: Memory, vector: Params, passes: int) -> Params:
    """The part of a vector that is orthogonal to every gradient of the span, `passes` times over."""
    if span["whitening"].shape[0] == 0:
        return vector
    for _ in range(passes):
        taken = _minus_inside(module, span, vector)
        vector = {k: v + taken[k] for k, v in vector.items()}
    return vector


def _minus_inside(module: nn.Module, span: Memory, vector: Params) -> Params:
    """−Jᵀ (J Jᵀ)⁻¹ J v"""
    overlap, back = jvp_and_vjp(module, span["rows"], vector)
    whitening = span["whitening"]
    return back(
        batch_invariant_matvec(whitening.mT, -batch_invariant_matvec(whitening, overlap.flatten())).view(overlap.shape)
    )


def whiten(gram: Tensor, tolerance: float, block: int = 32) -> Tensor:
    """Lower triangular S with S G Sᵀ = 1, but for rows of zeros where a row of G's factor is explained by those before.

    It is the inverse of a Cholesky factor, some rows at a time: first what the finished rows explain is taken away, by
    products of matrices, then what remains is eliminated row by row, where the pivot is a row's squared distance from
    all before it.
    """
    finished = gram.new_zeros(0, 0)
    for begin in range(0, gram.shape[0], block):
        rows = slice(begin, min(begin + block, gram.shape[0]))
        along = batch_invariant_matmul(gram[rows, :begin], finished.mT)
        own = _eliminated(gram[rows, rows] - batch_invariant_matmul(along, along.mT), tolerance)
        left = -batch_invariant_matmul(batch_invariant_matmul(own, along), finished)
        above = torch.cat([finished, finished.new_zeros(begin, own.shape[0])], 1)
        finished = torch.cat([above, torch.cat([left, own], 1)])
    return finished


def _eliminated(gram: Tensor, tolerance: float) -> Tensor:
    n = gram.shape[0]
    both = torch.cat([gram, torch.eye(n, dtype=gram.dtype, device=gram.device)], 1)  # G, and the row operations made
    done = []
    for i in range(n):
        pivot = both[i, i]
        row = both[i] * torch.where(pivot > tolerance**2, pivot, torch.inf).rsqrt()
        done.append(row[n:])
        both = both - row[:n].unsqueeze(1) * row
    return torch.stack(done)
