"""Runs of one seed are fed the same examples: what is done to them is done once for all its learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.algorithm import Algorithm, Batch, Memory, Step
from glocal.engine.cohort import Cohort
from glocal.engine.executors import BATCH_DIMS, STEP_DIMS, Tick, Vectorised
from glocal.engine.loader import Feed
from glocal.engine.state import State
from glocal.engine.step import Hyper
from glocal.tree import Tree


class Seedwise(Vectorised):
    """The cohort as seeds × runs of each: `vmap` over the seeds, and inside it over a seed's runs, which share a batch
    and, where it is blind to θ, during an epoch the memory.

    Images are gathered, stored and scaled once a seed, and one product with the stacked weights of all its runs takes
    the place of a product for each of them.
    """

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        self.each = runs_of_each_seed(cohort)
        self.common = is_blind(type(cohort.algorithm))
        self._objective = self._mapped(self.program.objective, memory=2, others=(0, 1, 3))
        self._direction = self._mapped(self.program.direction, memory=3, others=(0, 1, 2, 4))
        self._observed = vmap(self.program.observe, in_dims=(0, 0, STEP_DIMS))
        self._observe = self._observe_once

    def _epoch(self, state: State, feed: Feed, epoch: int, tick: Tick) -> Tensor:
        if not self.common:
            return super()._epoch(state, feed, epoch, tick)
        state.memory = tree.map_tree(lambda leaf: leaf[:: self.each].clone(), state.memory)
        losses = super()._epoch(state, feed, epoch, tick)
        state.memory = tree.map_tree(lambda leaf: leaf.repeat_interleave(self.each, 0), state.memory)
        return losses

    def _batch(self, feed: Feed, step: int) -> Batch:
        return feed.shared(step)

    def _mapped(self, function: Callable[..., Any], memory: int, others: tuple[int, ...]) -> Callable[..., Any]:
        """A function of trees with one entry a run, of a memory with one entry a run or a common one a seed, and, last,
        of seeds' batches."""
        if not self.common:
            others = (*others, memory)
        places = len(others) + 1 + self.common
        of_run = vmap(function, in_dims=tuple(0 if place in others else None for place in range(places)))
        of_seed = vmap(of_run, in_dims=(*(0 for _ in range(places - 1)), BATCH_DIMS))

        def mapped(*given: Any) -> Any:
            return joined(of_seed(*(self._split(part) if i in others else part for i, part in enumerate(given))))

        return mapped

    def _split(self, part: Tree) -> Tree:
        return tree.map_tree(lambda leaf: leaf.unflatten(0, (-1, self.each)), part)

    def _observe_once(self, memory: Memory, hyper: Hyper, step: Step) -> Memory:
        """For all runs of a seed at once: any one's hyperparameters will do."""
        return self._observed(memory, {k: v[:: self.each] for k, v in hyper.items()}, Step(step.batch, {}, {}, {}, {}))


def joined(made: Any) -> Any:
    """Seeds and their runs as one row of runs again."""
    if isinstance(made, tuple):
        return tuple(joined(part) for part in made)
    return {k: joined(part) for k, part in made.items()} if isinstance(made, dict) else made.flatten(0, 1)


def runs_of_each_seed(cohort: Cohort) -> int:
    """How many runs every seed has; 1 where they have not equally many."""
    seeds = [m.seed for m in cohort.members]
    each = seeds.count(seeds[0])
    return each if seeds == [seed for seed in sorted(set(seeds)) for _ in range(each)] else 1


def seeds_share(cohort: Cohort) -> bool:
    """Whether a cohort can be seen so: several runs of each seed, equally many, that are fed by their seed alone. Who
    adds to its memory at every step must be blind: then it is done once a seed."""
    own = type(cohort.algorithm)
    observes, mixes = own.observe is not Algorithm.observe, own.replayed is not Algorithm.replayed
    return (is_blind(own) or not observes) and not mixes and runs_of_each_seed(cohort) > 1


def is_blind(own: type[Algorithm]) -> bool:
    """Whether a memory is blind to θ, by the word of a class whose ways to remember are still the algorithm's own."""
    says = next(c for c in own.__mro__ if "blind" in vars(c))
    ways = ("init", "before_epoch", "observe", "consolidate")
    return own.blind and not own.watches and all(getattr(own, way) is getattr(says, way) for way in ways)
