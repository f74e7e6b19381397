"""The recommended family follows the errors, the forgetting and the curvature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from glocal.lens.examination import Advice, Examination
from glocal.lens.forgetting import Forgetting


def advice_of(
    errors: Sequence[float] = (0.01,),
    forgotten: Sequence[float] = (0.0, 0.0),
    eigenvalues: Sequence[float] = (2.0, -1.0),
    trace: float = 3.0,
    *,
    parameters: int = 50,
    moved: float = 1.0,
) -> Advice:
    """Return the advice for E(t) of every task and ξ_o(θ_t) of every pair."""
    n, zero = len(forgotten), torch.zeros(len(forgotten))
    later = torch.ones(n, n, dtype=torch.bool).tril(-1)
    nothing = torch.zeros(n, n)
    measured = nothing.clone()
    measured[:, 0] = torch.tensor(forgotten) * torch.arange(1, n + 1)
    predicted = measured.clone()
    predicted[later] -= torch.tensor(errors)
    pairs = Forgetting(measured, nothing, predicted, nothing, nothing, nothing, nothing)
    spectrum, traces = torch.tensor([eigenvalues] * n), torch.full((n,), trace)
    radii = torch.full((n,), 0.5), torch.full((n,), 9.0)
    updates = torch.full((n,), moved)
    return Examination(
        0.1, parameters, zero, updates, nothing, nothing, *radii, pairs, nothing, spectrum, traces, zero
    ).advice


def test_the_family_follows_errors_forgetting_and_curvature() -> None:
    near, unforgotten = (0.01, 0.05, 0.0), (0, 0.01, 0)
    few = advice_of(near, unforgotten, trace=3 / 0.9)
    assert few.family == "constraint" and "90 % of the trace" in few.reason
    spread = advice_of(near, unforgotten, trace=3 / 0.3)
    assert (spread.family, spread.locality) == ("quadratic", "local") and "30 % of the trace" in spread.reason
    assert advice_of(near, (0, 0.5, 0), trace=3 / 0.9).family == "quadratic"
    left = advice_of((0.01, -0.7, 0.2), (0, 0.5, 0), trace=3 / 0.9)
    assert (left.family, left.locality) == ("replay", "global") and "er" in left.algorithms
    assert "2 of 3 pairs" in left.reason
    assert advice_of((0.01, math.nan, 0.0), unforgotten, trace=3 / 0.9).family == "replay"
    assert advice_of(near, unforgotten, trace=math.nan).family == "quadratic"  # an unknown trace


@pytest.mark.parametrize(
    ("moved", "family", "reason"),
    [(0.4, "quadratic", "stays inside"), (3.0, "replay", "may leave"), (20.0, "replay", "leaves its")],
)
def test_of_one_task(moved: float, family: str, reason: str) -> None:
    found = advice_of((), (0.0,), moved=moved)
    assert found.family == family and reason in found.reason


@pytest.mark.parametrize(
    ("eigenvalues", "trace", "family"),
    [
        ([3.0, 1.0], 5.0, "constraint"),
        ([3.0, 1.0], 20.0, "quadratic"),
        ([3.0, -2.0], 3.0, "quadratic"),
        ([3.0, -9.0], -8.0, "quadratic"),
    ],
    ids=["few directions", "many directions", "a saddle", "a negative trace"],
)
def test_a_constraint_if_few_directions_are_curved(eigenvalues: list[float], trace: float, family: str) -> None:
    advice = advice_of(eigenvalues=eigenvalues, trace=trace)
    assert advice.family == family
    assert ("negative" in advice.reason) == (eigenvalues[1] < 0)


def test_few_parameters_leave_no_free_directions() -> None:
    assert advice_of(eigenvalues=[3.0, 1.0], trace=4.0, parameters=4).family == "constraint"
    assert advice_of(eigenvalues=[3.0, 1.0], trace=4.0, parameters=3).family == "quadratic"


def test_rounding_of_the_trace_is_no_saddle() -> None:
    assert advice_of(eigenvalues=[3.0, 1.0], trace=3.9).family == "constraint"
