"""A diverged run is recorded at its step, is not evaluated afterwards and does not affect other runs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from small_problems import blobs, cohort_of, linear_network, train_to_the_end
from torch import Tensor

from glocal.algorithms import ALGORITHMS
from glocal.algorithms.algorithm import Algorithm
from glocal.algorithms.baselines import SGD
from glocal.algorithms.ewc import EWC
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort
from glocal.engine.loop import Execution

EPOCHS = 60


def regressions(*scales: float) -> Challenge:
    """Linear regressions, one a scale of the inputs: the curvature is its square."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, generator=draw)
    tasks = [(scale * x, torch.randn(16, 1, generator=draw)) for scale in scales]
    return from_tasks("regressions", [(task, task) for task in tasks], setting="domain", loss="squared-error")


def flat_then_steep(lrs: list[float]) -> Cohort:
    """The second task has a hundred times the first one's curvature: learning rate 0.1 is fine, and then is not."""
    return cohort_of(regressions(1, 10), SGD(), list(enumerate(lrs)), linear_network, EPOCHS, batch_size=16)


def first_bad_step(cohort: Cohort, run: int) -> int:
    """Plain gradient descent by hand, until the loss is not finite."""
    params = [p[run].clone() for p in cohort.initial()[0].values()]
    for step in range(2 * EPOCHS):
        x, y = cohort.challenge.task(step // EPOCHS, 0).train
        weight, bias = (p.requires_grad_() for p in params)
        loss = 0.5 * ((x @ weight.T + bias - y) ** 2).sum(1).mean()
        if not math.isfinite(float(loss.detach())):
            return step
        gradients = torch.autograd.grad(loss, [weight, bias])
        params = [(p - cohort.members[run].lr * s).detach() for p, s in zip((weight, bias), gradients, strict=True)]
    return -1


def rows_measured(matrix: Tensor) -> list[list[bool]]:
    return [[bool(row.isfinite().all()) for row in run] for run in matrix]


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
def test_a_diverging_run_is_recorded_at_its_step_and_measured_no_more(execution: Execution) -> None:
    cohort = flat_then_steep([1e-4, 0.1, 1e6])
    expected = [first_bad_step(cohort, run) for run in range(3)]
    assert expected[0] == -1
    assert EPOCHS < expected[1] < 2 * EPOCHS, "the second run diverges in the second task"
    assert 0 < expected[2] < EPOCHS
    end = train_to_the_end(cohort, execution)
    assert end.state.diverged.tolist() == expected
    for name in ("train_class_loss", "test_class_loss"):
        measured = rows_measured(end.record.arrays[name])
        assert measured == [[True, True, True], [True, True, False], [True, False, False]]
        gone = end.record.arrays[name][2, 1:]
        assert bool(gone.isnan().all())


@pytest.mark.parametrize("algorithm", [SGD(), EWC()], ids=lambda a: a.name)
def test_the_other_runs_do_not_notice(algorithm: Algorithm) -> None:
    challenge = blobs((90, 90))
    sane, mad = [(0, 0.05), (1, 0.1), (3, 0.2)], (2, 1e30)
    without = train_to_the_end(cohort_of(challenge, algorithm, sane), "vectorised")
    among = train_to_the_end(cohort_of(challenge, algorithm, [*sane[:2], mad, *sane[2:]]), "vectorised")
    assert among.state.diverged.tolist()[2] >= 0
    others = [0, 1, 3]
    assert among.state.diverged[others].tolist() == [-1, -1, -1]
    for name, values in without.state.params.items():
        assert torch.equal(among.state.params[name][others], values)
    for name, values in without.record.arrays.items():
        if name != "memory_bytes":
            assert bool(values.isfinite().all())
        assert torch.equal(among.record.arrays[name][others], values)
    assert bool(among.record.arrays["test_class_accuracy"][2, 1:].isnan().all())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_lets_one_run_spoil_the_others(name: str) -> None:
    kind = ALGORITHMS[name]
    slots = {"slots": 32} if any(f.name == "slots" for f in dataclasses.fields(kind)) else {}
    algorithm = kind(**slots)
    challenge = blobs((60, 60, 60), test=12)
    sane, mad = [(0, 0.05), (1, 0.1)], (2, 1e30)
    without = train_to_the_end(cohort_of(challenge, algorithm, sane, epochs=1), "vectorised")
    among = train_to_the_end(cohort_of(challenge, algorithm, [*sane, mad], epochs=1), "vectorised")
    assert among.state.diverged.tolist()[:2] == [-1, -1] and among.state.diverged.tolist()[2] >= 0
    for key, values in without.state.params.items():
        torch.testing.assert_close(among.state.params[key][:2], values, rtol=1e-4, atol=1e-6)


def test_parameters_lost_in_the_very_last_step_are_noticed() -> None:
    """The only step's objective was finite, what it led to is not; a second step would have shown it."""
    diverged = []
    for epochs in (1, 2):
        cohort = cohort_of(regressions(100), SGD(), [(0, 1e-5), (1, 3e38)], linear_network, epochs, batch_size=16)
        end = train_to_the_end(cohort)
        diverged.append(end.state.diverged.tolist())
        assert rows_measured(end.record.arrays["test_class_loss"]) == [[True, True], [True, False]]
    assert diverged == [[-1, 1], [-1, 1]]
