"""What the published code does to BatchNorm, beside what it means to do: a side effect that published numbers have.

It takes the gradients of single images with the network in training mode. Every such pass moves the running statistics
a tenth of the way to those of one image, just before the task is evaluated, and a few dozen passes leave nothing of
the statistics of batches. Training goes by the batch's own statistics, so that only what is measured changes. And no
image's pass depends on those before it: where BatchNorm is ours they are made at once.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.networks.batchnorm import BatchNorm2d, SequentialBatchNorm2d, per_image_batchnorm
from glocal.networks.model import Model
from glocal.tree import Params

Statistics: TypeAlias = Literal["kept", "published"]
LAST = 200
"""Passes that count: of what was there before them 0.9²⁰⁰ is left, less than a number in fp32 can show."""


def disturb_batchnorm(model: Model, params: Params, x: Tensor) -> None:
    """Update the model's buffers by a pass in training mode over every image by itself, augmented as in training."""
    norms = [part for part in model.module.modules() if isinstance(part, _BatchNorm)]
    if norms and all(type(part) is BatchNorm2d for part in norms):
        model.outputs_of(per_image_batchnorm(model.module, SequentialBatchNorm2d), params, x[-LAST:])
    elif norms:
        for image in x[-LAST:]:
            model.outputs(params, image.unsqueeze(0))
