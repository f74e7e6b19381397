"""Notes of docs/reproduction/studies.md: what the paper says, how to read the table, and caveats.

A note is a function of a study's rows and of its summary table. Every number and every conclusion about our results is
computed; those that stand in a text are settings, or the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
from markup import join
from markup import table as table_of_lines

from glocal.paper import get_study
from glocal.paper.studies.approximation_error import CONSTANT, RADII
from glocal.paper.studies.common import (
    MeanInterval,
    column,
    complete_runs,
    distinct,
    finite_median,
    median,
    medians_by,
    names,
    rank_correlation,
)
from glocal.paper.studies.forgetting import PREDICTORS, paired
from glocal.paper.studies.hessian import ABOUT_ONE, SEEDS, float32_radii, float32_scores, radius_curve
from glocal.paper.studies.locality import SHOWN_EPSILON
from glocal.paper.studies.stability import AFTER_LAST_TASK, REGIMES, effects
from glocal.paper.studies.theorems import SIDES, second_task, variant_differences
from glocal.paper.study import Row, format_cell, read_table
from glocal.report.table import signed

RESULTS = Path(__file__).parents[1] / "results"
KINDS = ("local", "global")
RETURN_RADIUS = 1e3
"""From about here on the published curves of Figure 3 are at 1."""


def approximation_error(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    *_, high = distinct(rows, "lr")
    diverged_names = [f"`{row['approximation']}`" for row in table if not np.isfinite(row[f"error at {high:g}"])]
    divergence = (
        f" {join(diverged_names)} {'diverges' if len(diverged_names) == 1 else 'diverge'} at the high rate."
        if diverged_names
        else ""
    )
    by_seeds: dict[int, list[str]] = {}
    for name in sorted(names(rows.filter(approximation="own"))):
        constants = rows.filter(algorithm=name, approximation=CONSTANT)
        by_seeds.setdefault(constants["seed"].n_unique(), []).append(f"`{name}`")
    seed_counts = join(
        f"{seeds or 'no'} seeds of {join(algorithms)}" for seeds, algorithms in sorted(by_seeds.items(), reverse=True)
    )
    return rf"""
The paper says that local approximations are good only near the old solutions, and so at low learning rates. Quadratic
penalties have weight 1 here, unlike in Table 1.{divergence}

Errors in the table are medians over seeds; *error / old loss* compares them with an approximation by 0. *skill*
compares them with the constant L_o(θ_o), which is order 0: 1 − Σ error / Σ error of the constant, summed over the tasks
of the same run, as a mean with its 95 % t-interval over {seed_counts}.
Runs with the constant were trained on a CPU, the others on a GPU.

Skills do not rank algorithms: the constant of an algorithm that forgets less has a smaller error, which is harder to
beat. Late tasks, whose errors are larger, weigh more. Along the runs of `ogd-gtl` its approximation is the constant,
because it moves orthogonally to the gradients that it keeps. Losses of `si` are relative to θ_o, though its penalty
is centred at the last solution. `er` and `agem` do not keep L_o(θ_o), but examples that they fit.

A smooth loss leaves an error of one power more than the order; the kinks of ReLU networks leave r². The paper's bound
C rᵖ does not require errors to grow evenly."""


def epsilon_region(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    ratios = [row["radius, random"] / row["radius, principal"] for row in table]
    radii = rows.filter(kind="radius", direction="principal")
    powers = join(f"ε^{_power(*medians_by(radii.filter(order=p), 'epsilon', 'radius')):.2f}" for p in (0, 1, 2))
    return rf"""
