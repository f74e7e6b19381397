r"""Products of curvature matrices with vectors v in parameter space, the matrices never formed.

    Hessian         ∇²L v = ∇(⟨∇L, v⟩)
    Gauss–Newton    (1/n) Σ_i J_iᵀ [∇²_f ℓ_i] J_i v,   J_i = ∂f_θ(x_i)/∂θ
    functional      (1/n) Σ_i Σ_k [∇_f ℓ_i]_k ∇²fᵏ_θ(x_i) v

of L(θ) = (1/n) Σ_i ℓ(f_θ(x_i), y_i); the first is the sum of the others (Eq. Hessian-decomp). Each function prepares
the map v ↦ product between dicts shaped as θ. For vectors side by side map it, `vmap(product)`: the passes that do not
depend on v are shared. All is reverse mode: a second backward pass is faster here than a forward-mode one, and more
layers have it. Chains of linear layers and rectifiers have Hessian products of their own (`chained`).

`module` is in evaluation mode: with dropout or batch statistics L would be another function at every pass. At most
`chunk` samples are differentiated at once; if not said, up to 2,000, as many as there is memory for. Where that is all
of them, the passes that do not depend on v are made once and kept with the map; otherwise they are made anew for every
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from glocal.curvature import chained
from glocal.curvature.alive import Alive, alive
from glocal.curvature.chunk_size import chunk_size, memory_budget
from glocal.curvature.differentiable import differentiable
from glocal.curvature.layers import Params
from glocal.curvature.relu_mask import Rectified
from glocal.losses import AutogradLoss
from glocal.networks.convolution import ReplaceConv2d

if TYPE_CHECKING:
    from glocal.losses import Loss

Product: TypeAlias = Callable[[Params], Params]
MOST = 2_000
"""Samples that are differentiated at once."""


def hessian_product(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    chunk: int | None = None,
    alike: bool = False,
) -> Product:
    """v ↦ ∇²L v; of a chain of linear layers and rectifiers as `chained` has it, unless products of one run alone and
    of runs side by side must round `alike`. On a GPU torch's switches hold; instruments multiply `exactly`."""
    n = x.shape[0]
    names = () if alike else chained.links(module, params, x)
    some = alive(x.flatten(1), names[0], params) if names else None
    if some is not None:
        of_these = hessian_product(module, some.narrowed(params), buffers, some.of(x.flatten(1)), y, loss, chunk)
        return lambda v: some.widened(of_these(some.narrowed(v)))

    def of_chunk(x: Tensor, y: Tensor) -> Product:
        if names:
            return chained.hessian_product(names, params, x, y, loss, n)

        def share(params: Params) -> Tensor:
            return loss.per_sample(functional_call(module, {**params, **buffers}, (x,)), y).sum() / n

        return _second_derivative(share, params)

    if names and chunk is None:
        chunk = MOST  # chains keep little, and need not be called
    return _sum_over_chunks(module, params, buffers, of_chunk, (x, y), chunk)


def living(module: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> Alive | None:
    """What products of a chain need of its inputs (`alive`); of other networks they need all."""
    names = chained.links(module, params, x)
    return alive(x.flatten(1), names[0], params) if names else None


def functional_product(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    chunk: int | None = None,
) -> Product:
    """v ↦ the product with the functional Hessian: that of ⟨∇_f ℓ, f_θ⟩ with the first factor held constant."""
    n = x.shape[0]

    def of_chunk(x: Tensor, y: Tensor) -> Product:
        scores = loss.output_gradient(functional_call(module, {**params, **buffers}, (x,)), y)

        def share(params: Params) -> Tensor:
            return (scores * functional_call(module, {**params, **buffers}, (x,))).sum() / n

        return _second_derivative(share, params)

    return _sum_over_chunks(module, params, buffers, of_chunk, (x, y), chunk)


def gauss_newton_product(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    loss: Loss,
    chunk: int | None = None,
    y: Tensor | None = None,
) -> Product:
    """v ↦ the product with the Gauss–Newton matrix. It asks for no labels, unless a loss of somebody's own bends
    differently for each."""
    n = x.shape[0]
    labels = (y,) if y is not None and isinstance(loss, AutogradLoss) else ()

    def of_chunk(x: Tensor, *y: Tensor) -> Product:
        def outputs(params: Params) -> Tensor:
            return functional_call(module, {**params, **buffers}, (x,))

        f, pull = vjp(outputs, dict(params))  # type: ignore[misc]  # u ↦ Jᵀ u
        _, push = vjp(lambda u: pull(u)[0], torch.zeros_like(f))  # type: ignore[misc]  # its transpose, v ↦ J v
        bent = loss.output_hvp(f, *y) if labels else _by_roots(loss.output_hessian_sqrt(f))

        def product(v: Params) -> Params:
            (change,) = push(v)
            return pull(bent(change) / n)[0]

        return product

    return _sum_over_chunks(module, params, buffers, of_chunk, (x, *labels), chunk)


def _by_roots(roots: Tensor) -> Callable[[Tensor], Tensor]:
    """The product with a matrix by its roots: sums of positive terms, none of them the difference of larger ones."""
    return lambda change: (roots.mT @ (roots @ change.unsqueeze(-1))).squeeze(-1)


def in_evaluation(module: nn.Module) -> None:
    """Refuse a network that is not one function of its parameters and one sample."""
    for name, part in module.named_modules():
        chance = isinstance(part, _DropoutNd) and part.p > 0
        chance = chance or (isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout > 0)
        fixed = not part.training or not (chance or isinstance(part, _BatchNorm))
        if not fixed:
            which = f"{type(part).__name__} '{name}'" if name else type(part).__name__
            raise ValueError(
                f"a network whose {which} is in training mode was given; curvature asks for module.eval()."
            )


def _second_derivative(value: Callable[[Params], Tensor], params: Mapping[str, Tensor]) -> Product:
    _, pull = vjp(grad(value), dict(params))  # type: ignore[misc]  # a Hessian is its own transpose
    return lambda v: pull(v)[0]


@contextmanager
def _passes(module: nn.Module, x: Tensor) -> Iterator[None]:
    """No graph reaches out of a product, even where the parameters are leaves of one. On a GPU convolutions are ours,
    whose second derivatives are as fast as the first."""
    with torch.no_grad(), differentiable(module), Rectified(), ReplaceConv2d() if x.is_cuda else nullcontext():
        yield


def _sum_over_chunks(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    of_chunk: Callable[..., Product],
    data: Sequence[Tensor],
    chunk: int | None,
) -> Product:
    in_evaluation(module)
    with _passes(module, data[0]):
        if chunk is None:
            chunk = chunk_size(module, params, buffers, data[0], None, MOST, memory_budget(params))
        parts = list(zip(*(t.split(chunk) for t in data), strict=True))
        kept = of_chunk(*data) if len(parts) == 1 else None

    def product(v: Params) -> Params:
        if kept is not None:  # it calls no layer
            with torch.no_grad():
                return kept(v)
        with _passes(module, data[0]):
            total = {k: torch.zeros_like(t) for k, t in v.items()}
            for part in parts:
                total = {k: total[k] + t for k, t in of_chunk(*part)(v).items()}
            return total

    return product
