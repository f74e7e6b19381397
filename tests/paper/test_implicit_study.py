"""Implicit steps: against dense solves and against the minimum they are defined by; the study's rows and verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from small_problems import batch_of, double_model, elsewhere, examples, flat, gradient
from torch.autograd.functional import hessian

from glocal.paper import get_study
from glocal.paper.studies.implicit import (
    ImplicitEWC,
    ImplicitLaplace,
    ImplicitOptimalSoft,
    eigenbasis,
    largest_eigenvalue,
    solve,
    verdict,
)
from glocal.paper.study import Context
from glocal.tree import Params, from_vector

STUDY = get_study("implicit")


@pytest.mark.parametrize("kind", [ImplicitEWC, ImplicitLaplace, ImplicitOptimalSoft])
def test_a_step_minimises_the_penalty_exactly_and_the_loss_to_first_order(kind: Any) -> None:
    """∇L(θ) + ∇q(θ') + (θ' − θ)/η = 0 at θ', with the gradient of the penalty q by autograd."""
    model, params = double_model()
    algorithm = kind(penalty=0.7)
    memory = algorithm.init(model, params, batch_of(examples(2, 0)))
    lr = torch.tensor(40.0, dtype=torch.float64)
    batch = batch_of(examples(9, 5))._replace(lr=lr)
    grads = gradient(lambda p: algorithm.objective(model, p, memory, batch), params)
    first = algorithm.direction(model, grads, params, memory, batch)
    torch.testing.assert_close(first, grads)  # without a finished task it is a step of SGD
    for t in range(2):
        solution = elsewhere(params, 1 + t)
        memory = algorithm.consolidate(model, solution, memory, batch_of(examples(9, 50 + t), t, t))
    here = elsewhere(params, 8)

    def penalty(p: Params) -> torch.Tensor:
        value: torch.Tensor = algorithm.objective(model, p, memory, batch) - model.loss(p, batch.x, batch.y)
        return value

    grads = gradient(lambda p: algorithm.objective(model, p, memory, batch), here)
    direction = algorithm.direction(model, grads, here, memory, batch)
    there = {k: p - lr * direction[k] for k, p in here.items()}
    loss, pull = gradient(lambda p: model.loss(p, batch.x, batch.y), here), gradient(penalty, there)
    residual = flat(loss) + flat(pull) + (flat(there) - flat(here)) / lr
    assert residual.abs().max() < 1e-10 * max(1.0, float(flat(pull).abs().max()))


def test_the_eigenbasis_solves_and_finds_the_largest_eigenvalue_as_a_dense_matrix_does() -> None:
    model, params = double_model()
    laplace = ImplicitLaplace()
    memory = laplace.init(model, params, batch_of(examples(2, 0)))
    memory = laplace.consolidate(model, params, memory, batch_of(examples(9, 50)))
    anchor = flat(params)

    def quadratic(vector: torch.Tensor) -> torch.Tensor:
        return laplace.approximation(model, memory, 0)(from_vector(vector, params))

    dense = hessian(quadratic, anchor + 1)
    assert largest_eigenvalue(memory["hessian"]) == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]))
    vector, weight = flat(elsewhere(params, 4)), torch.tensor(3.0, dtype=torch.float64)
    expected = torch.linalg.solve(torch.eye(len(vector), dtype=torch.float64) + weight * dense, vector)
    found = flat(solve(eigenbasis(memory["hessian"]), from_vector(vector, params), weight))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_where_explicit_steps_diverge_implicit_ones_do_not(tmp_path: Path) -> None:
    context = Context(torch.device("cpu"), None, tmp_path)
    size = {"tasks": 3, "epochs": 1, "hidden": [32], "batch_size": 64, "lrs": [0.1, 0.5], "seeds": [11]}
    items = [item | size for item in STUDY.work_items(True) if "optimal-soft" in item["algorithm"]]
    items[-1] |= {"lrs": [0.1]}
    rows = pl.DataFrame([row for item in items for row in STUDY.measure(item, context)], infer_schema_length=None)
    acc = {(r["algorithm"], r["lr"]): r["acc"] for r in rows.filter(pl.col("sharpness").is_null()).rows(named=True)}
    assert np.isnan(acc["optimal-soft", 0.5])
    assert all(np.isfinite(v) for (name, lr), v in acc.items() if name != "optimal-soft" or lr < 0.5)
    sharpness = rows.filter(pl.col("sharpness").is_not_null()).sort("t")
    assert sharpness["t"].to_list() == [1, 2, 3]
    assert (sharpness["sharpness"].diff()[1:] > 0).all() and 2 / sharpness["sharpness"][-1] < 0.5
    STUDY.draw(rows, Figure())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([0.5, -0.5, 0.2, 0.0], "one of the explicit step"),
        ([-5.0, -5.5, -5.2, -4.9], "not one of the step"),
        ([-5.0, 3.0, 0.5, -1.0], "does not decide"),
        ([0.5, np.nan, 0.2, 0.0], "diverged"),
    ],
)
def test_verdicts_are_those_registered(found: list[float], said: str) -> None:
    assert said in verdict(np.array(found), 0.005, 0.1)
