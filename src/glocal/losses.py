r"""The loss ℓ(f, y) of a network's outputs f, with the derivatives in f that curvature is made of."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from glocal.errors import GlocalError, unknown


class Loss(Protocol):
    """ℓ and what is known of it in closed form. Outputs are (n, K); every method works sample by sample."""

    name: str

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        """ℓ(f_i, y_i), shape (n,)."""
        ...

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """∇_f ℓ(f_i, y_i), shape (n, K)."""
        ...

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Rows s_c with Σ_c s_c s_cᵀ = ∇²_f ℓ, shape (n, C, K)."""
        ...

    def draw(self, outputs: Tensor, uniform: Tensor) -> Tensor:
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

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.softmax(-1) - _one_hot(y, outputs)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """diag(p) − p pᵀ = Σ_c p_c (e_c − p)(e_c − p)ᵀ."""
        p = outputs.softmax(-1)
        identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return p.sqrt().unsqueeze(-1) * (identity - p.unsqueeze(-2))

    def draw(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        cumulative = outputs.softmax(-1).cumsum(-1)
        return (uniform.unsqueeze(-1) >= cumulative[..., :-1]).sum(-1)

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (-self.per_sample(outputs, y)).exp()


class SquaredError:
    """ℓ = ½‖f − y‖², the negative log-likelihood of a unit Gaussian up to a constant."""

    name = "squared-error"

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (outputs - y).square().sum(-1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs - y

    def hessian_root(self, outputs: Tensor) -> Tensor:
        identity = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return identity.expand(*outputs.shape[:-1], -1, -1)

    def draw(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        raise GlocalError("labels are sampled from a network's classes; squared-error tasks have none. Use 'exact'.")

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (-self.per_sample(outputs, y)).exp() * (2 * math.pi) ** (-outputs.shape[-1] / 2)


LOSSES: dict[str, Loss] = {loss.name: loss for loss in (CrossEntropy(), SquaredError())}


def get(name: str) -> Loss:
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]


def _one_hot(y: Tensor, outputs: Tensor) -> Tensor:
    classes = torch.arange(outputs.shape[-1], device=outputs.device)
    return (y.unsqueeze(-1) == classes).to(outputs.dtype)
