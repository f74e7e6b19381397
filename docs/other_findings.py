"""Text of docs/reproduction.md on what the results show besides the paper's claims. Every number is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from markup import code, join, table
from run_text import algorithm_of
from study_notes import part_effects

from glocal.metrics import summary
from glocal.paper.studies.approximation_error import CONSTANT, skill, skill_groups
from glocal.paper.studies.common import MeanInterval, column, distinct, median, names, rank_correlation
from glocal.paper.studies.implicit import best, complete, stability_limits
from glocal.paper.studies.locality import SHOWN_EPSILON
from glocal.paper.study import read_table
from glocal.report.summary import format_range
from glocal.report.table import ABSENT
from glocal.store.run import Run

PER_TASK = "the mean distance per task"
DISTANCES: dict[str, Callable[[Run], float]] = {
    PER_TASK: lambda run: float(np.mean(run.arrays["update_norm"][1:])),  # the first task's is that of learning it
    "the distance from θ_0": lambda run: float(run.arrays["distance_from_init"][-1]),
}


def findings(runs: Sequence[Run], seed_angle_runs: Sequence[Run], results: Path) -> str:
    """Return a list of findings; the runs are those on Rotated-MNIST with the published angles and with the seed's."""
    run_texts = [optimal_against_replay(runs, results), distance_and_forgetting(runs, seed_angle_runs)]
    study_texts = [own_approximations(results), assumption(results), stable_sgd(results)]
    return "\n".join(f"- {text}" for text in [*run_texts, *study_texts])


def optimal_against_replay(runs: Sequence[Run], results: Path) -> str:
    """Compare the paper's optimal local objective with replay at equal memory, and say where it diverges."""
    unstable = {}
    for lr in sorted({run.lr for run in runs}):
        lr_runs = [run for run in runs if run.lr == lr and algorithm_of(run)[0] == "optimal-soft"]
        if diverged := sum(run.diverged is not None for run in lr_runs):
            unstable[lr] = f"{diverged} of {len(lr_runs)} at {lr:g}"
    training_rows = read_table(results / "implicit.parquet").filter(pl.col("sharpness").is_null())
    best_difference = MeanInterval.of(np.subtract(*(best(training_rows, name)[1] for name in ("optimal-soft", "er"))))
    return (
        "At equal memory, the paper's optimal local objective (`optimal-soft`) differs in final accuracy from replay "
        f"(`er`) by {_by_rate(_at_equal_memory(results))}; each at its best rate, by {best_difference} "
        "([implicit](reproduction/experiments.md#implicit)). With the setup of Table 1, runs diverge: "
        f"{join(unstable.values()) if unstable else 'none'}.{_instability(unstable, {run.lr for run in runs}, results)}"
    )


def _instability(divergences: Mapping[float, str], rates: Collection[float], results: Path) -> str:
    """Say where `optimal-soft` diverges, and whether these are the rates at which its steps are unstable."""
    if not divergences:
        return ""
    limits = stability_limits(read_table(results / "implicit.parquet"))
    if not limits:
        return ""
    task, limit = max(limits.items())
    unstable_rates = {lr for lr in rates if lr > limit}
    explanation = (
        "some run diverges at every rate above the limit, and none at any other"
        if unstable_rates == set(divergences)
        else "this does not explain it alone"
    )
    return (
        " Gradient steps on its penalty are unstable if η·λ_max > 2, so "
        f"above η = {limit:.2g} after task {task}: {explanation}."
    )


def _by_rate(gains: Mapping[float, MeanInterval]) -> str:
    return join(f"{gain} at {lr:g}" for lr, gain in gains.items())


def _at_equal_memory(results: Path) -> dict[float, MeanInterval]:
    """Return the accuracy of `optimal-soft` minus that of `er` with its memory, where no run diverges."""
    rows = read_table(results / "implicit.parquet").filter(pl.col("sharpness").is_null())
    ours, replay = (complete(rows, name) for name in ("optimal-soft", "er"))
    return {lr: MeanInterval.of(accuracies - replay[lr]) for lr, accuracies in ours.items() if lr in replay}


def distance_and_forgetting(published: Sequence[Run], seed_angle_runs: Sequence[Run]) -> str:
    """Say at how many learning rates algorithms that move farther forget more, by two sets of algorithms.

    Args:
        published: runs with the published angles, of which some algorithms have their own.
        seed_angle_runs: runs with angles from the seed, the same for all algorithms.
    """
    seed_names, all_names = ({algorithm_of(run)[0] for run in runs} for runs in (seed_angle_runs, published))
    seed_rhos, all_rhos = (
        {distance: rank_correlations(runs, distance) for distance in DISTANCES} for runs in (seed_angle_runs, published)
    )
    text = (
        "At how many learning rates do algorithms that move farther forget more? "
        f"Among the {len(seed_names)} with seed angles: {'; '.join(_signs(seed_rhos))}"
    )
    if extras := all_names - seed_names:
        text += f". With {len(extras)} more, on the published angles: {'; '.join(_signs(all_rhos))}"
    table = "reproduction/claims-by-row.md#distance-and-forgetting-across-algorithms"
    return f"{text} ([correlations]({table})). This shows no cause."


