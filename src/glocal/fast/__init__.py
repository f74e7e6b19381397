"""Optional accelerations, registered with `glocal.accelerate`.

Delete this folder and everything still works, only slower. The kernels are written in Triton, which comes with PyTorch
for CUDA. Without a GPU they run in Triton's interpreter, for tests: set TRITON_INTERPRET=1 before importing them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from glocal import accelerate

if TYPE_CHECKING:
    from torch import Tensor

ALWAYS = {
    "step.compile": "glocal.fast.step_trace:compile_step",
    "step.captured": "glocal.fast.cuda_graph:captured_executors",
}
TRITON = {
    "layers.conv": "glocal.fast.grouped_conv:conv",
    "layers.conv_input_grad": "glocal.fast.grouped_conv:conv_input_grad",
    "layers.conv_weight_grad": "glocal.fast.grouped_conv:conv_weight_grad",
    "layers.batch_norm": "glocal.fast.batchnorm:batch_norm",
}
"""Accelerations that need Triton; their modules are imported when they are first used."""


def register() -> None:
    """Register every acceleration that can be imported here."""
    for name, target in {**ALWAYS, **(TRITON if find_spec("triton") is not None else {})}.items():
        accelerate.register(name, target)


def supports(x: Tensor) -> bool:
    """Return whether Triton kernels can run on this tensor: they use torch's current GPU."""
    import torch

    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return x.is_cuda and x.device.index == torch.cuda.current_device()
