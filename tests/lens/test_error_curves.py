"""Approximation errors where they are known: zero for exact approximations, a power of the distance for expansions."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratics import anywhere, at, diverged, network, theta_of
from recordings import blobs, cohort, hidden, linear, regressions, taylor_curves
from torch import nn

from glocal.algorithms import ALGORITHMS, ER, EWC, SGD, OptimalSoft
from glocal.engine.cohort import Cohort
from glocal.errors import GlocalError
from glocal.lens.approximation_error import error_order, errors_on_rays, fit_order, own_curves
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.perturbation import unit_directions
from glocal.lens.record import RecordedRun, Snapshot, record
from glocal.lens.taylor import exact_taylor, taylor


def run_of(watched: Cohort, every: int = 1) -> RecordedRun:
    (found,) = record(watched, every)
    return found


def test_expansions_of_quadratics_have_no_error_and_lower_orders_what_is_left_out() -> None:
    problem = anywhere(2)
    trace = problem.trace
    exact = taylor_curves(trace, 2, "full")
    assert exact.error[exact.known].max() < 1e-12 * exact.true[exact.known].max()
    linear_part = taylor_curves(trace, 1)
    for t in range(1, 5):
        for o in range(t):
            moved = problem.thetas[t] - problem.solution(o)
            expected = moved @ problem.hessian(o) @ moved / 2
            np.testing.assert_allclose(linear_part.error[t, o], expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(linear_part.distance[t, o], np.linalg.norm(moved), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(linear_part.true[t, o], problem.loss(o, problem.thetas[t]), rtol=1e-12)
    assert linear_part.error.isnan().equal(~linear_part.known)
    assert linear_part.finished.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
@pytest.mark.parametrize("p", [0, 1, 2])
def test_an_expansion_of_order_p_errs_by_the_next_power_of_the_distance(p: int, loss: str) -> None:
    trace = network(4, loss=loss)
    (direction,) = unit_directions(trace, 1, 1, seed=3)
    radii = [10.0 ** (-3 + i / 4) for i in range(5)]
    found = error_order(trace, 1, taylor(trace, 1, p), 7 * direction, radii)
    assert found.used.all()
    assert abs(found.exponent - (p + 1)) < 0.02
    assert 0 < found.standard_error < 0.01


def test_an_error_that_is_rounding_alone_has_no_order() -> None:
    trace = anywhere(0).trace
    found = error_order(trace, 0, taylor(trace, 0), torch.ones(8, dtype=torch.float64))
    assert math.isnan(found.exponent) and not found.used.any()


def test_in_single_precision_rounding_is_left_out_of_the_fit() -> None:
    trace = network(4, dtype=torch.float32)
    (direction,) = unit_directions(trace, 1, 1, seed=3)
    radii = [10.0 ** (-5 + i / 4) for i in range(20)]
    found = error_order(trace, 1, taylor(trace, 1), direction, radii)
    assert not found.used[0] and found.used[-1]
    assert abs(found.exponent - 3) < 0.4


@settings(deadline=None)
@given(st.floats(0.2, 6), st.floats(-8, 8), st.integers(3, 12), st.integers(0, 2))
def test_a_power_law_is_found_through_zeros_and_infinities(p: float, log_c: float, n: int, holes: int) -> None:
    radii = torch.logspace(-2, 1, n + holes, dtype=torch.float64)
    errors = math.exp(log_c) * radii**p
    errors[:holes] = torch.tensor([0.0, math.inf], dtype=torch.float64)[:holes]
    found = fit_order(radii, errors)
    assert found.exponent == pytest.approx(p, rel=1e-9)
    assert found.standard_error < 1e-6
    assert found.used.tolist() == [False] * holes + [True] * n


def test_the_standard_error_is_that_of_a_regression() -> None:
    random = np.random.default_rng(0)
    radii = np.geomspace(0.1, 10, 9)
    errors = 3 * radii**2.5 * np.exp(0.3 * random.normal(size=9))
    found = fit_order(torch.from_numpy(radii), torch.from_numpy(errors))
    coefficients, covariance = np.polyfit(np.log(radii), np.log(errors), 1, cov=True)
    np.testing.assert_allclose([found.exponent, found.standard_error], [coefficients[0], covariance[0, 0] ** 0.5])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_errors_tell_little(count: int) -> None:
    radii = torch.tensor([1.0, 2.0, 4.0])
    errors = torch.where(torch.arange(3) < count, radii**2, 0)
    found = fit_order(radii, errors)
    assert math.isnan(found.standard_error)
    assert math.isnan(found.exponent) if count < 2 else found.exponent == pytest.approx(2)


def test_on_rays_a_network_is_the_same_mapped_and_one_by_one() -> None:
    trace = network(0)
    directions = unit_directions(trace, 0, 3, seed=0)
    radii = torch.tensor([[0.1, 1.0], [0.2, 2.0], [0.3, 3.0]], dtype=torch.float64)
    expansion = taylor(trace, 0, 1)
    mapped = errors_on_rays(trace, 0, expansion, directions, radii)

    def looking(params: dict) -> torch.Tensor:
        found = expansion(params)
        return found if float(found) != math.pi else -found  # nothing that looks at its numbers can be mapped

    single = errors_on_rays(trace, 0, looking, directions, radii)  # type: ignore[arg-type]
    for a, b in zip(mapped, single, strict=True):
        assert a.shape == (3, 2)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    point = at(trace, theta_of(trace, 0) + 2 * directions[1])
    torch.testing.assert_close(mapped[0][1, 1], (expansion(point.params) - trace.value(0, point)).abs())


def test_replay_of_everything_has_no_error() -> None:
    """Every example is seen once in each of two epochs, and a reservoir of so many slots keeps it twice."""
    challenge = blobs()
    found = own_curves(run_of(cohort(challenge, ER(slots=240))))
    assert found.known.sum() > 8
    assert found.error[found.known].max() < 1e-6
    assert found.true[found.known].min() > 1e-3  # and that is no accident
    short = own_curves(run_of(cohort(challenge, ER(slots=10))))
    assert short.error[short.known].max() > 1e-2


def test_ewc_has_no_error_where_losses_are_diagonal_quadratics_and_solutions_minima() -> None:
    """Two tasks: the first is learnt to its minimum, where its quadratic is the exact Fisher's."""
    algorithm = EWC(penalty=1.0, anchors="each")
    found = own_curves(run_of(cohort(regressions(True, 2), algorithm, linear, [(0, 0.4)], epochs=80)))
    first = found.error[found.known[:, 0], 0]
    assert len(first) > 80 and first.max() < 1e-6
    assert found.distance[-1, 0] > 0.1
    correlated = own_curves(run_of(cohort(regressions(False, 2), algorithm, linear, [(0, 0.4)], epochs=80)))
    assert correlated.error[correlated.known[:, 0], 0].max() > 1e-2


