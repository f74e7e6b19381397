"""How many samples are differentiated at once: as many as there is memory for, whatever their size.

What a pass keeps grows with the numbers that a network's layers take and give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal.curvature.layers import KINDS
from glocal.curvature.output_jacobians import Cotangents
from glocal.networks.vmap_utils import batch_count

BYTES, SHARE = 1 << 30, 12
"""For layers' inputs and outputs: so many bytes, or on a GPU a twelfth of its memory, where it is to hold no others. A
Hessian product keeps about three times as much."""


def chunk_size(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents | None,
    most: int,
    within: int = BYTES,
) -> int:
    """As many as make layers' inputs, and their outputs or slopes of these in every one of the directions, of so many
    bytes; not more than `most`. The first of `x` tells: a network that cannot take it alone gets `most`."""
    taken, given = [0], [0]

    def count(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        taken[0] += _bytes(args)
        given[0] += _bytes(output if isinstance(output, tuple) else (output,))

    handles = [part.register_forward_hook(count) for part in module.modules() if isinstance(part, KINDS)]
    try:
        with torch.no_grad():
            outputs = functional_call(module, {**params, **buffers}, (x[:1],))
            ways = 1 if directions is None else directions(outputs).shape[1]
    except Exception:
        return most  # whatever is wrong, the pass itself says it better
    finally:
        for handle in handles:
            handle.remove()
    return max(1, min(most, within // max(1, taken[0] + ways * given[0])))


def memory_budget(params: Mapping[str, Tensor]) -> int:
    """Bytes for one of the runs that are mapped side by side."""
    one = next(iter(params.values()))
    on_gpu = one.device.type == "cuda"
    whole = torch.cuda.get_device_properties(one.device).total_memory // SHARE if on_gpu else BYTES
    return whole // batch_count(one)


def _bytes(given: tuple[Any, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in given if isinstance(t, Tensor))
