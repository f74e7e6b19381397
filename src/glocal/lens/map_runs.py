"""One function of every run of a cohort, all at once: on a GPU a call costs more than the work in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.engine.cohort import Cohort
from glocal.errors import GlocalError
from glocal.tree import Tree

OfRun = Callable[..., Tree]
"""Of the cohort's model, of trees that are a run's own, and of data that it shares with its group."""


class Runwise:
    """Maps functions over runs; those that cannot be mapped are called run by run, from the first failure on."""

    def __init__(self, cohort: Cohort) -> None:
        self.groups = cohort.groups
        self.model, self._mapped_model = (cohort.model(vectorised) for vectorised in (False, True))
        self.mapped = len(cohort) > 1

    def __call__(self, function: OfRun, own: Sequence[Tree], data: Sequence[Tensor]) -> Tree:
        """What it gives for each run, stacked. Leaves of `own` have one entry a run, tensors of `data` one a group."""
        if self.mapped:
            try:
                return self._side_by_side(partial(function, self._mapped_model), own, data)
            except (RuntimeError, GlocalError):
                self.mapped = False
        each = [(group, run) for group, runs in enumerate(self.groups) for run in range(runs.start, runs.stop)]
        return tree.stack([_called(partial(function, self.model), own, data, *where) for where in each])

    def _side_by_side(self, function: OfRun, own: Sequence[Tree], data: Sequence[Tensor]) -> Tree:
        of_group: Callable[..., Any] = vmap(function, in_dims=(*(0 for _ in own), *(None for _ in data)))
        if len({runs.stop - runs.start for runs in self.groups}) > 1:
            return tree.concatenate([_called(of_group, own, data, *where) for where in enumerate(self.groups)])
        apart = [tree.map_tree(lambda leaf: leaf.unflatten(0, (len(self.groups), -1)), part) for part in own]
        return tree.map_tree(lambda leaf: leaf.flatten(0, 1), vmap(of_group)(*apart, *data))


def _called(function: OfRun, own: Sequence[Tree], data: Sequence[Tensor], group: int, runs: int | slice) -> Tree:
    return function(*(tree.select(part, runs) for part in own), *(part[group] for part in data))
