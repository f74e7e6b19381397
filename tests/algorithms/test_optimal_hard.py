"""Theorem 4.1: updates in the null space of the average Hessian do not forget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_problems import (
    batch_of,
    blobs,
    cohort_of,
    correlated_task,
    double_model,
    elsewhere,
    examples,
    flat,
    gradient,
    regression_loss,
    regression_matrix,
    regression_snapshots,
    train_to_the_end,
)

from glocal.algorithms.baselines import SGD
from glocal.algorithms.optimal import OptimalHard
from glocal.engine.loop import train
from glocal.errors import GlocalError

FLAT = [correlated_task(seed, features=14, spans=3) for seed in range(3)]
"""Three tasks in three dimensions each, of fourteen: there is room for all of them."""


def forgetting(solutions: list, tasks: list) -> float:
    """E(T) = (1/T) Σ_o L_o(θ_T) − L_o(θ_o), from the definition."""
    ends = [regression_matrix(theta) for theta in solutions]
    return sum(
        regression_loss(t, ends[-1]) - regression_loss(t, end) for t, end in zip(tasks, ends, strict=True)
    ) / len(tasks)


@pytest.mark.parametrize("structure", ["full", "low-rank"])
@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_on_quadratic_tasks_with_room_it_forgets_nothing_and_learns_all(structure: str, matrix: str) -> None:
    hard = OptimalHard(threshold=1e-9, structure=structure, matrix=matrix, rank=8)  # type: ignore[arg-type]
    solutions, _ = regression_snapshots(hard, FLAT, epochs=150, lr=0.5)
    assert abs(forgetting(solutions, FLAT)) < 1e-8
    assert all(regression_loss(task, regression_matrix(solutions[-1])) < 1e-3 for task in FLAT), "and it has learnt"


def test_which_plain_sgd_does_not_manage() -> None:
    solutions, _ = regression_snapshots(SGD(), FLAT, epochs=150, lr=0.5)
    assert forgetting(solutions, FLAT) > 0.1


def test_theorem_1_the_second_tasks_forgetting_is_half_the_quadratic_form() -> None:
    """With a threshold that lets some curvature through, E(2) = ½ Δᵀ (½ H_1) Δ and is not 0."""
    tasks = FLAT[:2]
    solutions, _ = regression_snapshots(OptimalHard(threshold=0.9, structure="full"), tasks, epochs=150, lr=0.5)
    x = np.hstack([tasks[0][0].astype(np.float64), np.ones((16, 1))])
    moved = regression_matrix(solutions[1]) - regression_matrix(solutions[0])
    predicted = np.trace(moved.T @ (x.T @ x / 16) @ moved) / 2 / 2
    assert predicted > 1e-4
    assert forgetting(solutions, tasks) == pytest.approx(predicted, rel=1e-3)


def dense_hessians(theta: list, model, tasks: list) -> torch.Tensor:
    total = torch.zeros(())
    for params, task in zip(theta, tasks, strict=True):
        names, sizes = list(params), [p.numel() for p in params.values()]

        def of_vector(v, names=names, sizes=sizes, params=params, task=task):
            parts = {k: p.view_as(params[k]) for k, p in zip(names, v.split(sizes), strict=True)}
            return model.loss(parts, task.x, task.y)

        total = total + torch.autograd.functional.hessian(of_vector, flat(params))
    return total


@pytest.mark.parametrize(("structure", "rank"), [("full", 1), ("low-rank", 100)])
def test_its_direction_is_orthogonal_to_every_eigenvector_above_the_threshold(structure: str, rank: int) -> None:
    model, params = double_model()
    hard = OptimalHard(threshold=0.05, structure=structure, rank=rank)  # type: ignore[arg-type]
    memory = hard.init(model, params, batch_of(examples(2, 0)))
    solutions = [elsewhere(params, seed) for seed in (1, 2)]
    tasks = [batch_of(examples(9, 50 + t), t, t) for t in range(2)]
    for theta, task in zip(solutions, tasks, strict=True):
        memory = hard.consolidate(model, theta, memory, task)
    batch = batch_of(examples(4, 7), 0, 2)
    grads = gradient(lambda p: model.loss(p, batch.x, batch.y), params)
    followed = flat(hard.direction(model, grads, params, memory, batch))
    hessian = dense_hessians(solutions, model, tasks)
    if structure == "full":
        values, vectors = torch.linalg.eigh(hessian)
        steep = vectors[:, values.abs() > 0.05 * values.abs().max()]
        expected = flat(grads) - steep @ (steep.T @ flat(grads))
        torch.testing.assert_close(followed, expected, rtol=1e-8, atol=1e-10)
    else:  # by magnitudes: |H_1| + |H_2|
        parts = [dense_hessians([s], model, [t]) for s, t in zip(solutions, tasks, strict=True)]
        sizes = sum(((v * e.abs()) @ v.T for e, v in map(torch.linalg.eigh, parts)), torch.zeros(()))
        values, vectors = torch.linalg.eigh(sizes)
        steep = vectors[:, values > 0.05 * values.max()]
        expected = flat(grads) - steep @ (steep.T @ flat(grads))
        torch.testing.assert_close(followed, expected, rtol=1e-6, atol=1e-8)
    assert 0 < float(followed.norm()) < float(flat(grads).norm())


def test_before_the_first_task_ends_it_is_plain_sgd() -> None:
    cohort = cohort_of(blobs(), OptimalHard(), [(0, 0.1)])
    first = [s.state.params["layers.0.weight"].clone() for s in train(cohort)][1]
    plain = [s.state.params["layers.0.weight"].clone() for s in train(cohort_of(blobs(), SGD(), [(0, 0.1)]))][1]
    assert torch.equal(first, plain)


def test_it_forgets_less_than_sgd_where_steps_are_small() -> None:
    losses = {}
    for algorithm in (OptimalHard(threshold=1e-4), SGD()):
        end = train_to_the_end(cohort_of(blobs((200, 200)), algorithm, [(0, 0.1)], epochs=20))
        matrix = end.record.arrays["train_class_loss"][0]
        losses[algorithm.name] = float(matrix[2, 0] - matrix[1, 0])
    assert losses["optimal-hard"] < 0.5 * losses["sgd"]


@pytest.mark.parametrize("structure", ["full", "low-rank"])
def test_the_same_in_a_cohort_and_run_by_run(structure: str) -> None:
    cohort = cohort_of(blobs((60, 60)), OptimalHard(structure=structure, rank=4), [(0, 0.05), (1, 0.1)])  # type: ignore[arg-type]
    ends = [train_to_the_end(cohort, way).state for way in ("vectorised", "sequential")]
    torch.testing.assert_close(ends[0].params, ends[1].params, rtol=1e-3, atol=1e-4)


def test_a_full_hessian_of_a_large_network_is_refused() -> None:
    challenge = blobs((40,), shape=(1, 28, 28), classes=10)

    def wide(shape, outputs):
        from glocal.networks.mlp import mlp

        return mlp(shape, outputs)

    with pytest.raises(GlocalError, match=r"89,610 parameters has 8,029,952,100 entries.*low-rank"):
        train_to_the_end(cohort_of(challenge, OptimalHard(structure="full"), network=wide))
    with pytest.raises(GlocalError, match="threshold = 2 was given; it must be at least 0 and below 1"):
        OptimalHard(threshold=2)
