r"""Products of curvature matrices with vectors v in parameter space; the matrices are never formed.

    Hessian         ∇²L v = ∇(⟨∇L, v⟩)
    Gauss–Newton    (1/n) Σ_i J_iᵀ [∇²_f ℓ_i] J_i v,   J_i = ∂f_θ(x_i)/∂θ
    functional      (1/n) Σ_i Σ_k [∇_f ℓ_i]_k ∇²fᵏ_θ(x_i) v

of a risk L(θ) = (1/n) Σ_i ℓ(f_θ(x_i), y_i). The first is the sum of the other two (Eq. Hessian-decomp). Each function
returns an `Operator`, used as `H @ v`. For a batch of vectors use `vmap(lambda v: H @ v)`: passes that do not depend on
v are shared. All derivatives are reverse mode: a second backward pass is faster here than forward mode, and more layers
support it.

At most `risk.chunk_size` samples are differentiated at once, by default as many as fit into memory, up to 2,000. If
that is all of them, the passes that do not depend on v are done once and kept with the operator; otherwise they are
repeated for every product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vjp
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from glocal.curvature.layers import chunk_size
from glocal.curvature.network import takes_network
from glocal.networks.convolution import ReplaceConv2d
from glocal.risk import MAX_CHUNK_SIZE, Risk, unfused_ops
from glocal.tree import Params, from_vector, to_vector

Product: TypeAlias = Callable[[Params], Params]
Vector = TypeVar("Vector", Tensor, Params)
RELU_FUNCTIONS = (functional.relu, torch.relu, Tensor.relu)


class SymmetricMatrix(Protocol):
    """Anything that multiplies flat vectors by `A @ v`: an `Operator` or a dense tensor."""

    def __matmul__(self, v: Tensor, /) -> Tensor: ...


def as_matrix(matrix: SymmetricMatrix | Risk) -> SymmetricMatrix:
    """Return a matrix as it is, and the Hessian of a risk as an operator."""
    return hessian_operator(matrix) if isinstance(matrix, Risk) else matrix


def vector_like(matrix: SymmetricMatrix) -> Tensor:
    """Return a vector (P,) of the dtype and on the device of an operator's or a dense matrix's vectors."""
    if isinstance(matrix, Operator):
        return to_vector(matrix.like)
    if isinstance(matrix, Tensor):
        return matrix[0]
    raise ValueError(f"a {type(matrix).__name__} does not tell its size; give the start vector or the random vectors.")


class Operator:
    """A linear map of parameter space, used as `H @ v`.

    v is a flat vector (P,) in the order of `tree.to_vector`, or a dict of tensors shaped as θ; the product is of the
    same kind.
    """

    def __init__(self, product: Product, like: Mapping[str, Tensor]) -> None:
        self.product, self.like = product, like

    def __matmul__(self, v: Vector, /) -> Vector:
        return to_vector(self.product(from_vector(v, self.like))) if isinstance(v, Tensor) else self.product(v)


@takes_network
def hessian_operator(risk: Risk) -> Operator:
    """Return v ↦ ∇²L v, of a model, loss and data, or of one `Risk`."""
    n = len(risk)
    return _sum_over_chunks(risk, lambda part: _second_derivative(lambda params: part.losses(params).sum() / n, part))


@takes_network
def functional_operator(risk: Risk) -> Operator:
    """Return the product with the functional Hessian: that of ⟨∇_f ℓ, f_θ⟩ with the first factor held constant."""
    n = len(risk)

    def prepare(part: Risk) -> Product:
        gradients = part.loss.output_gradient(part.outputs(), part.y)
        return _second_derivative(lambda params: (gradients * part.outputs(params)).sum() / n, part)

    return _sum_over_chunks(risk, prepare)


@takes_network
def ggn_operator(risk: Risk) -> Operator:
    """Return the product with the Gauss–Newton matrix. Labels are not used, unless ∇²_f ℓ of an `AutogradLoss` depends
    on them."""
    n = len(risk)

    def prepare(part: Risk) -> Product:
        f, pull = vjp(part.outputs, dict(part.params))  # type: ignore[misc]  # u ↦ Jᵀ u
        _, push = vjp(lambda u: pull(u)[0], torch.zeros_like(f))  # type: ignore[misc]  # its transpose, v ↦ J v
        output_hvp = part.loss.output_hvp(f, part.y)
        return lambda v: pull(output_hvp(*push(v)) / n)[0]

    return _sum_over_chunks(risk, prepare)


def check_eval_mode(module: nn.Module) -> None:
    """Raise if dropout or batch statistics are active: L is then not one function of θ, or not a sum over samples."""
    for name, part in module.named_modules():
        random = isinstance(part, _DropoutNd) and part.p > 0
        random = random or (isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout > 0)
        if part.training and (random or isinstance(part, _BatchNorm)):
            layer = f"{type(part).__name__} '{name}'" if name else type(part).__name__
            raise ValueError(f"curvature needs the network in evaluation mode, and {layer} is training: module.eval().")


def _second_derivative(function: Callable[[Params], Tensor], risk: Risk) -> Product:
    _, pull = vjp(grad(function), dict(risk.params))  # type: ignore[misc]  # a Hessian is its own transpose
    return lambda v: pull(v)[0]


def _sum_over_chunks(risk: Risk, prepare: Callable[[Risk], Product]) -> Operator:
    """Return the operator that adds up the products of the risk's chunks."""
    check_eval_mode(risk.module)
    with _product_ops(risk):
        size = risk.chunk_size or chunk_size(risk, None, MAX_CHUNK_SIZE)
        full_product = prepare(risk) if len(risk) <= size else None

    def product(v: Params) -> Params:
        if full_product is not None:  # it calls no layer
            with torch.no_grad():
                return full_product(v)
        with _product_ops(risk):
            total = {k: torch.zeros_like(t) for k, t in v.items()}
            for part in risk.chunks(size):
                total = {k: total[k] + t for k, t in prepare(part)(v).items()}
            return total

    return Operator(product, risk.params)


@contextmanager
def _product_ops(risk: Risk) -> Iterator[None]:
    """Detach products from any graph that θ is part of. On a GPU use our convolutions, whose second derivatives are as
    fast as their first."""
    with torch.no_grad(), unfused_ops(risk.module), MaskedReLU(), ReplaceConv2d() if risk.x.is_cuda else nullcontext():
        yield


class MaskedReLU(TorchFunctionMode):
    """Compute relu(z) as [z > 0] z with a constant mask; in-place calls are left alone.

    Values and gradients are the same. Torch's relu has a second derivative of explicit zeros, which are then added up.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RELU_FUNCTIONS and not kwargs.get("inplace", args[1:] == (True,)):
            z = args[0] if args else kwargs["input"]
            return z * (z.detach() > 0).to(z.dtype)
        return func(*args, **kwargs)
