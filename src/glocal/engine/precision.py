"""How exactly a GPU multiplies: fp32 as it stands, tf32 with factors of 11 significant bits, bf16 with numbers of 8.

`bf16` concerns the network's own products alone (`networks.model`); parameters, gradients, updates, the algorithm's
memory and BatchNorm's statistics stay fp32, and what else is multiplied beside the network is tf32. On a CPU tf32 is
fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from glocal.fast.tf32 import tf32
from glocal.networks.model import Precision


@contextmanager
def multiplying(precision: Precision) -> Iterator[None]:
    """Torch's own switches, for as long as the context lasts. Of a convolution's kernels the fastest is taken."""
    convolutions, fused = torch.backends.cudnn, torch.backends.mkldnn
    before = convolutions.benchmark, fused.enabled
    with tf32(precision != "fp32"), warnings.catch_warnings():
        # Of processors without bf16: torch goes on in another way, tells it with a stack of its own calls, and leaves
        # its fused layers off for the rest of the process.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
        try:
            convolutions.benchmark = True
            yield
        finally:
            convolutions.benchmark = before[0]
            setattr(fused, "enabled", before[1])  # noqa: B010  (a type checker takes it for constant)
