"""The order of numbers in memory: on a GPU a convolution's weights, and all that is shaped like them, channels last."""

from __future__ import annotations

import torch
from torch import Tensor

from glocal import tree
from glocal.engine.state import State


def arrange(state: State, device: torch.device) -> None:
    """Bring a state into the order in which its device is fast; the numbers stay what they are."""
    if device.type == "cuda":
        state.params = tree.map_tree(channels_last, state.params)
        state.memory = tree.map_tree(channels_last, state.memory)


def channels_last(leaf: Tensor) -> Tensor:
    """Stacked weights (runs, width, channels, k, k), or several a run, with the channels side by side in memory."""
    if leaf.dim() not in (5, 6) or not leaf.is_floating_point():
        return leaf
    return leaf.movedim(-3, -1).contiguous().movedim(-1, -3)
