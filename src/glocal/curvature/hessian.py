r"""The Hessian of a small network's loss as a dense matrix, and its two parts (Eq. Hessian-decomp):

    ∇²L = (1/n) Σ_i J_iᵀ [∇²_f ℓ_i] J_i + (1/n) Σ_i Σ_k [∇_f ℓ_i]_k ∇²fᵏ_θ(x_i),

the outer-product Hessian, positive semi-definite for a convex ℓ and of rank at most nK, and the functional Hessian,
which vanishes where the network fits its data. Rows and columns are ordered as `vector.flatten` orders θ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap

from glocal.curvature.differentiable import differentiable, recurrent
from glocal.curvature.output_jacobians import dense_in_chunks
from glocal.curvature.products import (
    Product,
    functional_product,
    gauss_newton_product,
    hessian_product,
    in_evaluation,
)
from glocal.curvature.vector import flatten, unflatten

if TYPE_CHECKING:
    from glocal.losses import Loss


def dense(product: Product, like: Mapping[str, Tensor], block: int = 64) -> Tensor:
    """The dense matrix of a linear map of parameter vectors, `block` columns at a time."""
    return _added(None, product, like, block)


def hessian(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    chunk: int = 500,
    block: int = 64,
) -> Tensor:
    """∇²L, shape (P, P), from `chunk` samples and `block` columns at a time. It needs the memory of one such matrix."""

    def of_chunk(x: Tensor, y: Tensor) -> Product:
        return hessian_product(module, params, buffers, x, y, loss, chunk, alike=True)  # columns are mapped anyway

    return _mean_over_chunks(of_chunk, params, x, y, chunk, block)


def outer_product(
    module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor, loss: Loss
) -> Tensor:
    """The outer-product Hessian, that is the Gauss–Newton matrix, (P, P); it asks for no labels."""
    if recurrent(module):  # whose samples go one by one, each for all its columns
        return dense(gauss_newton_product(module, params, buffers, x, loss), params)
    in_evaluation(module)
    total: Tensor | None = None
    with differentiable(module):
        for gradients in dense_in_chunks(module, params, buffers, x, loss.output_hessian_sqrt):
            rows = vmap(vmap(flatten))(gradients).flatten(end_dim=1)  # one for each sample and column of the root
            total = rows.mT @ rows if total is None else total + rows.mT @ rows
    assert total is not None
    return total / x.shape[0]


def decomposition(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    chunk: int = 500,
    block: int = 64,
) -> tuple[Tensor, Tensor]:
    """The outer-product and the functional Hessian, each on its own; their sum is ∇²L."""

    def functional(x: Tensor, y: Tensor) -> Product:
        return functional_product(module, params, buffers, x, y, loss, chunk)

    outer = outer_product(module, params, buffers, x, loss)
    return outer, _mean_over_chunks(functional, params, x, y, chunk, block)


def _mean_over_chunks(
    of_chunk: Callable[[Tensor, Tensor], Product],
    like: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    chunk: int,
    block: int,
) -> Tensor:
    """The matrix of all the data from the products of its chunks: the passes before a chunk's columns are made once."""
    total: Tensor | None = None
    for a, b in zip(x.split(chunk), y.split(chunk), strict=True):
        total = _added(total, of_chunk(a, b), like, block, a.shape[0] / x.shape[0])
    assert total is not None
    return total


def _added(
    total: Tensor | None, product: Product, like: Mapping[str, Tensor], block: int, weight: float = 1.0
) -> Tensor:
    """`total` (zero if there is none yet) with the matrix of a product times `weight` added in place, column by column:
    a whole matrix of unit vectors, or of the part, would be another as large."""
    theta = flatten(like)
    places = torch.arange(theta.numel(), device=theta.device)
    columns = vmap(lambda e: flatten(product(unflatten(e, like))), out_dims=1)
    for first in range(0, theta.numel(), block):
        chosen = places[first : first + block]
        part = columns((chosen.unsqueeze(-1) == places).to(theta.dtype)) * weight
        if total is None:
            total = part.new_zeros(theta.numel(), theta.numel())  # as many runs as the products have
        total[:, first : first + len(chosen)] += part
    assert total is not None
    return total
