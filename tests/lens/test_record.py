"""A recording holds what training passed, at the moments that it names, and leaves training as it was."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from recordings import Branching, Recurrent, blobs, cohort, dropping, hidden, normalised, taylor_curves

from glocal import tree
from glocal.algorithms import ER, EWC, SGD, Algorithm
from glocal.engine.loop import train
from glocal.errors import GlocalError
from glocal.lens.approximation_error import own_curves
from glocal.lens.locality_assumption import locality_assumption
from glocal.lens.record import record
from glocal.lens.training_trace import distance


def test_a_recording_has_the_ends_of_tasks_with_both_memories() -> None:
    watched = cohort(blobs(), EWC(), epochs=3)
    (seen,) = record(watched, every_epochs=2)
    assert [(m.finished, m.step) for m in seen.snapshots] == [
        (0, 0),
        (0, 10),
        (0, 15),
        (1, 15),
        (1, 25),
        (1, 30),
        (2, 30),
        (2, 40),
        (2, 45),
        (3, 45),
    ]
    before, after = seen.snapshots[5], seen.snapshots[6]
    assert all(torch.equal(before.checkpoint.params[k], p) for k, p in after.checkpoint.params.items())
    assert [len(m.memory["loss_at_solution"]) for m in (before, after)] == [1, 2]
    (between,) = record(watched, every_epochs=0)
    assert [m.finished for m in between.snapshots] == [0, 1, 2, 3]


def test_a_recording_of_every_step() -> None:
    """40 examples in batches of 8: five steps an epoch. What training passes at the ends of epochs stays the same."""
    watched = cohort(blobs(2), EWC(), runs=[(0, 0.1), (1, 0.05)])
    epochs = record(watched)
    for seen, coarse in zip(record(watched, every_steps=1), epochs, strict=True):
        assert [(m.finished, m.step) for m in seen.snapshots] == [
            *((0, step) for step in range(11)),
            *((1, step) for step in range(10, 21)),
            (2, 20),
        ]
        by_time = {(m.finished, m.step): m for m in seen.snapshots}
        for moment in coarse.snapshots:
            same = by_time[moment.finished, moment.step].checkpoint.params
            assert all(torch.equal(same[k], p) for k, p in moment.checkpoint.params.items())
        moved = [distance(a.checkpoint, b.checkpoint) for a, b in pairwise(seen.snapshots) if a.step != b.step]
        assert min(moved) > 0
    found = locality_assumption(taylor_curves(seen.trace, snapshots=seen.snapshots), 1e-4)
    assert (
        found.first_violation is not None and found.first_violation.last_step_inside == found.first_violation.step - 1
    )
    assert f"at step {found.first_violation.step}," in str(found.first_violation)
    (some,) = record(cohort(blobs(2), SGD()), every_epochs=0, every_steps=2)
    assert [m.step for m in some.snapshots] == [0, 2, 4, 7, 9, 10, 12, 14, 17, 19, 20]


@pytest.mark.parametrize(
    ("make", "algorithm"),
    [(m, a) for m in (hidden, Branching, Recurrent, normalised, dropping) for a in (ER(slots=20), EWC())],
    ids=lambda given: getattr(given, "__name__", None) or given.name,
)
def test_every_step_of_one_run_whatever_its_network(make: Any, algorithm: Algorithm) -> None:
    """The recording ends epochs where training does, to the bit, and is of θ, statistics and memory at each step."""
    watched = cohort(blobs(2), algorithm, make)
    (seen,), (coarse,) = record(watched, every_steps=1), record(watched)
    assert [(m.finished, m.step) for m in seen.snapshots] == [
        *((0, step) for step in range(11)),
        *((1, step) for step in range(10, 21)),
        (2, 20),
    ]
    by_time = {(m.finished, m.step): m for m in seen.snapshots}
    for moment in coarse.snapshots:
        there = by_time[moment.finished, moment.step]
        for part in ("params", "buffers"):
            assert all(
                torch.equal(getattr(there.checkpoint, part)[k], p) for k, p in getattr(moment.checkpoint, part).items()
            )
        memory = tree.flatten(there.memory)
        assert all(torch.equal(memory[k], leaf) for k, leaf in tree.flatten(moment.memory).items())
    inside = [m for m in seen.snapshots if m.finished == 0]
    assert min(distance(a.checkpoint, b.checkpoint) for a, b in pairwise(inside)) > 0
    if make is normalised:
        assert [int(m.checkpoint.buffers["1.num_batches_tracked"]) for m in inside] == list(range(11))
    if algorithm.name == "er":  # which keeps the first twenty examples, eight a step
        assert [int(m.memory["count"]) for m in inside] == [8 * step for step in range(11)]


def test_steps_that_cannot_be_recorded() -> None:
    with pytest.raises(GlocalError, match="every_steps = 0"):
        record(cohort(blobs(2), SGD()), every_steps=0)
    with pytest.raises(GlocalError, match=r"one run at a time: vmap: .*\.item\(\)"):
        record(cohort(blobs(2), SGD(), Branching, runs=[(0, 0.1), (1, 0.1)]), every_steps=1)


def test_a_recording_holds_what_training_passed_and_does_not_disturb_it() -> None:
    watched = cohort(blobs(), ER(slots=12), runs=[(0, 0.1), (1, 0.05)])
    plain = record(watched, every_epochs=0, keep_memory=False)
    for run, seen in enumerate(record(watched)):
        for a, b in zip(plain[run].trace.checkpoints, seen.trace.checkpoints, strict=True):
            assert all(torch.equal(p, b.params[k]) for k, p in a.params.items())
        held = [m.memory["count"].item() for m in seen.snapshots]
        assert held == [0, 40, 80, 80, 120, 160, 160, 200, 240, 240]  # each as it was then
        assert seen.algorithm == watched.members[run].algorithm


def test_a_network_that_cannot_be_mapped_is_recorded() -> None:
    (seen,) = record(cohort(blobs(2), ER(slots=160), Branching))
    found = own_curves(seen)
    assert found.error[found.known].max() < 1e-6


def test_training_calls_who_watches_after_every_epoch_before_consolidation() -> None:
    watched, calls = cohort(blobs(), EWC()), []

    def watch(task: int, epoch: int, state: object, loader: object) -> None:
        calls.append((task, epoch, state.clock, state.memory["loss_at_solution"].shape[1], int(loader.task)))  # type: ignore[attr-defined]

    for _ in train(watched, watch=watch):
        pass
    assert calls == [
        (0, 0, 5, 0, 0),
        (0, 1, 10, 0, 0),
        (1, 0, 15, 1, 1),
        (1, 1, 20, 1, 1),
        (2, 0, 25, 2, 2),
        (2, 1, 30, 2, 2),
    ]
