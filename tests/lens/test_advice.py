"""At saddle points nobody is told that all other directions are free."""

from __future__ import annotations

import pytest
import torch

from glocal.lens.advice import Advice, advise


def with_spectrum(eigenvalues: list[float], trace: float) -> Advice:
    """Every later solution well inside, nothing forgotten."""
    spectrum, ways = torch.tensor([eigenvalues] * 2), torch.ones(1)
    inside = {"distance": ways, "radius": 5 * ways, "error": 0.01 * ways, "forgotten": torch.zeros(2)}
    return advise(0.1, **inside, eigenvalues=spectrum, trace=torch.full((2,), trace), following=(1.0, 0.5, 9.0))


@pytest.mark.parametrize(
    ("eigenvalues", "trace", "family"),
    [([3.0, 1.0], 5.0, "constraint"), ([3.0, 1.0], 20.0, "quadratic"), ([3.0, -2.0], 3.0, "quadratic")],
    ids=["few directions", "many directions", "a saddle"],
)
def test_a_constraint_where_few_directions_bend_upwards(eigenvalues: list[float], trace: float, family: str) -> None:
    found = with_spectrum(eigenvalues, trace)
    assert found.family == family
    assert ("bend downwards" in found.reason) == (eigenvalues[1] < 0)


def test_rounding_of_the_trace_makes_no_saddle() -> None:
    assert with_spectrum([3.0, 1.0], 3.9).family == "constraint"
