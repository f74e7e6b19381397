"""Pages of the split challenges and of precision. Every number about our results is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import get_args

from agreement_text import agreement, compared, row_differences, row_means
from markup import code, join, table
from run_text import chosen, cost
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
    made = compare(runs)
    parts = [f"# {challenge}", f"{SPLIT[challenge]}{other_draws(runs)} {cost(runs)}"]
    if any(row.acc.z is not None for row in made.rows):
        parts += [agreement(made), *by_more_seeds(runs, made)]
    if challenge in MEASURED:
        parts += [projection(runs, COLUMNS[challenge]), *others(runs, challenge)]
    parts += figures(runs, challenge)
    parts += [*exemplars(made), *power(made), *single_images(runs)]
    parts += [str(render(made, "markdown")).strip(), class_incremental(runs)]
    return "\n\n".join(parts) + "\n\n"


def class_incremental(runs: Runs) -> str:
    """Tabulate the final accuracy among all classes, by learning rate, with the seeds of each cell."""
    rows = compare(runs, scope="class", published=False).rows
    lrs = sorted({row.lr for row in rows})
    cells: dict[str, dict[float, str]] = {}
    most = 100 / runs[0].tasks
    above: dict[str, bool] = {}
    for row in rows:
        if (ours := row.acc.ours) is None:
            continue
        cells.setdefault(row.algorithm, {})[row.lr] = f"{mean_std(ours.mean, ours.std)} ({ours.seeds})"
        seeds = [100 * summary(run, "class")["acc"] for run in row.finished]
        above[row.algorithm] = above.get(row.algorithm, False) or confidence_interval(seeds)[0] > most
    lines = [
        {"algorithm": f"`{name}`"} | {f"lr {lr:g}": own.get(lr, ABSENT) for lr in lrs} for name, own in cells.items()
    ]
    outputs = runs[0].config["challenge"]["outputs"]
    more = [f"`{name}`" for name, shown in above.items() if shown]
    told = (
        f"The same runs, where an image is classified among all {outputs} classes instead of those of its task: final "
        "accuracy in percent, mean ± standard deviation, and in brackets the number of seeds. A network that knows the "
        f"classes of one task only has at most {most:.0f} %{f'; {join(more)} are shown to reach more' if more else ''}."
    )
    return "\n\n".join(["## Class-incremental accuracy", told, table(lines, right=True)])


def figures(runs: Runs, challenge: str) -> list[str]:
    """The distances of all runs, and iCaRL with both kinds of exemplars where both are there."""
    drawn = HERE / "images" / f"{challenge}-distance.png"
    relabel(runs).plot("distance", drawn)
    parts = [f"![Distance from the initialisation by learning rate, and relative to plain SGD](images/{drawn.name})"]
    buffers = runs.where(lambda run: run.config["algorithm"]["name"] in ICARL_ALGORITHMS)
    if {run.config["algorithm"]["name"] for run in buffers} == set(ICARL_ALGORITHMS):
        drawn = HERE / "images" / f"{challenge}-icarl-buffer.png"
        relabel(buffers).plot("forgetting-by-seed", drawn)
        parts.append(f"![Forgetting of iCaRL with herding and with random exemplars, by seed](images/{drawn.name})")
    return parts


def exemplars(made: Comparison) -> list[str]:
    """What the figure of iCaRL's buffers shows, beside what the paper says of it."""
    tests = {row.algorithm: row.trend for row in made.trends if row.algorithm in ICARL_ALGORITHMS}
    if set(tests) != set(ICARL_ALGORITHMS):
        return []
    herding, random = (tests[name] for name in ICARL_ALGORITHMS)
    changes = [MeanInterval(-x.difference, -x.upper, -x.lower) for x in (herding, random)]
    seeds = join(f"{trend.seeds} for `{name}`" for name, trend in tests.items())
    rows = {row.algorithm: row.values["forgetting"] for row in table_rows(made)}
    apart, _ = interaction_by_seed(*([rows[name]] for name in ICARL_ALGORITHMS))
    return [
        "The paper says that iCaRL with herding forgets more at high learning rates than at low ones, and with random "
        "exemplars about as much at both. From the two lowest rates to the two highest, forgetting changes by "
        f"{changes[0]} points with herding ({herding.verdict}) and by {changes[1]} with random exemplars "
        f"({random.verdict}). Herding minus random is {apart}: {apart.phrase('more', 'less', 'not settled')}. Seeds: "
        f"{seeds}."
    ]


