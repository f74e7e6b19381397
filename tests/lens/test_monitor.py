"""The monitor sees live what a recording shows afterwards, tells of a break once, and leaves training as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from recordings import Branching, Recurrent, Together, blobs, cohort, hidden, normalised, taylor_curves

from glocal.algorithms import ER, EWC, PNN, SGD, Algorithm
from glocal.challenges.challenge import Challenge, Data, Task
from glocal.engine.cohort import Cohort
from glocal.engine.loop import Snapshot, train
from glocal.errors import GlocalError
from glocal.lens.monitor import Monitor
from glocal.lens.record import record

RUNS = [(0, 0.3), (0, 0.05), (1, 0.1)]


def watched(monitor: Monitor) -> Snapshot:
    *_, last = train(monitor.cohort, watch=monitor)
    return last


def of_seeds() -> Challenge:
    """Blobs that every seed sees otherwise, the later tasks smaller."""
    made = blobs()

    def task(index: int, seed: int) -> Task:
        own, count = made.make_task(index, seed), 40 - 10 * index
        train, test = (Data(data.x[:count].roll(seed, 1), data.y[:count]) for data in (own.train, own.test))
        return replace(own, train=train, test=test)

    return replace(made, seeded=True, make_task=task)


def afterwards(trained: Cohort, structure: str, examples: int) -> list:
    """The same expansions from a recording, at the ends of epochs in which something is finished."""
    found = []
    for seen in record(trained, examples=examples):
        in_tasks = [m for a, m in zip(seen.snapshots, seen.snapshots[1:], strict=False) if m.finished == a.finished]
        in_tasks = [m for m in in_tasks if m.finished]
        found.append(taylor_curves(seen.trace, 2, structure, snapshots=in_tasks))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize(
    "make", [hidden, Branching, normalised, Recurrent], ids=["mapped", "one by one", "statistics", "recurrent"]
)
def test_it_sees_what_a_recording_shows(structure: str, make: object) -> None:
    trained = cohort(blobs(), SGD(), make, RUNS)
    monitor = Monitor(trained, 0.1, structure, every=1, examples=15)  # type: ignore[arg-type]
    watched(monitor)
    for run, expected in enumerate(afterwards(trained, structure, 15)):
        found = monitor.curves(run)
        assert found.finished.tolist() == [1, 1, 2, 2] and found.step.tolist() == [15, 20, 25, 30]
        for name in ("true", "approximate", "distance"):
            a, b = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seeds", [(0, 0, 1, 1), (0, 0, 1), (0, 1, 2), (3,)], ids=str)
@pytest.mark.parametrize("make", [hidden, Branching, normalised], ids=["mapped", "one by one", "statistics"])
def test_every_run_is_seen_on_the_examples_of_its_seed(seeds: Sequence[int], make: object) -> None:
    trained = cohort(of_seeds(), SGD(), make, [(seed, 0.05 + 0.1 * run) for run, seed in enumerate(seeds)])
    monitor = Monitor(trained, 0.1, every=1, examples=35)
    watched(monitor)
    for run, expected in enumerate(afterwards(trained, "diagonal", 35)):
        found = monitor.curves(run)
        assert found.known.sum() == 6
        for name in ("true", "approximate", "distance"):
            a, b = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_break_is_told_once_when_it_comes() -> None:
    trained = cohort(blobs(), SGD(), runs=RUNS)
    reference = afterwards(trained, "diagonal", 100)
    largest = [c.error.nan_to_num(0).amax(1) for c in reference]
    epsilon = float(largest[0][1] + largest[0][2]) / 2  # the first run breaks between its second and third look
    assert largest[0][0] < epsilon and largest[0][1] < epsilon < largest[0][2]
    told: list[str] = []
    monitor = Monitor(trained, epsilon, every=1, on_violation=told.append)
    watched(monitor)
    for run, errors in enumerate(largest):
        outside = (errors >= epsilon).nonzero().flatten().tolist()
        found = monitor.violations[run]
        assert (found is None) == (not outside)
        if found is not None:
            assert found.snapshot == outside[0] and found == monitor.assumption(run).first_violation
    first = monitor.violations[0]
    assert first is not None and (first.task, first.last_step_inside, first.step) == (2, 20, 25)
    assert len(told) == sum(b is not None for b in monitor.violations)
    (said,) = [sentence for sentence in told if sentence.startswith("sgd, lr 0.3, seed 0: ")]
    assert "violated between steps 20 and 25, with 2 tasks finished" in said


def test_who_knows_no_error_at_the_first_solution_says_nothing_of_it() -> None:
    """A run that diverged in the first task, and an approximation of the algorithm's own."""
    lost = Monitor(cohort(blobs(), SGD(), runs=((0, 1e9),)), 0.1, every=1)
    watched(lost)
    own = Monitor(cohort(blobs(), ER(slots=2), runs=RUNS), 1e-12, "own", every=1)
    watched(own)
    for found in (*lost.violations, *own.violations):
        assert found is not None and found.last_step_inside == -1 and "violated at step 15" in str(found)


