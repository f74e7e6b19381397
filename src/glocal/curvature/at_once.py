"""How many samples are differentiated at once: as many as there is memory for, whatever their size.

What a pass keeps grows with the numbers that a network's layers take and give.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal.curvature.layers import KINDS
from glocal.curvature.outputs import Directions
from glocal.kernels.mapped import side_by_side

BYTES, SHARE = 1 << 30, 12
"""For layers' inputs and outputs: so many bytes, or on a GPU a twelfth of its memory, where it is to hold no others. A
Hessian product keeps about three times as much."""


def samples_at_once(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Directions,
    most: int,
    within: int = BYTES,
) -> int:
    """As many as make layers' inputs, and slopes of their outputs in every one of the directions, of so many bytes; not
    more than `most`. The first of `x` tells."""
    taken, given = [0], [0]

    def count(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        taken[0] += sum(a.numel() * a.element_size() for a in args)
        given[0] += output.numel() * output.element_size()

    handles = [part.register_forward_hook(count) for part in module.modules() if isinstance(part, KINDS)]
    try:
        with torch.no_grad():
            ways = directions(functional_call(module, {**params, **buffers}, (x[:1],))).shape[1]
    finally:
        for handle in handles:
            handle.remove()
    return max(1, min(most, within // max(1, taken[0] + ways * given[0])))


def room(params: Mapping[str, Tensor]) -> int:
    """Bytes for one of the runs that are mapped side by side."""
    one = next(iter(params.values()))
    if one.device.type != "cuda":
        return BYTES
    return max(BYTES, torch.cuda.get_device_properties(one.device).total_memory // SHARE // side_by_side(one))
