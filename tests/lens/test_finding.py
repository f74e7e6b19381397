"""What an examination concludes: whether training left ε-regions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from glocal.lens.examination import Examination
from glocal.lens.forgetting import Forgetting


def examination(tasks: int, errors: Sequence[float]) -> Examination:
    """Return the examination of ξ_o(θ_t) of every pair, with ε = 0.1."""
    nothing, zero, predicted = torch.zeros(tasks, tasks), torch.zeros(tasks), torch.zeros(tasks, tasks)
    predicted[torch.ones(tasks, tasks, dtype=torch.bool).tril(-1)] -= torch.tensor(errors)
    pairs = Forgetting(nothing, nothing, predicted, nothing, nothing, nothing, nothing)
    radii = torch.full((tasks,), 0.5), torch.full((tasks,), 9.0)
    parts = (zero + 3, nothing, nothing, *radii, pairs, nothing, torch.ones(tasks, 2), zero, zero)
    return Examination(0.1, 50, zero, *parts)


def test_the_finding_counts_pairs_outside() -> None:
    assert "in 2 of 3 pairs" in examination(3, (0.01, -0.7, 0.2)).finding
    assert "in 0 of 3 pairs" in examination(3, (0.01, 0.05, 0.0)).finding
    assert "1 of 3 pairs of tasks are not finite" in examination(3, (0.01, math.nan, 0.5)).finding
    assert "moved by 3; the ε-region of its task extends 0.5 along v_1 and 9 in" in examination(1, ()).finding
