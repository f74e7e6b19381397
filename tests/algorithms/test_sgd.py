"""Plain SGD through the engine against a loop with torch's optimiser."""

from __future__ import annotations

import doctest
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from small_problems import blobs, cohort_of, double_model, small_mlp
from torch.nn import functional

import glocal.algorithms
import glocal.optimizers
from glocal.algorithms.baselines import SGD
from glocal.engine.loop import Execution, train
from glocal.errors import GlocalError
from glocal.rng import generator
from glocal.tree import Params, select


def hand_written(start: Params, lr: float, seed: int, sizes: tuple[int, ...], epochs: int, batch: int) -> list[Params]:
    """θ_1, θ_2, …: an ordinary training loop with the same batches."""
    challenge = blobs(sizes)
    network = small_mlp(challenge.input_shape, challenge.outputs)
    network.load_state_dict(start)
    optimiser = torch.optim.SGD(network.parameters(), lr=lr)
    solutions = []
    for task in range(len(sizes)):
        x, y = challenge.task(task, seed).train
        for epoch in range(epochs):
            order = torch.randperm(len(y), generator=generator(seed, "order", task, epoch))
            for rows in order.split(batch):
                optimiser.zero_grad()
                functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimiser.step()
        solutions.append({k: p.detach().clone() for k, p in network.named_parameters()})
    return solutions


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
@pytest.mark.parametrize(("epochs", "batch"), [(1, 32), (3, 50), (2, 1000)])
def test_the_engine_trains_as_a_plain_loop_does(execution: Execution, epochs: int, batch: int) -> None:
    runs, sizes = [(3, 0.05), (3, 0.2), (8, 0.1)], (150, 110)
    cohort = cohort_of(blobs(sizes), SGD(), runs, epochs=epochs, batch_size=batch)
    start, *solutions = [
        {k: p.clone() for k, p in snapshot.state.params.items()} for snapshot in train(cohort, execution=execution)
    ]
    for run, (seed, lr) in enumerate(runs):
        expected = hand_written(select(start, run), lr, seed, sizes, epochs, batch)
        for theta, solution in zip(expected, solutions, strict=True):
            torch.testing.assert_close(select(solution, run), theta, rtol=1e-5, atol=1e-6)


def test_runs_start_from_their_seed_alone() -> None:
    cohort = cohort_of(blobs(), SGD(), [(3, 0.05), (3, 0.2), (8, 0.1)])
    weight = cohort.initial()[0]["layers.0.weight"]
    assert torch.equal(weight[0], weight[1])
    assert not torch.equal(weight[0], weight[2])
    torch.manual_seed(99)
    assert torch.equal(cohort_of(blobs(), SGD(), [(8, 0.7)]).initial()[0]["layers.0.weight"][0], weight[2])


def test_training_leaves_the_challenges_data_as_they_were() -> None:
    challenge = blobs((60, 60))
    before = [part.clone() for t in range(2) for part in challenge.task(t, 0).train]
    for _ in train(cohort_of(challenge, SGD())):
        pass
    after = [part for t in range(2) for part in challenge.task(t, 0).train]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_it_remembers_nothing_and_approximates_the_past_by_zero() -> None:
    model, params = double_model()
    value = SGD().approximation(model, {}, 0)
    assert float(value(params)) == 0
    gradients = torch.func.grad(value)(params)
    assert all(torch.equal(grad_value, torch.zeros_like(params[k])) for k, grad_value in gradients.items())


def test_the_examples_in_docstrings_run() -> None:
    for module in (glocal.algorithms, glocal.optimizers):
        results = doctest.testmod(module)
        assert results.attempted > 0 and results.failed == 0


def test_options_may_have_types_that_only_a_type_checker_knows() -> None:
    @dataclass(frozen=True)
    class Mine(SGD):
        at_least: ClassVar[dict[str, float]] = {"size": 1}
        size: NotImported = 1  # type: ignore[name-defined]  # noqa: F821

    assert Mine(2).size == 2
    with pytest.raises(GlocalError, match="size = 0 was given; it must be at least 1"):
        Mine(0)
