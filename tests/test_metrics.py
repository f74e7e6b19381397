"""The metrics against matrices worked out by hand, a plain double loop, and the identities between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as draw_arrays
from scipy import stats

from glocal import metrics
from glocal.engine.evaluate import MEASURES
from glocal.errors import GlocalError
from glocal.store.run import Run

# Three tasks. Row 0: the initialisation; R[t, o] with o = 1, 2, 3.
HAND = np.array(
    [
        [0.10, 0.20, 0.30],
        [0.90, 0.40, 0.30],
        [0.70, 0.80, 0.50],
        [0.60, 0.50, 1.00],
    ]
)


def a_run(setting: str = "domain") -> Run:
    values = dict.fromkeys(MEASURES, HAND)
    values["test_task_accuracy"] = (1 + HAND) / 2
    values["test_class_loss"] = 2 * (1 - HAND)
    return Run(
        config={"challenge": {"name": "c", "tasks": 3}, "algorithm": {"name": "er"}, "lr": 0.1, "seed": 0},
        arrays={**values, "distance_from_init": np.array([1.0, 2.0, 3.5]), "update_norm": np.ones(3)},
        info={"label": "er", "locality": "global", "setting": setting, "diverged": None},
    )


def test_average_accuracy_by_hand() -> None:
    assert metrics.average_accuracy(HAND) == pytest.approx((0.60 + 0.50 + 1.00) / 3)
    assert metrics.average_accuracy(HAND, t=1) == pytest.approx(0.90)
    assert metrics.average_accuracy(HAND, t=2) == pytest.approx(0.75)


def test_forgetting_by_hand() -> None:
    assert metrics.average_forgetting(HAND, by="loss") == pytest.approx(-0.30)
    assert metrics.average_forgetting(HAND, over="t") == pytest.approx(0.20)
    assert metrics.average_forgetting(HAND, over="t-1") == pytest.approx(0.30)
    assert metrics.average_forgetting(HAND, t=2, over="t-1") == pytest.approx(0.20)
    assert metrics.average_forgetting(HAND, t=1, over="t") == 0
    assert math.isnan(metrics.average_forgetting(HAND, t=1, over="t-1"))


def test_transfer_and_learning_by_hand() -> None:
    assert metrics.backward_transfer(HAND) == pytest.approx((-0.30 - 0.30) / 2)
    assert metrics.forward_transfer(HAND) == pytest.approx(((0.40 - 0.20) + (0.50 - 0.30)) / 2)
    assert metrics.learning_accuracy(HAND) == pytest.approx((0.90 + 0.80 + 1.00) / 3)


def test_one_task_has_no_transfer() -> None:
    R = np.array([[0.1], [0.9]])
    assert metrics.average_accuracy(R) == metrics.learning_accuracy(R) == 0.9
    assert metrics.average_forgetting(R, over="t") == 0
    for undefined in (metrics.average_forgetting, metrics.backward_transfer, metrics.forward_transfer):
        assert math.isnan(undefined(R))


matrices = st.integers(1, 6).flatmap(lambda T: draw_arrays(np.float64, (T + 1, T), elements=st.floats(0, 1)))


@settings(max_examples=60, deadline=None)
@drawn(R=matrices, data=st.data())
def test_against_double_loops(R: np.ndarray, data: st.DataObject) -> None:
    T = R.shape[1]
    t = data.draw(st.integers(1, T))
    at = {(s, o): R[s][o - 1] for s in range(T + 1) for o in range(1, T + 1)}
    acc = lost = risen = 0.0
    for o in range(1, t + 1):
        acc += at[t, o]
        lost += at[o, o] - at[t, o]
        risen += at[t, o] - at[o, o]
    assert metrics.average_accuracy(R, t) == pytest.approx(acc / t)
    assert metrics.average_forgetting(R, t, over="t") == pytest.approx(lost / t, abs=1e-12)
    assert metrics.average_forgetting(R, t, over="t", by="loss") == pytest.approx(risen / t, abs=1e-12)
    if t > 1:
        assert metrics.average_forgetting(R, t, over="t-1") == pytest.approx(lost / (t - 1), abs=1e-12)
    if T > 1:
        forward = sum(at[o - 1, o] - at[0, o] for o in range(2, T + 1)) / (T - 1)
        backward = sum(at[T, o] - at[o, o] for o in range(1, T)) / (T - 1)
        assert metrics.forward_transfer(R) == pytest.approx(forward, abs=1e-12)
        assert metrics.backward_transfer(R) == pytest.approx(backward, abs=1e-12)


@settings(max_examples=60, deadline=None)
@drawn(R=matrices)
def test_identities(R: np.ndarray) -> None:
    T = R.shape[1]
    whole = metrics.average_accuracy(R) + metrics.average_forgetting(R, over="t")
    assert whole == pytest.approx(metrics.learning_accuracy(R))
    assert whole <= 1 + 1e-12  # over T, ACC and forgetting cannot pass 100 % together
    if T > 1:
        over = metrics.average_forgetting(R, over="t-1")
        assert metrics.backward_transfer(R) == pytest.approx(-over, abs=1e-12)
        assert (T - 1) * over == pytest.approx(T * metrics.average_forgetting(R, over="t"), abs=1e-12)


def test_over_the_first_tasks_the_sum_can_pass_100_as_published() -> None:
    """A published cell, 63.91 + 40.29 on five tasks, is impossible over T and possible over T − 1."""
    lost = 0.4029
    R = np.full((6, 5), 0.1)
    learnt = 0.6391 + lost * 4 / 5
    for o in range(1, 6):
        R[o:, o - 1] = learnt
    R[5, :4] -= lost
    assert metrics.average_forgetting(R, over="t-1") == pytest.approx(0.4029)
    assert metrics.average_accuracy(R) == pytest.approx(0.6391)
    assert R.max() <= 1 and 0.6391 + 0.4029 > 1


def test_divergence_propagates() -> None:
    R = HAND.copy()
    R[2:] = np.nan
    assert metrics.average_accuracy(R, t=1) == 0.9
    for broken in (metrics.average_accuracy, metrics.average_forgetting, metrics.backward_transfer):
        assert math.isnan(broken(R))
    assert math.isnan(metrics.learning_accuracy(R)) and math.isnan(metrics.forward_transfer(R))


def test_infinite_losses_are_no_warning() -> None:
    assert math.isnan(metrics.average_forgetting(np.full((3, 2), np.inf), by="loss"))


def test_summary_follows_the_setting() -> None:
    assert metrics.summary(a_run("domain"))["acc"] == pytest.approx(0.70)
    assert metrics.summary(a_run("class"))["acc"] == pytest.approx(0.70)
    assert metrics.summary(a_run("task"))["acc"] == pytest.approx(0.85)
    assert metrics.summary(a_run("task"), scope="class")["acc"] == pytest.approx(0.70)
    assert metrics.summary(a_run("class"), scope="task")["forgetting"] == pytest.approx(0.15)
    assert np.array_equal(metrics.accuracy_of(a_run("domain")), HAND)
    assert np.array_equal(metrics.accuracy_of(a_run("task")), (1 + HAND) / 2)
    by_loss = metrics.summary(a_run("class"), measure="loss", over="t")
    assert by_loss["forgetting"] == pytest.approx(2 * 0.20)
    assert by_loss["acc"] == pytest.approx(0.70)
    assert by_loss["distance"] == 3.5


def test_over_seeds() -> None:
    values = [{"acc": x} for x in (1.0, 2.0, 6.0)]
    mean, std = metrics.over_seeds(values)["acc"]
    assert mean == 3.0
    assert std == pytest.approx(math.sqrt((4 + 1 + 9) / 3))
    assert metrics.over_seeds(values[:1])["acc"] == (1.0, 0.0)
    assert metrics.over_seeds([]) == {}


@settings(max_examples=30, deadline=None)
@drawn(values=st.lists(st.floats(-5, 5), min_size=1, max_size=6), random=st.randoms())
def test_the_order_of_seeds_does_not_matter(values: list[float], random: Random) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    one, other = (metrics.over_seeds([{"x": v} for v in order])["x"] for order in (values, shuffled))
    assert one == pytest.approx(other, abs=1e-9)


def test_confidence_interval_against_scipys_t_test() -> None:
    values = np.random.default_rng(0).normal(3, 2, 5).tolist()
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert metrics.confidence_interval(values) == pytest.approx(tuple(expected))
    assert all(map(math.isnan, metrics.confidence_interval([1.0])))


LRS = (0.001, 0.01, 0.02, 0.05, 0.1)


def forgetting(*differences: float) -> dict[float, dict[int, float]]:
    """Forgetting at five learning rates; low minus high is differences[seed], the middle rate is not compared."""
    offsets = {0.001: -0.5, 0.01: 0.5, 0.02: 99.0, 0.05: 1.0, 0.1: -1.0}
    return {
        lr: {seed: 10 + offsets[lr] + (d if lr < 0.02 else 0.0) for seed, d in enumerate(differences)} for lr in LRS
    }


@pytest.mark.parametrize(
    ("differences", "sign", "local"),
    [
        ((-3.0, -4.0, -3.5), "negative", "supports the paper"),
        ((3.0, 4.0, 3.5), "positive", "contradicts the paper"),
        ((-1.5, -3.0, -7.5), "not settled", "not settled"),
    ],
)
def test_the_papers_test(differences: tuple[float, ...], sign: str, local: str) -> None:
    """Paired by seed, with scipy's interval of the differences."""
    trend = metrics.learning_rate_test(forgetting(*differences), "local")
    assert trend is not None
    assert trend.difference == pytest.approx(np.mean(differences))
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (trend.lower, trend.upper) == pytest.approx(tuple(expected))
    assert (trend.seeds, trend.sign, trend.verdict) == (3, sign, local)
    flat = {"not settled": "not settled"}.get(sign, "contradicts the paper")
    assert replace(trend, flat=True).verdict == flat
    other = metrics.learning_rate_test(forgetting(*differences), "global")  # for which the paper predicts no sign
    seen = {"negative": "forgets more at high lr", "positive": "forgets less at high lr"}.get(sign, sign)
    assert other is not None and (other.sign, other.verdict) == (sign, seen)


