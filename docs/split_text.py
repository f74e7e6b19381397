"""Pages of the split challenges and of precision. Every number about our results is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import get_args

from agreement_text import agreement, cells_by_name, row_differences, row_means
from markup import code, join, table
from run_text import algorithm_of, cost
from scipy import stats

from glocal.algorithms import ALGORITHMS
from glocal.metrics import END_LRS, confidence_interval, low_minus_high, summary
from glocal.paper import results
from glocal.paper.claims import interaction_by_seed, table_rows
from glocal.paper.comparison import MAX_Z, Comparison, compare, relabel, render
from glocal.paper.studies.common import MeanInterval
from glocal.paper.table1 import COLUMNS, ICARL_ALGORITHMS, SEEDS, Column
from glocal.precision import Precision
from glocal.report.table import ABSENT, mean_std, signed
from glocal.store.run import Run, Runs

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"

SPLIT = {
    "split-cifar10": """Five tasks of two classes, fifty epochs each, batch 32, ResNet-18 of 11,173,962 parameters in
bf16, the published hyperparameters; accuracy among the task's own classes. Several rows were trained at
the same time, so that their seconds include waiting for each other.""",
    "split-tinyimagenet": """ResNet-18 in bf16 on the part of the data at hand, two tasks of twenty classes with 200
images each, three epochs: short runs, which show that every row of the table trains, and what the whole column would
cost.""",
}
PRECISION = """# Precision

Split CIFAR-10 by plain SGD with three epochs a task, multiplied as `--precision` says: `glocal paper table1 --challenge
split-cifar10 --algorithms sgd --epochs 3 --lrs {rates} --seeds {seeds} --precision …`. {cost}

{table}

{verdict}

