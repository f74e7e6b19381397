"""At saddle points nobody is told that all other directions are free."""

from __future__ import annotations

import pytest
import torch

from glocal.lens.advice import Advice, advise


def with_spectrum(eigenvalues: list[float], trace: float, parameters: int = 50, reach: float = 5.0) -> Advice:
    """Every later solution well inside, nothing forgotten."""
    spectrum, ways = torch.tensor([eigenvalues] * 2), torch.ones(1)
    inside = {"distance": ways, "radius": reach * ways, "error": 0.01 * ways, "forgotten": torch.zeros(2)}
    return advise(
        0.1,
        **inside,
        eigenvalues=spectrum,
        trace=torch.full((2,), trace),
        parameters=parameters,
        following=(1.0, 0.5, 9.0),
    )


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
def test_a_constraint_where_few_directions_bend_upwards(eigenvalues: list[float], trace: float, family: str) -> None:
    found = with_spectrum(eigenvalues, trace)
    assert found.family == family
    assert ("bend downwards" in found.reason) == (eigenvalues[1] < 0)


def test_of_few_parameters_none_is_free() -> None:
    assert with_spectrum([3.0, 1.0], 4.0, parameters=4).family == "constraint"
    found = with_spectrum([3.0, 1.0], 4.0, parameters=3)
    assert found.family == "quadratic" and "has 3 parameters" in found.reason


def test_a_region_without_a_border() -> None:
    """Of a quadratic loss the expansion is right everywhere."""
    assert "task, of which no border was found. Few" in with_spectrum([3.0, 1.0], 5.0, reach=torch.inf).reason
    assert "task, whose radius is 5 times the way or more. Few" in with_spectrum([3.0, 1.0], 5.0).reason


def test_rounding_of_the_trace_makes_no_saddle() -> None:
    assert with_spectrum([3.0, 1.0], 3.9).family == "constraint"