def power(made: Comparison) -> list[str]:
    """Say how many seeds would tell the published difference of local and global algorithms from 0."""
    rows = [row for row in table_rows(made) if row.published]
    sides = [[row for row in rows if row.locality == kind] for kind in ("local", "global")]
    if not all(sides):
        return []
    found, seeds = interaction_by_seed(*([row.values["forgetting"] for row in side] for side in sides))
    if seeds < 2:
        return []
    deviation = (found.high - found.mean) * math.sqrt(seeds) / stats.t.ppf(0.975, seeds - 1)
    published = [mean(-low_minus_high(row.published["forgetting"]) for row in side) for side in sides]
    difference = published[0] - published[1]
    half = {n: stats.t.ppf(0.975, n - 1) * deviation / math.sqrt(n) for n in range(2, MAX_SEEDS + 1)}
    enough = next((f"{n}" for n, x in half.items() if x < abs(difference)), f"more than {MAX_SEEDS}")
    return [
        f"The difference of local and global algorithms in high − low forgetting is {found} by {seeds} seeds, and "
        f"deviates by {deviation:.1f} points between them. To tell the published one, {signed(difference)}, from 0 "
        f"would take {enough} seeds."
    ]


def single_images(runs: Runs) -> list[str]:
    """Say what else than locality is different in EWC and OGD: BatchNorm's statistics."""
    changed = sorted({chosen(r)[0] for r in runs if chosen(r)[1].get("statistics") == "published"})
    high = sorted({run.lr for run in runs})[-END_LRS:]
    learnt = {
        name: mean(100 * summary(r)["learning_accuracy"] for r in runs if chosen(r)[0] == name and r.lr in high)
        for name in ("sgd", *changed)
        if any(chosen(r)[0] == name and r.lr in high for r in runs)
    }
    if not changed or "sgd" not in learnt:
        return []
    told = join(f"{value:.1f} % (`{name}`)" for name, value in learnt.items())
    return [
        f"{code(changed)} do at the end of a task what the paper's code does: they pass single images through the "
        "network in training mode, and BatchNorm's running statistics, with which the task is then tested, move to "
        "those of single images. No other algorithm here does so. The accuracy right after learning, at the two "
        f"highest learning rates, is {told}: these rows differ from the others in more than locality."
    ]


def precision() -> str:
    """Accuracies by how exactly the network multiplies."""
    file = RESULTS / "precision.parquet"
    if not file.exists():
        return ""
    runs = results.read(file)
    found = {(run.config["precision"], run.lr, run.seed): summary(run) for run in runs}
    rates, seeds = (sorted({key[i] for key in found}) for i in (1, 2))
    lines = [
        "| precision | learning rate | right after learning | in the end | forgetting |",
        "| --- |" + " ---: |" * 4,
    ]
    names = [name for name in get_args(Precision) if any(key[0] == name for key in found)]
    for name, lr in product(names, rates):
        own = [found[name, lr, seed] for seed in seeds if (name, lr, seed) in found]
        if not own:
            continue
        cells = (f"{100 * mean(one[what] for one in own):.1f}" for what in ("learning_accuracy", "acc", "forgetting"))
        lines.append(f"| `{name}` | {lr:g} | {' | '.join(cells)} |")
    seconds = {n: mean(run.info["cost"]["seconds"] for run in runs if run.config["precision"] == n) for n in names}
    told = " ".join([costs(found, name) + pace(seconds, name) for name in names if name != EXACT] + [reason(seconds)])
    given = {"rates": " ".join(f"{lr:g}" for lr in rates), "seeds": " ".join(map(str, seeds))}
    return PRECISION.format(**given, cost=cost(runs), table="\n".join(lines), verdict=f"{MEANS} {told}")


def costs(found: Mapping[tuple[str, float, int], Mapping[str, float]], name: str) -> str:
    """How far from exact products a precision's accuracies are, by seeds, and what that excludes."""
    parts, apart = [], []
    for what, words in (("learning_accuracy", "right after learning"), ("acc", "in the end")):
        values = differences(found, name, what)
        low, high = confidence_interval(values)
        parts.append(f"{signed(mean(values))} points {words} (95 % interval {signed(low)} to {signed(high)})")
        apart += [words] if low > 0 or high < 0 else []
    shown = f"shown to differ {join(apart)}" if apart else "not shown to differ"
    return f"`{name}` minus `{EXACT}`: {' and '.join(parts)}, {shown}."


