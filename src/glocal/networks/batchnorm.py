r"""BatchNorm with what stands around it in a residual network, relu(B(x) + beside), as one operation.

    B(x) = γ (x − μ) / √(σ² + ε) + β,  μ and σ² over the batch and all positions, a channel at a time

On a GPU three passes over the numbers, where one after the other would take eight. Mapped over runs, every run's
channels are channels of one larger batch norm.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from glocal.fast.triton import available
from glocal.networks.vmap_utils import Dims, merge_batch_dim


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, but that new running statistics take the place of the old ones, which stay as they are, and
    that it does not count the batches it has seen: its momentum is constant."""

    def forward(self, x: Tensor, beside: Tensor | None = None, rectify: bool = False) -> Tensor:
        """B(x), or B(x) + beside, or relu of it."""
        mean, variance, momentum = self.running_mean, self.running_var, self.momentum
        assert mean is not None and variance is not None and momentum is not None
        if self.training and available(x):
            how = rectify, self.eps, momentum
            y, self.running_mean, self.running_var, *_ = Normalised.apply(
                x, self.weight, self.bias, beside, mean, variance, *how
            )
            return y
        z = self._plainly(x.to(mean.dtype), mean, variance, momentum)
        z = z if beside is None else z + beside
        return (z.relu() if rectify else z).to(x.dtype)

    def _plainly(self, x: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> Tensor:
        if self.training:
            self.running_mean, self.running_var = mean, variance = mean.clone(), variance.clone()
            return functional.batch_norm(x, mean, variance, self.weight, self.bias, True, momentum, self.eps)
        scale = self.weight * (variance + self.eps).rsqrt()
        return x * scale.view(-1, 1, 1) + (self.bias - mean * scale).view(-1, 1, 1)


class PerImageBatchNorm2d(BatchNorm2d):
    """Batch norm with the mean and variance of every image by itself: what a batch of one image meets in training."""

    def _plainly(self, x: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> Tensor:
        return self._by_images(x)[0]

    def _by_images(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """B(x), and every image's μ and σ², (n, channels)."""
        own = x.mean((-2, -1), keepdim=True)
        apart = x - own
        spread = apart.square().mean((-2, -1), keepdim=True)
        z = apart * (spread + self.eps).rsqrt() * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
        return z, own.flatten(1), spread.flatten(1)


class SequentialBatchNorm2d(PerImageBatchNorm2d):
    """The same, whose running statistics move on as by one image after the other, each a batch in training."""

    def _plainly(self, x: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> Tensor:
        z, means, variances = self._by_images(x)
        positions = x.shape[-2] * x.shape[-1]
        left = (1 - momentum) ** torch.arange(x.shape[0], -1, -1, dtype=mean.dtype, device=x.device)
        of_each = momentum * left[1:]
        self.running_mean = left[0] * mean + of_each @ means
        self.running_var = left[0] * variance + of_each @ variances * (positions / (positions - 1))
        return z


def per_image_batchnorm(module: nn.Module, kind: type[PerImageBatchNorm2d] = PerImageBatchNorm2d) -> nn.Module:
    """The network, in evaluation mode, as it is in training for batches of one image: a sample's outputs and gradients
    are its own, and many can be computed at once."""
    made = _ALONE.setdefault(module, {})
    if kind not in made:
        made[kind] = copy.deepcopy(module).eval()
        for part in made[kind].modules():
            if isinstance(part, nn.BatchNorm2d):
                part.__class__ = kind
    return made[kind]


_ALONE: WeakKeyDictionary[nn.Module, dict[type[PerImageBatchNorm2d], nn.Module]] = WeakKeyDictionary()


class Normalised(Function):
    """relu(B(x) + beside), the new running statistics, μ and σ²; all but the first are not differentiated."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, mean: Tensor, variance: Tensor, *how: Any
    ) -> tuple[Tensor, ...]:
        from glocal.fast import batchnorm_triton

        return batchnorm_triton.normalise(x, weight, bias, beside, mean, variance, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, beside, _, _, ctx.rectify, ctx.eps, _ = inputs
        y, *running, mean, variance = output
        ctx.mark_non_differentiable(*running, mean, variance)
        ctx.set_materialize_grads(False)
        ctx.beside = beside is not None
        ctx.save_for_backward(x, y, weight, bias, mean, variance)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        dx, dweight, dbias, dbeside = Slopes.apply(dy, *ctx.saved_tensors, ctx.beside, ctx.rectify, ctx.eps)
        return dx, dweight, dbias, dbeside if ctx.beside else None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, *rest: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        runs = info.batch_size
        x, weight, bias = (
            _channels(x, dims[0], runs),
            merge_batch_dim(weight, dims[1], 0, runs),
            merge_batch_dim(bias, dims[2], 0, runs),
        )
        beside = None if beside is None else _channels(beside, dims[3], runs)
        running = [merge_batch_dim(t, d, 0, runs) for t, d in zip(rest[:2], dims[4:6], strict=True)]
        y, *vectors = Normalised.apply(x, weight, bias, beside, *running, *rest[2:])
        return (y.unflatten(1, (runs, -1)), *(v.view(runs, -1) for v in vectors)), (1, 0, 0, 0, 0)


class Slopes(Function):
    """The slopes of `Normalised` in x, γ, β and beside; they are not differentiated again."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *how: Any
    ) -> tuple[Tensor, ...]:
        from glocal.fast import batchnorm_triton

        return batchnorm_triton.slopes(dy, x, y, weight, bias, mean, variance, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        raise NotImplementedError("curvature is measured with BatchNorm in evaluation mode.")

    @staticmethod
    def vmap(info: Any, dims: Dims, *given: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        runs = info.batch_size
        images = [_channels(t, d, runs) for t, d in zip(given[:3], dims[:3], strict=True)]
        vectors = [merge_batch_dim(t, d, 0, runs) for t, d in zip(given[3:7], dims[3:7], strict=True)]
        dx, dweight, dbias, dbeside = Slopes.apply(*images, *vectors, *given[7:])
        inner = [t.unflatten(1, (runs, -1)) for t in (dx, dbeside)]
        return (inner[0], dweight.view(runs, -1), dbias.view(runs, -1), inner[1]), (1, 0, 0, 1)


def _channels(x: Tensor, dim: int | None, runs: int) -> Tensor:
    """The runs' channels side by side, and last in memory."""
    return merge_batch_dim(x, dim, 1, runs).contiguous(memory_format=torch.channels_last)