The paper treats the ε-region of an expansion as a ball. Its radius along random directions is {min(ratios):.0f} to
{max(ratios):.0f} times that along principal eigenvectors, along which it grows as {powers} for the orders 0, 1
and 2 (fits to medians); the first term that a smooth loss leaves out gives exponents of 1, ½ and ⅓. The error is
measured at the ends of epochs. Seeds draw the angles, and the first tasks of some seeds are nearly equal.
{own_regions(read_table(RESULTS / "approximation-error.parquet"))}"""


def own_regions(rows: pl.DataFrame) -> str:
    r"""Lay out the radii of Ω^ε_1 of the algorithms' own approximations, and after how many tasks ξ_1 reaches ε."""
    own = rows.filter(approximation="own").sort("locality", "algorithm")
    low, *_, high = distinct(own, "lr")
    lines: list[dict[str, str]] = []
    hits: dict[tuple[float, str], list[bool]] = {}
    for (algorithm, locality), part in own.group_by("algorithm", "locality", maintain_order=True):
        line = {"algorithm": f"`{algorithm}`", "locality": str(locality)}
        for lr in (low, high):
            runs = part.filter(lr=lr, task=0).partition_by("seed")
            ends = [run.filter(ray=False).sort("learnt") for run in runs]
            distances = [float(end["distance"][0]) for end in ends]
            radii = [ray_radius(run.filter(ray=True), SHOWN_EPSILON) for run in runs]
            outside_tasks = [end.filter(~(pl.col("error") <= SHOWN_EPSILON))["learnt"] for end in ends]
            tasks = median([float(learnt[0]) if len(learnt) else np.inf for learnt in outside_tasks])
            hits.setdefault((lr, str(locality)), []).extend(map(float.__ge__, radii, distances))
            line |= {f"radius at {lr:g}": _radius(median(radii))}
            line |= {f"‖θ_2 − θ_1‖ at {lr:g}": format_cell(median(distances)), f"tasks at {lr:g}": format_cell(tasks)}
        lines.append(line)
    counts = join(
        f"in {join(f'{sum(hits[lr, kind])} of {len(hits[lr, kind])} {kind}' for kind in KINDS)} runs at {lr:g}"
        for lr in (low, high)
    )
    return rf"""
The same for the algorithms' own approximations of the first task's loss, in the setup of
[approximation-error](#approximation-error): the distance from θ_1 towards θ_2 at which the error first passes
ε = {SHOWN_EPSILON:g}, with the memory after the first task; how far θ_2 is; and the number of tasks learnt, from two
on, at whose end ξ_1 ≥ {SHOWN_EPSILON:g} first (medians over {own["seed"].n_unique()} seeds; inf: never). A radius of 0
means that the approximation is off by more than ε at θ_1 already. θ_2 is within the radius
{counts}.

{table_of_lines(lines, right=True)}
"""


def ray_radius(ray: pl.DataFrame, epsilon: float) -> float:
    """Return the distance up to which the error on a ray is at most ε, by interpolation of logarithms.

    It is 0 if the error is larger at the first distance, infinite if it is smaller at all, and NaN if none is known.
    Else a missing error is smaller than what rounding lets one measure.
    """
    distance, error = (column(ray.sort("distance"), name) for name in ("distance", "error"))
    if np.isnan(error).all():
        return np.nan
    error = np.nan_to_num(error, nan=0.0, posinf=np.inf)
    crossings = np.flatnonzero(error > epsilon)
    if not len(crossings):
        return np.inf
    crossing = crossings[0]
    if crossing == 0:
        return 0.0
    inner, outer = error[crossing - 1], error[crossing]
    share = np.log(epsilon / inner) / np.log(outer / inner) if inner > 0 and np.isfinite(outer) else 0.0
    return float(distance[crossing - 1] * (distance[crossing] / distance[crossing - 1]) ** share)


def _radius(value: float) -> str:
    return format_cell(value) if np.isfinite(value) else f"> {RADII[-1]:.0f}"


