r"""Channels-last layout of a cohort's state, in which a GPU's convolutions are fastest.

A grouped convolution over many runs then finds the channels of all runs at one pixel next to each other. Weights, and
memory tensors shaped like weights, keep the runs outermost. Images in an algorithm's memory are found by their key,
`curvature.jacobian.CONV`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from glocal import tree
from glocal.algorithms.algorithm import Memory
from glocal.curvature.jacobian import CONV
from glocal.engine.state import State

CHANNELS = {"inputs": 2, "deltas": 3}
"""The axis of the channels: inputs are (runs, n, channels, ...), output gradients (runs, n, C, channels, ...)."""


def arrange(state: State) -> None:
    """Convert a state, in place, to channels-last; values do not change."""
    state.params = tree.map_tree(channels_last, state.params)
    state.memory = arranged(state.memory)
    state.optimizer = tree.map_tree(channels_last, state.optimizer)


def arranged(memory: Mapping[str, Any]) -> Memory:
    """Convert a memory's weights and images to channels-last."""
    return {key: _in_order(key, leaf) for key, leaf in memory.items()}


def _in_order(key: str, leaf: Any) -> Any:
    if not isinstance(leaf, Mapping):
        return channels_last(leaf)
    if key != CONV:
        return arranged(leaf)
    convert = {name: partial(merged_channels_last, channels=axis) for name, axis in CHANNELS.items()}
    return {name: tree.map_tree(convert[name], leaf[name]) for name in CHANNELS}


def channels_last(leaf: Tensor) -> Tensor:
    """Convert stacked weights (runs, [m,] width, channels, k, k) to channels-last."""
    if leaf.dim() not in (5, 6) or not leaf.is_floating_point():
        return leaf
    return leaf.movedim(-3, -1).contiguous().movedim(-1, -3)


def merged_channels_last(leaf: Tensor, channels: int) -> Tensor:
    """Convert stacked images (runs, ...) to channels-last with the channels of all runs adjacent in memory."""
    return leaf.movedim((0, channels), (-2, -1)).contiguous().movedim((-2, -1), (0, channels))
