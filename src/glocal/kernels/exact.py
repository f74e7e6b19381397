"""Products as exact as numbers are, whatever torch's switches say.

On a GPU torch multiplies convolutions in tf32 unless told otherwise, with factors of 11 significant bits: instruments
would see the rounding. Torch has switches of two generations, and once somebody has set those of the newer one apart
from each other, refuses to read the older ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

CUDNN: Any = torch.backends.cudnn


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Torch's own switches, for as long as it lasts; what was switched on before is so again afterwards."""
    products, convolutions = torch.backends.cuda.matmul, CUDNN
    newer = products, convolutions.conv, convolutions.rnn
    precisions = [switch.fp32_precision for switch in newer]
    try:
        older = products.allow_tf32, convolutions.allow_tf32
    except RuntimeError:
        older = None
    try:
        products.allow_tf32 = convolutions.allow_tf32 = allowed
        yield
    finally:
        if older is not None:
            products.allow_tf32, convolutions.allow_tf32 = older
        else:
            for switch, precision in zip(newer, precisions, strict=True):
                switch.fp32_precision = precision


exactly = partial(tf32, False)
"""As a context and as a decorator."""


def convolved_exactly() -> bool:
    """Whether torch's convolutions are to be exact at present."""
    return CUDNN.conv.fp32_precision != "tf32"
