"""Elastic weight consolidation: closed forms for linear regression, and Fisher diagonals by per-sample loops."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import by_hand
import numpy as np
import pytest
import torch
from small_problems import (
    CLASSES,
    REGRESSIONS,
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    flat,
    gradient,
    learnt,
    normal_equations,
    train_to_the_end,
)
from torch import Tensor
from torch.nn import functional

from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.ewc import EWC, Fisher, task_fisher
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.tree import Params


def test_on_quadratic_losses_it_reaches_the_optimum_of_their_sum() -> None:
    a, b = (sum(parts) for parts in zip(*map(normal_equations, REGRESSIONS), strict=True))
    np.testing.assert_allclose(learnt(EWC(penalty=1.0, fisher="exact"), REGRESSIONS), np.linalg.solve(a, b), atol=1e-4)
    without = learnt(EWC(penalty=0.0), REGRESSIONS)
    np.testing.assert_allclose(without, np.linalg.solve(*normal_equations(REGRESSIONS[-1])), atol=1e-4)


def test_penalty_and_decay_weigh_the_older_tasks_as_written() -> None:
    penalty, decay = 0.6, 0.5
    theta: np.ndarray = np.zeros((4, 2))
    fisher: np.ndarray = np.zeros((4, 4))
    for a, b in map(normal_equations, REGRESSIONS):
        theta = np.linalg.solve(a + penalty * fisher, b + penalty * fisher @ theta)
        fisher = decay * fisher + a
    np.testing.assert_allclose(learnt(EWC(penalty=penalty, decay=decay), REGRESSIONS), theta, atol=1e-4)


def test_with_an_anchor_a_task_every_quadratic_stays_where_it_was_made() -> None:
    """The optimum of L_t + λ Σ_o γ^{t−1−o} ½ (θ − θ_o)ᵀ A_o (θ − θ_o), task after task."""
    penalty, decay = 0.6, 0.5
    past: list[tuple[np.ndarray, np.ndarray]] = []
    theta: np.ndarray = np.zeros((4, 2))
    for a, b in map(normal_equations, REGRESSIONS):
        weights = [penalty * decay ** (len(past) - 1 - o) for o in range(len(past))]
        left = a + sum((w * f for w, (f, _) in zip(weights, past, strict=True)), np.zeros((4, 4)))
        right = b + sum((w * f @ anchor for w, (f, anchor) in zip(weights, past, strict=True)), np.zeros((4, 2)))
        theta = np.linalg.solve(left, right)
        past.append((a, theta))
    ewc = EWC(penalty=penalty, decay=decay, anchors="each")
    np.testing.assert_allclose(learnt(ewc, REGRESSIONS), theta, atol=1e-4)


# The four Fisher diagonals, from one ordinary backward pass per sample and label.


def log_likelihood_gradient(model: Model, params: Params, x: Tensor, label: int) -> Params:
    return gradient(lambda p: functional.log_softmax(model.outputs(p, x[None])[0], 0)[label], params)


def weights_by_label(variant: Fisher, probability: Tensor, label: int, uniform: float) -> list[float]:
    """How much each label's squared gradient counts for one sample."""
    p = probability.tolist()
    if variant == "exact":
        return p
    drawn = next(c for c in range(CLASSES) if uniform < sum(p[: c + 1]) or c == CLASSES - 1)
    return {
        "sampled": [float(c == drawn) for c in range(CLASSES)],
        "empirical": [float(c == label) for c in range(CLASSES)],
        "published": [p[c] * (c == label) for c in range(CLASSES)],
    }[variant]


def fisher_by_loops(model: Model, params: Params, data: Batch, variant: Fisher) -> Params:
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    uniforms = by_hand.uniforms(data.key, "labels", len(data.y)).tolist()
    for x, y, u in zip(data.x, data.y.tolist(), uniforms, strict=True):
        probability = model.outputs(params, x[None])[0].softmax(0)
        for label, weight in enumerate(weights_by_label(variant, probability, y, u)):
            squares = {k: g**2 for k, g in log_likelihood_gradient(model, params, x, label).items()}
            total = {k: total[k] + weight * squares[k] / len(data.x) for k in total}
    return total


