r"""A network whose BatchNorm takes the mean and variance of the examples that pass together, where it would take those
that training left behind.

The two make other functions of θ. By the running statistics, which do not follow θ, outputs grow with every layer's
weights, without a bound; by the batch's own, a layer before BatchNorm may be of any scale.
"""

from __future__ import annotations

from copy import deepcopy
from types import MethodType

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def by_batch(module: nn.Module) -> nn.Module:
    """A copy that normalises by the batch in evaluation mode too; its running statistics are there and not used."""
    made = deepcopy(module)
    for part in made.modules():
        if isinstance(part, _BatchNorm):
            part.forward = MethodType(_normalised, part)  # type: ignore[method-assign]
    return made


def _normalised(norm: _BatchNorm, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
    """γ (x − μ) / √(σ² + ε) + β, and what `networks.batchnorm` adds to it; of plain operations, as curvature needs."""
    over = [0, *range(2, x.dim())]
    centred = x - x.mean(over, keepdim=True)
    z = centred * (centred.square().mean(over, keepdim=True) + norm.eps).rsqrt()
    if norm.affine:
        shape = (-1, *[1] * (x.dim() - 2))
        z = z * norm.weight.view(shape) + norm.bias.view(shape)
    z = z if residual is None else z + residual
    return z.relu() if relu else z