def pace(seconds: Mapping[str, float], name: str) -> str:
    """How long a run took, and how many times as fast that is as exact products; "" without runs of those."""
    if EXACT not in seconds:
        return ""
    own, exact = seconds[name], seconds[EXACT]
    return f" A run took {own:.1f} s against {exact:.1f} s: {exact / own:.1f} times as fast."


def reason(seconds: Mapping[str, float]) -> str:
    """Which precision the split challenges are trained with, and whether it is the fastest here."""
    used = COLUMNS["split-cifar10"].precision
    fastest = "the fastest here" if used == min(seconds, key=lambda name: seconds[name]) else "not the fastest here"
    return (
        f"The split challenges are trained with `{used}`, {fastest}; their agreement with published numbers is no "
        "argument for it."
    )


def differences(found: Mapping[tuple[str, float, int], Mapping[str, float]], name: str, what: str) -> list[float]:
    """For every seed the mean over the learning rates, in points."""
    own = [key for key in found if key[0] == name and (EXACT, *key[1:]) in found]
    by_seed = {seed: [key for key in own if key[2] == seed] for _, _, seed in own}
    return [100 * mean(found[key][what] - found[EXACT, *key[1:]][what] for key in keys) for keys in by_seed.values()]


def projection(runs: Runs, column: Column) -> str:
    """What a step of every row took and what was beside the steps, and what the whole column would take so."""
    lines = [
        "| row | ms a step | hours of steps | s a task beside | hours beside |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    batches = min(run.info["steps"] / (run.tasks * run.config["epochs"]) for run in runs)  # of an epoch, not replayed
    larger = column.steps / (column.tasks * column.epochs) / batches
    there = len(column.lrs) * len(column.seeds) / 3600
    hours, absent = 0.0, []
    for row in column.all_rows:
        own = [run for run in runs if column.find_row(*chosen(run)) == row]
        if not own and row in column.rows:
            absent.append(f"`{row.algorithm}`")
        if not own:
            continue
        pace = median(run.info["cost"]["step_seconds"] for run in own)
        steps = column.steps + mean(_replayed(run, batches) for run in own) * column.epochs * (column.tasks - 1)
        beside = mean((run.info["cost"]["seconds"] - pace * run.info["steps"]) / run.tasks for run in own)
        both = pace * steps * there, larger * beside * column.tasks * there
        lines.append(f"| `{row.algorithm}` | {1000 * pace:.2f} | {both[0]:.1f} | {beside:.1f} | {both[1]:.1f} |")
        hours += sum(both)
    sizes = sorted({run.info["cost"]["cohort_runs"] for run in runs})
    told = (
        f"A step's time is that of the median epoch of {' to '.join(map(str, sizes[:: max(1, len(sizes) - 1)]))} runs "
        "trained together, which share it. Beside its steps a run spends time on start-up, consolidation and "
        f"measuring; where tasks have {larger:.1f} times as many examples it is taken to be as many times as long, "
        f"which is too much for start-up.{unfilled(runs)} {len(lines) - 2} rows of {len(column.lrs)} learning rates "
        f"and {len(column.seeds)} seeds, {column.steps:,} steps a run without exemplars, would take {hours:.1f} hours"
    )
    told += f", without {', '.join(absent)}, of which there are no runs." if absent else "."
    return "\n".join([*lines, "", told])


def others(runs: Runs, challenge: str) -> list[str]:
    """Every algorithm that the table has no row of, one short run each."""
    file = RESULTS / f"{challenge}-others.parquet"
    if not file.exists():
        return []
    more = results.read(file)
    ((lr, seed),) = {(run.lr, run.seed) for run in more}
    lines = ["| algorithm | ACC | FGT | class-incremental ACC | ms a step | s in all |", "| --- |" + " ---: |" * 5]
    for run in sorted(more, key=lambda run: list(ALGORITHMS).index(chosen(run)[0])):
        found, took = summary(run), run.info["cost"]
        values = (found["acc"], found["forgetting"], summary(run, "class")["acc"])
        accuracies = " | ".join("diverged" if run.diverged else f"{100 * value:.2f}" for value in values)
        lines.append(
            f"| `{run.info['label']}` | {accuracies} | {1000 * took['step_seconds']:.2f} | {took['seconds']:.0f} |"
        )
    here = {chosen(run)[0] for run in (*runs, *more)}
    absent = [f"`{name}`" for name in ALGORITHMS if name not in here]
    told = f" Not run yet: {', '.join(absent)}." if absent else ""
    about = f"The other algorithms, each once, at learning rate {lr:g} and with seed {seed}: "
    given = " `hat`, `packnet` and `pnn` are given the task of an image, in class-incremental accuracy as well."
    return [f"{about}{cost(more)}{told}{given}", "\n".join(lines)]


def unfilled(runs: Runs) -> str:
    """Whose memories slow steps down by what is in them: of the first of two tasks nothing was."""
    names = [f"`{name}`" for name in dict.fromkeys(chosen(run)[0] for run in runs) if name in FILLING]
    if not names:
        return ""
    return (
        f" Steps of {' and '.join(names)} are slower with more in memory, which was empty for half of these epochs: "
        "their hours are too few."
    )


def _replayed(run: Run, batches: float) -> float:
    """By how many steps exemplars among the data lengthen an epoch of every task but the first."""
    epochs = run.config["epochs"]
    return (run.info["steps"] - batches * run.tasks * epochs) / (epochs * (run.tasks - 1))


def by_more_seeds(runs: Runs, made: Comparison) -> list[str]:
    """What became of the numbers that the seed which all cells have put further than 2 standard errors from ours."""
    common = set.intersection(*({run.seed for run in row.finished} for row in made.rows))
    first = next((seed for seed in SEEDS if seed in common), None)
    if first is None or max(row.seeds for row in made.rows) == 1:
        return []
    every, parts = compared(made), []
    for where, alone in compared(compare(run for run in runs if run.seed == first)).items():
        now = every[where]
        if not alone.differs or now.ours is None or now.published is None or now.ours.seeds == 1:
            continue
        assert alone.z is not None and alone.ours is not None and now.z is not None
        apart = abs(alone.ours.mean - now.ours.mean) / now.ours.std
        parts.append(
            f"- {where[0].upper()}{where[1:]}: z = {signed(alone.z)} by seed {first}, {signed(now.z)} by "
            f"{now.ours.seeds} seeds. Ours deviate by {now.ours.std:.1f} points, the published ones by "
            f"{now.published.std:.1f}, of which one seed's standard error was made; seed {first} is {apart:.1f} "
            "deviations from our mean."
        )
    alone, every = (row_differences(x) for x in (compare(run for run in runs if run.seed == first), made))
    for name, (found, _) in alone.items():
        seeds = min(row.acc.ours.seeds for row in made.rows if row.algorithm == name and row.acc.ours)
        if abs(found.z) > MAX_Z and seeds > 1:
            now, (row,) = every[name][0], [row for row in table_rows(made) if row.algorithm == name]
            target = mean(row.published["acc"].values())
            by_seed = {seed: x - target for seed, x in row_means(row, "acc").items()}
            same = sum(x * found.mean > 0 for x in by_seed.values())
            parts.append(
                f"- The accuracy of `{name}`, averaged over learning rates: {signed(found.mean)} points (z "
                f"{signed(found.z, 1)}) by seed {first}, {signed(now.mean)} ± {now.error:.2f} (z {signed(now.z, 1)}) "
                f"by {seeds} seeds. By seed: {join(f'{signed(x)} ({seed})' for seed, x in by_seed.items())}. "
                f"{same} of {len(by_seed)} seeds are {'above' if found.mean > 0 else 'below'} the published mean, and "
                f"the spread over seeds is {'too large to tell' if abs(now.z) < MAX_Z else 'smaller'}."
            )
    if not parts:
        return []
    return [
        f"By seed {first} alone these were further than {MAX_Z:g} standard errors from the published number, and more "
        "seeds were trained to find out why.",
        "\n".join(parts),
    ]


def other_draws(runs: Runs) -> str:
    """Say which runs draw other random numbers than most: those of another protocol."""
    usual, _ = Counter(run.config.get("protocol") for run in runs).most_common(1)[0]
    seeds: dict[str, set[int]] = {}
    for run in runs:
        if run.config.get("protocol") != usual:
            seeds.setdefault(chosen(run)[0], set()).add(run.seed)
    told = join(f"seeds {join(map(str, sorted(own)))} of `{name}`" for name, own in seeds.items()) if seeds else ""
    return f" Trained later, with other random numbers of the same distributions: {told}." if told else ""
