"""ε-regions of polynomial losses, whose radii are roots, and the locality assumption along known trajectories."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from quadratics import anywhere, at, network, theta_of
from torch import Tensor, nn

from glocal.errors import GlocalError
from glocal.lens.approximation_error import ErrorCurves
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.locality_assumption import (
    locality_assumption,
    region_radii,
    trajectory_radii,
)
from glocal.lens.perturbation import top_eigenpairs, unit_directions
from glocal.lens.taylor import exact_taylor, taylor
from glocal.lens.training_trace import TrainingTrace


class ScalarNetwork(nn.Module):
    """f_θ(x) = g(θ) x with a scalar θ: for x = 1 and y = 0 the loss is ½ g(θ)²."""

    def __init__(self, g: str) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))
        self.g = g

    def forward(self, x: Tensor) -> Tensor:
        return (self.theta.square() if self.g == "square" else self.theta.exp()) * x


def scalar_trace(g: str, theta: float, dtype: torch.dtype = torch.float64) -> TrainingTrace:
    module = ScalarNetwork(g).to(dtype)
    state = {"theta": torch.tensor([theta], dtype=dtype)}
    data = (torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype))
    return trace_checkpoints(module, "squared-error", [data], [state, state])


BOTH_DIRECTIONS = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)


def first_root(polynomials: Sequence[Sequence[float]]) -> float:
    """Return the smallest positive real root of the polynomials."""
    roots = np.concatenate([np.roots(p) for p in polynomials])
    return float(min(r.real for r in roots if abs(r.imag) < 1e-9 and r.real > 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_large_losses_does_not_end_a_region(dtype: torch.dtype) -> None:
    """A quadratic equals its expansion everywhere; at a distance of 10⁴ its losses round by more than ε."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2).to(dtype)
    data = (torch.randn(30, 4, dtype=dtype), torch.randn(30, 2, dtype=dtype))
    trace = trace_checkpoints(module, "squared-error", [data], [module.state_dict()] * 2)
    directions = unit_directions(trace, 0, 5)
    assert region_radii(trace, 0, exact_taylor(trace, 0), directions, 0.01).tolist() == [math.inf] * 5
    assert bool((region_radii(trace, 0, taylor(trace, 0, 1), directions, 0.01) < 10).all())


@settings(deadline=None, max_examples=25)
@given(st.floats(-2, 2), st.floats(1e-4, 10), st.integers(0, 2))
@example(0.46875, 0.5, 2)  # left at 1.08 and reentered before 1.78, the next radius of the grid
def test_the_radii_of_a_quartic_are_roots(a: float, epsilon: float, order: int) -> None:
    """For L = ½ θ⁴ at θ = a + s r the error is 2a³s r + 3a² r² + 2a s r³ + ½ r⁴ without the terms up to the order."""
    for peak in (13.5 * a**4, 0.5 * a**4):  # maxima of the errors of order 2 and 0, where crossings merge
        assume(abs(peak - epsilon) > 0.05 * epsilon)
    trace = scalar_trace("square", a)
    result = region_radii(trace, 0, taylor(trace, 0, order), BOTH_DIRECTIONS, epsilon, tolerance=1e-6)
    for sign, radius in zip((1, -1), result.tolist(), strict=True):
        terms = [0.5, 2 * a * sign, 3 * a * a, 2 * a**3 * sign]  # of r⁴ … r
        error = [*terms[: 4 - order], *[0.0] * order]
        expected = first_root([[*error, -epsilon], [*error, epsilon]])
        assert radius == pytest.approx(expected, rel=1e-4)
        assert radius <= expected * (1 + 1e-9)  # still inside


def test_radii_along_eigenvectors_of_a_quadratic() -> None:
    """At a minimum, the error of the constant approximation is ½ λ r²."""
    scales = np.array([3.0, 1.5, 0.7, 0.2])
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 4)))[0] * scales * 12**0.5
    module = nn.Linear(4, 1, bias=False).double()
    minimum = {"weight": torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)}
    data = (torch.from_numpy(x), torch.from_numpy(x) @ minimum["weight"].T)
    trace = trace_checkpoints(module, "squared-error", [data], [minimum, minimum])
    vectors = top_eigenpairs(trace, 0, 4).vectors
    result = region_radii(trace, 0, taylor(trace, 0, 0), 5 * torch.cat([vectors, -vectors]), 0.3, tolerance=1e-7)
    expected = np.sqrt(2 * 0.3 / scales**2)
    np.testing.assert_allclose(result, [*expected, *expected], rtol=1e-6)


def test_exact_and_wrong_approximations() -> None:
    trace = anywhere(0).trace
    directions = unit_directions(trace, 1, 5)
    exact = taylor(trace, 1)
    assert region_radii(trace, 1, exact, directions, 1e-3, grid=(0.1, 1.0, 100.0)).isinf().all()
    wrong = region_radii(trace, 1, lambda params: exact(params) + 0.5, directions, 0.5 - 1e-9)
    assert wrong.tolist() == [0.0] * 5


