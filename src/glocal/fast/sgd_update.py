"""The update of gradient descent, in place, for one run or for stacked runs."""

from __future__ import annotations

from torch import Tensor

from glocal.accelerate import accelerated


@accelerated("layers.sgd_update")
def descend(params: Tensor, direction: Tensor, lr: Tensor) -> None:
    """θ ← θ − lr · direction; lr is a scalar, or one scalar per run, shaped to multiply stacked parameters."""
    params.addcmul_(direction, lr, value=-1)
