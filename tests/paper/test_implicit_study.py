"""The study of implicit steps: its rows and verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from small_problems import batch_of, double_model, examples, flat
from torch.autograd.functional import hessian

from glocal.algorithms import Laplace
from glocal.paper import get_study
from glocal.paper.studies.implicit import best, largest_eigenvalue, verdict
from glocal.paper.study import Context
from glocal.tree import from_vector

STUDY = get_study("implicit")


def test_the_largest_eigenvalue_is_that_of_the_dense_matrix() -> None:
    model, params = double_model()
    laplace = Laplace()
    memory = laplace.init(model, params, batch_of(examples(2, 0)))
    memory = laplace.consolidate(model, params, memory, batch_of(examples(9, 50)))

    def quadratic(vector: torch.Tensor) -> torch.Tensor:
        return laplace.approximation(model, memory, 0)(from_vector(vector, params))

    dense = hessian(quadratic, flat(params) + 1)
    assert largest_eigenvalue(memory["hessian"]) == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]))


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
        ([0.5, np.nan, 0.2, 0.0], "1 of 4 pairs diverged: its failure is not one of the step"),
    ],
)
def test_verdicts_are_those_registered(found: list[float], said: str) -> None:
    assert said in verdict(np.array(found), 0.005, 0.1)


def test_a_rate_at_which_a_run_diverged_is_not_the_best() -> None:
    rows = pl.DataFrame(
        {"algorithm": "er", "lr": [0.1, 0.1, 0.5, 0.5], "seed": [1, 2] * 2, "acc": [70.0, 72.0, 95.0, np.nan]}
    )
    lr, accuracies = best(rows, "er")
    assert lr == 0.1 and accuracies.tolist() == [70, 72]
