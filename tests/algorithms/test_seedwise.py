"""Runs of one seed share batches and memory where that changes nothing; the bits are compared by
`test_cohort_independence.py`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from small_problems import blobs, cohort_of, train_to_the_end

from glocal import tree
from glocal.algorithms import DER, ER, EWC, SGD, SI, Algorithm
from glocal.algorithms.algorithm import Memory, Step
from glocal.engine.executors import RunByRun, Vectorised
from glocal.engine.loader import Feed
from glocal.engine.loop import choose
from glocal.engine.seedwise import Seedwise

GRID = [(seed, lr) for seed in (0, 1, 2) for lr in (0.1, 0.2)]


@dataclass(frozen=True)
class Otherwise(ER):
    """It inherits that it is blind, and remembers in a way of its own."""

    def observe(self, memory: Memory, step: Step) -> Memory:
        return super().observe(memory, step)


@pytest.mark.parametrize(
    ("algorithm", "runs", "kind"),
    [
        (ER(slots=9), GRID, Seedwise),
        (ER(slots=9), GRID[:-1], Vectorised),
        (ER(slots=9), GRID[::2], Vectorised),
        (ER(slots=9), GRID[::-1], Vectorised),
        (ER(slots=9), GRID[:1], RunByRun),
        (Otherwise(slots=9), GRID, Vectorised),
        (DER(slots=9), GRID, Vectorised),
        (SGD(), GRID, Seedwise),
        (EWC(), GRID, Seedwise),
        (SI(), GRID, Vectorised),
    ],
)
def test_seeds_share_what_all_their_runs_would_do_alike(
    algorithm: Algorithm, runs: list[tuple[int, float]], kind: type
) -> None:
    cohort = cohort_of(blobs(), algorithm, runs)
    feed = Feed(cohort)
    feed.load_task(0)
    assert type(choose(cohort, feed, "auto")) is kind


def test_every_run_has_its_memory_again_after_an_epoch() -> None:
    memory = train_to_the_end(cohort_of(blobs(), ER(slots=9), GRID), "vectorised").state.memory
    one_by_one = train_to_the_end(cohort_of(blobs(), ER(slots=9), GRID), "run-by-run").state.memory
    for name, leaf in tree.flatten(memory).items():
        assert leaf.shape[0] == len(GRID)
        assert leaf.equal(tree.flatten(one_by_one)[name])