def test_what_an_algorithm_keeps_of_a_sum_is_right_in_the_mean() -> None:
    """The soft optimum with whole Hessians knows the sum of old losses, if these are quadratics, and no one of them."""
    algorithm = OptimalSoft(structure="full", matrix="hessian", samples=0)
    found = own_curves(run_of(cohort(regressions(False), algorithm, linear, [(0, 0.1)], epochs=20)))
    assert found.mean_error.max() < 1e-6
    assert found.error[found.known].max() > 1e-2


def test_counted_from_the_solution_the_error_of_sgd_is_forgetting() -> None:
    seen = run_of(cohort(blobs(), SGD()))
    stated, relative_to_solution = own_curves(seen), own_curves(seen, relative_to_solution=True)
    torch.testing.assert_close(stated.error[stated.known], stated.true[stated.known])
    for i, moment in enumerate(seen.snapshots):
        for o in range(moment.finished):
            reached = float(seen.trace.value(o, seen.trace.checkpoints[o + 1]))
            forgotten = float(seen.trace.value(o, moment.checkpoint)) - reached
            assert float(relative_to_solution.error[i, o]) == pytest.approx(abs(forgotten), abs=1e-6)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_has_curves_of_what_is_finished(name: str) -> None:
    kind = ALGORITHMS[name]
    challenge = blobs(2, new_classes="domain" not in kind.settings)
    found = own_curves(run_of(cohort(challenge, kind())))
    assert found.error.isnan().equal(~found.known)
    assert found.known.sum() == 3 + 1 + 1  # task 0 after it, after each epoch of the next, and at the end; task 1 then
    assert found.error[found.known].isfinite().all()
    if name in ("pnn", "packnet"):  # what they state is exact along training
        assert found.error[found.known].max() < 1e-5
        assert found.distance[-1, 0] > 0


