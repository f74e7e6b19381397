r"""Products of curvature matrices with vectors v in parameter space, the matrices never formed.

    Hessian         ∇²L v = ∇(⟨∇L, v⟩)
    Gauss–Newton    (1/n) Σ_i J_iᵀ [∇²_f ℓ_i] J_i v,   J_i = ∂f_θ(x_i)/∂θ
    functional      (1/n) Σ_i Σ_k [∇_f ℓ_i]_k ∇²fᵏ_θ(x_i) v

of L(θ) = (1/n) Σ_i ℓ(f_θ(x_i), y_i); the first is the sum of the others (Eq. Hessian-decomp). Each function prepares
the map v ↦ product between dicts shaped as θ. For vectors side by side map it, `vmap(product)`: the passes that do not
depend on v are shared. All is reverse mode: a second backward pass is faster here than a forward-mode one, and more
layers have it.

`module` should be in evaluation mode. At most `chunk` samples are differentiated at once. Where that is all of them,
the passes that do not depend on v are made once and kept with the map; otherwise they are made anew for every product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp

from glocal.curvature.layers import Params

if TYPE_CHECKING:
    from glocal.losses import Loss

Product: TypeAlias = Callable[[Params], Params]


def hessian_product(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    chunk: int = 2000,
) -> Product:
    """v ↦ ∇²L v."""
    n = x.shape[0]

    def of_chunk(x: Tensor, y: Tensor) -> Product:
        def share(params: Params) -> Tensor:
            return loss.per_sample(functional_call(module, {**params, **buffers}, (x,)), y).sum() / n

        return _second_derivative(share, params)

    return _sum_over_chunks(of_chunk, (x, y), chunk)


def functional_product(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    chunk: int = 2000,
) -> Product:
    """v ↦ the product with the functional Hessian: that of ⟨∇_f ℓ, f_θ⟩ with the first factor held constant."""
    n = x.shape[0]

    def of_chunk(x: Tensor, y: Tensor) -> Product:
        scores = loss.score(functional_call(module, {**params, **buffers}, (x,)), y)

        def share(params: Params) -> Tensor:
            return (scores * functional_call(module, {**params, **buffers}, (x,))).sum() / n

        return _second_derivative(share, params)

    return _sum_over_chunks(of_chunk, (x, y), chunk)


def gauss_newton_product(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    loss: Loss,
    chunk: int = 2000,
) -> Product:
    """v ↦ the product with the Gauss–Newton matrix, which asks for no labels."""
    n = x.shape[0]

    def of_chunk(x: Tensor) -> Product:
        def outputs(params: Params) -> Tensor:
            return functional_call(module, {**params, **buffers}, (x,))

        f, pull = vjp(outputs, dict(params))  # type: ignore[misc]  # u ↦ Jᵀ u
        _, push = vjp(lambda u: pull(u)[0], torch.zeros_like(f))  # type: ignore[misc]  # its transpose, v ↦ J v
        roots = loss.hessian_root(f)

        def product(v: Params) -> Params:
            (change,) = push(v)
            turned = roots.mT @ (roots @ change.unsqueeze(-1))
            return pull(turned.squeeze(-1) / n)[0]

        return product

    return _sum_over_chunks(of_chunk, (x,), chunk)


def _second_derivative(value: Callable[[Params], Tensor], params: Mapping[str, Tensor]) -> Product:
    _, pull = vjp(grad(value), dict(params))  # type: ignore[misc]  # a Hessian is its own transpose
    return lambda v: pull(v)[0]


def _sum_over_chunks(of_chunk: Callable[..., Product], data: Sequence[Tensor], chunk: int) -> Product:
    parts = list(zip(*(t.split(chunk) for t in data), strict=True))
    with torch.no_grad():  # no graph reaches out of a product, even where the parameters are leaves of one
        kept = of_chunk(*data) if len(parts) == 1 else None

    def product(v: Params) -> Params:
        with torch.no_grad():
            if kept is not None:
                return kept(v)
            total = {k: torch.zeros_like(t) for k, t in v.items()}
            for part in parts:
                total = {k: total[k] + t for k, t in of_chunk(*part)(v).items()}
            return total

    return product
