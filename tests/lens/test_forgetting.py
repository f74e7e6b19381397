"""Eq. forgetting-quadratic and eqt:forgetting-rec: exact on quadratics, and of the second order on a network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratics import Quadratics, anywhere, dense_hessian, diverged, network, theta_of

from glocal.errors import GlocalError
from glocal.lens.forgetting import average, forgetting, measured_forgetting, recursion
from glocal.lens.training_trace import TrainingTrace
from glocal.metrics import OVER, Over, average_forgetting


def by_hand(known: Quadratics, over: Over) -> dict[str, list[float]]:
    """The right side of eqt:forgetting-rec as the paper writes it, its t counted from 1."""
    rows: dict[str, list[float]] = {name: [] for name in ("before", "gradient", "quadratic", "v")}
    tasks = len(known.data)
    lost = [
        sum(known.loss(o, known.solution(t)) - known.loss(o, known.solution(o)) for o in range(t)) for t in range(tasks)
    ]
    for t in range(2, tasks + 1):
        delta, old, count = known.update(t - 1), range(t - 1), t if over == "t" else t - 1
        slopes = np.sum([known.gradient(o, known.solution(o)) for o in old], axis=0)
        hessians = np.sum([known.hessian(o) for o in old], axis=0)
        v = np.zeros_like(delta)
        for o in range(t - 2):
            v += known.hessian(o) @ (known.solution(t - 2) - known.solution(o))
        rows["before"].append(lost[t - 2] / count)
        rows["gradient"].append(float(delta @ slopes) / count)
        rows["quadratic"].append(float(delta @ hessians @ delta) / 2 / count)
        rows["v"].append(float(v @ delta) / count)
    return rows


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), tasks=st.integers(1, 5), spans=st.integers(1, 4))
def test_on_quadratics_every_pair_is_predicted_exactly(seed: int, tasks: int, spans: int) -> None:
    known = anywhere(seed, tasks, spans)
    found = forgetting(known.trace)
    for t in range(tasks):
        for o in range(tasks):
            if o > t:
                assert all(
                    part[t, o].isnan() for part in (found.measured, found.gradient, found.quadratic, found.added_v)
                )
                continue
            moved = known.solution(t) - known.solution(o)
            lost = known.loss(o, known.solution(t)) - known.loss(o, known.solution(o))
            slope = known.gradient(o, known.solution(o)) @ moved
            scale = 1 + abs(lost) + abs(slope)
            np.testing.assert_allclose(found.measured[t, o], lost, atol=1e-11 * scale)
            np.testing.assert_allclose(found.gradient[t, o], slope, atol=1e-11 * scale)
            np.testing.assert_allclose(found.quadratic[t, o], moved @ known.hessian(o) @ moved / 2, atol=1e-11 * scale)
            assert abs(found.remainder[t, o]) < 1e-11 * scale


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), tasks=st.integers(2, 5), spans=st.integers(1, 4), over=st.sampled_from(OVER))
def test_on_quadratics_the_recursion_adds_up_term_by_term(seed: int, tasks: int, spans: int, over: Over) -> None:
    known = anywhere(seed, tasks, spans)
    found = recursion(forgetting(known.trace), over)
    for name, expected in by_hand(known, over).items():
        np.testing.assert_allclose(getattr(found, name)[1:], expected, rtol=1e-9, atol=1e-9, err_msg=name)
    added_up = found.before + found.gradient + found.quadratic + found.v
    torch.testing.assert_close(added_up[1:], found.measured[1:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.predicted[1:], found.measured[1:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("over", OVER)
def test_the_factor_before_the_last_average_is_the_definitions(over: Over) -> None:
    found = recursion(forgetting(anywhere(3, 5).trace), over)
    t = torch.arange(3, 6, dtype=torch.float64)  # the paper's count
    factor = (t - 1) / t if over == "t" else (t - 2) / (t - 1)
    torch.testing.assert_close(found.before[2:], factor * found.predicted[1:-1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("over", OVER)
def test_averages_are_those_of_the_metrics(over: Over) -> None:
    known = anywhere(0, 4)
    losses = np.array([[known.loss(o, theta) for o in range(4)] for theta in known.thetas])
    expected = [average_forgetting(losses, t, over, by="loss") for t in range(1, 5)]
    np.testing.assert_allclose(average(measured_forgetting(known.trace), over), expected, rtol=1e-12)


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
def test_on_a_network_the_terms_are_those_of_its_dense_hessian(loss: str) -> None:
    trace = network(loss=loss)
    found = forgetting(trace)
    for o in range(3):
        matrix, slope = dense_hessian(trace, o), trace.gradient(o)
        for t in range(o + 1, 3):
            moved, delta = theta_of(trace, t) - theta_of(trace, o), theta_of(trace, t) - theta_of(trace, t - 1)
            expected = [
                slope @ moved,
                moved @ matrix @ moved / 2,
                slope @ delta,
                delta @ matrix @ delta / 2,
                (moved - delta) @ matrix @ delta,
            ]
            parts = [found.gradient, found.quadratic, found.added_gradient, found.added_quadratic, found.added_v]
            torch.testing.assert_close(
                torch.stack([p[t, o] for p in parts]), torch.stack(expected), rtol=1e-9, atol=1e-12
            )
            assert abs(found.remainder[t, o]) > 1e-4


def test_what_is_left_falls_with_the_cube_of_the_distance() -> None:
    far, near = (forgetting(network(step=step)).remainder[1, 0] for step in (0.01, 0.005))
    assert 7 < far / near < 9


def test_shares_sum_to_one_and_follow_the_terms() -> None:
    found = forgetting(network())
    total = found.gradient.abs() + found.quadratic.abs() + found.remainder.abs()
    below = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    assert torch.equal(found.shares["gradient"].isnan(), ~below)
    torch.testing.assert_close(sum(found.shares.values())[below], torch.ones(3, dtype=torch.float64))  # type: ignore[index]
    torch.testing.assert_close(found.shares["quadratic"][below], (found.quadratic.abs() / total)[below])
    exact = forgetting(anywhere(0).trace).shares
    assert exact["remainder"][1:, 0].max() < 1e-10


def test_in_single_precision_too() -> None:
    double, single = (forgetting(network(dtype=dtype)) for dtype in (torch.float64, torch.float32))
    assert single.measured.dtype == torch.float64
    for name in ("measured", "gradient", "quadratic", "added_v"):
        torch.testing.assert_close(getattr(single, name), getattr(double, name), rtol=1e-3, atol=2e-5, equal_nan=True)


def test_a_run_that_diverged_has_no_numbers_from_there_on() -> None:
    found = forgetting(diverged(network(), 3))
    assert found.measured[:2, 0].isfinite().all()
    assert found.predicted[:2, 0].isfinite().all()
    for part in (found.measured, found.gradient, found.quadratic, found.remainder, found.added_v):
        assert part[2, :2].isnan().all()
    assert recursion(found).predicted.isnan().tolist() == [False, False, True]


def test_a_loss_that_overflowed_is_infinitely_forgotten() -> None:
    trace = network(loss="squared-error", dtype=torch.float32)
    points = list(trace.checkpoints)
    points[2] = points[2]._replace(params={k: p * 1e30 for k, p in points[2].params.items()})
    found = forgetting(TrainingTrace(trace.module, trace.loss, trace.tasks, points))
    assert found.measured[1, 0] == torch.inf
    assert not found.remainder[1, 0].isfinite()


def test_mistakes_are_told() -> None:
    trace = network()
    with pytest.raises(GlocalError, match=r"unknown average of forgetting over 't-2'.*Allowed: t, t-1"):
        recursion(forgetting(trace), "t-2")  # type: ignore[arg-type]
    untrained = TrainingTrace(trace.module, trace.loss, trace.tasks, trace.checkpoints[:1])
    with pytest.raises(GlocalError, match="no learned task"):
        forgetting(untrained)
