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
    """Stacked weights (runs, width, channels, k, k) with the channels side by side in memory."""
    if leaf.dim() != 5 or not leaf.is_floating_point():
        return leaf
    return leaf.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
