"""Notes of docs/reproduction/experiments.md: how to read the results of our own experiments, and caveats.

A note is a function of an experiment's rows and of its summary table, and every number in it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
from claims_text import join

from glocal.paper.studies import ball as ball_study
from glocal.paper.studies import choosing as choosing_study
from glocal.paper.studies import common
from glocal.paper.studies import forecast as forecast_study
from glocal.paper.studies.common import MeanInterval, column, distinct, finite, names
from glocal.paper.study import Row
from glocal.report.table import signed


def ball(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    by_distance, _ = ball_study.fit(rows, {name: name for name in names(rows)})
    slopes = {name: MeanInterval.of(values) for name, values in by_distance.items()}
    told = join(f"{slopes[name]} for `{name}`" for name in sorted(slopes, key=lambda name: -slopes[name].mean))
    ends = [rows.filter(radius=radius) for radius in (rows["radius"].min(), rows["radius"].max())]
    forgotten, learnt = ([common.mean(own, name) for own in ends] for name in ("forgetting", "learning_accuracy"))
    return rf"""
From the smallest ball to none, mean forgetting rises from {signed(forgotten[0])} to {signed(forgotten[1])} points,
and learning accuracy from {learnt[0]:.1f} to {learnt[1]:.1f} %, which is why the two are separated. At equal learning
rate and learning accuracy forgetting rises, per doubling of the distance, by {told}. The slope of `sgd`, which
approximates nothing and is called global, is like that of the local algorithms; `er` and `agem`, which replay old
data, have none that could be told from 0. So the experiment cannot tell "local" from "without old data": no local
algorithm in it replays any."""


def implicit(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    trained = rows.filter(pl.col("sharpness").is_null())
    parts = []
    for name in ("ewc", "laplace", "optimal-soft"):
        explicit, solved = (best(trained, kind) for kind in (name, f"{name}-implicit"))
        gain = MeanInterval.of(solved[1] - explicit[1])
        parts.append(f"{gain} points for `{name}` (lr {explicit[0]:g} and {solved[0]:g})")
    winner, replay = best(trained, "laplace-implicit"), best(trained, "er")
    against = MeanInterval.of(winner[1] - replay[1])
    falls = best(trained, "optimal-soft-implicit")
    last = max(lr for lr in distinct(trained, "lr") if complete(trained, "optimal-soft-implicit", lr))
    lost = MeanInterval.of(accuracies(trained, "optimal-soft-implicit", last) - falls[1])
    return rf"""
Implicit minus explicit steps, each at the learning rate with the best mean accuracy of those at which no run diverged,
paired by seed: {join(parts)}. `laplace` with implicit steps is then {against} points from `er`, which keeps as many
bytes as `optimal-soft`. So for `laplace` the failure is one of the step. `optimal-soft` changes by {lost} points from
its best rate to {last:g}, where its steps are stable too: that loss is not one of the step. It may be one of locality,
which this experiment does not show."""


def forecast(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    settings = forecast_study.settings_table(rows)
    wins = [(lr, settings.filter(lr=lr)["gain"]) for lr in distinct(settings, "lr")]
    told = join(f"{int((gain > 0).sum())} of {len(gain)} at {lr:g}" for lr, gain in wins)
    high = wins[-1][0]
    own = rows.filter(algorithm="laplace", lr=high)
    diverged = len(own) - len(finite(own, "acc"))
    predicted = {
        row["predictor"]: forecast_study.r_squared(settings, row["predictor"].replace(" ", "_"), "sgd_forgetting")
        for row in table
        if row["AUC"]
    }
    order = sorted(predicted, key=lambda name: -predicted[name](np.arange(len(settings))))
    first = join(f"{name} ({forecast_study.interval(predicted[name], len(settings))})" for name in order[:2])
    shares = [f"after {100 * share:g} %" for share in forecast_study.SHARES]
    early = [
        max((row for row in table if row[share] is not None), key=lambda row, share=share: row[share])
        for share in shares
    ]
    parts = join(f"{row['predictor']} {share} ({row[share]:.2f})" for share, row in zip(shares, early, strict=True))
    return rf"""
A local algorithm ends with a higher accuracy than replay of 500 examples in {told}. Of `laplace`, {diverged} of
{len(own)} runs diverge at {high:g}, by their step ([implicit](#implicit)), so the learning rate predicts the winner
partly because of how the penalty is trained. What the lens measures does predict how much plain SGD forgets. The
highest R² of leave-one-out predictions: {first}; from parts of the second task: {parts}. These are MLPs on
Rotated-MNIST with plain SGD; nothing is known about other settings."""


def choosing(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    parts = {str(own["algorithm"][0]): own for own in rows.partition_by("algorithm", maintain_order=True)}
    local = {name for name, own in parts.items() if own["locality"][0] == "local"}
    gaps = {p: choosing_study.local_minus_global(parts, local, p) for p in ("first_task", "per_task")}
    refuted = [choosing_study.PROTOCOLS[name] for name, gap in gaps.items() if not gap.low > 0]
    largest = max(
        (MeanInterval.of(np.array([*choosing_study.lost(own, p).values()])), name, protocol)
        for name, own in parts.items()
        for p, protocol in list(choosing_study.PROTOCOLS.items())[:-1]
    )
    verdict = f"refuted for {join(refuted)}" if refuted else "not refuted"
    return rf"""
The table has the learning rate that each protocol chooses and, where it is not the oracle's, the oracle's optimism:
by how many points its choice is better. The second hypothesis, that protocols which see little forgetting cost local
algorithms more, is {verdict}. The largest optimism is {largest[0]} points, of `{largest[1]}` by {largest[2]}."""


NOTES: dict[str, Callable[[pl.DataFrame, Sequence[Row]], str]] = {
    "ball": ball,
    "implicit": implicit,
    "forecast": forecast,
    "choosing": choosing,
}


def best(rows: pl.DataFrame, name: str) -> tuple[float, np.ndarray]:
    """Return the learning rate with the best mean accuracy of those at which no run diverged, and its accuracies."""
    rates = [lr for lr in distinct(rows, "lr") if complete(rows, name, lr)]
    chosen = max(rates, key=lambda lr: common.mean(rows.filter(algorithm=name, lr=lr), "acc"))
    return chosen, accuracies(rows, name, chosen)


def complete(rows: pl.DataFrame, name: str, lr: float) -> bool:
    return bool(np.isfinite(accuracies(rows, name, lr)).all())


def accuracies(rows: pl.DataFrame, name: str, lr: float) -> np.ndarray:
    return column(rows.filter(algorithm=name, lr=lr).sort("seed"), "acc")
