r"""The loss ℓ(f, y) of a network's outputs f, with the derivatives in f that curvature is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

from glocal.errors import GlocalError, unknown


class Loss(Protocol):
    """ℓ and what is known of it in closed form. Outputs are (n, K); every method works sample by sample."""

    name: str

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        """ℓ(f_i, y_i), shape (n,)."""
        ...

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        """∇_f ℓ(f_i, y_i), shape (n, K)."""
        ...

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        """Rows s_c with Σ_c s_c s_cᵀ = ∇²_f ℓ, shape (n, C, K)."""
        ...

    def output_hvp(self, outputs: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """t ↦ ∇²_f ℓ(f_i, y_i) t_i, shape (n, K)."""
        ...

    def sample_labels(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        """Labels from the network's own predictive distribution, one uniform number each."""
        ...

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """p(y_i | x_i), shape (n,)."""
        ...


class CrossEntropy:
    """ℓ = −log softmax(f)_y, y a class."""

    name = "cross-entropy"

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.is_cuda:
            return -outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        # A CPU takes a tenth of the time across the last dimension, which is as long as the batch: classes are few.
        return -outputs.mT.log_softmax(-2).gather(-2, y.unsqueeze(-2)).squeeze(-2)

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.softmax(-1) - _one_hot(y, outputs)

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        """diag(p) − p pᵀ = Σ_c p_c (e_c − p)(e_c − p)ᵀ."""
        p = outputs.softmax(-1)
        identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return p.sqrt().unsqueeze(-1) * (identity - p.unsqueeze(-2))

    def output_hvp(self, outputs: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        p = outputs.mT.softmax(-2)  # the layout that is fast on a CPU

        def times(t: Tensor) -> Tensor:
            weighted = p * t.mT
            return (weighted - p * weighted.sum(-2, keepdim=True)).mT

        return times

    def sample_labels(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        cumulative = outputs.softmax(-1).cumsum(-1)
        return (uniform.unsqueeze(-1) >= cumulative[..., :-1]).sum(-1)

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (-self.per_sample(outputs, y)).exp()


class SquaredError:
    """ℓ = ½‖f − y‖², the negative log-likelihood of a unit Gaussian up to a constant."""

    name = "squared-error"

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * self.output_gradient(outputs, y).square().sum(-1)

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.shape != y.shape:  # (n, 1) and (n,) would become (n, n)
            both = f"outputs {tuple(outputs.shape)} and targets {tuple(y.shape)} were given"
            raise GlocalError(f"the squared error is between tensors of one shape; {both}.")
        return outputs - y

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        identity = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return identity.expand(*outputs.shape[:-1], -1, -1)

    def output_hvp(self, outputs: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda t: t

    def sample_labels(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        raise GlocalError("labels are sampled from a network's classes; squared-error tasks have none. Use 'exact'.")

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (-self.per_sample(outputs, y)).exp() * (2 * math.pi) ** (-outputs.shape[-1] / 2)


LOOKED_AT = 8
"""Outputs at which the second derivatives of a loss of one's own are compared, label by label."""


class AutogradLoss:
    r"""Any function (outputs, y) that is a mean over samples, with its derivatives by autograd.

    ∇²_f ℓ has a root that asks for no label where it is positive and the same for all of them, as for every negative
    log-likelihood of an exponential family in its natural parameters f (cross-entropy, squared error, logistic,
    Poisson): log p(y | f) = ⟨f, T(y)⟩ − A(f) + h(y), and ∇²_f ℓ = ∇²A(f). Whether it is such a loss is tried on some
    `examples`, outputs (m, K) and their labels, of every K; without them nobody knows, and it has no root.
    """

    name = "own"

    def __init__(self, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.mean = mean
        self.examples: list[tuple[Tensor, Tensor]] = []

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        return vmap(self._one)(outputs, y)

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        return vmap(grad(self._one))(outputs, y)

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        """√λ_c v_c of the eigenpairs of ∇²_f ℓ."""
        label = self._any_label(outputs.shape[-1]).to(outputs.device)
        label = label.to(outputs.dtype) if label.is_floating_point() else label
        values, vectors = torch.linalg.eigh(self._bends(outputs, label.expand(len(outputs), *label.shape)))
        return values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT

    def output_hvp(self, outputs: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        _, pull = vjp(lambda f: self.output_gradient(f, y), outputs)  # type: ignore[misc]
        return lambda t: pull(t)[0]

    def sample_labels(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        raise GlocalError("labels are sampled from a network's classes; a loss of one's own says of none. Use 'exact'.")

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Of a loss that is a negative log-likelihood."""
        return (-self.per_sample(outputs, y)).exp()

    def _any_label(self, width: int) -> Tensor:
        """A label to differentiate at, if ∇²_f ℓ is positive and the same at those of all examples."""
        labels = self._labels
        if width not in labels:
            raise GlocalError(
                "the outer-product Hessian asks for a loss whose second derivative in the outputs is positive and does "
                "not depend on the labels, such as cross-entropy or squared error; another function was given."
            )
        return labels[width]

    @cached_property
    def _labels(self) -> dict[int, Tensor]:
        """A label for every K, where all examples bend alike; none of any K if some do not."""
        for outputs, _ in self.examples:
            if outputs.dim() != 2:
                raise GlocalError(
                    "the outer-product Hessian asks for outputs of the shape (n, K), a row an example; those of the "
                    f"network are {tuple(outputs.shape)}. A module around it can flatten or unsqueeze them."
                )
        some = [(outputs[:LOOKED_AT], y) for outputs, y in self.examples]
        first = [self._bends(outputs, y[:1].expand(len(outputs), *y.shape[1:])) for outputs, y in some]
        # Where a network is sure of its answers nothing bends but by rounding.
        rounding = 1e-4 * max((float(bends.abs().amax()) for bends in first), default=0.0)
        alike = all(self._alike(*each, bends, rounding) for each, bends in zip(some, first, strict=True))
        return {outputs.shape[1]: y[0] for outputs, y in some} if alike else {}

    def _alike(self, outputs: Tensor, y: Tensor, first: Tensor, rounding: float) -> bool:
        """Whether ∇²_f ℓ at these outputs is positive, and at all these labels what it is at the first."""
        for label in y[1:]:
            apart = (self._bends(outputs, label.expand(len(outputs), *label.shape)) - first).abs()
            if not bool((apart <= rounding).all()):  # nor where one is no number
                return False
        return bool((torch.linalg.eigvalsh(first) >= -rounding).all())

    def _one(self, f: Tensor, y: Tensor) -> Tensor:
        return self.mean(f.unsqueeze(0), y.unsqueeze(0)).sum()

    def _bends(self, outputs: Tensor, y: Tensor) -> Tensor:
        """∇²_f ℓ, (n, K, K)."""
        return vmap(jacrev(grad(self._one)))(outputs, y)


LOSSES: dict[str, Loss] = {loss.name: loss for loss in (CrossEntropy(), SquaredError())}


def get(name: str) -> Loss:
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]


def _one_hot(y: Tensor, outputs: Tensor) -> Tensor:
    classes = torch.arange(outputs.shape[-1], device=outputs.device)
    return (y.unsqueeze(-1) == classes).to(outputs.dtype)
