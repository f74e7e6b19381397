r"""The Hessian of a small network's risk as a dense matrix, and its two parts (Eq. Hessian-decomp):

    ∇²L = (1/n) Σ_i J_iᵀ [∇²_f ℓ_i] J_i + (1/n) Σ_i Σ_k [∇_f ℓ_i]_k ∇²fᵏ_θ(x_i),

the outer-product Hessian or Gauss–Newton matrix (GGN), positive semi-definite for a convex ℓ and of rank at most nK,
and the functional Hessian, which vanishes where the network fits its data. Rows and columns are in the order of
`tree.to_vector`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.func import vmap

from glocal.curvature.jacobian import dense_jacobian_chunks, output_hessian_sqrt
from glocal.curvature.network import takes_network
from glocal.curvature.operators import Operator, check_eval_mode, functional_operator, ggn_operator, hessian_operator
from glocal.risk import Risk, is_recurrent
from glocal.tree import to_vector

CHUNK_SIZE = 500
"""Samples that are differentiated at once, unless the risk has a chunk size."""


@takes_network
def hessian(risk: Risk, block_size: int = 64) -> Tensor:
    """Return ∇²L, (P, P), of a model, loss and data, or of one `Risk`.

    It is computed `block_size` columns at a time; peak memory is one such matrix.
    """
    return _mean_over_chunks(risk, hessian_operator, block_size)


@takes_network
def functional_hessian(risk: Risk, block_size: int = 64) -> Tensor:
    """Return the functional Hessian, (P, P), computed `block_size` columns at a time."""
    return _mean_over_chunks(risk, functional_operator, block_size)


@takes_network
def ggn(risk: Risk) -> Tensor:
    """Return the Gauss–Newton matrix, (P, P). Labels are not used."""
    if is_recurrent(risk.module):  # `vmap` cannot batch its samples
        return to_dense(ggn_operator(risk))
    check_eval_mode(risk.module)
    chunks = dense_jacobian_chunks(risk, output_hessian_sqrt(risk.loss))
    rows = (vmap(vmap(to_vector))(part).flatten(end_dim=1) for part in chunks)  # a row for each sample and column
    return reduce(torch.add, (j.mT @ j for j in rows)) / len(risk)


def to_dense(operator: Operator, block_size: int = 64, weight: float = 1.0, total: Tensor | None = None) -> Tensor:
    """Return `weight` times the matrix of a linear map of parameter space, added to `total` in place if one is given.

    Only `block_size` columns are computed at a time: all unit vectors, or the whole matrix to add, would take as much
    memory again.
    """
    theta = to_vector(operator.like)
    indices = torch.arange(theta.numel(), device=theta.device)
    columns = vmap(lambda e: operator @ e, out_dims=1)
    for first in range(0, theta.numel(), block_size):
        block = indices[first : first + block_size]
        part = columns((block.unsqueeze(-1) == indices).to(theta.dtype)) * weight
        if total is None:
            total = part.new_zeros(theta.numel(), theta.numel())  # batched under `vmap` as the products are
        total[:, first : first + len(block)] += part
    assert total is not None
    return total


def _mean_over_chunks(risk: Risk, operator: Callable[[Risk], Operator], block_size: int) -> Tensor:
    """Return the matrix of the whole risk from its chunks' operators, whose passes are shared by all columns."""
    size = risk.chunk_size or CHUNK_SIZE
    total: Tensor | None = None
    for part in replace(risk, chunk_size=size).chunks(size):
        total = to_dense(operator(part), block_size, len(part) / len(risk), total)
    assert total is not None
    return total
