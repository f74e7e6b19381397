"""The recommended family follows the errors, the forgetting and the curvature."""

from __future__ import annotations

import pytest
import torch

from glocal.lens.examination import Advice, advise


def with_spectrum(eigenvalues: list[float], trace: float, parameters: int = 50) -> Advice:
    """All later solutions are inside, and nothing was forgotten."""
    spectrum, traces = torch.tensor([eigenvalues] * 2), torch.full((2,), trace)
    after = (1.0, 0.5, 9.0)
    errors, forgetting = torch.tensor([0.01]), torch.zeros(2)
    return advise(0.1, errors, forgetting, spectrum, traces, parameters=parameters, next_task=after)


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
    advice = with_spectrum(eigenvalues, trace)
    assert advice.family == family
    assert ("negative" in advice.reason) == (eigenvalues[1] < 0)


def test_few_parameters_leave_no_free_directions() -> None:
    assert with_spectrum([3.0, 1.0], 4.0, parameters=4).family == "constraint"
    assert with_spectrum([3.0, 1.0], 4.0, parameters=3).family == "quadratic"


def test_rounding_of_the_trace_is_no_saddle() -> None:
    assert with_spectrum([3.0, 1.0], 3.9).family == "constraint"
