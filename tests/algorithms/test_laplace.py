"""Online Laplace: the exact posterior where the Kronecker form is exact, else the sum of the tasks' curvatures."""

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
    normal_equations,
    regression_matrix,
    regression_snapshots,
    train_to_the_end,
)

from glocal.algorithms.optimal import Laplace
from glocal.errors import GlocalError

TASKS = [correlated_task(seed) for seed in (0, 1, 2)]


@pytest.mark.parametrize("sums", ["nearest", "each"])
def test_on_linear_gaussian_problems_it_is_the_exact_posterior(sums: str) -> None:
    """Mean and precision of p(θ | D_1 … D_t) for unit noise, a flat prior and sixteen examples a task, task by task."""
    solutions, end = regression_snapshots(Laplace(sums=sums), TASKS, epochs=250)  # type: ignore[arg-type]
    precision, information = np.zeros((4, 4)), np.zeros((4, 2))
    for task, theta in zip(TASKS, solutions, strict=True):
        a, b = normal_equations((task[0].astype(np.float64), task[1].astype(np.float64)))
        precision, information = precision + a, information + b
        np.testing.assert_allclose(regression_matrix(theta), np.linalg.solve(precision, information), atol=1e-5)
    block = end.state.memory["hessian"]["kronecker"]["base.layers.0"]
    factors = zip(*(block[f][0] if sums == "each" else block[f] for f in ("A", "G")), strict=True)
    actual = sum(np.kron(g.numpy(), a.numpy()) for a, g in factors)
    np.testing.assert_allclose(actual, np.kron(np.eye(2), precision), atol=1e-5)


def test_the_penalty_weighs_the_past() -> None:
    solutions, _ = regression_snapshots(Laplace(penalty=0.4), TASKS[:2], epochs=250)
    (a, b), (c, d) = (normal_equations((x.astype(np.float64), y.astype(np.float64))) for x, y in TASKS[:2])
    np.testing.assert_allclose(regression_matrix(solutions[-1]), np.linalg.solve(0.4 * a + c, 0.4 * b + d), atol=1e-5)


def test_with_each_tasks_factors_its_quadratic_is_the_sum_of_their_products() -> None:
    model, params = double_model()
    laplace = Laplace(penalty=0.6, sums="each")
    memory = laplace.init(model, params, batch_of(examples(2, 0)))
    solutions = [elsewhere(params, seed) for seed in (1, 2)]
    tasks = [batch_of(examples(9, 50 + t), t, t) for t in range(2)]
    for theta, task in zip(solutions, tasks, strict=True):
        memory = laplace.consolidate(model, theta, memory, task)
    here, expected = elsewhere(params, 8), 0.0
    for theta, task in zip(solutions, tasks, strict=True):
        inputs = {"layers.0": task.x, "layers.1": (task.x @ theta["layers.0.weight"].T + theta["layers.0.bias"]).relu()}
        p = model.outputs(theta, task.x).softmax(-1)
        roots = p.sqrt().unsqueeze(-1) * (torch.eye(3) - p.unsqueeze(-2))  # (n, c, k)
        deltas = {
            "layers.1": roots,
            "layers.0": (roots @ theta["layers.1.weight"]) * (inputs["layers.1"] > 0).unsqueeze(1),
        }
        for name, a in inputs.items():
            a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
            left, right = a.T @ a / len(a), torch.einsum("nci,ncj->ij", deltas[name], deltas[name]) / len(a)
            moved = {k: here[k] - solutions[-1][k] for k in here}
            v = torch.cat([moved[f"{name}.weight"], moved[f"{name}.bias"].unsqueeze(1)], 1)
            expected += 0.3 * float((v * (right @ v @ left)).sum())
    final_loss = [float(model.loss(s, t.x, t.y)) for s, t in zip(solutions, tasks, strict=True)]
    actual = sum(float(laplace.approximation(model, memory, o)(here)) for o in range(2))
    assert actual == pytest.approx(expected + sum(final_loss), rel=1e-8)
    batch = batch_of(examples(4, 7), 0, 2)
    stream = float(model.loss(here, batch.x, batch.y))
    assert float(laplace.objective(model, here, memory, batch)) == pytest.approx(stream + expected, rel=1e-8)


def test_the_objectives_gradient_is_that_of_its_value() -> None:
    model, params = double_model()
    laplace = Laplace()
    memory = laplace.init(model, params, batch_of(examples(2, 0)))
    memory = laplace.consolidate(model, params, memory, batch_of(examples(9, 50)))
    batch, here = batch_of(examples(4, 7), 0, 1), elsewhere(params, 8)
    grad_value = flat(gradient(lambda p: laplace.objective(model, p, memory, batch), here))
    full = gradient(lambda p: model.loss(p, batch.x, batch.y) + laplace.approximation(model, memory, 0)(p), here)
    torch.testing.assert_close(grad_value, flat(full), rtol=1e-9, atol=1e-12)


def test_it_forgets_less_than_without() -> None:
    losses = {}
    for penalty in (0.0, 1.0):
        end = train_to_the_end(cohort_of(blobs((200, 200)), Laplace(penalty=penalty), [(0, 0.05)], epochs=10))
        matrix = end.record.arrays["train_class_loss"][0]
        losses[penalty] = float(matrix[2, 0] - matrix[1, 0])
    assert losses[1.0] < 0.5 * losses[0.0]


@pytest.mark.parametrize("sums", ["nearest", "each"])
def test_the_same_in_a_cohort_and_run_by_run(sums: str) -> None:
    cohort = cohort_of(blobs((40, 40, 40)), Laplace(sums=sums), [(0, 0.05), (1, 0.1)])  # type: ignore[arg-type]
    ends = [train_to_the_end(cohort, way).state for way in ("vectorised", "sequential")]
    torch.testing.assert_close(ends[0].params, ends[1].params, rtol=1e-3, atol=1e-4)


def test_bad_values_are_named() -> None:
    with pytest.raises(GlocalError, match="penalty = -1 was given; it must be at least 0"):
        Laplace(penalty=-1)
