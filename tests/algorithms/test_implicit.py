"""Implicit steps: against dense solves, against the minimum they are defined by, and where explicit steps diverge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import (
    batch_of,
    correlated_task,
    double_model,
    elsewhere,
    examples,
    flat,
    gradient,
    regression_snapshots,
)
from torch import Tensor

from glocal.algorithms import Batch, Laplace, Memory, OptimalSoft
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.paper.studies.implicit import ImplicitEWC
from glocal.tree import Params, nbytes

PENALTY, MODEL = 0.7, double_model()[0]
KRONECKER: list[tuple[Any, float]] = [  # and the weight of Σ H_o after two tasks
    (Laplace(penalty=PENALTY, implicit=True), PENALTY),
    (OptimalSoft(penalty=PENALTY, implicit=True), PENALTY),
    (OptimalSoft(penalty=PENALTY, implicit=True, weighing="stated"), PENALTY / 3),
]
OTHERS: list[Any] = [OptimalSoft(penalty=PENALTY, implicit=True, structure="diagonal"), ImplicitEWC(penalty=PENALTY)]


def after_two_tasks(algorithm: Any) -> tuple[Model, Params, Memory]:
    model, params = double_model()
    memory = algorithm.init(model, params, batch_of(examples(2, 0)))
    for t in range(2):
        memory = algorithm.consolidate(model, elsewhere(params, 1 + t), memory, batch_of(examples(9, 50 + t), t, t))
    return model, elsewhere(params, 8), memory


def batch_at(lr: float) -> Batch:
    return batch_of(examples(9, 5), 0, 2)._replace(lr=torch.tensor(lr, dtype=torch.float64))


def layer_rows(vector: Params, layer: str) -> Tensor:
    """Return the rows of [W b], one after the other."""
    return torch.cat([vector[f"{layer}.weight"], vector[f"{layer}.bias"].unsqueeze(1)], 1).flatten()


@pytest.mark.parametrize(("algorithm", "weight"), KRONECKER)
@pytest.mark.parametrize("lr", [0.01, 1.0, 300.0])
def test_directions_solve_the_dense_system(algorithm: Any, weight: float, lr: float) -> None:
    model, params, memory = after_two_tasks(algorithm)
    grads = elsewhere(params, 4)
    found = algorithm.direction(model, grads, params, memory, batch_at(lr))
    for layer, block in memory["hessian"]["kronecker"].items():
        dense = torch.kron(block["G"], block["A"])
        expected = torch.linalg.solve(torch.eye(len(dense)) + lr * weight * dense, layer_rows(grads, layer))
        torch.testing.assert_close(layer_rows(found, layer), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", [*(a for a, _ in KRONECKER), *OTHERS])
def test_a_step_minimises_the_penalty_exactly_and_the_loss_to_first_order(algorithm: Any) -> None:
    """∇L(θ) + ∇q(θ') + (θ' − θ)/η = 0 at θ', with the gradient of the penalty q by autograd."""
    lr = 40.0
    batch, (model, here, memory) = batch_at(lr), after_two_tasks(algorithm)
    grads = gradient(lambda p: algorithm.objective(model, p, memory, batch), here)
    direction = algorithm.direction(model, grads, here, memory, batch)
    there = {k: p - lr * direction[k] for k, p in here.items()}
    loss, pull = gradient(lambda p: model.loss(p, batch.x, batch.y), here), penalty_gradient(algorithm, there, memory)
    residual = flat(loss) + flat(pull) + (flat(there) - flat(here)) / lr
    assert residual.abs().max() < 1e-10 * max(1.0, float(flat(pull).abs().max()))
    fresh = algorithm.init(model, here, batch_of(examples(2, 0)))
    torch.testing.assert_close(algorithm.direction(model, grads, here, fresh, batch), grads)


def penalty_gradient(algorithm: Any, params: Params, memory: Memory) -> Params:
    model, batch = MODEL, batch_at(0)
    return gradient(lambda p: algorithm.objective(model, p, memory, batch) - model.loss(p, batch.x, batch.y), params)


@settings(max_examples=10, deadline=None)
@given(case=st.integers(0, 2), excess=st.floats(2, 1e6), momentum=st.sampled_from([0.0, 0.9]))
def test_above_the_limit_of_explicit_steps_only_they_diverge(case: int, excess: float, momentum: float) -> None:
    """Heavy-ball steps on the penalty alone, at learning rates over 2 (1 + momentum) / λ_max."""
    algorithm, weight = KRONECKER[case]
    model, start, memory = after_two_tasks(algorithm)
    blocks = memory["hessian"]["kronecker"].values()
    largest = max(float(torch.linalg.eigvalsh(torch.kron(b["G"], b["A"]))[-1]) for b in blocks)
    lr = excess * 2 * (1 + momentum) / (weight * largest)
    length = {}
    for steps in ("explicit", "implicit"):
        params, velocity, begin = start, dict.fromkeys(start, torch.zeros(())), None
        for _ in range(30):
            grads = penalty_gradient(algorithm, params, memory)
            begin = begin or grads
            if steps == "implicit":
                grads = algorithm.direction(model, grads, params, memory, batch_at(lr))
            velocity = {k: momentum * velocity[k] + g for k, g in grads.items()}
            params = {k: p - lr * velocity[k] for k, p in params.items()}
        length[steps] = flat(penalty_gradient(algorithm, params, memory)).norm() / flat(begin or {}).norm()
    assert not length["explicit"] < 1e3
    assert length["implicit"] < 1


@pytest.mark.parametrize("kind", [Laplace, OptimalSoft])
def test_at_small_learning_rates_implicit_and_explicit_runs_agree(kind: Any) -> None:
    """The updates in the second task differ by O(η), relatively."""
    tasks = [correlated_task(seed) for seed in (0, 1)]
    differences = []
    for lr in (1e-3, 1e-5):
        (first, explicit), (_, implicit) = (
            [flat(p) for p in regression_snapshots(kind(implicit=option), tasks, epochs=5, lr=lr)[0]]
            for option in (False, True)
        )
        differences.append(float((implicit - explicit).norm() / (explicit - first).norm()))
    assert 1e-4 < differences[0] < 0.1
    assert differences[1] == pytest.approx(differences[0] / 100, rel=0.1)


def test_the_eigenbasis_takes_the_memory_that_is_declared() -> None:
    for algorithm, more in ((KRONECKER[0][0], 6**2 + 4**2 + 5**2 + 3**2), (OTHERS[0], 0)):
        _, params, memory = after_two_tasks(algorithm)
        assert nbytes(memory["eigen"]) == 8 * (len(flat(params)) + more)


@pytest.mark.parametrize("structure", ["low-rank", "full"])
def test_matrices_without_an_eigenbasis_are_refused(structure: Any) -> None:
    with pytest.raises(GlocalError, match=f"structure=diagonal or kronecker; '{structure}' was given"):
        OptimalSoft(structure=structure, implicit=True)
    with pytest.raises(GlocalError, match="sums=nearest; 'each' was given"):
        Laplace(sums="each", implicit=True)
