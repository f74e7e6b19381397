"""Products as exact as numbers are, whatever torch's switches say.

On a GPU torch multiplies convolutions in tf32 unless told otherwise, with factors of 11 significant bits: instruments
would see the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Torch's own switches, for as long as it lasts; what was switched on before is so again afterwards."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    try:
        products.allow_tf32 = convolutions.allow_tf32 = allowed
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


exactly = partial(tf32, False)
"""As a context and as a decorator."""
