"""Passes that derivatives can follow: torch's fused layers have first ones alone, and not for mapped samples; of its
fused weight normalisation the second ones are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode


def recurrent(module: nn.Module) -> bool:
    """Whether it has recurrent layers of torch's."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


def normalises_weights(module: nn.Module) -> bool:
    """Whether it has weights g v / ‖v‖, by torch's parametrisation or by its older hook."""
    return any(
        isinstance(part, _WeightNorm) or any(isinstance(hook, WeightNorm) for hook in part._forward_pre_hooks.values())
        for part in module.modules()
    )


class Unfused(TorchFunctionMode):
    """While it lasts weights are normalised step by step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _normalised(*args, **kwargs or {}) if func is torch._weight_norm else func(*args, **kwargs or {})


def _normalised(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ‖v‖, a norm for each index along the dimension, or one for all where it is −1."""
    others = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Passes by operations that can be differentiated twice and mapped, as torch's fused attention and recurrent layers
    cannot. Convolutions lose their fast kernels beside recurrent layers alone."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if normalises_weights(module):
            stack.enter_context(Unfused())
        if recurrent(module):
            for backend in (torch.backends.mkldnn, torch.backends.cudnn):
                # Not by `flags`, which sets their precision and determinism too.
                stack.callback(setattr, backend, "enabled", backend.enabled)
                setattr(backend, "enabled", False)  # noqa: B010
        yield
