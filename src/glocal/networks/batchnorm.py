r"""BatchNorm with the operations that follow it in a residual network, relu(B(x) + residual).

B(x) = γ (x − μ) / √(σ² + ε) + β,  with μ and σ² per channel, over the batch and all positions
"""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.accelerate import accelerated
from glocal.networks.layer_calls import set_eval_mode

Pair: TypeAlias = tuple[Tensor, Tensor]
"""γ and β, or the running mean and variance."""


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that replaces its running statistics instead of modifying them in place.

    Its momentum is constant, so it does not count batches.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Return B(x), plus the residual and followed by a ReLU where asked."""
        mean, variance, momentum = self.running_mean, self.running_var, self.momentum
        assert mean is not None and variance is not None and momentum is not None
        if self.training:
            affine: Pair = self.weight, self.bias
            options: Any = {"relu": relu, "eps": self.eps, "momentum": momentum}
            y, self.running_mean, self.running_var = batch_norm(x, residual, affine, (mean, variance), **options)
            return y
        z = self._normalize(x.to(mean.dtype), mean, variance, momentum)
        return _add_and_rectify(z, residual, relu).to(x.dtype)

    def _normalize(self, x: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> Tensor:
        scale = self.weight * (variance + self.eps).rsqrt()
        return x * scale.view(-1, 1, 1) + (self.bias - mean * scale).view(-1, 1, 1)


@accelerated("layers.batch_norm")
def batch_norm(
    x: Tensor, residual: Tensor | None, affine: Pair, running: Pair, *, relu: bool, eps: float, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return relu(B(x) + residual) with the batch's statistics, and the new running mean and variance."""
    mean, variance = running[0].clone(), running[1].clone()
    z = functional.batch_norm(x.to(mean.dtype), mean, variance, *affine, True, momentum, eps)
    return _add_and_rectify(z, residual, relu).to(x.dtype), mean, variance


def _add_and_rectify(z: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    z = z if residual is None else z + residual
    return z.relu() if relu else z


class PerImageBatchNorm2d(BatchNorm2d):
    """BatchNorm with each image's own mean and variance: train-mode BatchNorm on batches of one image."""

    update_statistics = False

    def _normalize(self, x: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> Tensor:
        means = x.mean((-2, -1), keepdim=True)
        centred = x - means
        variances = centred.square().mean((-2, -1), keepdim=True)
        if self.update_statistics:  # with one image after the other
            positions = x.shape[-2] * x.shape[-1]
            decay = (1 - momentum) ** torch.arange(x.shape[0], -1, -1, dtype=mean.dtype, device=x.device)
            weights = momentum * decay[1:]
            self.running_mean = decay[0] * mean + weights @ means.flatten(1)
            self.running_var = decay[0] * variance + weights @ variances.flatten(1) * (positions / (positions - 1))
        return centred * (variances + self.eps).rsqrt() * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def per_image_batchnorm(module: nn.Module, update_statistics: bool = False) -> nn.Module:
    """Return a copy of the network that computes, in evaluation mode, what it computes in training on single images.

    A sample's outputs and gradients then depend on that sample only, so many can be computed at once. Its running
    statistics change only if `update_statistics`.
    """
    module = set_eval_mode(copy.deepcopy(module))
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.__class__ = PerImageBatchNorm2d
            part.update_statistics = update_statistics  # type: ignore[assignment]
    return module