def _signs(rhos: Mapping[str, Mapping[float, MeanInterval]]) -> list[str]:
    """Say at how many learning rates the correlations with a distance are above and below 0."""
    parts = []
    for distance, intervals in rhos.items():
        more, less = (sum(x) for x in zip(*((x.low > 0, x.high < 0) for x in intervals.values()), strict=True))
        signs = [f"more at {more}"] * (more > 0 or less == 0) + [f"less at {less}"] * (less > 0)
        parts.append(f"{join(signs)} of {len(intervals)} by {distance}")
    return parts


def correlation_table(published: Sequence[Run], seed_angle_runs: Sequence[Run]) -> str:
    """Tabulate, by learning rate, the rank correlation of distance and forgetting for three sets of runs."""
    seed_names = {algorithm_of(run)[0] for run in seed_angle_runs}
    groups = {
        f"{len(seed_names)} algorithms, seed angles": seed_angle_runs,
        "the same, published angles": [run for run in published if algorithm_of(run)[0] in seed_names],
        f"{len({algorithm_of(run)[0] for run in published})} algorithms, published angles": published,
    }
    correlations = {
        (title, distance): rank_correlations(runs, distance) for distance in DISTANCES for title, runs in groups.items()
    }
    lrs = sorted({lr for by_lr in correlations.values() for lr in by_lr})
    return table(
        [
            {"algorithms": title, "distance": distance} | {f"lr {lr:g}": str(by_lr.get(lr, ABSENT)) for lr in lrs}
            for (title, distance), by_lr in correlations.items()
        ]
    )


def rank_correlations(runs: Sequence[Run], distance: str) -> dict[float, MeanInterval]:
    """Return by learning rate Spearman's ρ over algorithms for each seed: mean and t-interval, cut at ±1."""
    measure, intervals = DISTANCES[distance], {}
    for lr in sorted({run.lr for run in runs}):
        by_seed: dict[int, list[tuple[float, float]]] = {}
        for run in runs:
            if run.lr == lr and run.diverged is None:
                by_seed.setdefault(run.seed, []).append((measure(run), summary(run)["forgetting"]))
        interval = MeanInterval.of(np.array([rank_correlation(*np.array(part).T) for part in by_seed.values()]))
        intervals[lr] = MeanInterval(*(float(np.clip(x, -1, 1)) for x in interval))
    return intervals


def own_approximations(results: Path) -> str:
    """Compare the algorithms' own approximations with the constant, at the lowest and the highest learning rate."""
    rows = read_table(results / "approximation-error.parquet")
    lrs = distinct(rows, "lr")
    paired_rows = rows.filter(pl.col("algorithm").is_in(names(rows.filter(approximation=CONSTANT))))
    parts = []
    for lr in (lrs[0], lrs[-1]):
        skills = {name: value for name, value in skill(paired_rows, lr).items() if name in names(paired_rows)}
        groups = skill_groups(skills)
        diverged_names = sorted(set(names(paired_rows)) - skills.keys())
        texts = [
            f"{kind}: {', '.join(_with_skill(name, skills) for name in members)}" for kind, members in groups.items()
        ]
        parts.append(
            f"At {lr:g}, {'; '.join([*texts, *([f'diverged: {code(diverged_names)}'] if diverged_names else [])])}."
        )
    seeds = format_range(paired_rows.filter(approximation=CONSTANT).group_by("algorithm").n_unique()["seed"], "seed")
    return (
        f"Do the algorithms' approximations say more than the constants L_o(θ_o), on the same runs ({seeds})? "
        f"{' '.join(parts)} [Skill](reproduction/studies.md#approximation-error) is 1 if exact and 0 for the "
        "constants; it does not rank algorithms."
    )


def _with_skill(name: str, skills: Mapping[str, MeanInterval]) -> str:
    """Name an algorithm, with its skill if that is shown to differ from 0."""
    if not skills[name].low * skills[name].high > 0:
        return f"`{name}`"
    return f"`{name}` ({f'{skills[name].mean:+.2g}'.replace('-', '−')})"


def assumption(results: Path) -> str:
    """Say when the locality assumption breaks."""
    rows = read_table(results / "epsilon-region.parquet", ["kind", "epsilon", "lr", "learnt"])
    breaks = rows.filter(kind="break", epsilon=SHOWN_EPSILON)
    tasks = [median(column(breaks.filter(lr=lr), "learnt")) for lr in distinct(breaks, "lr")]
    return (
        f"With ε = {SHOWN_EPSILON:g} plain SGD breaks the paper's locality assumption after {min(tasks):.1f} to "
        f"{max(tasks):.1f} tasks, by learning rate (medians over seeds)."
    )


def stable_sgd(results: Path) -> str:
    """Say which parts of stable SGD reduce forgetting."""
    rows = read_table(results / "stable-sgd.parquet", ["algorithm", "batch_size", "t", "forgetting", "lr", "seed"])
    return (
        "What the parts of stable SGD do to forgetting, averaged over learning rates and the other parts, in points: "
        f"{part_effects(rows)}"
    )
