"""What a cohort is made of while it trains: one tree of tensors, with the runs along the first axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from glocal import tree
from glocal.tree import Params, Tree


@dataclass
class State:
    """θ, the network's buffers, the memory M_t, the step at which a run diverged (−1: it has not), and the clock."""

    params: Params
    buffers: Params
    memory: Tree
    diverged: Tensor
    clock: int = 0
    """Steps made so far, the same for all runs."""

    def as_tree(self) -> Tree:
        """The part that belongs to single runs, with the runs along the first axis of every leaf."""
        return {"params": self.params, "buffers": self.buffers, "memory": self.memory, "diverged": self.diverged}

    @classmethod
    def from_tree(cls, parts: Tree, clock: int) -> State:
        return cls(parts["params"], parts.get("buffers", {}), parts.get("memory", {}), parts["diverged"], clock)

    def select(self, runs: int | slice | Sequence[int]) -> State:
        return State.from_tree(tree.select(self.as_tree(), runs), self.clock)