"""
EXACT = "fp32"
MEANS = """Means over seeds, in percent. Differences are taken at the same learning rate and seed, and their intervals
over seeds: of few seeds they only tell what a precision may cost at most."""
FILLING = ("ogd", "ogd-ave", "ogd-gtl")
"""Algorithms whose steps are slower the more they remember."""
POWER = 0.8
MAX_SEEDS = 200
"""Seeds that `more_seeds` counts up to."""
MEASURED = ("split-tinyimagenet",)
"""Columns that are too short to compare, and whose cost is projected."""


def split(challenge: str) -> str:
    """A section for a split challenge, where its results are."""
    file = RESULTS / f"{challenge}.parquet"
    if not file.exists():
        return ""
    runs = results.read(file)
    comparison = compare(runs)
    parts = [f"# {challenge}", f"{SPLIT[challenge]}{draws(runs)} {cost(runs)}"]
    if any(row.acc.z is not None for row in comparison.rows):
        parts += [agreement(comparison), *first_seed_outliers(runs, comparison)]
    if challenge in MEASURED:
        parts += [projection(runs, COLUMNS[challenge]), *other_algorithms(runs, challenge)]
    parts += figures(runs, challenge)
    parts += [*exemplars(comparison), *power(comparison), *single_images(runs)]
    parts += [str(render(comparison, "markdown")).strip(), class_incremental(runs)]
    return "\n\n".join(parts) + "\n\n"


def class_incremental(runs: Runs) -> str:
    """Tabulate the final accuracy among all classes, by learning rate, with the seeds of each cell."""
    rows = compare(runs, scope="class", published=False).rows
    lrs = sorted({row.lr for row in rows})
    cells: dict[str, dict[float, str]] = {}
    limit = 100 / runs[0].tasks
    above_limit: dict[str, bool] = {}
    for row in rows:
        if (ours := row.acc.ours) is None:
            continue
        cells.setdefault(row.algorithm, {})[row.lr] = f"{mean_std(ours.mean, ours.std)} ({ours.seeds})"
        seeds = [100 * summary(run, "class")["acc"] for run in row.finished]
        above_limit[row.algorithm] = above_limit.get(row.algorithm, False) or confidence_interval(seeds)[0] > limit
    lines = [
        {"algorithm": f"`{name}`"} | {f"lr {lr:g}": by_lr.get(lr, ABSENT) for lr in lrs}
        for name, by_lr in cells.items()
    ]
    outputs = runs[0].config["challenge"]["outputs"]
    names = [f"`{name}`" for name, is_above in above_limit.items() if is_above]
    text = (
        f"The same runs, where an image is classified among all {outputs} classes instead of those of its task: final "
        "accuracy in percent, mean ± standard deviation, and in brackets the number of seeds. A network that knows the "
        f"classes of one task only has at most {limit:.0f} %"
        f"{f'; {join(names)} are shown to reach more' if names else ''}."
    )
    return "\n\n".join(["## Class-incremental accuracy", text, table(lines, right=True)])


def figures(runs: Runs, challenge: str) -> list[str]:
    """The distances of all runs, and iCaRL with both kinds of exemplars where both are there."""
    path = HERE / "images" / f"{challenge}-distance.png"
    relabel(runs).plot("distance", path)
    parts = [f"![Distance from the initialisation by learning rate, and relative to plain SGD](images/{path.name})"]
    buffers = runs.where(lambda run: run.config["algorithm"]["name"] in ICARL_ALGORITHMS)
    if {run.config["algorithm"]["name"] for run in buffers} == set(ICARL_ALGORITHMS):
        path = HERE / "images" / f"{challenge}-icarl-buffer.png"
        relabel(buffers).plot("forgetting-by-seed", path)
        parts.append(f"![Forgetting of iCaRL with herding and with random exemplars, by seed](images/{path.name})")
    return parts


def exemplars(comparison: Comparison) -> list[str]:
    """What the figure of iCaRL's buffers shows, beside what the paper says of it."""
    tests = {row.algorithm: row.trend for row in comparison.trends if row.algorithm in ICARL_ALGORITHMS}
    if set(tests) != set(ICARL_ALGORITHMS):
        return []
    herding, random = (tests[name] for name in ICARL_ALGORITHMS)
    changes = [MeanInterval(-x.difference, -x.upper, -x.lower) for x in (herding, random)]
    seeds = join(f"{trend.seeds} for `{name}`" for name, trend in tests.items())
    rows = {row.algorithm: row.values["forgetting"] for row in table_rows(comparison)}
    difference, _ = interaction_by_seed(*([rows[name]] for name in ICARL_ALGORITHMS))
    return [
        "The paper says that iCaRL with herding forgets more at high learning rates than at low ones, and with random "
        "exemplars about as much at both. From the two lowest rates to the two highest, forgetting changes by "
        f"{changes[0]} points with herding ({herding.verdict}) and by {changes[1]} with random exemplars "
        f"({random.verdict}). Herding minus random is {difference}: "
        f"{difference.phrase('more', 'less', 'not settled')}. Seeds: {seeds}."
    ]


def power(comparison: Comparison) -> list[str]:
    """Say how many seeds would tell the published difference of local and global algorithms from 0."""
    rows = [row for row in table_rows(comparison) if row.published]
    sides = [[row for row in rows if row.locality == kind] for kind in ("local", "global")]
    if not all(sides):
        return []
    interval, seeds = interaction_by_seed(*([row.values["forgetting"] for row in side] for side in sides))
    if seeds < 2:
        return []
    deviation = (interval.high - interval.mean) * math.sqrt(seeds) / stats.t.ppf(0.975, seeds - 1)
    published = [mean(-low_minus_high(row.published["forgetting"]) for row in side) for side in sides]
    difference = published[0] - published[1]
    sizes = range(2, MAX_SEEDS + 1)
    seed_count = next((f"{n}" for n in sizes if _power(difference / deviation, n) > POWER), f"more than {MAX_SEEDS}")
    ends = (deviation * math.sqrt((seeds - 1) / stats.chi2.ppf(q, seeds - 1)) for q in (0.975, 0.025))
    return [
        f"The difference of local and global algorithms in high − low forgetting is {interval} by {seeds} seeds, and "
        f"deviates by {deviation:.1f} points between them (95 % interval {' to '.join(f'{x:.1f}' for x in ends)}). "
        f"With this deviation, {seed_count} seeds would tell the published one, {signed(difference)}, from 0 with a "
        f"probability of {100 * POWER:.0f} %."
    ]


def _power(effect: float, n: int) -> float:
    """Return the probability that the 95 % t-interval of n values leaves out 0 on the side of their mean.

    `effect` is the mean over the standard deviation.
    """
    return float(stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, abs(effect) * math.sqrt(n)))