def test_the_first_crossing_counts() -> None:
    """|sin r| exceeds ε before it falls below it again near π."""
    trace = scalar_trace("square", 0.0)
    sine = lambda params: 0.5 * params["theta"][0] ** 4 + params["theta"][0].sin()  # noqa: E731
    result = region_radii(trace, 0, sine, BOTH_DIRECTIONS, 0.9, tolerance=1e-6)
    np.testing.assert_allclose(result, [math.asin(0.9)] * 2, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_that_overflow_are_outside(dtype: torch.dtype) -> None:
    """L = ½ e^{2θ}, which is inf at most radii of the grid."""
    trace = scalar_trace("exp", 0.0, dtype)
    result = region_radii(trace, 0, taylor(trace, 0), BOTH_DIRECTIONS, 1.0)
    for sign, radius in zip((1, -1), result.tolist(), strict=True):
        error = abs(0.5 * math.exp(2 * sign * radius) - (0.5 + sign * radius + radius**2))
        assert error == pytest.approx(1.0, rel=1e-3)
    not_finite = region_radii(trace, 0, lambda params: params["theta"].sum() * torch.nan, BOTH_DIRECTIONS, 1.0)
    assert not_finite.tolist() == [0.0, 0.0]


def test_the_error_of_a_network_reaches_epsilon_at_the_radius() -> None:
    trace = network(1)
    expansion = taylor(trace, 0, structure="diagonal")
    units = unit_directions(trace, 0, 4)
    for unit, radius in zip(units, region_radii(trace, 0, expansion, units, 0.05), strict=True):
        errors = []
        for r in (radius, radius * (1 + 2e-4)):
            point = at(trace, theta_of(trace, 0) + r * unit)
            errors.append(float((expansion(point.params) - trace.value(0, point)).abs()))
        assert errors[0] < 0.05 <= errors[1]


def curves(errors: list[list[float]], finished: list[int], distance: list[list[float]] | None = None) -> ErrorCurves:
    """Return curves with these errors, NaN where a task is not finished; distances default to the errors."""
    error = torch.tensor(errors, dtype=torch.float64)
    distances = error if distance is None else torch.tensor(distance, dtype=torch.float64)
    return ErrorCurves(
        torch.tensor(finished), 10 * torch.arange(len(finished)), torch.zeros_like(error), error, distances
    )


NAN = math.nan
TRAJECTORY = curves(
    [[NAN, NAN], [0.0, NAN], [0.2, NAN], [0.1, NAN], [0.6, 0.0], [0.3, 0.7]],
    [0, 1, 1, 1, 2, 2],
    [[NAN, NAN], [0.0, NAN], [2.0, NAN], [1.5, NAN], [4.0, 0.0], [3.0, 5.0]],
)


def test_the_first_violation_is_reported() -> None:
    result = locality_assumption(TRAJECTORY, 0.5)
    assert result.holds.tolist() == [True, True, True, True, False, False]
    np.testing.assert_allclose(result.min_epsilon, [0, 0, 0.2, 0.1, 0.6, 0.7])
    assert result.first_violation is not None
    assert result.first_violation[:4] == (4, 2, 40, (0,)) and result.first_violation.error == pytest.approx(0.6)
    assert "steps 30 and 40" in str(result.first_violation) and "task 1 is 0.6" in str(result.first_violation)
    assert locality_assumption(TRAJECTORY, 0.8).first_violation is None
    both = locality_assumption(curves([[1.0, 2.0]], [2]), 0.5).first_violation
    assert both is not None and both.tasks == (0, 1)


def test_the_region_is_open() -> None:
    """ξ < ε, not ξ ≤ ε."""
    assert not locality_assumption(curves([[0.5]], [1]), 0.5).holds.any()


def test_errors_that_are_not_finite_are_outside() -> None:
    for error in (math.inf, NAN):
        result = locality_assumption(curves([[0.0, NAN], [error, NAN]], [1, 1]), 1e9)
        assert result.holds.tolist() == [True, False] and result.min_epsilon[1].isinf()


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=6), st.floats(1e-6, 20))
def test_it_holds_exactly_for_epsilon_above_min_epsilon(errors: list, epsilon: float) -> None:
    finished = [min(i, 3) for i in range(len(errors))]
    result = locality_assumption(curves(errors, finished), epsilon)
    for row, t, holds, smallest in zip(
        errors, finished, result.holds.tolist(), result.min_epsilon.tolist(), strict=True
    ):
        assert holds == all(e < epsilon for e in row[:t])
        assert holds == (epsilon > smallest) or t == 0
    assert (result.first_violation is None) == all(result.holds.tolist())
    if result.first_violation is not None:
        assert result.first_violation.snapshot == result.holds.tolist().index(False)


def test_trajectory_radii() -> None:
    result = trajectory_radii(TRAJECTORY, 0.5)
    np.testing.assert_array_equal(result.last_inside, [2.0, 0.0])
    np.testing.assert_array_equal(result.first_outside, [4.0, 5.0])
    longer = trajectory_radii(TRAJECTORY, 0.65)
    np.testing.assert_array_equal(longer.last_inside, [4.0, 0.0])
    np.testing.assert_array_equal(longer.first_outside, [math.inf, 5.0])
    never_inside = trajectory_radii(curves([[NAN, NAN], [1.0, NAN]], [0, 1]), 0.5)
    np.testing.assert_array_equal(never_inside.last_inside, [NAN, NAN])
    np.testing.assert_array_equal(never_inside.first_outside, [1.0, NAN])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0 was given"),
        ({"epsilon": NAN}, "epsilon = nan was given"),
        ({"grid": (1.0, 0.5)}, "increasing radii above 0"),
        ({"grid": ()}, "increasing radii above 0"),
        ({"tolerance": 0.0}, "tolerance = 0.0 was given"),
        ({"directions": torch.zeros(1, 1)}, "finite lengths above 0"),
        ({"task": 1}, "counted from 0; 1 was given"),
    ],
)
def test_invalid_options(options: dict, message: str) -> None:
    trace = scalar_trace("square", 1.0)
    arguments = {"task": 0, "directions": BOTH_DIRECTIONS, "epsilon": 1.0} | options
    with pytest.raises(GlocalError, match=message):
        region_radii(trace, approximation=taylor(trace, 0), **arguments)
