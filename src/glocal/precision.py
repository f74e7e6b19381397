"""The precision of matrix products and convolutions: fp32, TF32 or bf16.

On a GPU torch computes fp32 convolutions in TF32 by default, with factors of 11 significant bits. That is fine for
training and visible in curvature, so instruments run under `full_precision`. On a CPU TF32 is fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from glocal.rng import GLOBAL_STATE

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
CUDNN: Any = torch.backends.cudnn


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Train in this precision, with cuDNN's fastest convolution algorithms, and restore torch's switches afterwards.

    `bf16` concerns only the network's own products (`networks.model`). Parameters, gradients, updates, the algorithm's
    memory and BatchNorm's statistics stay fp32, and other products are TF32.
    """
    mkldnn = torch.backends.mkldnn
    with allow_tf32(precision != "fp32"), warnings.catch_warnings():
        before = CUDNN.benchmark, mkldnn.enabled
        # On CPUs without bf16 torch falls back with this warning, and disables mkldnn for the rest of the process.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
        # Operations that `vmap` does not batch are called run by run; executors are compared by their time.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        try:
            CUDNN.benchmark = True
            yield
        finally:
            CUDNN.benchmark = before[0]
            setattr(mkldnn, "enabled", before[1])  # noqa: B010  (declared constant)


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Set torch's TF32 switches, and restore them afterwards.

    Torch has two generations of switches, `allow_tf32` and `fp32_precision`. The newer ones may inherit a global value
    that the older ones do not override, and torch refuses to read the older ones while both disagree.
    """
    matmul, new = torch.backends.cuda.matmul, "tf32" if allowed else "ieee"
    switches: list[tuple[Any, str, Any]] = [(matmul, "allow_tf32", allowed), (CUDNN, "allow_tf32", allowed)]
    switches += [(switch, "fp32_precision", new) for switch in (matmul, CUDNN.conv, CUDNN.rnn)]
    before = []  # the older switches first: setting them also sets the newer ones
    with GLOBAL_STATE:
        for switch, name, _ in switches:
            with suppress(RuntimeError):
                before.append((switch, name, getattr(switch, name)))
        try:
            for switch, name, value in switches:
                setattr(switch, name, value)
            yield
        finally:
            for switch, name, value in before:
                setattr(switch, name, value)


full_precision = partial(allow_tf32, False)
"""Compute fp32 products in full precision; a context manager and a decorator."""


def conv_uses_tf32() -> bool:
    """Return whether convolutions may use TF32."""
    return bool(CUDNN.conv.fp32_precision == "tf32")