@pytest.mark.parametrize("chunk", [500, 7])
@pytest.mark.parametrize("variant", get_args(Fisher))
def test_fishers_are_loops_over_samples_and_labels(
    variant: Fisher, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glocal.algorithms.ewc.max_chunk_size", lambda _: chunk)
    model, params = double_model()
    params = elsewhere(params)
    data = batch_of(examples(17, 3), 6)
    expected = fisher_by_loops(model, params, data, variant)
    torch.testing.assert_close(task_fisher(model, params, data, variant), expected, rtol=1e-9, atol=1e-13)


def consolidated(ewc: EWC, model: Model, solutions: list[Params]) -> tuple[Memory, list[Batch]]:
    """The memory after one task a solution, and the tasks."""
    memory = ewc.init(model, solutions[0], batch_of(examples(2, 0)))
    tasks = [batch_of(examples(9, 50 + t), t, t) for t in range(len(solutions))]
    for theta, task in zip(solutions, tasks, strict=True):
        memory = ewc.consolidate(model, theta, memory, task)
    return memory, tasks


def three_solutions(params: Params) -> list[Params]:
    return [elsewhere(params, seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("decay", [1.0, 0.3, 0.0])
def test_consolidating_decays_the_old_fisher_and_moves_the_anchor(decay: float) -> None:
    model, params = double_model()
    solutions = three_solutions(params)
    memory, tasks = consolidated(EWC(decay=decay), model, solutions)
    terms = [fisher_by_loops(model, theta, task, "exact") for theta, task in zip(solutions, tasks, strict=True)]
    expected = {k: decay**2 * terms[0][k] + decay * terms[1][k] + terms[2][k] for k in params}
    torch.testing.assert_close(memory["fisher"], expected, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(memory["anchor"], solutions[-1], rtol=0, atol=0)


@pytest.mark.parametrize("variant", get_args(Fisher))
def test_the_penaltys_gradient_is_lambda_fisher_times_displacement(variant: Fisher) -> None:
    model, params = double_model()
    ewc = EWC(penalty=2.5, fisher=variant)
    solutions = three_solutions(params)
    memory, _ = consolidated(ewc, model, solutions)
    batch = batch_of(examples(4, 7), 0, 3)
    full = gradient(lambda p: ewc.objective(model, p, memory, batch), params)
    stream = gradient(lambda p: functional.cross_entropy(model.outputs(p, batch.x), batch.y), params)
    for k in params:
        expected = 2.5 * memory["fisher"][k] * (params[k] - solutions[-1][k])
        torch.testing.assert_close(full[k] - stream[k], expected, rtol=1e-8, atol=1e-12)


def test_before_the_first_task_ends_nothing_is_penalised() -> None:
    model, params = double_model()
    ewc = EWC(penalty=1e3)
    memory = ewc.init(model, params, batch_of(examples(2, 0)))
    batch = batch_of(examples(4, 7))
    for at in (params, elsewhere(params)):
        expected = functional.cross_entropy(model.outputs(at, batch.x), batch.y)
        torch.testing.assert_close(ewc.objective(model, at, memory, batch), expected)


def test_the_published_objective_is_a_penalty_twice_as_large() -> None:
    """CE + 0.7 Σ F (θ − θ*)², no ½, F = mean of p(y|x) (∂ log p(y|x))²."""
    model, params = double_model()
    ewc = EWC(penalty=1.4, fisher="published")
    solution = elsewhere(params)
    memory, (task,) = consolidated(ewc, model, [solution])
    batch = batch_of(examples(4, 7), 0, 1)
    fisher = fisher_by_loops(model, solution, task, "published")
    quadratic = sum(float((fisher[k] * (params[k] - solution[k]) ** 2).sum()) for k in params)
    expected = float(functional.cross_entropy(model.outputs(params, batch.x), batch.y)) + 0.7 * quadratic
    assert float(ewc.objective(model, params, memory, batch)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("decay", [1.0, 0.3])
def test_one_anchor_a_task_is_a_sum_of_quadratics_at_the_solutions(decay: float) -> None:
    model, params = double_model()
    ewc = EWC(penalty=0.8, decay=decay, anchors="each")
    solutions = three_solutions(params)
    memory, tasks = consolidated(ewc, model, solutions)
    batch = batch_of(examples(4, 7), 0, 3)
    here = elsewhere(params, seed=8)
    expected = float(functional.cross_entropy(model.outputs(here, batch.x), batch.y))
    for o, (theta, task) in enumerate(zip(solutions, tasks, strict=True)):
        fisher = fisher_by_loops(model, theta, task, "exact")
        quadratic = 0.4 * decay ** (2 - o) * sum(float((fisher[k] * (here[k] - theta[k]) ** 2).sum()) for k in params)
        final_loss = float(functional.cross_entropy(model.outputs(theta, task.x), task.y))
        assert float(ewc.approximation(model, memory, o)(here)) == pytest.approx(final_loss + quadratic, rel=1e-9)
        expected += quadratic
    assert float(ewc.objective(model, here, memory, batch)) == pytest.approx(expected, rel=1e-9)


def test_its_approximations_touch_the_losses_reached() -> None:
    model, params = double_model()
    solutions = three_solutions(params)
    ewc = EWC()
    memory, tasks = consolidated(ewc, model, solutions)
    for number, (theta, task) in enumerate(zip(solutions, tasks, strict=True)):
        final_loss = float(functional.cross_entropy(model.outputs(theta, task.x), task.y))
        assert float(ewc.approximation(model, memory, number)(solutions[-1])) == pytest.approx(final_loss, rel=1e-12)


def test_its_approximations_add_up_to_what_its_objective_adds() -> None:
    model, params = double_model()
    ewc = EWC(penalty=0.9)
    memory, _ = consolidated(ewc, model, three_solutions(params))
    batch = batch_of(examples(4, 7), 0, 3)
    approximations = [ewc.approximation(model, memory, o) for o in range(3)]
    added = gradient(lambda p: sum((f(p) for f in approximations), torch.zeros(())), params)
    full = gradient(lambda p: ewc.objective(model, p, memory, batch), params)
    stream = gradient(lambda p: model.loss(p, batch.x, batch.y), params)
    torch.testing.assert_close({k: stream[k] + added[k] for k in params}, full, rtol=1e-9, atol=1e-12)


def test_its_approximations_hessian_is_diagonal() -> None:
    model, params = double_model(hidden=())
    ewc = EWC(penalty=0.9)
    memory, _ = consolidated(ewc, model, three_solutions(params))
    names, sizes = list(params), [p.numel() for p in params.values()]

    def of_vector(theta: Tensor) -> Tensor:
        parts = {k: part.view_as(params[k]) for k, part in zip(names, theta.split(sizes), strict=True)}
        return ewc.approximation(model, memory, 1)(parts)

    hessian = torch.autograd.functional.hessian(of_vector, flat(params))
    torch.testing.assert_close(hessian, torch.diag(0.9 * flat(memory["fisher"]) / 3), rtol=1e-9, atol=1e-13)


def test_its_approximation_depends_on_the_solution() -> None:
    model, params = double_model()
    ewc = EWC()
    values = []
    for solution in (params, elsewhere(params)):
        memory, _ = consolidated(ewc, model, [solution])
        values.append(float(ewc.approximation(model, memory, 0)(elsewhere(params, 9))))
    assert values[0] != pytest.approx(values[1], rel=1e-3)


def test_runs_with_other_penalties_train_together() -> None:
    cohort = cohort_of(blobs(), EWC(), [(1, 0.1)] * 2)
    low, high = EWC(penalty=0.5), EWC(penalty=300.0)
    members = tuple(replace(m, algorithm=a) for m, a in zip(cohort.members, (low, high), strict=True))
    together = train_to_the_end(cohort.only(members)).state.params
    for run, member in enumerate(members):
        alone = train_to_the_end(cohort.only([member])).state.params
        assert all(torch.equal(alone[k][0], together[k][run]) for k in alone)
    assert not torch.equal(together["layers.0.weight"][0], together["layers.0.weight"][1])


def test_a_mistyped_fisher_suggests_the_nearest_name() -> None:
    with pytest.raises(GlocalError, match="Did you mean 'empirical'"):
        EWC(fisher="emprical")  # type: ignore[arg-type]
