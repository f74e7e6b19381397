"""Theorem 4.1 on quadratics: both sides equal under its premises, zero together, and different without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratics import anywhere, apart, dense_hessian, diverged, network, of_data, theta_of

from glocal.errors import GlocalError
from glocal.lens.theorems import theorem1
from glocal.metrics import OVER, Over

SEEDS = st.integers(0, 1000)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, tasks=st.integers(2, 4), over=st.sampled_from(OVER))
def test_updates_in_the_null_space_forget_nothing(seed: int, tasks: int, over: Over) -> None:
    found = theorem1(apart(seed, tasks).trace, over)
    for zero in (found.measured, found.quadratic, found.condition, found.relative):
        assert zero[1:].abs().max() < 1e-12
    assert found.max_forgetting[1:].abs().max() < 1e-12
    assert found.max_gradient[1:].max() < 1e-12
    assert found.min_eigenvalue[1:].min() > -1e-12
    assert found.max_distance_cubed[1:].min() > 1e-3  # of which quadratics take no notice


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, tasks=st.integers(2, 4), over=st.sampled_from(OVER), strays=st.sampled_from([1e-3, 1.0, 10.0]))
def test_an_update_beyond_it_forgets_the_quadratic(seed: int, tasks: int, over: Over, strays: float) -> None:
    known = apart(seed, tasks, strays)
    found = theorem1(known.trace, over)
    count = tasks if over == "t" else tasks - 1
    matrix, delta = sum(known.hessian(o) for o in range(tasks - 1)) / count, known.update(tasks - 1)
    assert found.max_forgetting[-1] < 1e-12
    assert found.max_gradient[-1] < 1e-12
    assert found.measured[-1] > 0
    np.testing.assert_allclose(found.measured[-1], delta @ matrix @ delta / 2, rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(found.quadratic[-1], delta @ matrix @ delta / 2, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(found.condition[-1], np.linalg.norm(matrix @ delta), rtol=1e-9)


@pytest.mark.parametrize("over", OVER)
def test_two_tasks_in_the_base_case_of_the_proof(over: Over) -> None:
    known = apart(5, 2, strays=1.0)
    found = theorem1(known.trace, over)
    half = known.update(1) @ known.hessian(0) @ known.update(1) / 2
    np.testing.assert_allclose(found.measured[1], half / 2 if over == "t" else half, rtol=1e-9)
    assert found.measured[0].isnan() if over == "t-1" else found.measured[0] == 0


def test_an_update_that_leads_back_forgets_less_than_the_quadratic() -> None:
    """After something was forgotten the right side of the theorem bounds nothing, and the premise says so."""
    known = apart(1, 3)
    away = known.thetas[2] + 2.0 * (known.data[0][0][:1].repeat(2, 0).reshape(-1))
    back = of_data(known.data, [*known.thetas[:2], away, known.thetas[2]])
    found = theorem1(back.trace)
    assert found.max_forgetting[2] > 0.1
    assert found.quadratic[2] > 0.1
    assert abs(found.measured[2]) < 1e-12


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, over=st.sampled_from(OVER))
def test_premises_and_condition_of_any_walk(seed: int, over: Over) -> None:
    known = anywhere(seed, 4)
    found = theorem1(known.trace, over)
    lost = [[known.loss(o, known.solution(t)) - known.loss(o, known.solution(o)) for o in range(t)] for t in range(4)]
    averages = [0.0] + [sum(lost[t]) / (t + (over == "t")) for t in range(1, 4)]
    spectra = [np.linalg.eigvalsh(known.hessian(o)) for o in range(4)]
    for t in range(1, 4):
        old, delta = range(t), known.update(t)
        matrix = sum(known.hessian(o) for o in old)
        slopes = [np.linalg.norm(known.gradient(o, known.solution(o))) for o in old]
        apart_by = [np.linalg.norm(known.solution(i) - known.solution(k)) for i in range(t + 1) for k in range(i)]
        np.testing.assert_allclose(found.measured[t], averages[t], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.max_forgetting[t], max(np.abs(averages[:t])), rtol=1e-9)
        np.testing.assert_allclose(found.max_gradient[t], max(slopes), rtol=1e-9)
        np.testing.assert_allclose(found.min_eigenvalue[t], min(spectra[o][0] for o in old), rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(found.max_distance_cubed[t], max(apart_by) ** 3, rtol=1e-9)
        bound = sum(spectra[o][-1] for o in old) * np.linalg.norm(delta)
        np.testing.assert_allclose(found.relative[t], np.linalg.norm(matrix @ delta) / bound, rtol=1e-9)


def test_on_a_network_with_its_dense_hessians() -> None:
    trace = network(tasks=4)
    found = theorem1(trace)
    for t in range(1, 4):
        matrix = torch.stack([dense_hessian(trace, o) for o in range(t)]).sum(0) / (t + 1)
        delta = theta_of(trace, t) - theta_of(trace, t - 1)
        torch.testing.assert_close(found.quadratic[t], delta @ matrix @ delta / 2, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.condition[t], (matrix @ delta).norm(), rtol=1e-9, atol=1e-12)
        lowest = min(torch.linalg.eigvalsh(dense_hessian(trace, o))[0] for o in range(t))
        torch.testing.assert_close(found.min_eigenvalue[t], lowest, rtol=1e-6, atol=1e-8)


def test_a_run_that_diverged_is_not_said_to_hold() -> None:
    found = theorem1(diverged(network(), 2))
    for part in (found.measured, found.quadratic, found.condition, found.relative):
        assert part[1:].isnan().all()
    for part in (
        found.max_forgetting,
        found.max_gradient,
        found.min_eigenvalue,
        found.max_distance_cubed,
    ):
        assert part[2].isnan()


def test_mistakes_are_told() -> None:
    with pytest.raises(GlocalError, match="unknown average of forgetting over 'T'"):
        theorem1(network(), "T")  # type: ignore[arg-type]
    with pytest.raises(GlocalError, match="steps = 0 was given; it must be at least 1"):
        theorem1(network(), steps=0)
