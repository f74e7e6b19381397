"""Text on our own experiments: a line each on docs/reproduction.md, and notes on docs/reproduction/experiments.md.

Lines and notes are functions of an experiment's rows; every number and every conclusion in them is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import markup
import numpy as np
import polars as pl
import retraining_text
from markup import join
from study_notes import RESULTS

from glocal.paper.studies import ball as ball_study
from glocal.paper.studies import choosing as choosing_study
from glocal.paper.studies import common
from glocal.paper.studies import forecast as forecast_study
from glocal.paper.studies import implicit as implicit_study
from glocal.paper.studies.common import MeanInterval, column, distinct, finite, names
from glocal.paper.study import Row, read_table
from glocal.report.table import signed

WIDE = 2.0
"""Radius of the smallest of the balls that let parameters move about as far as without one."""


def ball(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    groups = {name: name for name in names(rows)}
    shared_fit, separate_fit = (
        {name: MeanInterval.of(values) for name, values in ball_study.fit(rows, groups, common_accuracy)[0].items()}
        for common_accuracy in (True, False)
    )
    order = sorted(shared_fit, key=lambda name: -shared_fit[name].mean)
    wide = rows.filter(pl.col("radius") >= WIDE)
    return rf"""
{_smallest_and_no_ball(rows)} Forgetting is learning accuracy minus final accuracy on old tasks, so at equal learning
accuracy it measures the final accuracy.

At equal learning rate and learning accuracy, a doubling of the distance changes forgetting by
{join(f"{shared_fit[name]} for `{name}`" for name in order)}. This assumes that a point of learning accuracy
means the same for all algorithms. With a slope of the learning accuracy for each, it is
{join(f"{separate_fit[name]} for `{name}`" for name in order)}.

Not registered: compared with `sgd` alone, which approximates nothing and is called global, the difference of the local
algorithms is {_interaction(rows, "sgd")} points; compared with `sgd` and `si`, it is
{_interaction(rows, "sgd", "si")}. The other global algorithms, `er` and `agem`, replay old data, and the experiment
cannot tell "local" from "without old data": no local algorithm in it replays any. Compared with all global algorithms,
but with the radii 2, 4 and ∞ alone, the difference is
{ball_study.interactions(wide, _local(rows))[0]}.

