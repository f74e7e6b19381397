"""relu(z) as [z > 0] z, its first factor a constant: the same values and slopes of finite z, and no second derivative.

Torch knows relu's slope as a function of z, and where that is differentiated once more it writes the derivative down:
zeros, as many as z has numbers, which it then adds up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

RELUS = (functional.relu, torch.relu, Tensor.relu)


class Rectified(TorchFunctionMode):
    """While it lasts every relu is such a product, but for those in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RELUS:
            z, in_place = _given(*args, **kwargs)
            if not in_place:
                return z * (z.detach() > 0).to(z.dtype)
        return func(*args, **kwargs)


def _given(input: Tensor, inplace: bool = False) -> tuple[Tensor, bool]:
    return input, inplace
