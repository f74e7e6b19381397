"""Passes that derivatives can follow: torch's fused layers have first ones alone, and not for mapped samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel


def recurrent(module: nn.Module) -> bool:
    """Whether it has recurrent layers of torch's."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Passes by operations that can be differentiated twice and mapped, as torch's fused attention and recurrent layers
    cannot. Convolutions lose their fast kernels beside recurrent layers alone."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if recurrent(module):
            for backend in (torch.backends.mkldnn, torch.backends.cudnn):
                # Not by `flags`, which sets their precision and determinism too.
                stack.callback(setattr, backend, "enabled", backend.enabled)
                setattr(backend, "enabled", False)  # noqa: B010
        yield