def test_expansions_along_a_recording() -> None:
    seen = run_of(cohort(blobs(), SGD()))
    found = taylor_curves(seen.trace, 2, "diagonal", snapshots=seen.snapshots)
    expansion = taylor(seen.trace, 0, 2, "diagonal")
    i = 5
    expected = abs(
        float(expansion(seen.snapshots[i].checkpoint.params) - seen.trace.value(0, seen.snapshots[i].checkpoint))
    )
    assert float(found.error[i, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert found.error[3, 0] < 1e-6 and found.distance[3, 0] == 0  # at θ_o itself


def test_errors_beyond_numbers_are_infinite() -> None:
    trace = diverged(network(0), 2)
    found = taylor_curves(trace)
    assert found.error[1, 0] < 1e-12
    assert found.error[2:, 1].isinf().all() and found.error[2, 0].isinf()
    assert found.error[3, 0].isfinite() and found.mean_error[3].isinf()
    assert found.error.isnan().equal(~found.known)


def test_a_diverged_run_has_curves_too() -> None:
    seen = run_of(cohort(blobs(), EWC(), runs=[(0, 1e20)]))
    found = own_curves(seen)
    assert found.error[found.known].isinf().all()


def test_bad_input_is_said() -> None:
    trace = network(0)
    expansion = taylor(trace, 0)
    ones = torch.ones(theta_of(trace, 0).shape, dtype=torch.float64)
    with pytest.raises(GlocalError, match="every_epochs = -1"):
        record(cohort(blobs(), SGD(), hidden), every_epochs=-1)
    with pytest.raises(GlocalError, match=r"length 0\.0"):
        error_order(trace, 0, expansion, 0 * ones)
    with pytest.raises(GlocalError, match=r"radii = \[0\.0, 1\.0\] was given; they must be positive"):
        error_order(trace, 0, expansion, ones, [0.0, 1.0])
    with pytest.raises(GlocalError, match="5 was given"):
        error_order(trace, 5, expansion, ones)
    with pytest.raises(GlocalError, match="no snapshots were given"):
        taylor_curves(trace, snapshots=[])
    with pytest.raises(GlocalError, match="3 was given"):
        taylor_curves(trace, snapshots=[Snapshot(4, 0, trace.checkpoints[0])])


def test_in_double_precision_the_order_of_a_smooth_network_is_found() -> None:
    """What an expansion of the second order leaves out is of the third; in single precision rounding hides it."""
    trace = network(seed=5, tasks=2, dtype=torch.float32)
    exact = trace.double()
    found = error_order(exact, 0, exact_taylor(exact, 0), exact.update(1), [10 ** (-i / 4) for i in range(3, 10)])
    assert found.exponent == pytest.approx(3, abs=0.1) and bool(found.used.all())


def test_curves_of_expansions_are_of_parameters_alone() -> None:
    """With BatchNorm's statistics of the task's solution, wherever training left them since."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    tasks, states = [], [copy.deepcopy(module.state_dict())]
    for shift in (0.0, 3.0):
        x = torch.randn(30, 3) + shift
        module(x)  # moves the statistics alone
        tasks.append((x, torch.randint(2, (30,))))
        states.append(copy.deepcopy(module.state_dict()))
    found = taylor_curves(trace_checkpoints(module, "cross-entropy", tasks, states))
    assert float(found.error[2, 0]) < 1e-6
