"""Runs that explode while their numbers stay finite are marked and left out of means; sound runs are not marked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import fake_run

import glocal
from glocal.algorithms import EWC
from glocal.metrics import summary
from glocal.paper import results
from glocal.report.summary import diverged_note, matrix_table, rows
from glocal.store.run import Run

RESULTS = Path(__file__).parents[2] / "results"
QUICK: Any = {"epochs": 1, "train_eval": 200}


def with_arrays(run: Run, **arrays: Any) -> Run:
    return replace(run, arrays={**run.arrays, **{k: np.asarray(v, dtype=float) for k, v in arrays.items()}})


def with_losses(untrained: Any, learnt: Any, objective: Any, **challenge: Any) -> Run:
    """A run of two tasks with these training losses before training and right after it, and these objectives."""
    run = fake_run(tasks=2, epochs=1)
    losses = np.array([untrained, [learnt[0], untrained[1]], [learnt[0], learnt[1]]])
    run = with_arrays(run, train_class_loss=losses, epoch_loss=np.array(objective)[:, None])
    return replace(run, config={**run.config, "challenge": {**run.config["challenge"], **challenge}})


def test_sgd_at_rates_that_are_far_too_high(tmp_path: Path) -> None:
    runs = glocal.sweep(
        "rotated-digits", ["sgd"], lrs=[0.5, 3.0, 100.0, 1e30], seeds=[1, 2], tasks=1, store=tmp_path, **QUICK
    )
    sound, exploded = runs.where(lambda run: run.lr < 1), runs.where(lambda run: run.lr > 1)
    assert all(run.diverged is None for run in sound)
    assert all(run.diverged is not None for run in exploded)
    finite = exploded.where(lambda run: run.info["diverged"] is None)
    assert len(finite) >= 2, "runs that no check of finite numbers finds"
    assert all(run.arrays["distance_from_init"].max() > 1e3 for run in finite)
    table = runs.table()
    assert table["diverged"].to_list() == [0, 2, 2, 2]
    assert table["acc_mean"].is_null().to_list() == [False, True, True, True]
    assert len(glocal.load(tmp_path)) == 8, "however large a rate is, its run can be read"
    assert "exploded" in str(matrix_table(finite[0]).notes)


@pytest.mark.slow
def test_ewc_with_a_penalty_that_is_too_strong_for_its_rate(tmp_path: Path) -> None:
    runs = glocal.sweep(
        "rotated-digits", [EWC(penalty=1000.0)], lrs=[0.01, 0.1], seeds=[1], tasks=2, store=tmp_path, **QUICK
    )
    assert [run.diverged is not None for run in runs] == [run.lr == 0.1 for run in runs]


def test_means_are_over_the_other_seeds() -> None:
    runs = [fake_run(seed=seed, learnt=0.8 if seed else 0.1, tasks=3) for seed in range(3)]
    losses = runs[0].arrays["train_class_loss"].copy()
    losses[2:] = 8e10
    runs[0] = with_arrays(runs[0], train_class_loss=losses, epoch_loss=[[1, 1], [1, 8e10], [8e10, 8e10]])
    assert runs[0].diverged is not None and "task 2" in runs[0].diverged
    (row,) = glocal.Runs(runs).table().to_dicts()
    (others,) = glocal.Runs(runs[1:]).table().to_dicts()
    assert (row["seeds"], row["diverged"]) == (3, 1)
    assert all(row[name] == others[name] for name in ("acc_mean", "acc_std", "forgetting_mean", "distance_mean"))
    assert np.isnan(list(summary(runs[0]).values())).all(), "what studies and archives are made of"
    assert "1 of 3" in diverged_note(rows(runs))


@pytest.mark.parametrize(
    ("untrained", "learnt", "objective", "exploded"),
    [
        ([2.3, 2.3], [0.3, 0.4], [1.0, 1.0], False),
        ([2.3, 2.3], [2.2, 2.2], [2.3, 2.3], False),  # a low learning rate
        ([2.3, 2.3], [0.3, 0.4], [2300.0, 1000.0], False),  # an objective that is a sum over the batch
        ([2.3, 2.3], [0.3, 90.0], [1.0, 1.0], False),  # predictions that are no logits, as iCaRL's
        ([1e-3, 1e-3], [0.02, 0.02], [0.5, 0.5], False),  # a pretrained network
        ([2.3, 2.3], [0.3, np.nan], [1.0, np.nan], False),  # not finite: found during training
        ([2.3, 2.3], [2.31, 2.31], [379.0, 2.3], True),  # all units died
        ([0.69, 0.69], [0.69, 1.38], [379.0, 2.3], True),  # the same, measured among the classes seen so far
        ([2.3, 2.3], [0.3, 8e10], [1.0, 1e12], True),
        ([2.3, 2.3], [0.3, 5.0], [1.0, -1e6], True),  # down a direction of negative curvature
    ],
)
def test_rule(untrained: Any, learnt: Any, objective: Any, exploded: bool) -> None:
    run = with_losses(untrained, learnt, objective, loss="cross-entropy", outputs=10)
    assert (run.diverged is not None) is exploded


def test_archived_results_that_are_marked() -> None:
    """Results without losses: the last task of one moved 75 times as far as any before, that of the other 29 times."""
    names = (
        "rotated-mnist",
        "rotated-mnist-seed-angles",
        "split-cifar10",
        "split-tinyimagenet",
        "split-tinyimagenet-others",
    )
    runs = [run for name in names for run in results.read(RESULTS / f"{name}.parquet")]
    marked = {(run.algorithm, run.lr, run.seed) for run in runs if run.diverged and run.info["diverged"] is None}
    assert marked == {("optimal-soft", 0.01, 13), ("optimal-soft samples=1000", 0.01, 11)}
    assert sum(run.algorithm.startswith("icarl") for run in runs) > 20, "whose losses are distances"
