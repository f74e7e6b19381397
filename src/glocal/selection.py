"""Protocols that choose one configuration (learning rate and options) of an algorithm, and the oracle's optimism.

A protocol is a criterion: a function of the accuracies R that a run stores, larger is better. Of several configurations
it chooses the one with the largest mean over seeds. R is measured on validation data, by the oracle on test data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from glocal import metrics
from glocal.errors import require, require_known

if TYPE_CHECKING:
    from glocal.metrics import Scope
    from glocal.store.run import Run

T = TypeVar("T")
ORACLE = "oracle-test"
PROTOCOLS = {
    "first-task": "validation accuracy on the first task after it, R[1, 1]",
    "first-k=K": "average validation accuracy on the first K tasks after task K, ACC(K)",
    "per-task": "validation accuracy on each task right after it, averaged over all tasks, the mean of R[t, t]",
    "all-validation": "average validation accuracy on all tasks after the last, ACC(T)",
    ORACLE: "average test accuracy on all tasks after the last, ACC(T)",
}
"""What each protocol maximises; without classes, it minimises the loss in place of the accuracy."""


def criterion(run: Run, protocol: str, scope: Scope | None = None) -> float:
    """Compute a protocol's criterion of one run, in percent; minus the loss without classes; NaN if the run diverged.

    Args:
        run: the run, with validation data unless the protocol is 'oracle-test'.
        protocol: a name from `PROTOCOLS`, with a number in place of K.
        scope: accuracy among the task's classes ('task') or all classes ('class'); by default that of the setting.
    """
    description = f"{run.algorithm} on {run.challenge}"
    name, tasks = check_protocol(protocol, metrics.choice_split(run) == "validation", run.tasks, description)
    if run.diverged is not None:
        return math.nan
    R = metrics.shown_matrix(run, scope, "test" if name == ORACLE else "validation")
    value = float(metrics.learning_accuracy(R) if name == "per-task" else metrics.average_accuracy(R, tasks))
    return -value if metrics.measure_of(run) == "loss" else value


def check_protocol(protocol: str, validation: bool, tasks: int, what: str) -> tuple[str, int | None]:
    """Raise unless a protocol can be used for runs with or without validation data and with so many tasks.

    Returns:
        Its name without number, and the number of tasks that it sees, None if it sees all: 'first-k=3' has 3.
    """
    name, _, count = protocol.partition("=")
    seen = 1 if name == "first-task" else None
    if name == "first-k":
        valid = count.isdecimal() and len(count) < 10 and int(count) > 0
        require(valid, f"the protocol '{protocol}' was given; write first-k=K with a number of tasks, as in first-k=3.")
        seen = int(count)
    else:
        require_known("protocol", protocol, PROTOCOLS)
    require((seen or 1) <= tasks, f"{protocol} was given, but {what} has {tasks} tasks: give a smaller K.")
    advice = "repeat the sweep with --validation 0.1, which holds out a tenth of the training data, use oracle-test,"
    needed = f"{protocol} needs validation data, and {what} has none: {advice} or leave such runs out with --where."
    require(validation or name == ORACLE, needed)
    return name, seen


def choose(scores: Mapping[T, Mapping[int, float]]) -> T:
    """Choose the configuration with the largest mean over seeds of `scores[configuration][seed]`, the first of equals.

    NaN is the score of a diverged run. A configuration of which fewer runs diverged comes before all with more, so one
    that diverged is chosen only if all did; the mean is over the runs that did not diverge.
    """

    def key(configuration: T) -> tuple[int, float]:
        values = list(scores[configuration].values())
        finished = [value for value in values if not math.isnan(value)]
        return len(finished) - len(values), float(np.mean(finished)) if finished else -math.inf

    return max(scores, key=key)


def optimism(test: Mapping[T, Mapping[int, float]], chosen: T) -> dict[int, float]:
    """Compute by seed the test result of the oracle's choice minus that of another choice.

    Seeds of which a run diverged are left out. `test[configuration][seed]` is the oracle's criterion.
    """
    other, best = test[chosen], test[choose(test)]
    pairs = {seed: (value, other[seed]) for seed, value in best.items() if seed in other}
    return {seed: a - b for seed, (a, b) in pairs.items() if not math.isnan(a) and not math.isnan(b)}


def kendall_tau(first: Iterable[float], second: Iterable[float]) -> float:
    """Compute Kendall's τ_b between the rankings of the same algorithms by two results; NaN counts as the lowest.

    1: the same ranking; −1: the reverse; NaN for fewer than two algorithms, or if all are equal.
    """
    from scipy import stats

    x, y = (np.nan_to_num(np.fromiter(values, float), nan=-np.inf, neginf=-np.inf) for values in (first, second))
    if x.size < 2 or np.all(x == x[0]) or np.all(y == y[0]):
        return math.nan
    return float(stats.kendalltau(x, y).statistic)
