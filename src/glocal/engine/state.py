"""The state of a cohort in training: trees of tensors with the runs along the first axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from glocal import tree
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


def check_memory(memory: Any, method: str, kind: str = "memory") -> None:
    """Raise unless the memory that a method returned consists of tensors and nested dicts of them, as files do."""
    if not isinstance(memory, Mapping):
        raise GlocalError(f"{method} must return a dict of tensors; it returned {type(memory).__name__}.")
    for key, leaf in memory.items():
        if isinstance(leaf, Mapping) and leaf:
            check_memory(leaf, method, kind)
        elif isinstance(leaf, Mapping):
            raise GlocalError(f"'{key}' in the {kind} from {method} is an empty dict, which is not kept: leave it out.")
        elif not isinstance(leaf, Tensor):
            place = f"'{key}' in the {kind} from {method}"
            allowed = "keep tensors, such as torch.tensor(0.0), and dicts of tensors"
            raise GlocalError(f"{place} is of the type {type(leaf).__name__}: {allowed}.")
        elif "/" in key:
            raise GlocalError(f"'{key}' in the {kind} from {method} has a '/' in its name: use another name.")