Diverged and left out: {_diverged_in_balls(rows)}."""


def ball_cifar10(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    return rf"""
The same question as in [ball](#ball), by ResNet-18 with few epochs and {rows["seed"].n_unique()} seeds.
{_smallest_and_no_ball(rows)}

Compared with `sgd` alone, the difference of the local algorithms is {_interaction(rows, "sgd")} points.

Diverged and left out: {_diverged_in_balls(rows)}."""


def _smallest_and_no_ball(rows: pl.DataFrame) -> str:
    """Say what the smallest ball does, and how much distance and learning accuracy are correlated."""
    ends = [rows.filter(radius=radius) for radius in (rows["radius"].min(), rows["radius"].max())]
    forgetting, accuracies = ([common.mean(end, name) for end in ends] for name in ("forgetting", "learning_accuracy"))
    correlations = [
        np.corrcoef(np.log2(column(part, "distance")), column(part, "learning_accuracy"))[0, 1]
        for part in rows.filter(pl.col("forgetting").is_finite()).partition_by("seed")
    ]
    return (
        f"From the smallest ball to none, mean forgetting changes from {signed(forgetting[0])} to "
        f"{signed(forgetting[1])} points, and learning accuracy from {accuracies[0]:.1f} to {accuracies[1]:.1f} %. The "
        "fit separates distance and learning accuracy, which is harder the more they are correlated: the correlation "
        f"of learning accuracy with log2(distance) is {np.mean(correlations):.2f} within a seed."
    )


def _diverged_in_balls(rows: pl.DataFrame) -> str:
    diverged_runs = rows.filter(~pl.col("forgetting").is_finite())
    counts = diverged_runs.group_by("algorithm", "lr", "radius").len().sort("radius").rows()
    parts = [f"{count} of `{name}` at {lr:g} with ρ = {radius:g}" for name, lr, radius, count in counts]
    return join(parts) if parts else "no run"


def implicit(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    training_rows = rows.filter(pl.col("sharpness").is_null())
    best = {name: implicit_study.best(training_rows, name) for name in names(training_rows)}
    parts = []
    for name in implicit_study.PENALTIES:
        explicit_best, implicit_best = best[name], best[f"{name}-implicit"]
        gain = MeanInterval.of(implicit_best[1] - explicit_best[1])
        parts.append(f"{gain} points for `{name}` (lr {implicit_best[0]:g} and {explicit_best[0]:g})")
    memory = {str(row["algorithm"]): float(row["memory (MB)"]) for row in table}
    ratio = memory["laplace-implicit"] / memory["er"]
    er_difference = MeanInterval.of(best["laplace-implicit"][1] - best["er"][1])
    accuracies = implicit_study.complete(training_rows, "optimal-soft-implicit")
    last = max(accuracies)
    change = MeanInterval.of(accuracies[last] - best["optimal-soft-implicit"][1])
    reason = ": that loss is not one of unstable steps; the experiment does not show if it is one of locality"
    return rf"""
*Best* is the learning rate with the best mean accuracy of those at which no run diverged. It is chosen by the accuracy
that it is compared by, on test data, for every row. Points of the figure are means over the runs that did not diverge.

Implicit minus explicit steps, each at its best rate, paired by seed: {join(parts)}. `laplace` with implicit steps is
then {er_difference} points from `er`. Their memory is not equal: `er` was given the bytes of `optimal-soft` with
explicit steps, and `laplace` with implicit steps keeps {ratio:.1f} times as many, for the eigenbasis of its penalty.

`optimal-soft` with implicit steps changes by {change} points from its best rate to {last:g}, where no run
diverges{reason if change.high < 0 else ""}."""


def forecast(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    settings, implicit_settings = (forecast_study.settings_table(rows, implicit) for implicit in (False, True))
    wins, solver_wins = (_wins_by_rate(part) for part in (settings, implicit_settings))
    high = max(distinct(settings, "lr"))
    runs = rows.filter(algorithm="laplace", lr=high)
    diverged = len(runs) - len(finite(runs, "acc"))
    rest = forecast_study.settings_table(rows.filter(pl.col("algorithm") != "laplace"))
    areas = {name: forecast_study.auc(rest, name)(np.arange(len(rest))) for name in ("error", "kl", "distance", "lr")}
    rest_areas = join(f"{area:.2f} for `{name}`" for name, area in areas.items())
    highest = join(_highest(settings, [*forecast_study.LENS, *forecast_study.RIVALS], 2))
    leads = join(f"{lead} at {lr:g}" for lr, lead in _leads(rows).items())
    change, memory = _lead_changes(rows), _memory()
    few, equal = (forecast_study.leads(rows, name) for name in (forecast_study.REPLAY, forecast_study.LARGE_REPLAY))
    return rf"""
AUC is the probability that a predictor ranks a setting in which a local algorithm wins above one in which none does:
0.5 is chance, 1 is perfect. A local algorithm ends with a higher accuracy than replay of 500 examples in {wins}.
The AUC of the learning rate less that of the distance is {_auc_difference(settings, "lr", "distance")}.
Of `laplace`, {diverged} of {len(runs)} runs diverge at {high:g}, probably by their step ([implicit](#implicit)), so the
learning rate predicts the winner partly because of how the penalty is trained.

Registered after this result: with implicit steps of `laplace`, a local algorithm wins in {solver_wins}. `laplace` with
implicit steps alone has a higher mean accuracy than `er` in {_win_share(few)} settings. Its mean lead in
points, with 95 % t-intervals over settings: {leads}. Not registered: from the lowest learning rate to the highest, the
lead changes by {change[0]} over settings, and by {change[1]} over the {rows["seed"].n_unique()} seeds.

This is against replay with little memory: for layers of 100 units, `laplace` with implicit steps keeps
{memory["laplace"]:.1f} MB and `er` {memory["er"]:.1f} MB. Registered after this result: replay with equal memory,
{_examples(rows)}. {_decision(equal)} Over the {rows["seed"].n_unique()} seeds the mean lead is {_lead_by_seed(rows)}.

{_lead_table(equal)}

The lines by angles were not registered.

Not registered: without `laplace`, a local algorithm (`ewc` or `ogd-gtl`) wins in {int((rest["gain"] > 0).sum())} of
{len(rest)} settings, and AUC is {rest_areas}.

How much plain SGD forgets is predicted with the highest R² by {highest}. These are measured on the finished run, where
forgetting itself could be measured. True forecasts are those from the first part of the second task. Registered were
all predictors; those that need several tasks or the whole run were not measured so early, and `rise`, the rise of the
first task's loss, was added. Which of them has the highest R² depends on what was not registered: here the logarithms
of a setting's three runs are averaged, not the predictors.

The intervals treat the settings as independent, though they are a grid. These are MLPs on Rotated-MNIST with plain SGD;
nothing is known about other settings."""


def _wins_by_rate(settings: pl.DataFrame) -> str:
    wins = {lr: settings.filter(lr=lr)["gain"] > 0 for lr in distinct(settings, "lr")}
    return join(f"{int(outcomes.sum())} of {len(outcomes)} settings at {lr:g}" for lr, outcomes in wins.items())


def _win_count(leads: pl.DataFrame) -> int:
    return int((column(leads, "lead") > 0).sum())


def _examples(rows: pl.DataFrame) -> str:
    """Say of how many examples replay with equal memory is."""
    sizes = {width: forecast_study.equal_memory(int(width)) for width in distinct(rows, "width")}
    return join(f"{slots:,} examples for layers of {width:g} units" for width, slots in sizes.items())


def _lead_table(leads: pl.DataFrame) -> str:
    """Return a table of how often and by how much `laplace` with implicit steps beats replay."""
    parts = {"all": leads}
    parts |= {f"learning rate {lr:g}": leads.filter(lr=lr) for lr in distinct(leads, "lr")}
    parts |= {f"layers of {width:g} units": leads.filter(width=width) for width in distinct(leads, "width")}
    parts |= {f"angles within {angle:g}°": leads.filter(angles=angle) for angle in distinct(leads, "angles")}
    header = "settings", "won by `laplace`", "its mean lead in points"
    return markup.table(
        [dict(zip(header, (name, _win_share(part), _lead(part)), strict=True)) for name, part in parts.items()]
    )


def _win_share(leads: pl.DataFrame) -> str:
    return f"{_win_count(leads)} of {len(leads)}"


def _lead(leads: pl.DataFrame) -> str:
    """Return the mean lead over the settings in which no run diverged."""
    lead = column(leads, "lead")
    count = len(lead) - np.isfinite(lead).sum()
    return f"{MeanInterval.of(lead)}{f' ({count} settings with diverged runs left out)' if count else ''}"


def _lead_by_seed(rows: pl.DataFrame) -> MeanInterval:
    """Return the mean lead over replay with equal memory, with seeds as units; NaN if a run diverged."""
    parts = [forecast_study.leads(seed_rows, forecast_study.LARGE_REPLAY) for seed_rows in rows.partition_by("seed")]
    means = np.array([column(part, "lead").mean() for part in parts])
    return MeanInterval.of(means) if np.isfinite(means).all() else MeanInterval(np.nan, np.nan, np.nan)


def _decision(leads: pl.DataFrame) -> str:
    """Say what the registered rule makes of the settings won at equal memory."""
    wins, limit = _win_count(leads), forecast_study.MIN_WINS
    if leads.is_empty():
        return "Replay with equal memory has not been trained, so `glocal lens` recommends nothing."
    if wins > len(leads) - limit:
        return "By the registered rule, `glocal lens` recommends it at equal memory."
    if wins < limit:
        return "By the registered rule, `glocal lens` recommends replay."
    return f"By the registered rule, `glocal lens` recommends neither, for each wins {limit} settings or more."


def _leads(rows: pl.DataFrame) -> dict[float, MeanInterval]:
    leads = forecast_study.leads(rows)
    return {lr: MeanInterval.of(column(leads.filter(lr=lr), "lead")) for lr in distinct(leads, "lr")}


def _lead_changes(rows: pl.DataFrame) -> list[MeanInterval]:
    """Return the lead at the highest learning rate minus that at the lowest, over settings and over seeds."""

    def changes(sample: pl.DataFrame) -> np.ndarray:
        low, *_, high = (column(part, "lead") for part in forecast_study.leads(sample).partition_by("lr"))
        return np.asarray(high - low)

    by_seed = np.array([changes(seed_rows).mean() for seed_rows in rows.partition_by("seed")])
    return [MeanInterval.of(changes(rows)), MeanInterval.of(by_seed)]


def _memory() -> dict[str, float]:
    """Return the MB of `laplace` with implicit steps and of `er`, for layers of 100 units."""
    training_rows, table1 = (read_table(RESULTS / f"{name}.parquet") for name in ("implicit", "rotated-mnist"))
    parts = {"laplace": (training_rows, "laplace-implicit"), "er": (table1, "er")}
    return {key: common.mean(rows.filter(algorithm=name), "memory_bytes") / 1e6 for key, (rows, name) in parts.items()}


def choosing(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    primary, oracle = (choosing_study.results(rows, name) for name in (choosing_study.PRIMARY, "oracle_test"))
    pairs = list(combinations(range(len(primary)), 2))
    count = sum(interval.low > 0 or interval.high < 0 for interval in (_pair(oracle, *pair) for pair in pairs))
    changed_pairs = [pair for pair in pairs if _pair(primary, *pair).mean * _pair(oracle, *pair).mean < 0]
    changes = "; ".join(
        f"`{names(rows)[a]}` and `{names(rows)[b]}` ({_pair(oracle, a, b)} points by the oracle's choice, "
        f"{_pair(primary, a, b)} by that of {choosing_study.PROTOCOLS[choosing_study.PRIMARY]})"
        for a, b in changed_pairs
    )
    highest = max(distinct(rows, "lr"))
    cells = [row[protocol] for row in table for protocol in choosing_study.PROTOCOLS.values()]
    edge = sum(str(cell).split(":")[0] == f"lr {highest:g}" for cell in cells)
    diverged = len(rows) - len(finite(rows, "oracle_test"))
    return rf"""
The table has the learning rate that each protocol chooses and, where it is not the oracle's, the oracle's optimism:
by how many points its choice is better. The largest is {_largest_optimism(rows)}.

By the oracle's choice, the order of {count} of {len(pairs)} pairs of algorithms is beyond doubt; only these could be
reversed beyond doubt. In the mean over seeds, the order changes of {changes or "no pair"}. The second hypothesis,
that protocols which see little forgetting cost local algorithms more, is {_second_hypothesis(rows)}. An interval that
is not above 0 refutes it, which does not show that the costs are equal.

{diverged or "No"} run{"s" if diverged > 1 else ""} diverged. The intervals take the choices as given: they do not
include how the choice would vary with other seeds. The highest rate, {highest:g}, is chosen in {edge} of {len(cells)}
cells{": with higher rates the protocols might differ more" if edge else ""}. τ is at most 1; t-intervals do not know
that."""


NOTES: dict[str, Callable[[pl.DataFrame, Sequence[Row]], str]] = {
    "ball": ball,
    "ball-cifar10": ball_cifar10,
    "implicit": implicit,
    "forecast": forecast,
    "choosing": choosing,
    "retraining": retraining_text.note,
}


def ball_line(rows: pl.DataFrame) -> str:
    difference, wide_difference, sgd_difference = _ball_differences(rows)
    weak = difference.low > 0 and not (wide_difference.low > 0 and sgd_difference.low > 0)
    return (
        "**Does forgetting rise faster with the distance that a task moves the parameters for local algorithms?** "
        f"By the registered rule, {'yes' if difference.low > 0 else 'no'}: at equal learning rate and learning "
        f"accuracy, a doubling of the distance adds {difference} points more for local algorithms than for global "
        f"ones. Not registered: it is {wide_difference} with radii of {WIDE:g} and more alone, and {sgd_difference} "
        f"compared with plain SGD alone{'. The experiment does not show that locality is the reason' if weak else ''}."
    )


def _ball_differences(rows: pl.DataFrame) -> tuple[MeanInterval, MeanInterval, MeanInterval]:
    """Return the interaction over all runs, over the wide balls, and compared with plain SGD alone."""
    wide = rows.filter(pl.col("radius") >= WIDE)
    first, second = (ball_study.interactions(part, _local(rows))[0] for part in (rows, wide))
    return first, second, _interaction(rows, "sgd")


def ball_cifar10_line(rows: pl.DataFrame) -> str:
    difference = ball_study.interactions(rows, _local(rows))[0]
    answer = difference.phrase("Yes", "No", "Not settled")
    return (
        f"**And with ResNet-18 on Split CIFAR-10?** {answer}: the difference is {difference} points over "
        f"{rows['seed'].n_unique()} seeds, and {_interaction(rows, 'sgd')} compared with plain SGD alone."
    )


def implicit_line(rows: pl.DataFrame) -> str:
    training_rows = rows.filter(pl.col("sharpness").is_null())
    low, high = implicit_study.LOW, implicit_study.HIGH
    optimal_soft, laplace = (
        implicit_study.differences(training_rows.filter(algorithm=f"{name}-implicit"), low, high)
        for name in ("optimal-soft", "laplace")
    )
    return (
        "**Do quadratic penalties fail at high learning rates because their gradient steps are unstable, and not "
        f"because they are local?** {implicit_study.answer(optimal_soft).capitalize()} for `optimal-soft`, the "
        "registered case: with implicit steps, which keep the penalty stable, its accuracy changes by "
        f"{MeanInterval.of(optimal_soft)} points from the learning rate {low:g} to {high:g}; the registered limit is "
        f"−{implicit_study.MARGIN:g}. For `laplace`, not registered, {implicit_study.answer(laplace)} by the same "
        f"rule: {MeanInterval.of(laplace)}."
    )


def forecast_line(rows: pl.DataFrame) -> str:
    settings = forecast_study.settings_table(rows)
    area = {name: forecast_study.auc(settings, name)(np.arange(len(settings))) for name in ("advice", "distance", "lr")}
    few, equal = (forecast_study.leads(rows, name) for name in (forecast_study.REPLAY, forecast_study.LARGE_REPLAY))
    return (
        "**Do measurements of plain SGD predict whether a local algorithm will beat replay?** The recommendation that "
        f"`glocal lens` made by ε-regions has an AUC of {area['advice']:.3f} (0.5 is chance, 1 perfect), the distance "
        f"{area['distance']:.3f}, a difference of {_auc_difference(settings, 'advice', 'distance')}, and the learning "
        f"rate {area['lr']:.3f}. With implicit steps, `laplace` beats replay of 500 examples in {_win_share(few)} "
        f"settings, and replay with equal memory in {_win_share(equal)}: its mean lead is {_lead(equal)} points over "
        f"settings and, not registered, {_lead_by_seed(rows)} over seeds. "
        f"{_decision(equal)}"
    )


def choosing_line(rows: pl.DataFrame) -> str:
    pairs = "; ".join(choosing_study.reversals(rows, choosing_study.PRIMARY))
    reversed_pairs = f"{pairs} are" if pairs else "no pair of algorithms is"
    return (
        "**Does the ranking of algorithms survive if learning rates are chosen without test data?** If they are "
        f"chosen on validation data of the first three tasks, {reversed_pairs} reversed beyond doubt. That protocols "
        f"which see little forgetting cost local algorithms more than global ones is {_second_hypothesis(rows)}."
    )


LINES: dict[str, Callable[[pl.DataFrame], str]] = {
    "ball": ball_line,
    "ball-cifar10": ball_cifar10_line,
    "implicit": implicit_line,
    "forecast": forecast_line,
    "choosing": choosing_line,
    "retraining": retraining_text.line,
}


def _local(rows: pl.DataFrame) -> set[str]:
    return set(rows.filter(locality="local")["algorithm"])


def _interaction(rows: pl.DataFrame, *others: str) -> MeanInterval:
    """Return the interaction of the ball with these global algorithms alone."""
    local = _local(rows)
    return ball_study.interactions(rows.filter(pl.col("algorithm").is_in([*local, *others])), local)[0]


def _auc_difference(settings: pl.DataFrame, first: str, second: str) -> MeanInterval:
    areas = [forecast_study.auc(settings, name) for name in (first, second)]
    return forecast_study.interval(lambda i: areas[0](i) - areas[1](i), len(settings))


def _highest(settings: pl.DataFrame, predictors: Sequence[str], count: int) -> list[str]:
    """Return the predictors with the highest R² for forgetting of SGD, with their intervals."""
    scores = {name: forecast_study.r_squared(settings, name, "sgd_forgetting") for name in predictors}
    order = sorted(scores, key=lambda name: -scores[name](np.arange(len(settings))))[:count]
    return [f"`{name}` {forecast_study.interval(scores[name], len(settings))}" for name in order]


def _parts(rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    return {str(part["algorithm"][0]): part for part in rows.partition_by("algorithm", maintain_order=True)}


def _gaps(rows: pl.DataFrame) -> dict[str, MeanInterval]:
    """Return the optimism of local minus that of global algorithms for the protocols that see little forgetting."""
    return {
        choosing_study.PROTOCOLS[name]: choosing_study.local_minus_global(_parts(rows), _local(rows), name)
        for name in ("first_task", "per_task")
    }


def _second_hypothesis(rows: pl.DataFrame) -> str:
    protocols = [protocol for protocol, gap in _gaps(rows).items() if not gap.low > 0]
    return f"not shown for {join(protocols)}, which by the registered rule refutes it" if protocols else "not refuted"


def _largest_optimism(rows: pl.DataFrame) -> str:
    interval, name, protocol = max(
        (MeanInterval.of(np.array([*choosing_study.lost(part, p).values()])), name, protocol)
        for name, part in _parts(rows).items()
        for p, protocol in list(choosing_study.PROTOCOLS.items())[:-1]
    )
    return f"{interval} points, of `{name}` with {protocol}"


def _pair(results: np.ndarray, a: int, b: int) -> MeanInterval:
    return MeanInterval.of(results[a] - results[b])