def test_a_break_at_the_first_look_is_after_the_first_task() -> None:
    """Ten steps a task: at its solution an expansion has no error."""
    monitor = Monitor(cohort(blobs(), SGD(), runs=RUNS), 1e-12, every=1)
    watched(monitor)
    for found in monitor.violations:
        assert found is not None and (found.snapshot, found.last_step_inside, found.step) == (0, 10, 15)
        assert "violated between steps 10 and 15, with 1 task finished" in str(found)


@pytest.mark.parametrize(("epochs", "every", "steps"), [(5, 3, [40, 50]), (1, 3, [10]), (4, 2, [30, 40])])
def test_it_looks_every_few_epochs_and_at_the_last(epochs: int, every: int, steps: list[int]) -> None:
    monitor = Monitor(cohort(blobs(2), SGD(), epochs=epochs), 1e9, every=every)
    watched(monitor)
    assert monitor.curves().step.tolist() == steps
    assert monitor.assumption().first_violation is None


def test_by_default_it_looks_more_seldom_as_tasks_become_more() -> None:
    monitor = Monitor(cohort(blobs(9), SGD(), epochs=6), 1.0)
    watched(monitor)
    steps, found = 5, monitor.curves()
    epochs = (found.step // steps - 1 - 6 * found.finished).tolist()
    seen = {task: [e for t, e in zip(found.finished.tolist(), epochs, strict=True) if t == task] for task in range(9)}
    assert seen[0] == []
    assert seen[1] == seen[3] == [2, 5]
    assert seen[4] == [3, 5]
    assert seen[8] == [5]


@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=20), EWC()], ids=lambda a: a.name)
@pytest.mark.parametrize("approximation", ["diagonal", "own"])
def test_training_is_the_same_bit_for_bit(algorithm: Algorithm, approximation: str) -> None:
    trained = cohort(blobs(), algorithm, runs=RUNS)
    *_, plain = train(trained)
    seen = watched(Monitor(trained, 0.1, approximation, every=1))  # type: ignore[arg-type]
    assert all(torch.equal(p, seen.state.params[k]) for k, p in plain.state.params.items())
    assert torch.equal(plain.record.arrays["epoch_loss"], seen.record.arrays["epoch_loss"])


def test_replay_of_everything_is_seen_to_have_no_error() -> None:
    monitor = Monitor(cohort(blobs(), ER(slots=240), runs=RUNS), 1e-5, "own", every=1)
    watched(monitor)
    for run in range(3):
        found = monitor.curves(run)
        assert found.known.sum() == 6 and found.error[found.known].max() < 1e-6
        assert found.distance[found.known].min() > 0
    assert monitor.violations == [None] * 3


def test_columns_of_finished_tasks_are_seen_not_to_change() -> None:
    monitor = Monitor(cohort(blobs(), PNN()), 1e-4, "own")
    watched(monitor)
    assert monitor.violations == [None] and monitor.curves().known.any()


def test_a_run_that_diverges_breaks_and_the_others_go_on() -> None:
    trained = cohort(blobs(), SGD(), runs=[(0, 1e20), (1, 1e-4)])
    monitor = Monitor(trained, 1.0)
    watched(monitor)
    lost, small = monitor.violations
    assert lost is not None and lost.task == 1 and lost.error == float("inf")
    assert small is None and monitor.curves(1).error[monitor.curves(1).known].max() < 0.1


def test_before_anything_is_finished_nothing_is_seen() -> None:
    monitor = Monitor(cohort(blobs(1), SGD()), 1.0)
    watched(monitor)
    assert monitor.curves().true.shape == (0, 1)


def test_it_watches_one_training_from_its_beginning() -> None:
    trained = cohort(blobs(), SGD())
    monitor = Monitor(trained, 1.0)
    watched(monitor)
    with pytest.raises(GlocalError, match="task 1 is training, but this monitor has seen 2 tasks end"):
        watched(monitor)
    training = train(trained)
    next(training)
    begin = next(training)
    with pytest.raises(GlocalError, match="task 2 is training, but this monitor has seen 0 tasks end"):
        list(train(trained, begin, watch=Monitor(trained, 1.0)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": -1.0}, "epsilon = -1"),
        ({"approximation": "diagnoal"}, "Did you mean 'diagonal'"),
        ({"every": 0}, "every = 0"),
        ({"examples": 0}, "examples = 0"),
    ],
)
def test_bad_input_is_said(given: dict, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        Monitor(cohort(blobs(), SGD()), **{"epsilon": 1.0, **given})


@pytest.mark.parametrize("runs", [RUNS[:1], RUNS], ids=["one run", "several"])
def test_who_cannot_be_expanded_is_watched_by_the_algorithms_own_approximation(runs: list) -> None:
    with pytest.raises(GlocalError, match=r"cannot be monitored with expansions; use 'own'\..*two samples or more"):
        watched(Monitor(cohort(blobs(), SGD(), Together, runs), 1.0))
    monitor = Monitor(cohort(blobs(), ER(slots=240), Together, runs), 1e-5, "own")
    watched(monitor)
    assert monitor.violations == [None] * len(runs) and monitor.curves().known.any()


def test_networks_with_outputs_for_every_task_are_not_expanded() -> None:
    with pytest.raises(GlocalError, match="pnn has separate outputs for every task"):
        Monitor(cohort(blobs(), PNN()), 1.0)
