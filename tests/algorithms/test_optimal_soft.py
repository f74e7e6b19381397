"""Eq. general-opt-local: the joint optimum on quadratics, and EWC with a diagonal Hessian."""

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
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.algorithms.ewc import EWC
from glocal.algorithms.optimal import OptimalSoft
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.tree import Params

TASKS = [correlated_task(seed) for seed in (0, 1, 2)]


def joint_optimum(weights: list[float]) -> np.ndarray:
    pairs = [normal_equations((x.astype(np.float64), y.astype(np.float64))) for x, y in TASKS]
    a, b = (sum(w * part for w, part in zip(weights, parts, strict=True)) for parts in zip(*pairs, strict=True))
    return np.linalg.solve(a, b)


@pytest.mark.parametrize("matrix", ["ggn", "hessian"])
@pytest.mark.parametrize("epochs", [250, 7], ids=["at the minima", "stopped early"])
def test_with_full_hessians_it_reaches_the_joint_optimum_of_the_quadratics(matrix: str, epochs: int) -> None:
    """Also where the solutions are no minima: that is what the gradient term and v are for."""
    soft = OptimalSoft(structure="full", matrix=matrix)  # type: ignore[arg-type]
    solutions, end = regression_snapshots(soft, TASKS, epochs)
    if epochs == 250:
        np.testing.assert_allclose(regression_matrix(solutions[-1]), joint_optimum([1, 1, 1]), atol=1e-7)
    memory = {k: v[0] for k, v in end.state.memory["linear"].items()}, end.state.memory["hessian"]["full"][0]
    grad_value = torch.cat([memory[0][k].flatten() for k in memory[0]])
    # What is kept after the last task is the joint loss: its minimum is the joint optimum, wherever training stopped.
    theta = torch.cat([solutions[-1][k].flatten() for k in solutions[-1]])
    best = theta - torch.linalg.solve(memory[1], grad_value)
    expected = joint_optimum([1, 1, 1])
    np.testing.assert_allclose(best.numpy(), np.concatenate([expected[:-1].T.flatten(), expected[-1]]), atol=1e-5)


def test_as_stated_it_weighs_the_past_by_one_over_t() -> None:
    solutions, _ = regression_snapshots(OptimalSoft(structure="full", weighing="stated"), TASKS[:2], epochs=250)
    pairs = [normal_equations((x.astype(np.float64), y.astype(np.float64))) for x, y in TASKS[:2]]
    expected = np.linalg.solve(pairs[0][0] / 2 + pairs[1][0], pairs[0][1] / 2 + pairs[1][1])
    np.testing.assert_allclose(regression_matrix(solutions[-1]), expected, atol=1e-6)


@pytest.mark.parametrize("structure", ["kronecker", "low-rank"])
def test_other_exact_structures_reach_it_too(structure: str) -> None:
    """A linear layer under squared error is exactly I ⊗ A, and rank 8 is all there is."""
    soft = OptimalSoft(structure=structure, rank=8)  # type: ignore[arg-type]
    solutions, _ = regression_snapshots(soft, TASKS, 250)
    np.testing.assert_allclose(regression_matrix(solutions[-1]), joint_optimum([1, 1, 1]), atol=1e-5)


def consolidated(algorithm: Algorithm, model: Model, solutions: list[Params], tasks: list[Batch]) -> Memory:
    memory = algorithm.init(model, solutions[0], batch_of(examples(2, 0)))
    for theta, task in zip(solutions, tasks, strict=True):
        memory = algorithm.consolidate(model, theta, memory, task)
    return memory


def setup() -> tuple[Model, Params, list[Params], list[Batch]]:
    model, params = double_model()
    tasks = [batch_of(examples(9, 50 + t), t, t) for t in range(3)]
    return model, params, [elsewhere(params, seed) for seed in (1, 2, 3)], tasks


@pytest.mark.parametrize("anchors", ["each", "last"])
def test_with_a_diagonal_hessian_it_is_ewc(anchors: str) -> None:
    """Without the gradient term it is EWC with an anchor a task; without v as well, EWC online."""
    model, params, solutions, tasks = setup()
    soft = OptimalSoft(penalty=0.8, structure="diagonal", gradient=False, recentred=anchors == "each")
    ewc = EWC(penalty=0.8, anchors=anchors)  # type: ignore[arg-type]
    batch = batch_of(examples(4, 7), 0, 3)
    gradients = []
    for algorithm in (soft, ewc):
        memory = consolidated(algorithm, model, solutions, tasks)
        gradients.append(gradient(lambda p, a=algorithm, m=memory: a.objective(model, p, m, batch), params))  # type: ignore[misc]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_in_training_it_is_ewc_too() -> None:
    runs = [(0, 0.05), (1, 0.2)]
    soft = OptimalSoft(penalty=2.0, structure="diagonal", gradient=False, recentred=False, samples=0)
    ends = [train_to_the_end(cohort_of(blobs((40, 40, 40)), a, runs)).state.params for a in (soft, EWC(penalty=2.0))]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-5)


