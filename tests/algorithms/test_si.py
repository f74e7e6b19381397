"""Synaptic intelligence: the path integral is the decrease of the loss, and half the curvature on quadratics."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from small_problems import (
    REGRESSIONS,
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    gradient,
    learnt,
    linear_network,
    normal_equations,
    train_to_the_end,
)
from torch import Tensor
from torch.nn import functional

from glocal.algorithms.algorithm import Batch, Memory, Step
from glocal.algorithms.si import SI, Importance
from glocal.challenges import from_tasks
from glocal.engine.loop import train
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.tree import Params

LR = 0.3


def objective_at(si: SI, model: Model, memory: Memory, batch: Batch, params: Params) -> Tensor:
    return si.objective(model, params, memory, batch)


def steps(si: SI, model: Model, params: Params, memory: Memory, seeds: list[int]) -> tuple[Params, Memory]:
    """A few steps as an engine makes them, on copies."""
    params = {k: p.clone() for k, p in params.items()}
    for seed in seeds:
        batch = batch_of(examples(4, seed))
        grads = gradient(partial(objective_at, si, model, memory, batch), params)
        followed = si.direction(model, grads, params, memory, batch)
        params = {k: params[k] - LR * followed[k] for k in params}
        memory = si.observe(
            memory, Step(batch, grads, followed, params, {}, followed, torch.tensor(LR, dtype=torch.float64))
        )
    return params, memory


def by_hand(model: Model, params: Params, si: SI, tasks: list[list[int]]) -> tuple[Params, Params]:
    """The same training written down for itself: parameters and Ω after the last task but one."""
    theta = {k: p.clone() for k, p in params.items()}
    big: Params = {k: torch.zeros_like(p) for k, p in params.items()}
    for number, seeds in enumerate(tasks):
        anchor = {k: p.clone() for k, p in theta.items()}
        small = {k: torch.zeros_like(p) for k, p in params.items()}
        for seed in seeds:
            x, y = examples(4, seed)
            loss = gradient(lambda p, x=x, y=y: functional.cross_entropy(model.outputs(p, x), y), theta)  # type: ignore[misc]
            for k in theta:
                full = loss[k] + 2 * si.penalty * big[k] * (theta[k] - anchor[k])
                if si.importance == "published":
                    full = full.clip(-1, 1)
                    small[k] += LR * full**2
                else:
                    small[k] += LR * loss[k] * full
                theta[k] = theta[k] - LR * full
        if number < len(tasks) - 1:
            big = {k: big[k] + small[k] / ((theta[k] - anchor[k]) ** 2 + si.damping) for k in big}
    return theta, big


@pytest.mark.parametrize("importance", ["path", "published"])
def test_it_steps_as_written_by_hand(importance: Importance) -> None:
    model, params = double_model()
    params = elsewhere(params, by=3.0)  # far away: some gradients are above 1 and are clipped where that is published
    si = SI(penalty=20.0, damping=0.1, importance=importance)
    memory = si.init(model, params, batch_of(examples(4, 0)))
    tasks = [[1, 2, 3], [4, 5], [6, 7, 8]]
    theta = params
    for seeds in tasks[:-1]:
        theta, memory = steps(si, model, theta, memory, seeds)
        memory = si.consolidate(model, theta, memory, batch_of(examples(4, 0)))
    theta, memory = steps(si, model, theta, memory, tasks[-1])
    expected, big = by_hand(model, params, si, tasks)
    torch.testing.assert_close(memory["importance"], big, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(theta, expected, rtol=1e-9, atol=1e-12)


def test_clipping_matters_in_that_reference() -> None:
    model, params = double_model()
    params = elsewhere(params, by=3.0)
    x, y = examples(4, 1)
    loss_gradients = gradient(lambda p: functional.cross_entropy(model.outputs(p, x), y), params)
    assert max(float(g.abs().max()) for g in loss_gradients.values()) > 1


def test_along_small_steps_the_path_integral_is_the_fall_of_the_loss() -> None:
    """Also in the second task, where the step follows the quadratic too: ω is of L_t alone."""
    cohort = cohort_of(blobs((64, 64), test=8), SI(penalty=5.0, damping=0.5), [(0, 0.002)], epochs=150, batch_size=64)
    held: list[tuple[Params, Params]] = []
    for snapshot in train(cohort):
        copied = [
            {k: v[0].double() for k, v in t.items()}
            for t in (snapshot.state.params, snapshot.state.memory["importance"])
        ]
        held.append((copied[0], copied[1]))
        losses = snapshot.record.arrays["train_class_loss"][0]
    for t in (1, 2):
        (theta, big), (old_theta, old_big) = held[t], held[t - 1]
        path = sum(float(((big[k] - old_big[k]) * ((theta[k] - old_theta[k]) ** 2 + 0.5)).sum()) for k in theta)
        fall = float(losses[t - 1, t - 1] - losses[t, t - 1])
        assert fall > 0.05
        assert path == pytest.approx(fall, rel=0.02)


def test_on_diagonal_quadratics_its_importance_is_half_their_curvature() -> None:
    """Downhill to the minimum of ½ h x², x from Δ to 0, the loss falls by ½ h Δ²: ω/Δ² = h/2, and Ω Δθ² is the loss."""
    challenge = from_tasks("one", [(REGRESSIONS[0], REGRESSIONS[0])], setting="domain", loss="squared-error")
    si = SI(damping=1e-9)
    cohort = cohort_of(challenge, si, [(0, 0.01)], network=linear_network, epochs=1500, batch_size=8)
    end = train_to_the_end(cohort)
    curvature, _ = normal_equations(REGRESSIONS[0])
    for output in range(2):
        actual = end.state.memory["importance"]["layers.0.weight"][0, output]
        np.testing.assert_allclose(actual, np.diag(curvature)[:3] / 2, rtol=0.02)


def test_a_large_penalty_keeps_it_where_it_was_and_none_lets_it_go() -> None:
    stayed = learnt(SI(penalty=0.5, damping=0.1), REGRESSIONS, epochs=300)
    went = learnt(SI(penalty=0.0), REGRESSIONS, epochs=300)
    first, last = (np.linalg.solve(*normal_equations(task)) for task in (REGRESSIONS[0], REGRESSIONS[-1]))
    np.testing.assert_allclose(went, last, atol=1e-3)
    assert np.linalg.norm(stayed - last) > 0.2 * np.linalg.norm(first - last)


def test_its_approximations_add_up_to_what_its_objective_adds() -> None:
    model, params = double_model()
    si = SI(penalty=0.9)
    memory = si.init(model, params, batch_of(examples(4, 0)))
    theta = params
    for seeds in ([1, 2], [3, 4], [5]):
        theta, memory = steps(si, model, theta, memory, seeds)
        memory = si.consolidate(model, theta, memory, batch_of(examples(4, 0)))
    batch, here = batch_of(examples(4, 7), 0, 3), elsewhere(params, 5)
    added = sum(float(si.approximation(model, memory, o)(here)) for o in range(3))
    stream = float(functional.cross_entropy(model.outputs(here, batch.x), batch.y))
    assert added > 0
    assert float(si.objective(model, here, memory, batch)) == pytest.approx(stream + added, rel=1e-9)


@pytest.mark.parametrize("importance", ["path", "published"])
def test_the_same_in_a_cohort_and_run_by_run(importance: Importance) -> None:
    runs = [(0, 0.05), (1, 0.2)]
    cohort = cohort_of(blobs(), SI(importance=importance), runs)
    ends = [train_to_the_end(cohort, way).state for way in ("vectorised", "sequential")]
    torch.testing.assert_close(ends[0].params, ends[1].params, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ends[0].memory, ends[1].memory, rtol=1e-4, atol=1e-7)


def test_bad_values_are_named() -> None:
    with pytest.raises(GlocalError, match="damping = 0 was given; it must be above 0"):
        SI(damping=0)
    with pytest.raises(GlocalError, match="penalty = -1 was given; it must be at least 0"):
        SI(penalty=-1)
