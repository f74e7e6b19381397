"""Products as exact as numbers are, whatever torch's switches say.

On a GPU torch multiplies convolutions in tf32 unless told otherwise, with factors of 11 significant bits: instruments
would see the rounding. Torch has switches of two generations: the newer ones may follow one for everything, which the
older ones do not undo, and where both disagree torch refuses to read the older ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

CUDNN: Any = torch.backends.cudnn


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Torch's own switches, for as long as it lasts; what was switched on before is so again afterwards."""
    products = torch.backends.cuda.matmul
    older, newer = (products, CUDNN), (products, CUDNN.conv, CUDNN.rnn)
    before = [_allowed(switch) for switch in older], [switch.fp32_precision for switch in newer]
    try:
        _switch(older, [allowed] * 2, newer, ["tf32" if allowed else "ieee"] * 3)
        yield
    finally:
        _switch(older, before[0], newer, before[1])


def _allowed(switch: Any) -> bool | None:
    """By an older switch; None where torch refuses to say."""
    try:
        return switch.allow_tf32
    except RuntimeError:
        return None


def _switch(older: Sequence[Any], allowed: Sequence[bool | None], newer: Sequence[Any], to: Sequence[str]) -> None:
    """The older ones first: they set newer ones too."""
    for switch, on in zip(older, allowed, strict=True):
        if on is not None:
            switch.allow_tf32 = on
    for switch, precision in zip(newer, to, strict=True):
        switch.fp32_precision = precision


full_precision = partial(tf32, False)
"""As a context and as a decorator."""


def convolved_exactly() -> bool:
    """Whether torch's convolutions are to be exact at present."""
    return CUDNN.conv.fp32_precision != "tf32"
