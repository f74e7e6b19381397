"""Protocols against matrices by hand, and properties that hold for all matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from fake_runs import fake_run
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from glocal.errors import GlocalError
from glocal.selection import choose, criterion, kendall_tau, optimism
from glocal.store.run import Run

VALIDATION = [[0.1, 0.1, 0.1], [0.8, 0.2, 0.2], [0.6, 0.9, 0.3], [0.1, 0.4, 0.7]]
"""R[t, o - 1] after t = 0, 1, 2, 3 tasks."""


def measured(validation: object, test: object = None, **more: object) -> Run:
    """A run with these accuracies; its losses are 1 − accuracy."""
    run = fake_run(**more)  # type: ignore[arg-type]
    R, S = (np.asarray(x, dtype=float) for x in (validation, validation if test is None else test))
    own = {"validation_class_accuracy": R, "validation_class_loss": 1 - R}
    return replace(run, arrays={**run.arrays, **own, "test_class_accuracy": S, "test_class_loss": 1 - S})


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        ("first-task", 80),
        ("first-k=1", 80),
        ("first-k=2", 75),
        ("first-k=3", 40),
        ("per-task", 80),
        ("all-validation", 40),
        ("oracle-test", 50),
    ],
)
def test_criteria_by_hand(protocol: str, expected: float) -> None:
    test = [[0.0] * 3, [0.0] * 3, [0.0] * 3, [0.3, 0.5, 0.7]]
    assert criterion(measured(VALIDATION, test), protocol) == pytest.approx(expected)
    loss = criterion(measured(VALIDATION, test, regression=True), protocol)
    assert loss == pytest.approx(expected / 100 - 1), "minus the loss, so that larger is better"
    assert math.isnan(criterion(measured(VALIDATION, test, diverged=7), protocol))


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ("first-k", "first-k=3"),
        ("first-k=0", "first-k=3"),
        ("first-k=-1", "first-k=3"),
        ("first-k=" + "9" * 5000, "first-k=3"),
        ("first-k=4", "has 3 tasks"),
        ("first-tsk", "Did you mean 'first-task'"),
        ("first-task=2", "unknown protocol"),
    ],
)
def test_wrong_protocols_are_refused(protocol: str, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        criterion(measured(VALIDATION), protocol)


@pytest.mark.parametrize("protocol", ["first-task", "first-k=2", "per-task", "all-validation"])
def test_without_validation_data_only_the_oracle_chooses(protocol: str) -> None:
    with pytest.raises(GlocalError, match=r"--validation 0\.1"):
        criterion(fake_run(), protocol)
    assert criterion(fake_run(learnt=0.9, lost=0.1), "oracle-test") == pytest.approx(85)


def test_a_configuration_that_diverged_is_chosen_only_if_all_did() -> None:
    nan = math.nan
    assert choose({"a": {1: 10.0, 2: 11.0}, "b": {1: 90.0, 2: nan}}) == "a"
    assert choose({"a": {1: nan, 2: nan}, "b": {1: nan, 2: 20.0}, "c": {1: 30.0, 2: nan}}) == "c"
    assert choose({"a": {1: nan}, "b": {1: nan}}) == "a"
    assert choose({"a": {1: 50.0, 2: 70.0}, "b": {1: 61.0, 2: 61.0}}) == "b"


def test_optimism_is_paired_by_seed() -> None:
    test = {"a": {1: 50.0, 2: 60.0, 3: 70.0}, "b": {1: 52.0, 2: 66.0, 3: 71.0}}
    assert optimism(test, "a") == {1: 2, 2: 6, 3: 1}
    assert optimism(test, "b") == {1: 0, 2: 0, 3: 0}
    assert optimism({**test, "a": {1: 50.0, 2: math.nan, 4: 1.0}}, "a") == {1: 2}


def test_kendall_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx((5 - 1) / 6)
    assert kendall_tau([1, math.nan, 3], [2, -5, 9]) == pytest.approx(1)
    assert math.isnan(kendall_tau([1], [1])) and math.isnan(kendall_tau([2, 2], [1, 3]))


Scores = st.dictionaries(
    st.integers(0, 5), st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=6
).map(lambda own: {key: dict(enumerate(values)) for key, values in own.items()})


@given(Scores, st.data())
def test_the_oracle_is_never_worse_by_its_own_criterion(
    test: Mapping[int, Mapping[int, float]], data: st.DataObject
) -> None:
    chosen = data.draw(st.sampled_from(sorted(test)))
    assert np.mean(list(optimism(test, chosen).values())) >= -1e-9


@given(Scores, st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_seeds(scores: dict[int, dict[int, float]], random: object) -> None:
    shuffled = {}
    for key, own in scores.items():
        seeds = list(own)
        random.shuffle(seeds)  # type: ignore[attr-defined]
        shuffled[key] = {seed: own[seed] for seed in seeds}
    means = {key: np.mean(list(own.values())) for key, own in scores.items()}
    assert means[choose(shuffled)] == pytest.approx(max(means.values()))


@given(arrays(float, (4, 3), elements=st.floats(0, 1)))
def test_all_tasks_are_the_first_t_tasks_and_one_is_the_first(R: np.ndarray) -> None:
    run = measured(R)
    assert criterion(run, "first-k=3") == criterion(run, "all-validation")
    assert criterion(run, "first-k=1") == criterion(run, "first-task")
    assert criterion(run, "all-validation") == criterion(measured(R * 0, R), "oracle-test")
