"""Text of docs/reproduction/rotated-mnist.md: further rows, divergence, OGD and OGD-GTL. Every number is computed."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from statistics import mean

import numpy as np
from markup import code, join
from run_text import algorithm_of, cost

from glocal.algorithms import ALGORITHMS
from glocal.metrics import summary
from glocal.paper.comparison import Comparison
from glocal.paper.studies.common import MeanInterval
from glocal.report.table import signed
from glocal.store.run import Runs, exploded_task

TOLD_THE_TASK = [name for name, algorithm in ALGORITHMS.items() if algorithm.family == "partition"]


def excluded_rows(runs: Runs) -> str:
    """Which rows of a table are in no comparison, and why."""
    partition_runs = [run for run in runs if algorithm_of(run)[0] in TOLD_THE_TASK]
    if not partition_runs:
        return ""
    names = dict.fromkeys(f"`{algorithm_of(run)[0]}`" for run in partition_runs)
    most = max(abs(100 * summary(run)["forgetting"]) for run in partition_runs)
    return (
        f"\n{join(names)} know which task a test input is from and are built not to forget; they forget at most "
        f"{most:.2f} points. They are in the table, but left out of all comparisons, figures and claims.\n"
    )


def extra_rows_cost(runs: Runs) -> str:
    """What the rows took that the paper does not have."""
    names = dict.fromkeys(algorithm_of(run)[0] for run in runs)
    if not names:
        return ""
    return f" The rows of {code(names)} were trained beside other work on the same GPU: {cost(runs)}"


def divergence(runs: Runs) -> str:
    """Say in which tasks runs diverge, and whether higher learning rates diverge earlier; "" if none does."""
    tasks: dict[str, dict[float, list[int]]] = {}
    finite_runs = []
    for run in runs:
        if run.diverged is None:
            continue
        name, step, distances = algorithm_of(run)[0], run.info["diverged"], run.arrays["distance_from_init"]
        task = exploded_task(run) if step is None else (step - 1) * run.tasks // run.info["steps"] + 1
        assert task is not None
        tasks.setdefault(name, {}).setdefault(run.lr, []).append(task)
        if step is None:
            jump = f"{distances[task - 2]:.0f} to {distances[task - 1]:.0f}"
            finite_runs.append(
                f"`{name}` at {run.lr:g} with seed {run.seed}, whose distance from θ_0 jumps from {jump}"
            )
    if not tasks:
        return ""
    total = Counter((algorithm_of(run)[0], run.lr) for run in runs)
    parts = {
        name: join(
            f"at {lr:g} in task {' to '.join(map(str, sorted({min(run_tasks), max(run_tasks)})))} "
            f"({len(run_tasks)} of {total[name, lr]} runs)"
            for lr, run_tasks in sorted(by_lr.items())
        )
        for name, by_lr in tasks.items()
    }
    listing = "; ".join(f"`{name}` {part}" for name, part in parts.items())
    means = [[mean(run_tasks) for _, run_tasks in sorted(by_lr.items())] for by_lr in tasks.values()]
    all_earlier = all(first > second for run_tasks in means for first, second in pairwise(run_tasks))
    finite_text = f" The parameters stay finite of {join(finite_runs)}." if finite_runs else ""
    return (
        f"\nDiverged: {listing}.{finite_text} A gradient step on a quadratic of curvature λ is stable up to a learning "
        "rate of 2/λ, and these algorithms add up the curvatures of the tasks. If that is the reason, higher rates "
        f"diverge after fewer tasks, which they {'do' if all_earlier else 'do not always'} here, on average; "
        "[implicit](../experiments/implicit.md) is the experiment on it.\n"
    )


def orthogonality(comparison: Comparison, runs: Runs) -> str:
    """Forgetting of sgd, ogd-published and ogd-gtl at the lowest and the highest rate."""
    rates = sorted({row.lr for row in comparison.rows})
    (gradients,) = {algorithm_of(run)[1]["slots"] // run.tasks for run in runs if algorithm_of(run)[0] == "ogd-gtl"}

    def forgetting(name: str, lr: float) -> float:
        (row,) = [row for row in comparison.rows if row.algorithm == name and row.lr == lr]
        ours = row.forgetting[comparison.over].ours
        assert ours is not None
        return ours.mean

    parts, shares, published_gaps, gains = [], [], [], []
    for lr in (rates[0], rates[-1]):
        sgd, published, theorem = (forgetting(name, lr) for name in ("sgd", "ogd-published", "ogd-gtl"))
        shares.append(1 - theorem / sgd)
        published_gaps.append(abs(published - sgd))
        gains.append(sgd - theorem)
        parts.append(
            f"At lr {lr:g} plain SGD forgets {sgd:.1f} points, `ogd-published` {published:.1f}, and `ogd-gtl`, with "
            f"{gradients} gradients a task kept orthogonal, {theorem:.1f}: {100 * abs(shares[-1]):.0f} % "
            f"{'less' if shares[-1] >= 0 else 'more'} than SGD."
        )
    return " ".join(
        [*parts, thesis(*shares, published_differs=max(published_gaps) >= min(gains)), paper_test(comparison)]
    ).rstrip()


def paper_test(comparison: Comparison) -> str:
    """What the paper's test makes of the three, and what that is worth."""
    trends = {row.algorithm: row.trend for row in comparison.trends}
    names = ("ogd-published", "sgd", "ogd-gtl")
    if not set(names) <= set(trends):
        return ""
    published, sgd, theorem = (trends[name] for name in names)
    text = (
        "By the paper's test, forgetting at the two lowest rates less that at the two highest, they have "
        f"{signed(published.difference)} (`ogd-published`), {signed(sgd.difference)} (SGD) and "
        f"{signed(theorem.difference)} points (`ogd-gtl`)."
    )
    if sgd.lower <= published.difference <= sgd.upper:
        text += " The published row is that of SGD, which approximates nothing and is called global"
        text += " and passes the test of local algorithms" if sgd.sign == "negative" else ""
        text += ": it is no evidence of how local algorithms differ from global ones."
    return text