def test_the_papers_test_leaves_out_seeds_that_miss_a_compared_rate() -> None:
    values = forgetting(-1.0, -2.0, -3.0)
    del values[0.1][0], values[0.02][1]
    trend = metrics.learning_rate_test(values, "local")
    assert trend is not None and trend.seeds == 2 and trend.difference == pytest.approx(-2.5)
    values[0.1] = {2: values[0.1][2]}
    trend = metrics.learning_rate_test(values, "local")
    assert trend is not None and trend.difference == pytest.approx(-3) and math.isnan(trend.lower)
    assert trend.verdict == "not settled: one seed"
    values[0.1] = {}
    trend = metrics.learning_rate_test(values, "local")
    assert trend is not None and trend.seeds == 0 and math.isnan(trend.difference)
    assert trend.verdict.startswith("not tested")


def test_the_papers_test_needs_four_rates_and_two_tasks() -> None:
    values = forgetting(-1.0, -2.0)
    assert metrics.learning_rate_test({lr: values[lr] for lr in LRS[:3]}, "local") is None
    assert metrics.learning_rate_test({lr: dict.fromkeys((0, 1), math.nan) for lr in LRS}, "local") is None


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (metrics.average_accuracy, {"R": np.zeros((3, 3))}, "(T + 1, T)"),
        (metrics.average_accuracy, {"R": np.zeros(4)}, "(4,)"),
        (metrics.average_accuracy, {"R": HAND, "t": 4}, "1 to 3"),
        (metrics.average_accuracy, {"R": HAND, "t": 0}, "1 to 3"),
        (metrics.average_forgetting, {"R": HAND, "over": "t-2"}, "Did you mean 't-1'"),
        (metrics.average_forgetting, {"R": HAND, "by": "acuracy"}, "Did you mean 'accuracy'"),
        (metrics.summary, {"run": a_run(), "scope": "tasks"}, "Did you mean 'task'"),
        (metrics.summary, {"run": a_run(), "measure": "losses"}, "Did you mean 'loss'"),
    ],
)
def test_errors_teach(function: Callable[..., object], given: dict[str, Any], said: str) -> None:
    with pytest.raises(GlocalError) as caught:
        function(**given)
    assert said in str(caught.value) and "\n" not in str(caught.value)
