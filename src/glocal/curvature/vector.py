r"""θ as one vector of P numbers, for algorithms that know matrices and vectors alone.

The order is that of the dict, each tensor row by row. For vectors side by side map them: `vmap(flatten)`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glocal.curvature.layers import Params


def flatten(params: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in params.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Params:
    """The inverse of `flatten`, into the names and shapes of `like`."""
    parts = vector.split([p.numel() for p in like.values()])
    return {k: part.reshape(p.shape) for (k, p), part in zip(like.items(), parts, strict=True)}