def recursion(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    first, *_, last = (row for row in table if row["network"] == "mlp")
    low, high = (100 * row["share, higher orders"] for row in (first, last))
    return rf"""
The paper writes forgetting as its quadratic approximation, which holds while learning is local. Terms of higher order
make {low:.0f} % of forgetting at the lowest learning rate and {high:.0f} % at the highest. The linear network has
quadratic losses, for which the prediction must be exact."""


def locality(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    exceptions = list(dict.fromkeys(f"`{row['algorithm']}`" for row in table if row["declared"] < row["found"]))
    (random,) = (row["explained"] for row in table if row["algorithm"] == "icarl-random")
    silent_rows = [row for row in table if row["found"] == "local" and not row["information"]]
    places = join(f"`{row['algorithm']}` on {row['challenge']}" for row in silent_rows) if silent_rows else "nowhere"
    return rf"""
Definition 3.1 calls an approximation local if it depends on the solution θ_o. *explained* is the share of the
variance of $\hat L_o$ that θ_o explains, *information* an estimate in nats, *p_value* that of a permutation test, which
decides. Called global by the paper and found local: {join(exceptions or ["none"])}. For `si` the paper argues that its
centre θ_{{t−1}} moves with every task, but after one task that is θ_o. For `pnn`, `packnet` and `hat` it argues that
the derivative is taken at the current θ, but what they keep of a finished task is as it was at θ_o, and their
$\hat L_o$ is a constant, like L_o(θ_o), the paper's own example of a local approximation. The paper calls iCaRL local
because of herding; with random exemplars θ_o can still act through the targets that its network generates, and explains
{100 * random:.0f} %. Where information is 0 and the verdict local ({places}), θ_o may act together with the memory's
draws, which the estimate does not know."""


def perturbation_cifar10(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    kinds = names(rows, "statistics")
    solutions = "; ".join(f"with {kind} statistics {_solution_spread(rows.filter(statistics=kind))}" for kind in kinds)
    overflow = join(_overflow(rows, kind) for kind in kinds)
    return rf"""
The paper: the score increases with the radius while that is small and drops to 1 after about 10³; the curve has much
the same shape for all tasks. The published figures compute the Hessian on a task's first 2,000 examples and divide
the sum of test losses by the number of training batches; here examples are spread over the whole task, losses are
means over their own examples, and everything is in double precision. Losses leave the range of single precision
{overflow}, so the figure ends before; the table and the verdict have all radii. {_rounded(rows)}
Between solutions: {solutions}.{_missing_seeds(rows)}"""


def perturbation_mnist(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    other = "perturbation-cifar10"
    cifar10_table = get_study(other).summarize(read_table(RESULTS / f"{other}.parquet")).table
    highest = {
        kind: _highest(cifar10_table, kind)
        for kind in dict.fromkeys(row["BatchNorm statistics"] for row in cifar10_table)
    }
    cifar10_scores = join(f"{value:.3g} ({kind} statistics)" for kind, value in highest.items())
    return rf"""
The paper: the score does not converge to 1 as the radius grows, and is much lower than on Split CIFAR-10. The highest
median score here is {_highest(table, "none"):.3g}, against {cifar10_scores} on Split CIFAR-10. Between solutions:
{_solution_spread(rows)}."""


def hessian_rank(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    in_roots = {row["definition"]: row["after 1 task, in √P"] for row in table}
    count = sum(0.1 <= value <= 10 for value in in_roots.values())
    parameters = rows["parameters"][0]
    return rf"""
The paper: the rank of the average Hessian is small compared with P and grows sub-linearly with the tasks. What it
calls effective rank is the number of eigenvalues above a threshold; here *effective rank* is exp(−Σ p log p) with p =
|λ| / Σ|λ|, which needs no threshold. How small the rank is depends on what counts as zero.

The paper also says (§4.1), by a theorem on deep linear networks, that the rank of one task's Hessian is of the order of
√P, which is {parameters**0.5:.0f} for the {parameters:,} parameters here. After one task, the rank is
{min(in_roots.values()):.2g} to {max(in_roots.values()):.2g} √P by the {len(in_roots)} definitions, of which {count} are
within a factor of 10 of √P, and {in_roots["numerical rank"]:.2g} √P by the numerical rank. One network cannot show how
the rank grows with P."""


def flatness(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    *regimes, total = table
    means = {name: np.mean([row[f"ρ with {name}"] for row in regimes]) for name in PREDICTORS}
    parts = join(
        f"{signed(means[name])} ({signed(total[f'ρ with {name}'])} over all solutions) with {name}" for name in means
    )
    sizes = distinct(rows, "batch_size")
    pairs = {size: paired(rows.filter(batch_size=size)) for size in sizes}
    counts = "; ".join(
        f"with batches of {size:g} it is flatter in {(part['top'] > part['top_stable']).sum()} and forgets less in "
        f"{(part['at_end'] > part['at_end_stable']).sum()} of {len(part)} pairs"
        for size, part in pairs.items()
    )
    return rf"""
The paper: near a solution the quadratic approximation makes flat minima forget less, as long as learning is local. ρ
is Spearman's rank correlation with forgetting after the last task. Its mean over regimes, batch sizes and learning
rates is {parts}. That with λ_max is {signed(means["λ_max"])} ± {_jackknife(rows):.2f} (standard error, leaving out
one seed at a time). The authors of stable SGD use batches of 16 for it and of 64 for plain SGD with five tasks. Here
both regimes are compared at equal batch sizes of {join(f"{size:g}" for size in sizes)}, so at equal numbers
of steps. Stable SGD against plain SGD: {counts}."""


def _jackknife(rows: pl.DataFrame) -> float:
    """Return the standard error of the mean rank correlation with λ_max, by leaving out one seed at a time."""
    seeds, means = names(rows, "seed"), []
    for seed in seeds:
        *regimes, _ = get_study("flatness").summarize(rows.filter(pl.col("seed") != seed)).table
        means.append(np.mean([row["ρ with λ_max"] for row in regimes]))
    return float(np.sqrt((len(seeds) - 1) * np.var(means)))


def theorem1(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    finished_runs = complete_runs(rows, "measured")
    earlier_error = finite_median(finished_runs.filter(pl.col("t") > 2), "forgotten")
    parts = (
        f"{signed(rank_correlation(*(column(second_task(part), side) for side in SIDES)))} for `{part['algorithm'][0]}`"
        for part in rows.partition_by("algorithm", maintain_order=True)
    )
    return rf"""
Theorem 4.1 states E(t) = ½ Δᵀ H̄ Δ ≥ 0 at minima that are close to each other, if nothing was forgotten before. The
last premise holds after the second task, which the table is about. For later tasks, the largest |E| before them, which
would have to be 0, is {earlier_error:.1f} in the median. Within an algorithm, over learning rates and seeds, the rank
correlation of E(2) with the quadratic form is {join(parts)}."""


def theorem2(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    line = {(row["algorithm"], row["lr"]): row for row in table}
    low, *_, high = distinct(rows, "lr")
    share = {
        lr: [100 * line["ogd", lr][name] / line["sgd", lr][name] for name in ("Δᵀ G Δ", "E(t)")] for lr in (low, high)
    }
    pooled_share = {
        lr: [100 * _pooled_ratio(rows.filter(lr=lr), name) for name in ("outer", "forgetting")] for lr in share
    }
    parts = [line["ogd", lr]["functional part (%)"] for lr in (low, high)]
    return rf"""
Theorem 5.1: updates orthogonal to the gradients of old outputs have Δᵀ G Δ = 0, and with it Δᵀ H Δ ≈ 0 and no
forgetting, if the functional part is negligible. The constraint holds on the stored inputs; the table measures all of
them. At the lowest learning rate OGD keeps {share[low][0]:.0f} % of SGD's Δᵀ G Δ and {share[low][1]:.0f} % of its
forgetting, at the highest {share[high][0]:.0f} % and {share[high][1]:.0f} %. These are ratios of medians over seeds of
each run's median over its tasks, as in the table; with medians over all tasks and seeds at once, they are
{pooled_share[low][0]:.0f} % and {pooled_share[low][1]:.0f} % at the lowest rate, {pooled_share[high][0]:.0f} % and
{pooled_share[high][1]:.0f} % at the highest. The functional part, which the theorem neglects, is {parts[0]:.0f} % of
OGD's curvature at the lowest rate and {parts[1]:.0f} % at the highest. Lower rates also learn less, so these shares
do not tell whether locality is the reason."""


def ogd_gtl(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    runs, most = rows.filter(part="forgetting"), table[-1]
    differences = join(
        f"{MeanInterval.of(np.array(variant_differences(runs.filter(classes=row['classes']))))} at K = {row['classes']}"
        for row in table
    )
    return rf"""
The appendix says that the true label's entry of ∇²_f ℓ exceeds the others by a factor of the order of K, K − 1 if a
confident network's other labels are equal. In trained networks it is {most["entry / next"]:.1f} times the next entry at
K = {most["classes"]}. It never has more than half of the trace.
Forgetting of OGD-GTL minus that of full OGD, in points with 95 % t-intervals over seeds: {differences}."""


def stable_sgd(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    lrs, (small, *_, large) = distinct(rows, "lr"), distinct(rows, "batch_size")
    forgetting = {(row["algorithm"], row["lr"]): row["forgetting"] for row in table if row["batch_size"] == small}
    averages = {name: np.mean([forgetting[name, lr] for lr in lrs]) for name in names(rows)}
    stable = REGIMES["stable"][1]
    worse = sum(forgetting["dropout alone", lr] > forgetting["plastic", lr] for lr in lrs)
    parts = join(f"{value:.1f} ({name})" for name, value in averages.items())
    return rf"""
The paper observes less forgetting in the stable regime at all learning rates, more forgetting at higher rates in
both, and a trajectory that soon stays in one region, which a decaying rate enforces. The stable regime here is dropout
of {stable["dropout"]:g} and a rate that decays by {stable["decay"]:g} per task, without the momentum and the lower
bound on the rate of its authors' code. With batches of {small:g} in both regimes, as in their scripts for twenty tasks,
forgetting averaged over learning rates is {parts}, and dropout alone forgets more than plastic SGD at {worse} of
{len(lrs)} rates. These batches are those of the figure.

Every combination of dropout, decay and batch size was trained. What each part does to forgetting, averaged over
learning rates and the other parts, in points with 95 % t-intervals over seeds: {part_effects(rows)} Batches of
{small:g} instead of {large:g} also make {large / small:.1f} times as many steps. Changes of
the accuracy right after learning and of the final accuracy: {_learning(rows)}. {_decay_or_lower_rate(rows)}"""


def tradeoff(rows: pl.DataFrame, table: Sequence[Row]) -> str:
    return r"""
The paper says that higher learning rates make networks more plastic, and that global algorithms gain more by it,
since local ones pay with forgetting. Changes are from the two lowest learning rates to the two highest, in points.
The best final accuracy and its learning rate are chosen on test data. The verdict is by the paper's classes;
[the claims](../reproduction.md#the-papers-claims-each-tested) are tested on the paper's rows, and with the measured
classes too. In the figure, error bars are one standard deviation over seeds, and only the last point of a path has
them, the highest learning rate with a run that did not diverge."""


NOTES: dict[str, Callable[[pl.DataFrame, Sequence[Row]], str]] = {
    "approximation-error": approximation_error,
    "epsilon-region": epsilon_region,
    "recursion": recursion,
    "locality": locality,
    "perturbation-cifar10": perturbation_cifar10,
    "perturbation-mnist": perturbation_mnist,
    "hessian-rank": hessian_rank,
    "flatness": flatness,
    "theorem1": theorem1,
    "theorem2": theorem2,
    "ogd-gtl": ogd_gtl,
    "stable-sgd": stable_sgd,
    "tradeoff": tradeoff,
}


def part_effects(rows: pl.DataFrame) -> str:
    """Say what each part of stable SGD does to forgetting, the most helpful first."""
    final = rows.filter(AFTER_LAST_TASK)
    averages, diverged_seeds = effects(final), distinct(final.filter(~pl.col("forgetting").is_finite()), "seed")
    by_rate = {lr: effects(final.filter(lr=lr)) for lr in distinct(final, "lr")}
    parts = []
    for part in sorted(averages, key=lambda x: averages[x].mean):
        rates = {lr: rate_effects[part] for lr, rate_effects in by_rate.items()}
        low, high = (f(rates, key=lambda lr: rates[lr].mean) for f in (min, max))
        text = f"{part} {averages[part].phrase('raises it', 'lowers it', 'has no clear effect')} ({averages[part]})"
        if rates[low].mean < 0 < rates[high].mean:
            ends = " and ".join(f"by {rates[lr]} at {lr:g}" for lr in (low, high))
            text = f"{part} changes it {ends}, on average by {averages[part]}"
        parts.append(text)
    exclusion = (
        f", leaving out seeds with a diverged run ({join(f'{seed:g}' for seed in diverged_seeds)})"
        if diverged_seeds
        else ""
    )
    return f"{'; '.join(parts)}{exclusion}."


def _learning(rows: pl.DataFrame) -> str:
    """Say what the parts of stable SGD do to accuracies."""
    final = rows.filter(AFTER_LAST_TASK)
    learning, end = effects(final, "learning_accuracy"), effects(final, "acc")
    return "; ".join(f"{part} {learning[part]} and {end[part]}" for part in learning)


def _decay_or_lower_rate(rows: pl.DataFrame) -> str:
    """Compare a decaying rate with a lower constant one."""
    final = rows.filter(AFTER_LAST_TASK, pl.col("batch_size") == pl.col("batch_size").max())
    low, high = distinct(final, "lr")[:2]
    sides = [final.filter(algorithm=a, lr=lr).sort("seed") for a, lr in (("decay alone", high), ("plastic", low))]
    decay, plain = sides
    learning, forgetting, acc = (
        MeanInterval.of(column(decay, name) - column(plain, name))
        for name in ("learning_accuracy", "forgetting", "acc")
    )
    return (
        f"With batches of {final['batch_size'][0]}, a rate that decays from {high:g} differs from a constant one of "
        f"{low:g} by {learning} in the accuracy right after learning, by {forgetting} in forgetting and by {acc} in "
        "the final accuracy; this pair was chosen after seeing the results."
    )


def _pooled_ratio(rows: pl.DataFrame, name: str) -> float:
    """Divide OGD's median over all tasks and seeds by plain SGD's."""
    ogd, sgd = (finite_median(rows.filter(algorithm=algorithm), name) for algorithm in ("ogd", "sgd"))
    return ogd / sgd


def _power(x: np.ndarray, y: np.ndarray) -> float:
    """Fit p of y ∝ xᵖ to the points that are finite."""
    finite = np.isfinite(y)
    return float(np.polyfit(np.log(x[finite]), np.log(y[finite]), 1)[0])


def _highest(table: Sequence[Row], statistics: str) -> float:
    return max(row["eigen, train"] for row in table if row["BatchNorm statistics"] == statistics)


def _solution_spread(rows: pl.DataFrame) -> str:
    """Compare the median scores of eigenvectors on training data between all tasks of all seeds."""
    eigen_rows = rows.filter(split="train", kind="eigen")
    curves = np.stack([radius_curve(part, "score").middle for part in eigen_rows.partition_by("seed", "task")])
    factors = curves.max(0) / curves.min(0)
    correlation = np.median([np.corrcoef(np.log(pair))[0, 1] for pair in combinations(curves, 2)])
    return (
        f"median scores at {len(curves)} solutions differ by a factor of {np.median(factors):.3g} at the median "
        f"radius, {factors.max():.3g} at most; the median correlation of two solutions' curves, in logarithms, is "
        f"{correlation:.2f}"
    )


def _missing_seeds(rows: pl.DataFrame) -> str:
    seeds = rows["seed"].n_unique()
    return f" Measured so far with {seeds} of {len(SEEDS)} seeds." if seeds < len(SEEDS) else ""


def _overflow(rows: pl.DataFrame, statistics: str) -> str:
    """Say where losses leave the range of single precision."""
    kind_rows = rows.filter(statistics=statistics)
    overflow = [radius for radius in distinct(kind_rows, "radius") if radius not in float32_radii(kind_rows)]
    place = f"from r = {overflow[0]:g} on" if overflow else "nowhere"
    return f"{place} with {statistics} statistics"


def _rounded(rows: pl.DataFrame) -> str:
    """Compare the overflow with the radius of the published curves, and say what rounded losses would give."""
    running_rows = rows.filter(statistics="running")
    if not (
        overflow := [radius for radius in distinct(running_rows, "radius") if radius not in float32_radii(running_rows)]
    ):
        return "No curve is explained by single precision."
    cast_curve, saturated_curve = (float32_scores(running_rows, saturate) for saturate in (False, True))
    bad_radii = {
        "infinite": cast_curve.x[np.isinf(cast_curve.middle)],
        "undefined (∞/∞)": cast_curve.x[np.isnan(cast_curve.middle)],
    }
    parts = [
        f"{word} at r = {join(f'{radius:,.0f}' for radius in radii)}" for word, radii in bad_radii.items() if len(radii)
    ]
    checks = [
        (r, 1 / ABOUT_ONE <= score <= ABOUT_ONE)
        for r, score in zip(saturated_curve.x, saturated_curve.middle, strict=True)
    ]
    return_radii = [r for i, (r, _) in enumerate(checks) if all(is_one for _, is_one in checks[i:])]
    returns = f"about 1 from r = {return_radii[0]:,.0f} on" if return_radii else "not about 1 at the largest radius"
    return (
        f"With running statistics that is {'' if overflow[0] == RETURN_RADIUS else 'not '}the radius after which the "
        "published curves are at 1. If the losses of these rows are rounded to single precision, the median score is "
        f"{join(parts or ['finite'])}; if a loss out of range becomes the largest number instead, it is {returns}. "
        "Not measured: the network itself in single precision. Whether single precision made the published curves is "
        "therefore not shown."
    )
