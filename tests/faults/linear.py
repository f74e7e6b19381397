"""The network of the small sweeps; its bytes are part of the names of the runs in `format1`."""

from collections.abc import Sequence

from torch import nn


def make(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Linear(input_shape[0], outputs)
