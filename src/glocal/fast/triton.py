"""Whether kernels of our own can be compiled: on a GPU, where Triton is there, as it is beside PyTorch for CUDA. They
run on torch's current GPU; what is on another one is left to torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def available(x: Tensor) -> bool:
    kind = x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return kind and _installed() and x.device.index == torch.cuda.current_device()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