def single_images(runs: Runs) -> list[str]:
    """Say what else than locality is different in EWC and OGD: BatchNorm's statistics."""
    names = sorted({algorithm_of(r)[0] for r in runs if algorithm_of(r)[1].get("statistics") == "published"})
    high = sorted({run.lr for run in runs})[-END_LRS:]
    accuracies = {
        name: mean(100 * summary(r)["learning_accuracy"] for r in runs if algorithm_of(r)[0] == name and r.lr in high)
        for name in ("sgd", *names)
        if any(algorithm_of(r)[0] == name and r.lr in high for r in runs)
    }
    if not names or "sgd" not in accuracies:
        return []
    listing = join(f"{value:.1f} % (`{name}`)" for name, value in accuracies.items())
    return [
        f"{code(names)} do at the end of a task what the paper's code does: they pass single images through the "
        "network in training mode, and BatchNorm's running statistics, with which the task is then tested, move to "
        "those of single images. No other algorithm here does so. The accuracy right after learning, at the two "
        f"highest learning rates, is {listing}: these rows differ from the others in more than locality."
    ]


def precision() -> str:
    """Accuracies by how exactly the network multiplies."""
    file = RESULTS / "precision.parquet"
    if not file.exists():
        return ""
    runs = results.read(file)
    summaries = {(run.config["precision"], run.lr, run.seed): summary(run) for run in runs}
    rates, seeds = (sorted({key[i] for key in summaries}) for i in (1, 2))
    lines = [
        "| precision | learning rate | right after learning | in the end | forgetting |",
        "| --- |" + " ---: |" * 4,
    ]
    names = [name for name in get_args(Precision) if any(key[0] == name for key in summaries)]
    for name, lr in product(names, rates):
        cell = [summaries[name, lr, seed] for seed in seeds if (name, lr, seed) in summaries]
        if not cell:
            continue
        cells = (
            f"{100 * mean(values[statistic] for values in cell):.1f}"
            for statistic in ("learning_accuracy", "acc", "forgetting")
        )
        lines.append(f"| `{name}` | {lr:g} | {' | '.join(cells)} |")
    seconds = {n: mean(run.info["cost"]["seconds"] for run in runs if run.config["precision"] == n) for n in names}
    text = " ".join(
        [costs(summaries, name) + pace(seconds, name) for name in names if name != EXACT] + [reason(seconds)]
    )
    settings = {"rates": " ".join(f"{lr:g}" for lr in rates), "seeds": " ".join(map(str, seeds))}
    return PRECISION.format(**settings, cost=cost(runs), table="\n".join(lines), verdict=f"{MEANS} {text}")


def costs(summaries: Mapping[tuple[str, float, int], Mapping[str, float]], name: str) -> str:
    """How far from exact products a precision's accuracies are, by seeds, and what that excludes."""
    parts, significant = [], []
    for statistic, words in (("learning_accuracy", "right after learning"), ("acc", "in the end")):
        values = differences(summaries, name, statistic)
        low, high = confidence_interval(values)
        parts.append(f"{signed(mean(values))} points {words} (95 % interval {signed(low)} to {signed(high)})")
        significant += [words] if low > 0 or high < 0 else []
    conclusion = f"shown to differ {join(significant)}" if significant else "not shown to differ"
    return f"`{name}` minus `{EXACT}`: {' and '.join(parts)}, {conclusion}."


def pace(seconds: Mapping[str, float], name: str) -> str:
    """How long a run took, and how many times as fast that is as exact products; "" without runs of those."""
    if EXACT not in seconds:
        return ""
    time, exact_time = seconds[name], seconds[EXACT]
    return f" A run took {time:.1f} s against {exact_time:.1f} s: {exact_time / time:.1f} times as fast."


def reason(seconds: Mapping[str, float]) -> str:
    """Which precision the split challenges are trained with, and whether it is the fastest here."""
    split_precision = COLUMNS["split-cifar10"].precision
    fastest = (
        "the fastest here"
        if split_precision == min(seconds, key=lambda name: seconds[name])
        else "not the fastest here"
    )
    return (
        f"The split challenges are trained with `{split_precision}`, {fastest}; their agreement with published numbers "
        "is no argument for it."
    )


