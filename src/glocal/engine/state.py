r"""The state of a cohort in training: trees of tensors with the runs along the first axis.

On a GPU, images are stored channels-last, because convolutions are fastest in that layout: a grouped convolution over
many runs then finds the channels of all runs at one pixel next to each other. Weights, and memory tensors shaped like
weights, keep the runs outermost. Images in an algorithm's memory are found by their key, `curvature.jacobian.CONV`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glocal import tree
from glocal.algorithms.algorithm import Memory
from glocal.curvature.jacobian import CONV
from glocal.errors import GlocalError
from glocal.tree import Params, Tree


@dataclass
class State:
    """θ, the network's buffers, the memory M_t, and the step at which a run diverged (−1: it has not)."""

    params: Params
    buffers: Params
    memory: Tree
    diverged: Tensor
    clock: int = 0
    """Steps taken so far, the same for all runs."""
    optimizer: Tree = field(default_factory=dict)
    """The optimiser's state; empty for plain SGD."""

    def as_tree(self) -> Tree:
        """Return everything but the clock, with the runs along the first axis of every leaf."""
        return {**self.parts(), "diverged": self.diverged}

    def parts(self) -> Tree:
        """Return the trees that a step changes: parameters, buffers, memory and the optimiser's state."""
        parts = {"params": self.params, "buffers": self.buffers, "memory": self.memory}
        return parts | ({"optimizer": self.optimizer} if self.optimizer else {})

    @classmethod
    def from_tree(cls, parts: Tree, clock: int) -> State:
        buffers, memory, optimizer = (parts.get(k, {}) for k in ("buffers", "memory", "optimizer"))
        return cls(parts["params"], buffers, memory, parts["diverged"], clock, optimizer)

    def select(self, runs: int | slice | Sequence[int]) -> State:
        return State.from_tree(tree.select(self.as_tree(), runs), self.clock)


def check_memory(memory: Mapping[str, Any]) -> None:
    """Raise unless a memory consists of tensors and nested dicts of tensors, so that it can be saved."""
    for key, leaf in memory.items():
        if isinstance(leaf, Mapping) and leaf:
            check_memory(leaf)
        elif not isinstance(leaf, Tensor) or "/" in key:
            kind = "an empty dict" if isinstance(leaf, Mapping) else f"a {type(leaf).__name__}"
            raise GlocalError(f"an algorithm's memory holds tensors under names without '/': '{key}' is {kind}.")


CHANNELS = {"inputs": 2, "deltas": 3}
"""The axis of the channels: inputs are (runs, n, channels, ...), output gradients (runs, n, C, channels, ...)."""


def arrange(state: State, device: torch.device) -> None:
    """Convert a state, in place, to the tensor layout that is fast on its device; values do not change."""
    if device.type == "cuda":
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
