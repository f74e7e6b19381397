"""What an examination concludes: whether training left ε-regions, and what to train instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import glocal
from glocal.errors import GlocalError
from glocal.lens import examine, open_run
from glocal.lens.examination import Examination
from glocal.lens.forgetting import Forgetting


def examination(tasks: int, errors: Sequence[float], lr: float | None = None) -> Examination:
    """Return the examination of ξ_o(θ_t) of every pair, with ε = 0.1."""
    nothing, zero, predicted = torch.zeros(tasks, tasks), torch.zeros(tasks), torch.zeros(tasks, tasks)
    predicted[torch.ones(tasks, tasks, dtype=torch.bool).tril(-1)] -= torch.tensor(errors)
    pairs = Forgetting(nothing, nothing, predicted, nothing, nothing, nothing, nothing)
    radii = torch.full((tasks,), 0.5), torch.full((tasks,), 9.0)
    parts = (zero + 3, nothing, nothing, *radii, pairs, nothing, torch.ones(tasks, 2), zero, zero)
    return Examination(0.1, 50, zero, *parts, lr=lr)


def test_the_finding_counts_pairs_outside() -> None:
    assert "in 2 of 3 pairs" in examination(3, (0.01, -0.7, 0.2)).finding
    assert "in 0 of 3 pairs" in examination(3, (0.01, 0.05, 0.0)).finding
    assert "1 of 3 pairs of tasks are not finite" in examination(3, (0.01, math.nan, 0.5)).finding
    assert "moved by 3; the ε-region of its task extends 0.5 along v_1 and 9 in" in examination(1, ()).finding


def test_nothing_is_recommended_outside_the_measured_learning_rates() -> None:
    for errors in ((0.0,), (0.5,)):
        given = {lr: examination(2, errors, lr) for lr in (None, 0.001, 0.003, 0.03, 0.1, 0.3)}
        assert [lr for lr, found in given.items() if "Recommended" in str(found)] == [0.003, 0.03, 0.1]
    assert examination(2, (math.nan,), 0.03).recommendation is None


def test_the_learning_rate_of_own_checkpoints() -> None:
    states = [{"weight": torch.full((1, 2), float(t)), "bias": torch.zeros(1)} for t in range(3)]
    parts: Any = (torch.nn.Linear(2, 1), "squared-error", [(torch.eye(2), torch.ones(2, 1))] * 2, states, 0.1)
    assert examine(*parts, lr=0.03).recommendation and examine(*parts).recommendation is None
    with pytest.raises(GlocalError, match=r"lr = 0 was given; it must be a finite number above 0"):
        examine(*parts, lr=0)


def test_a_run_has_a_learning_rate_if_it_is_constant(tmp_path: Path) -> None:
    sizes: Any = {"tasks": 1, "epochs": 1, "batch_size": 500, "keep_parameters": True, "store": tmp_path}
    optimizers: Any = ["sgd", ("sgd", {"momentum": 0.9}), ("sgd", {"schedule": "cosine"}), "adam"]
    runs = glocal.sweep("rotated-digits", ["sgd"], [0.02], [1], optimizer=optimizers, **sizes)
    runs += glocal.sweep("rotated-digits", ["stable-sgd", "er"], [0.02], [1], **sizes)
    traces = {run.algorithm: open_run(str(run.path)).trace(20) for run in runs}
    assert len(traces) == 6 and {name for name, trace in traces.items() if trace.lr == 0.02} == {"sgd", "er"}
    assert {trace.lr for trace in traces.values()} == {0.02, None} and traces["sgd"].double().lr == 0.02