def taylor(model: Model, theta: Params, task: Batch, here: Params, ggn: bool) -> Tensor:
    """Eq. taylor-p to second order, with dense matrices."""
    names, sizes = list(theta), [p.numel() for p in theta.values()]

    def outputs(v: Tensor) -> Tensor:
        parts = {k: p.view_as(theta[k]) for k, p in zip(names, v.split(sizes), strict=True)}
        return model.outputs(parts, task.x)

    def value(v: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs(v), task.y)

    start, moved = flat(theta), flat(here) - flat(theta)
    if ggn:
        jacobian = torch.autograd.functional.jacobian(outputs, start)
        p = outputs(start).softmax(-1)
        inside = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        curvature = torch.einsum("nkp,nkl,nlq->pq", jacobian, inside, jacobian) / len(task.y)
    else:
        curvature = torch.autograd.functional.hessian(value, start)
    (grad_value,) = torch.autograd.grad(value(v := start.clone().requires_grad_()), v)
    return value(start) + grad_value @ moved + moved @ curvature @ moved / 2


@pytest.mark.parametrize("ggn", [True, False])
def test_its_objective_is_the_sum_of_taylor_expansions_each_at_its_own_solution(ggn: bool) -> None:
    model, params, solutions, tasks = setup()
    soft = OptimalSoft(penalty=0.7, structure="full", matrix="ggn" if ggn else "hessian")
    memory = consolidated(soft, model, solutions, tasks)
    batch, here = batch_of(examples(4, 7), 0, 3), elsewhere(params, 8)
    expansions = [float(taylor(model, s, t, here, ggn)) for s, t in zip(solutions, tasks, strict=True)]
    final_loss = [
        float(torch.nn.functional.cross_entropy(model.outputs(s, t.x), t.y))
        for s, t in zip(solutions, tasks, strict=True)
    ]
    stream = float(torch.nn.functional.cross_entropy(model.outputs(here, batch.x), batch.y))
    expected = stream + 0.7 * (sum(expansions) - sum(final_loss))
    assert float(soft.objective(model, here, memory, batch)) == pytest.approx(expected, rel=1e-8)
    assert sum(float(soft.approximation(model, memory, o)(here)) for o in range(3)) == pytest.approx(
        sum(expansions), rel=1e-8
    )


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank", "full"])
def test_the_objectives_gradient_is_that_of_its_value(structure: str) -> None:
    """H Δ is held fixed in the objective: its gradient must still be the gradient of the number it returns."""
    model, params, solutions, tasks = setup()
    soft = OptimalSoft(structure=structure, rank=5)  # type: ignore[arg-type]
    memory = consolidated(soft, model, solutions, tasks)
    batch, here = batch_of(examples(4, 7), 0, 3), elsewhere(params, 8)
    grad_value = gradient(lambda p: soft.objective(model, p, memory, batch), here)
    ways = elsewhere({k: torch.zeros_like(p) for k, p in params.items()}, 9)
    step = 1e-5
    ahead, behind = (
        float(soft.objective(model, {k: here[k] + s * step * ways[k] for k in here}, memory, batch)) for s in (1, -1)
    )
    expected = sum(float((grad_value[k] * ways[k]).sum()) for k in grad_value)
    assert (ahead - behind) / 2 / step == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank", "full"])
def test_the_same_in_a_cohort_and_run_by_run(structure: str) -> None:
    soft = OptimalSoft(structure=structure, rank=3)  # type: ignore[arg-type]
    cohort = cohort_of(blobs((40, 40, 40)), soft, [(0, 0.05), (1, 0.1)])
    ends = [train_to_the_end(cohort, way).state for way in ("vectorised", "sequential")]
    torch.testing.assert_close(ends[0].params, ends[1].params, rtol=1e-3, atol=1e-4)


def test_a_hessian_that_is_not_made_is_refused() -> None:
    with pytest.raises(GlocalError, match="matrix=hessian requires structure=full or low-rank"):
        OptimalSoft(structure="kronecker", matrix="hessian")
    with pytest.raises(GlocalError, match="Did you mean 'kronecker'"):
        OptimalSoft(structure="kroneker")  # type: ignore[arg-type]