def gtl_minus_sgd(runs: Runs) -> str:
    """How much more ogd-gtl forgets than sgd at every learning rate, over the seeds that both have."""
    forgetting = {
        (algorithm_of(run)[0], run.lr, run.seed): 100 * summary(run)["forgetting"]
        for run in runs
        if algorithm_of(run)[0] in ("ogd-gtl", "sgd")
    }
    pairs = sorted((lr, seed) for name, lr, seed in forgetting if name == "ogd-gtl" and ("sgd", lr, seed) in forgetting)
    if not pairs:
        return ""
    parts = {}
    for lr, group in groupby(pairs, key=lambda pair: pair[0]):
        parts[lr] = MeanInterval.of(
            np.array([forgetting["ogd-gtl", *pair] - forgetting["sgd", *pair] for pair in group])
        )
    listing = ", ".join(f"{difference} at {lr:g}" for lr, difference in parts.items())
    verdict = " One seed gives no verdict." if len({seed for _, seed in pairs}) == 1 else ""
    return (
        f"On {runs[0].challenge} the forgetting of `ogd-gtl`, less that of SGD with the same seed, is in points: "
        f"{listing}.{verdict} `ogd-published` also overwrites BatchNorm's statistics there, by those of single images."
    )


def thesis(lowest: float, highest: float, published_differs: bool) -> str:
    """What the shares of SGD's forgetting that OGD avoids at the two rates say, and whether the published row could."""
    if lowest <= max(highest, 0):
        return "Orthogonality does not help more at the lowest rate than at the highest, against the paper's thesis."
    helps = "Orthogonality helps more at the lowest rate, where learning is most local, than at the highest"
    blind = "" if published_differs else ", and the published row, as near to SGD as it is, could not show it"
    return f"{helps}, which is the paper's thesis{blind}."
