"""ε-regions of polynomials, whose radii are roots; the locality assumption along trajectories written by hand."""

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
from glocal.lens.approximation import ErrorCurves
from glocal.lens.locality_assumption import (
    locality_assumption,
    principal_directions,
    random_directions,
    region_radii,
    trajectory_radii,
)
from glocal.lens.taylor import exact_taylor, taylor
from glocal.lens.trace import TrainingTrace, trace_checkpoints


class OfNumber(nn.Module):
    """f_θ(x) = g(θ) x of one number θ: with x = 1 and y = 0 the loss is ½ g(θ)²."""

    def __init__(self, g: str) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))
        self.g = g

    def forward(self, x: Tensor) -> Tensor:
        return (self.theta.square() if self.g == "square" else self.theta.exp()) * x


def one_number(g: str, theta: float, dtype: torch.dtype = torch.float64) -> TrainingTrace:
    module = OfNumber(g).to(dtype)
    state = {"theta": torch.tensor([theta], dtype=dtype)}
    data = (torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype))
    return trace_checkpoints(module, "squared-error", [data], [state, state])


BOTH = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)


def first_root(polynomials: Sequence[Sequence[float]]) -> float:
    """The smallest positive real root of any of them."""
    roots = np.concatenate([np.roots(p) for p in polynomials])
    return float(min(r.real for r in roots if abs(r.imag) < 1e-9 and r.real > 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_large_losses_is_no_border(dtype: torch.dtype) -> None:
    """A quadratic is its own expansion, as far as one goes; ten thousand away its losses round by more than ε."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2).to(dtype)
    data = (torch.randn(30, 4, dtype=dtype), torch.randn(30, 2, dtype=dtype))
    trace = trace_checkpoints(module, "squared-error", [data], [module.state_dict()] * 2)
    directions = random_directions(trace, 0, 5)
    assert region_radii(trace, 0, exact_taylor(trace, 0), directions, 0.01).radii.tolist() == [math.inf] * 5
    assert bool((region_radii(trace, 0, taylor(trace, 0, 1), directions, 0.01).radii < 10).all())


@settings(deadline=None, max_examples=25)
@given(st.floats(-2, 2), st.floats(1e-4, 10), st.integers(0, 2))
@example(0.46875, 0.5, 2)  # left at 1.08 and entered again before 1.78, the next radius of the grid
def test_the_radii_of_a_quartic_are_roots(a: float, epsilon: float, order: int) -> None:
    """L = ½ θ⁴ at θ = a ± r, less its expansion: 2a³s r + 3a² r² + 2a s r³ + ½ r⁴ without the terms up to the order."""
    for peak in (13.5 * a**4, 0.5 * a**4):  # of the second and zeroth order's error: ε just below is left for a moment
        assume(abs(peak - epsilon) > 0.05 * epsilon)
    trace = one_number("square", a)
    found = region_radii(trace, 0, taylor(trace, 0, order), BOTH, epsilon, tolerance=1e-6)
    for sign, radius in zip((1, -1), found.radii.tolist(), strict=True):
        terms = [0.5, 2 * a * sign, 3 * a * a, 2 * a**3 * sign]  # of r⁴ … r
        left = [*terms[: 4 - order], *[0.0] * order]
        expected = first_root([[*left, -epsilon], [*left, epsilon]])
        assert radius == pytest.approx(expected, rel=1e-4)
        assert radius <= expected * (1 + 1e-9)  # still inside


def test_along_eigenvectors_of_a_quadratic_the_radius_goes_with_the_curvature() -> None:
    """A constant errs by ½ λ r² around a minimum."""
    scales = np.array([3.0, 1.5, 0.7, 0.2])
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 4)))[0] * scales * 12**0.5
    module = nn.Linear(4, 1, bias=False).double()
    best = {"weight": torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)}
    data = (torch.from_numpy(x), torch.from_numpy(x) @ best["weight"].T)
    trace = trace_checkpoints(module, "squared-error", [data], [best, best])
    directions = principal_directions(trace, 0, 4)
    assert directions.shape == (8, 4)
    torch.testing.assert_close(directions[:4], -directions[4:])
    found = region_radii(trace, 0, taylor(trace, 0, 0), 5 * directions, 0.3, tolerance=1e-7)
    expected = np.sqrt(2 * 0.3 / scales**2)
    np.testing.assert_allclose(found.radii, [*expected, *expected], rtol=1e-6)
    torch.testing.assert_close(found.directions.norm(dim=1), torch.ones(8, dtype=torch.float64))


def test_an_exact_approximation_has_no_border_and_a_wrong_one_no_region() -> None:
    trace = anywhere(0).trace
    directions = random_directions(trace, 1, 5)
    exact = taylor(trace, 1)
    assert region_radii(trace, 1, exact, directions, 1e-3, grid=(0.1, 1.0, 100.0)).radii.isinf().all()
    wrong = region_radii(trace, 1, lambda params: exact(params) + 0.5, directions, 0.5 - 1e-9)
    assert wrong.radii.tolist() == [0.0] * 5


def test_the_first_crossing_counts() -> None:
    """An error of |sin r| is small again at π."""
    trace = one_number("square", 0.0)
    wavy = lambda params: 0.5 * params["theta"][0] ** 4 + params["theta"][0].sin()  # noqa: E731
    found = region_radii(trace, 0, wavy, BOTH, 0.9, tolerance=1e-6)
    np.testing.assert_allclose(found.radii, [math.asin(0.9)] * 2, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_that_overflow_are_outside(dtype: torch.dtype) -> None:
    """L = ½ e^{2θ}, which is inf at most radii of the grid."""
    trace = one_number("exp", 0.0, dtype)
    found = region_radii(trace, 0, taylor(trace, 0), BOTH, 1.0)
    for sign, radius in zip((1, -1), found.radii.tolist(), strict=True):
        error = abs(0.5 * math.exp(2 * sign * radius) - (0.5 + sign * radius + radius**2))
        assert error == pytest.approx(1.0, rel=1e-3)
    beyond = region_radii(trace, 0, lambda params: params["theta"].sum() * torch.nan, BOTH, 1.0)
    assert beyond.radii.tolist() == [0.0, 0.0]


def test_in_any_network_the_error_reaches_epsilon_just_there() -> None:
    trace = network(1)
    expansion = taylor(trace, 0, structure="diagonal")
    found = region_radii(trace, 0, expansion, random_directions(trace, 0, 4), 0.05)
    for unit, radius in zip(found.directions, found.radii, strict=True):
        errors = []
        for r in (radius, radius * (1 + 2e-4)):
            point = at(trace, theta_of(trace, 0) + r * unit)
            errors.append(float((expansion(point.params) - trace.value(0, point)).abs()))
        assert errors[0] < 0.05 <= errors[1]


def curves(errors: list[list[float]], finished: list[int], distance: list[list[float]] | None = None) -> ErrorCurves:
    """Trajectories by hand: nan where a task is not finished."""
    gap = torch.tensor(errors, dtype=torch.float64)
    far = gap if distance is None else torch.tensor(distance, dtype=torch.float64)
    return ErrorCurves(torch.tensor(finished), 10 * torch.arange(len(finished)), torch.zeros_like(gap), gap, far)


NAN = math.nan
WALK = curves(
    [[NAN, NAN], [0.0, NAN], [0.2, NAN], [0.1, NAN], [0.6, 0.0], [0.3, 0.7]],
    [0, 1, 1, 1, 2, 2],
    [[NAN, NAN], [0.0, NAN], [2.0, NAN], [1.5, NAN], [4.0, 0.0], [3.0, 5.0]],
)


def test_the_assumption_holds_until_it_breaks() -> None:
    found = locality_assumption(WALK, 0.5)
    assert found.holds.tolist() == [True, True, True, True, False, False]
    np.testing.assert_allclose(found.min_epsilon, [0, 0, 0.2, 0.1, 0.6, 0.7])
    assert found.first_violation is not None
    assert found.first_violation[:4] == (4, 2, 40, (0,)) and found.first_violation.error == pytest.approx(0.6)
    assert "steps 30 and 40" in str(found.first_violation) and "task 0 is 0.6" in str(found.first_violation)
    assert locality_assumption(WALK, 0.8).first_violation is None
    both = locality_assumption(curves([[1.0, 2.0]], [2]), 0.5).first_violation
    assert both is not None and both.tasks == (0, 1)


def test_the_region_is_open() -> None:
    """ξ < ε, and not ξ ≤ ε."""
    assert not locality_assumption(curves([[0.5]], [1]), 0.5).holds.any()


def test_what_is_beyond_numbers_is_outside() -> None:
    for beyond in (math.inf, NAN):
        found = locality_assumption(curves([[0.0, NAN], [beyond, NAN]], [1, 1]), 1e9)
        assert found.holds.tolist() == [True, False] and found.min_epsilon[1].isinf()


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=6), st.floats(1e-6, 20))
def test_it_holds_for_every_epsilon_above_the_smallest_and_no_other(errors: list, epsilon: float) -> None:
    finished = [min(i, 3) for i in range(len(errors))]
    found = locality_assumption(curves(errors, finished), epsilon)
    for row, t, holds, smallest in zip(errors, finished, found.holds.tolist(), found.min_epsilon.tolist(), strict=True):
        assert holds == all(e < epsilon for e in row[:t])
        assert holds == (epsilon > smallest) or t == 0
    assert (found.first_violation is None) == all(found.holds.tolist())
    if found.first_violation is not None:
        assert found.first_violation.snapshot == found.holds.tolist().index(False)


def test_along_the_trajectory_the_radius_is_the_way_before_it_was_left() -> None:
    found = trajectory_radii(WALK, 0.5)
    np.testing.assert_array_equal(found.last_inside, [2.0, 0.0])
    np.testing.assert_array_equal(found.first_outside, [4.0, 5.0])
    longer = trajectory_radii(WALK, 0.65)
    np.testing.assert_array_equal(longer.last_inside, [4.0, 0.0])
    np.testing.assert_array_equal(longer.first_outside, [math.inf, 5.0])
    at_once = trajectory_radii(curves([[NAN, NAN], [1.0, NAN]], [0, 1]), 0.5)
    np.testing.assert_array_equal(at_once.last_inside, [NAN, NAN])
    np.testing.assert_array_equal(at_once.first_outside, [1.0, NAN])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0 was given"),
        ({"epsilon": NAN}, "epsilon = nan was given"),
        ({"grid": (1.0, 0.5)}, "increasing radii above 0"),
        ({"grid": ()}, "increasing radii above 0"),
        ({"tolerance": 0.0}, "tolerance = 0.0 was given"),
        ({"directions": torch.zeros(1, 1)}, "finite lengths above 0"),
        ({"directions": torch.ones(1)}, "must be rows"),
        ({"task": 1}, "task 1 was given"),
    ],
)
def test_bad_input_is_said(given: dict, message: str) -> None:
    trace = one_number("square", 1.0)
    arguments = {"task": 0, "directions": BOTH, "epsilon": 1.0} | given
    with pytest.raises(GlocalError, match=message):
        region_radii(trace, approximation=taylor(trace, 0), **arguments)