def differences(
    summaries: Mapping[tuple[str, float, int], Mapping[str, float]], name: str, statistic: str
) -> list[float]:
    """For every seed the mean over the learning rates, in points."""
    precision_keys = [key for key in summaries if key[0] == name and (EXACT, *key[1:]) in summaries]
    by_seed = {seed: [key for key in precision_keys if key[2] == seed] for _, _, seed in precision_keys}
    return [
        100 * mean(summaries[key][statistic] - summaries[EXACT, *key[1:]][statistic] for key in keys)
        for keys in by_seed.values()
    ]


def projection(runs: Runs, column: Column) -> str:
    """What a step of every row took and what was beside the steps, and what the whole column would take so."""
    lines = [
        "| row | ms a step | hours of steps | s a task beside | hours beside |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    batches = min(run.info["steps"] / (run.tasks * run.config["epochs"]) for run in runs)  # of an epoch, not replayed
    size_ratio = column.steps / (column.tasks * column.epochs) / batches
    run_hours = len(column.lrs) * len(column.seeds) / 3600
    hours, absent = 0.0, []
    for row in column.all_rows:
        row_runs = [run for run in runs if column.find_row(*algorithm_of(run)) == row]
        if not row_runs and row in column.rows:
            absent.append(f"`{row.algorithm}`")
        if not row_runs:
            continue
        pace = median(run.info["cost"]["step_seconds"] for run in row_runs)
        steps = column.steps + mean(_replay_steps(run, batches) for run in row_runs) * column.epochs * (
            column.tasks - 1
        )
        overhead = mean((run.info["cost"]["seconds"] - pace * run.info["steps"]) / run.tasks for run in row_runs)
        row_hours = pace * steps * run_hours, size_ratio * overhead * column.tasks * run_hours
        lines.append(
            f"| `{row.algorithm}` | {1000 * pace:.2f} | {row_hours[0]:.1f} | {overhead:.1f} | {row_hours[1]:.1f} |"
        )
        hours += sum(row_hours)
    sizes = sorted({run.info["cost"]["cohort_runs"] for run in runs})
    text = (
        f"A step's time is that of the median epoch of {' to '.join(map(str, sizes[:: max(1, len(sizes) - 1)]))} runs "
        "trained together, which share it. Beside its steps a run spends time on start-up, consolidation and "
        f"measuring; where tasks have {size_ratio:.1f} times as many examples it is taken to be as many times as long, "
        f"which is too much for start-up.{unfilled_memories(runs)} {len(lines) - 2} rows of {len(column.lrs)} learning "
        f"rates and {len(column.seeds)} seeds, {column.steps:,} steps a run without exemplars, would take "
        f"{hours:.1f} hours"
    )
    text += f", without {', '.join(absent)}, of which there are no runs." if absent else "."
    return "\n".join([*lines, "", text])


def other_algorithms(runs: Runs, challenge: str) -> list[str]:
    """Every algorithm that the table has no row of, one short run each."""
    file = RESULTS / f"{challenge}-others.parquet"
    if not file.exists():
        return []
    other_runs = results.read(file)
    ((lr, seed),) = {(run.lr, run.seed) for run in other_runs}
    lines = ["| algorithm | ACC | FGT | class-incremental ACC | ms a step | s in all |", "| --- |" + " ---: |" * 5]
    for run in sorted(other_runs, key=lambda run: list(ALGORITHMS).index(algorithm_of(run)[0])):
        metrics, run_cost = summary(run), run.info["cost"]
        values = (metrics["acc"], metrics["forgetting"], summary(run, "class")["acc"])
        accuracies = " | ".join("diverged" if run.diverged else f"{100 * value:.2f}" for value in values)
        lines.append(
            f"| `{run.info['label']}` | {accuracies} | {1000 * run_cost['step_seconds']:.2f} | "
            f"{run_cost['seconds']:.0f} |"
        )
    algorithms = {algorithm_of(run)[0] for run in (*runs, *other_runs)}
    absent = [f"`{name}`" for name in ALGORITHMS if name not in algorithms]
    missing_text = f" Not run yet: {', '.join(absent)}." if absent else ""
    introduction = f"The other algorithms, each once, at learning rate {lr:g} and with seed {seed}: "
    note = " `hat`, `packnet` and `pnn` are given the task of an image, in class-incremental accuracy as well."
    return [f"{introduction}{cost(other_runs)}{missing_text}{note}", "\n".join(lines)]


def unfilled_memories(runs: Runs) -> str:
    """Whose memories slow steps down by what is in them: of the first of two tasks nothing was."""
    names = [f"`{name}`" for name in dict.fromkeys(algorithm_of(run)[0] for run in runs) if name in FILLING]
    if not names:
        return ""
    return (
        f" Steps of {' and '.join(names)} are slower with more in memory, which was empty for half of these epochs: "
        "their hours are too few."
    )


def _replay_steps(run: Run, batches: float) -> float:
    """By how many steps exemplars among the data lengthen an epoch of every task but the first."""
    epochs = run.config["epochs"]
    return (run.info["steps"] - batches * run.tasks * epochs) / (epochs * (run.tasks - 1))


def first_seed_outliers(runs: Runs, comparison: Comparison) -> list[str]:
    """What became of the numbers that the seed which all cells have put further than 2 standard errors from ours."""
    common = set.intersection(*({run.seed for run in row.finished} for row in comparison.rows))
    first = next((seed for seed in SEEDS if seed in common), None)
    if first is None or max(row.seeds for row in comparison.rows) == 1:
        return []
    all_cells, parts = cells_by_name(comparison), []
    for cell_name, first_cell in cells_by_name(compare(run for run in runs if run.seed == first)).items():
        cell = all_cells[cell_name]
        if not first_cell.differs or cell.ours is None or cell.published is None or cell.ours.seeds == 1:
            continue
        assert first_cell.z is not None and first_cell.ours is not None and cell.z is not None
        distance = abs(first_cell.ours.mean - cell.ours.mean) / cell.ours.std
        parts.append(
            f"- {cell_name[0].upper()}{cell_name[1:]}: z = {signed(first_cell.z)} by seed {first}, {signed(cell.z)} by "
            f"{cell.ours.seeds} seeds. Ours deviate by {cell.ours.std:.1f} points, the published ones by "
            f"{cell.published.std:.1f}, of which one seed's standard error was made; seed {first} is {distance:.1f} "
            "deviations from our mean."
        )
    first_rows, all_rows = (row_differences(x) for x in (compare(run for run in runs if run.seed == first), comparison))
    for name, (first_acc, _) in first_rows.items():
        seeds = min(row.acc.ours.seeds for row in comparison.rows if row.algorithm == name and row.acc.ours)
        if abs(first_acc.z) > MAX_Z and seeds > 1:
            acc, (row,) = all_rows[name][0], [row for row in table_rows(comparison) if row.algorithm == name]
            target = mean(row.published["acc"].values())
            by_seed = {seed: x - target for seed, x in row_means(row, "acc").items()}
            same_sign = sum(x * first_acc.mean > 0 for x in by_seed.values())
            parts.append(
                f"- The accuracy of `{name}`, averaged over learning rates: {signed(first_acc.mean)} points (z "
                f"{signed(first_acc.z, '.1f')}) by seed {first}, {signed(acc.mean)} ± {acc.error:.2f} (z "
                f"{signed(acc.z, '.1f')}) by {seeds} seeds. By seed: "
                f"{join(f'{signed(x)} ({seed})' for seed, x in by_seed.items())}. "
                f"{same_sign} of {len(by_seed)} seeds are {'above' if first_acc.mean > 0 else 'below'} the published "
                f"mean, and the spread over seeds is {'too large to tell' if abs(acc.z) < MAX_Z else 'smaller'}."
            )
    if not parts:
        return []
    return [
        f"By seed {first} alone these were further than {MAX_Z:g} standard errors from the published number, and more "
        "seeds were trained to find out why.",
        "\n".join(parts),
    ]


def draws(runs: Runs) -> str:
    """Say how many runs draw the random numbers of each protocol, if there are several."""
    counts = sorted(Counter(run.config["protocol"] for run in runs).items())
    if len(counts) < 2:
        return ""
    listing = join(f"{count} of protocol {protocol}" for protocol, count in counts)
    return f" Their random numbers have the same distributions, but come from {len(counts)} protocols: {listing}."
