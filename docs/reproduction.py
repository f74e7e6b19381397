"""Makes docs/reproduction.md, the pages in docs/reproduction and their figures from the files in results/.

Nothing is trained.

python docs/reproduction.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

import polars as pl
from matplotlib.figure import Figure

from glocal.algorithms import ALGORITHMS
from glocal.metrics import confidence_interval, summary
from glocal.paper import STUDIES, get_study, results
from glocal.paper.claims import measured_locality, table_rows
from glocal.paper.comparison import MAX_Z, Comparison, compare, paper_layout, relabel, render
from glocal.paper.scoreboard import scoreboard
from glocal.paper.study import Row, draw, format_cell, read_cost, read_table
from glocal.paper.table1 import COLUMNS, ICARL_ALGORITHMS, SEEDS, Column
from glocal.precision import Precision
from glocal.report.figure import save_figure
from glocal.report.style import FAINT
from glocal.report.table import ABSENT, mean_std, signed
from glocal.store.run import Run, Runs, exploded_task

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import experiment_notes  # noqa: E402
from claims_text import abstract, agreement, board, compared, details, join  # noqa: E402
from other_findings import findings  # noqa: E402
from study_notes import NOTES  # noqa: E402

RESULTS = HERE.parent / "results"
ALL_NOTES = NOTES | experiment_notes.NOTES
ROTATED = "rotated-mnist"
TEXT = """# The paper's tables and figures, made again

{abstract}

## The paper's claims, each tested

{board}

## What else the results show

{findings}

## Experiments beyond the paper

Question, statistic and decision of each were registered before it was run. Brackets: 95 % intervals.

{beyond}

## Ours and the published numbers

![Ours minus the published numbers](images/reproduction-differences.png)

Every number of Table 1, ours minus the published one, with 2 standard errors on either side. Where we have one seed,
its standard error is made of the published deviation.

## Table 1

{side}
{told}
## More

`python docs/reproduction.py` makes these pages from [results](../results), and every number on them but where they say
otherwise.

{contents}

{missing}"""
PAGES = {
    "claims-by-row": """# The rows behind the claims

{details}
""",
    "rotated-mnist": """# Rotated-MNIST

Twenty rotations, five epochs each, batch 128, the MLP of 89,610 parameters, five seeds, the published hyperparameters
and the published angles. There is no row of iCaRL, as in the paper. Several rows were trained at the same time on one
GPU, so that their seconds include waiting for each other. {cost} Trained by `glocal paper table1
--device cuda`.{further}

{agreement}

![Distance from the initialisation by learning rate, and relative to plain SGD](images/reproduction-distance.png)

{published}
{told}{diverged}
## OGD and OGD-GTL

The published OGD row is what `ogd-published` computes: its gradients are, but for one direction a task, plain SGD's.
Theorem 5.1 is about `ogd`, which keeps the gradients of all outputs, and which [ogd-gtl](studies.md#ogd-gtl) compares
with the paper's cheaper OGD-GTL, those of the true labels' outputs. {orthogonal}

## With angles from the seed alone

The same grid where all algorithms meet the same angles, drawn from the seed: our own result, not to be compared cell by
cell. {seed_cost} Over all T tasks, as the paper's formula has it, forgetting is {over_all} of what stands here.

{own}
""",
    "split-cifar10": "{split_cifar10}",
    "split-tinyimagenet": "{split_tinyimagenet}",
    "precision": "{precision}",
    "studies": """# The paper's other experiments

The experiments on this page were measured on one GPU, up to ten of them, or of the parts of one, at a time: their
seconds include waiting for each other.

{studies}""",
    "experiments": """# Experiments beyond the paper

Question, design, statistic and what would refute the hypothesis were written down before any run. Up to eight parts
were measured on one GPU at a time: their seconds include waiting for each other.

{experiments}""",
}
"""Pages in docs/reproduction; one without results is not written."""
ABOUT = {
    "claims-by-row": "minimum, correlation and low − high of every row",
    "rotated-mnist": "Table 1 beside its published numbers, OGD and OGD-GTL, and the same with angles from the seed",
    "split-cifar10": "Table 1 beside its published numbers",
    "split-tinyimagenet": "short runs, and what Table 1 would cost",
    "precision": "accuracies with fp32, tf32 and bf16",
}

SPLIT = {
    "split-cifar10": """Five tasks of two classes, fifty epochs each, batch 32, ResNet-18 of 11,173,962 parameters in
bf16, the published hyperparameters; accuracy among the task's own classes. Up to three rows were trained at a
time on one GPU, so that their seconds include waiting for each other.""",
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
over seeds: of few seeds they only tell what a precision may cost at most. The split challenges are trained with
`bf16`, the fastest, because of these differences alone; the agreement with published numbers is no argument for it."""
FILLING = ("ogd", "ogd-ave", "ogd-gtl")
"""Algorithms whose steps are slower the more they remember."""
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
    parts += exemplars(made)
    parts += [str(render(made, "markdown")).strip(), class_incremental(runs)]
    return "\n\n".join(parts) + "\n\n"


def class_incremental(runs: Runs) -> str:
    """Tabulate the final accuracy among all classes, by learning rate, with the seeds of each cell."""
    rows = compare(runs, scope="class", published=False).rows
    lrs = sorted({row.lr for row in rows})
    cells: dict[str, dict[float, str]] = {}
    best: dict[str, float] = {}
    for row in rows:
        if (ours := row.acc.ours) is None:
            continue
        cells.setdefault(row.algorithm, {})[row.lr] = f"{mean_std(ours.mean, ours.std)} ({ours.seeds})"
        best[row.algorithm] = max(ours.mean, best.get(row.algorithm, 0.0))
    lines = [["algorithm", *(f"lr {lr:g}" for lr in lrs)], ["---", *["---:"] * len(lrs)]]
    lines += [[f"`{name}`", *(own.get(lr, ABSENT) for lr in lrs)] for name, own in cells.items()]
    tasks, outputs = runs[0].tasks, runs[0].config["challenge"]["outputs"]
    most = 100 / tasks
    above = [f"`{name}`" for name, value in best.items() if value > most]
    told = (
        f"The same runs, where an image is classified among all {outputs} classes instead of those of its task: final "
        "accuracy in percent, mean ± standard deviation, and in brackets the number of seeds. A network that knows the "
        f"classes of one task only has at most {most:.0f} %{f'; {join(above)} reach more' if above else ''}."
    )
    return "\n\n".join(["## Class-incremental accuracy", told, "\n".join(f"| {' | '.join(x)} |" for x in lines)])


def figures(runs: Runs, challenge: str) -> list[str]:
    """The distances of all runs, and iCaRL with both kinds of exemplars where both are there."""
    drawn = HERE / "images" / f"{challenge}-distance.png"
    relabel(runs).plot("distance", drawn)
    parts = [f"![Distance from the initialisation by learning rate, and relative to plain SGD](images/{drawn.name})"]
    buffers = runs.where(lambda run: run.config["algorithm"]["name"] in ICARL_ALGORITHMS)
    if {run.config["algorithm"]["name"] for run in buffers} == set(ICARL_ALGORITHMS):
        drawn = HERE / "images" / f"{challenge}-icarl-buffer.png"
        relabel(buffers).plot("forgetting", drawn)
        parts.append(f"![Forgetting of iCaRL with herding and with random exemplars](images/{drawn.name})")
    return parts


def exemplars(made: Comparison) -> list[str]:
    """What the figure of iCaRL's buffers shows, beside what the paper says of it."""
    tests = {row.algorithm: row.trend for row in made.trends if row.algorithm in ICARL_ALGORITHMS}
    more = {name: -trend.difference for name, trend in tests.items()}
    if set(more) != set(ICARL_ALGORITHMS):
        return []
    seeds = " and ".join(f"{trend.seeds} for `{name}`" for name, trend in tests.items())
    herding, random = (more[name] for name in ICARL_ALGORITHMS)
    unsure = f" Seeds: {seeds}; the table of low against high rates below has intervals where there are several."
    return [
        "The paper says that iCaRL with herding forgets more at high learning rates than at low ones, and with random "
        "exemplars about as much at both. From the two lowest rates to the two highest, forgetting changes by "
        f"{herding:+.1f} points with herding and by {random:+.1f} with random exemplars.{unsure}"
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
    told = " ".join(costs(found, name) for name in names if name != EXACT)
    given = {"rates": " ".join(f"{lr:g}" for lr in rates), "seeds": " ".join(map(str, seeds))}
    return PRECISION.format(**given, cost=cost(runs), table="\n".join(lines), verdict=f"{MEANS} {told}")


def costs(found: Mapping[tuple[str, float, int], Mapping[str, float]], name: str) -> str:
    """How far from exact products a precision's accuracies are, by seeds, and what that excludes."""
    parts = []
    for what, words in (("learning_accuracy", "right after learning"), ("acc", "in the end")):
        apart = differences(found, name, what)
        low, high = confidence_interval(apart)
        parts.append(f"{signed(mean(apart))} points {words} (95 % interval {signed(low)} to {signed(high)})")
    return f"`{name}` differs from `{EXACT}` by {' and by '.join(parts)}."


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
        own = [run for run in runs if column.find_row(*_chosen(run)) == row]
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
    for run in sorted(more, key=lambda run: list(ALGORITHMS).index(_chosen(run)[0])):
        found, took = summary(run), run.info["cost"]
        values = (found["acc"], found["forgetting"], summary(run, "class")["acc"])
        accuracies = " | ".join("diverged" if run.diverged else f"{100 * value:.2f}" for value in values)
        lines.append(
            f"| `{run.info['label']}` | {accuracies} | {1000 * took['step_seconds']:.2f} | {took['seconds']:.0f} |"
        )
    here = {_chosen(run)[0] for run in (*runs, *more)}
    absent = [f"`{name}`" for name in ALGORITHMS if name not in here]
    told = f" Not run yet: {', '.join(absent)}." if absent else ""
    about = f"The other algorithms, each once, at learning rate {lr:g} and with seed {seed}: "
    given = " `hat`, `packnet` and `pnn` are given the task of an image, in class-incremental accuracy as well."
    return [f"{about}{cost(more)}{told}{given}", "\n".join(lines)]


def unfilled(runs: Runs) -> str:
    """Whose memories slow steps down by what is in them: of the first of two tasks nothing was."""
    names = [f"`{name}`" for name in dict.fromkeys(_chosen(run)[0] for run in runs) if name in FILLING]
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


def _seconds(runs: Iterable[Run]) -> float:
    return sum(run.info["cost"]["seconds"] for run in runs)


def _chosen(run: Run) -> tuple[str, dict[str, Any]]:
    chosen = run.config["algorithm"]
    return chosen["name"], chosen.get("options", {})


TOLD_THE_TASK = [name for name, algorithm in ALGORITHMS.items() if algorithm.family == "partition"]


def told_the_task(runs: Runs) -> str:
    """Which rows of a table are in no comparison, and why."""
    names = [f"`{name}`" for name in dict.fromkeys(_chosen(run)[0] for run in runs) if name in TOLD_THE_TASK]
    if not names:
        return ""
    return (
        f"\n{join(names)} are told which task a test input is from, and forget nothing by construction. They are in "
        "the table, but in no comparison, figure or claim.\n"
    )


def table_of(name: str) -> Path:
    """Where a study's rows are; stability and plasticity are read from table 1's."""
    return RESULTS / f"{'rotated-mnist' if name == 'tradeoff' else name}.parquet"


def study(name: str) -> str:
    """A section for a study whose table is in results: note, verdict, summary table and figure."""
    file = table_of(name)
    if not file.exists():
        return ""
    experiment, measured = STUDIES[name], get_study(name)
    rows, cost = read_table(file, measured.columns.split(), f"a table of {name}"), read_cost(file)
    rows = rows.filter(~pl.col("algorithm").is_in(TOLD_THE_TASK)) if name == "tradeoff" else rows
    summary = measured.summarize(rows)
    picture = draw(measured, rows, HERE / "images" / f"{name}.png")
    took = "" if cost is None else f" {cost.seconds:.0f} s on {cost.device}, finished on {cost.finished[:10]}."
    parts = (
        f"## {name}",
        f"{experiment.reference}: {experiment.title}. `{experiment.command}`: {experiment.cost}.{took}",
        ALL_NOTES[name](rows, summary.table).strip(),
        f"**{summary.verdict}**",
        markdown_table(summary.table),
        f"![{experiment.title}](images/{picture.name})",
    )
    return "\n\n".join(parts) + "\n\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """A summary table; numbers are aligned right."""
    header = [str(name).replace("|", "\\|") for name in rows[0]]
    numeric = [not isinstance(value, str) for value in rows[0].values()]
    lines = [header, ["---:" if right else "---" for right in numeric]]
    lines += [[format_cell(value).replace("|", "\\|") for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def contents() -> str:
    """A line for each other page that has results, and one for each study."""
    lines = [f"- [{name}](reproduction/{name}.md): {about}" for name, about in ABOUT.items() if _has_results(name)]
    studies = {name: experiment.title for name, experiment in STUDIES.items() if table_of(name).exists()}
    page = {name: "experiments" if name in experiment_notes.NOTES else "studies" for name in studies}
    return "\n".join([*lines, *(f"- [{n}](reproduction/{page[n]}.md#{n}): {title}" for n, title in studies.items())])


def beyond() -> str:
    """A line for each of our own experiments."""
    lines = []
    for name, line in experiment_notes.LINES.items():
        if not table_of(name).exists():
            continue
        links = f"[Result](reproduction/experiments.md#{name}), [registration](experiments/{name}.md)."
        lines.append(f"- {line(read_table(table_of(name)))} {links}")
    return "\n".join(lines)


def equivalence(folder: str) -> str:
    """What the standard errors on Rotated-MNIST include, and what retraining finds without it; "" if it was not run."""
    if not table_of("retraining").exists():
        return ""
    counts = experiment_notes.retraining_counts(read_table(table_of("retraining")))
    return (
        "On Rotated-MNIST the errors include the spread of the angles, which both sides share. Without it, "
        f"{counts}: see [retraining]({folder}experiments.md#retraining)."
    )


def _has_results(page: str) -> bool:
    return page in ("claims-by-row", "studies", "experiments") or (RESULTS / f"{page}.parquet").exists()


def draw_differences(tables: Mapping[str, Comparison], path: Path) -> Path:
    """Draw our numbers minus the published ones, with 2 standard errors, a panel for each column and measure."""

    def fill(figure: Figure) -> None:
        figure.set_size_inches(9.6, 6.4)
        panels = figure.subplots(1, 2 * len(tables))
        for i, (name, made) in enumerate(tables.items()):
            rows = [row for row in made.rows if row.acc.published is not None]
            for axes, measure in zip(panels[2 * i : 2 * i + 2], ("ACC", "FGT"), strict=True):
                cells = [row.acc if measure == "ACC" else row.forgetting["t-1"] for row in rows]
                differences, errors = ([getattr(c, part) for c in cells] for part in ("difference", "standard_error"))
                places = range(len(rows))
                axes.axvline(0, color=FAINT, linewidth=0.9)
                for place, difference, error in zip(places, differences, errors, strict=True):
                    colour = "C3" if abs(difference) > MAX_Z * error else "C0"
                    axes.errorbar(difference, place, xerr=MAX_Z * error, fmt="o", markersize=3, color=colour)
                axes.set(title=f"{name}: {measure}", xlabel="ours − published (points)")
                axes.set_yticks(places, [f"{row.algorithm} {row.lr:g}" for row in rows] if measure == "ACC" else [])
                axes.invert_yaxis()
                axes.tick_params(labelsize=7)

    return save_figure(fill, path)


def missing() -> str:
    """Columns and studies that have no results, and the rows that a column lacks."""
    absent = [f"`{name}`" for name in (*SPLIT, *STUDIES) if not table_of(name).exists()]
    absent += [lacking(COLUMNS[name]) for name in ("rotated-mnist", *SPLIT) if table_of(name).exists()]
    told = ", ".join(filter(None, absent))
    return f"## Not here yet\n\nIn place, but not run at full size: {told}.\n" if told else ""


def lacking(column: Column) -> str:
    if column.challenge in MEASURED:
        return f"all of {column.challenge}"
    here = {run.config["algorithm"]["name"] for run in results.read(table_of(column.challenge))}
    rows = [f"`{row.algorithm}`" for row in column.all_rows if row.algorithm not in here]
    return f"of {column.challenge} {' and '.join(filter(None, (', '.join(rows[:-1]), rows[-1])))}" if rows else ""


def cost(runs: Runs) -> str:
    where = sorted({str(run.info["versions"]["device"]) for run in runs})
    return f"{len(runs)} runs took {_seconds(runs):.0f} s together on {', '.join(where)}{when(runs)}."


def further(runs: Runs) -> str:
    """What the rows took that the paper does not have."""
    names = [f"`{name}`" for name in dict.fromkeys(_chosen(run)[0] for run in runs)]
    if not names:
        return ""
    told = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f" The rows of {told} were trained beside other work on the same GPU: {cost(runs)}"


def when(runs: Runs) -> str:
    """The days on which they were finished."""
    days = sorted({run.finished[:10] for run in runs})
    return f", finished on {days[0]}" if len(days) == 1 else f", finished from {days[0]} to {days[-1]}"


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
            f"- {where[0].upper()}{where[1:]}: {signed(alone.z)} by seed {first}, {signed(now.z)} by "
            f"{now.ours.seeds} seeds. Ours deviate by {now.ours.std:.1f} points, the published ones by "
            f"{now.published.std:.1f}, of which one seed's standard error was made; seed {first} is {apart:.1f} "
            "deviations from our mean."
        )
    if not parts:
        return []
    single = sum(row.seeds == 1 for row in made.rows)
    return [
        f"By seed {first} alone these were further than {MAX_Z:g} standard errors from the published number, and more "
        f"seeds were trained to find out why. {single} of {len(made.rows)} cells have one seed and had no such second "
        "look.",
        "\n".join(parts),
    ]


def other_draws(runs: Runs) -> str:
    """Say which runs draw other random numbers than most: those of another protocol."""
    usual, _ = Counter(run.config.get("protocol") for run in runs).most_common(1)[0]
    seeds: dict[str, set[int]] = {}
    for run in runs:
        if run.config.get("protocol") != usual:
            seeds.setdefault(_chosen(run)[0], set()).add(run.seed)
    told = join(f"seeds {join(map(str, sorted(own)))} of `{name}`" for name, own in seeds.items()) if seeds else ""
    return f" Trained later, with other random numbers of the same distributions: {told}." if told else ""


def divergence(runs: Runs) -> str:
    """Say in which tasks runs diverge, and whether higher learning rates diverge earlier; "" if none does."""
    tasks: dict[str, dict[float, list[int]]] = {}
    finite = []
    for run in runs:
        if run.diverged is None:
            continue
        name, step, distances = _chosen(run)[0], run.info["diverged"], run.arrays["distance_from_init"]
        task = exploded_task(run) if step is None else (step - 1) * run.tasks // run.info["steps"] + 1
        assert task is not None
        tasks.setdefault(name, {}).setdefault(run.lr, []).append(task)
        if step is None:
            jump = f"{distances[task - 2]:.0f} to {distances[task - 1]:.0f}"
            finite.append(f"`{name}` at {run.lr:g} with seed {run.seed}, whose distance from θ_0 jumps from {jump}")
    if not tasks:
        return ""
    total = Counter((_chosen(run)[0], run.lr) for run in runs)
    parts = {
        name: join(
            f"at {lr:g} in task {' to '.join(map(str, sorted({min(own), max(own)})))} "
            f"({len(own)} of {total[name, lr]} runs)"
            for lr, own in sorted(by_lr.items())
        )
        for name, by_lr in tasks.items()
    }
    told = "; ".join(f"`{name}` {where}" for name, where in parts.items())
    means = [[mean(own) for _, own in sorted(by_lr.items())] for by_lr in tasks.values()]
    earlier = all(first > second for own in means for first, second in pairwise(own))
    stayed = f" The parameters stay finite of {join(finite)}." if finite else ""
    return (
        f"\nDiverged: {told}.{stayed} A gradient step on a quadratic of curvature λ is stable up to a learning rate of "
        "2/λ, and these algorithms add up the curvatures of the tasks. If that is the reason, higher rates diverge "
        f"after fewer tasks, which they {'do' if earlier else 'do not always'} here, on average; "
        "[implicit](../experiments/implicit.md) is the experiment on it.\n"
    )


def orthogonal(made: Comparison, runs: Runs) -> str:
    """Forgetting of sgd, ogd-published and ogd-gtl at the lowest and the highest rate."""
    rates = sorted({row.lr for row in made.rows})
    (kept,) = {_chosen(run)[1]["slots"] // run.tasks for run in runs if _chosen(run)[0] == "ogd-gtl"}

    def forgetting(name: str, lr: float) -> float:
        (row,) = [row for row in made.rows if row.algorithm == name and row.lr == lr]
        found = row.forgetting[made.over].ours
        assert found is not None
        return found.mean

    parts, shares, apart, gained = [], [], [], []
    for lr in (rates[0], rates[-1]):
        sgd, published, theorem = (forgetting(name, lr) for name in ("sgd", "ogd-published", "ogd-gtl"))
        shares.append(1 - theorem / sgd)
        apart.append(abs(published - sgd))
        gained.append(sgd - theorem)
        parts.append(
            f"At lr {lr:g} plain SGD forgets {sgd:.1f} points, `ogd-published` {published:.1f}, and `ogd-gtl`, with "
            f"{kept} gradients a task kept orthogonal, {theorem:.1f}: {100 * abs(shares[-1]):.0f} % "
            f"{'less' if shares[-1] >= 0 else 'more'} than SGD."
        )
    return " ".join([*parts, thesis(*shares, shown=max(apart) >= min(gained)), tested(made)]).rstrip()


def tested(made: Comparison) -> str:
    """What the paper's test makes of the three, and what that is worth."""
    trends = {row.algorithm: row.trend for row in made.trends}
    names = ("ogd-published", "sgd", "ogd-gtl")
    if not set(names) <= set(trends):
        return ""
    published, sgd, theorem = (trends[name] for name in names)
    told = (
        "By the paper's test, forgetting at the two lowest rates less that at the two highest, they have "
        f"{signed(published.difference)} (`ogd-published`), {signed(sgd.difference)} (SGD) and "
        f"{signed(theorem.difference)} points (`ogd-gtl`)."
    )
    if sgd.lower <= published.difference <= sgd.upper:
        told += " The published row is that of SGD, which approximates nothing and is called global"
        told += " and passes the test of local algorithms" if sgd.sign == "negative" else ""
        told += ": it is no evidence of how local algorithms differ from global ones."
    return told


def by_rates(made: Comparison, runs: Runs) -> str:
    """How much less ogd-gtl forgets than sgd at every rate, where there are runs of both."""
    found = {
        (row.algorithm, row.lr): ours.mean for row in made.rows if (ours := row.forgetting[made.over].ours) is not None
    }
    rates = sorted(lr for name, lr in found if name == "ogd-gtl" and ("sgd", lr) in found)
    if not rates:
        return ""
    told = ", ".join(f"{found['ogd-gtl', lr] - found['sgd', lr]:+.1f} at {lr:g}" for lr in rates)
    seeds = len({run.seed for run in runs if _chosen(run)[0] == "ogd-gtl"})
    verdict = " One seed gives no verdict." if seeds == 1 else ""
    return (
        f"On {runs[0].challenge} the forgetting of `ogd-gtl`, less that of SGD, is in points: {told}.{verdict} "
        "`ogd-published` also overwrites BatchNorm's statistics there, by those of single images."
    )


def thesis(lowest: float, highest: float, shown: bool) -> str:
    """What the shares of SGD's forgetting that OGD avoids at the two rates say, and whether the published row could."""
    if lowest <= max(highest, 0):
        return "Orthogonality does not help more at the lowest rate than at the highest, against the paper's thesis."
    helps = "Orthogonality helps more at the lowest rate, where learning is most local, than at the highest"
    blind = "" if shown else ", and the published row, as near to SGD as it is, could not show it"
    return f"{helps}, which is the paper's thesis{blind}."


def claims_parts(tables: Mapping[str, Comparison]) -> dict[str, str]:
    """The abstract, the scoreboard and the statistics of each row."""
    found = read_table(RESULTS / "locality.parquet", ["challenge", "algorithm", "found"], "a table of locality")
    rows = {name: table_rows(made) for name, made in tables.items()}
    measured = {name: measured_locality(found, name) for name in tables}
    claims = [claim for name, own in rows.items() for claim in scoreboard(name, own, measured[name])]
    counted = [(row, measured[name]) for name, own in rows.items() for row in own if row.published]
    moved = sorted({row.algorithm for row, classes in counted if classes[row.algorithm] != row.locality})
    comparable = {name: made for name, made in tables.items() if name in COLUMNS}
    return {
        # The last finding is how many of our numbers agree with the published ones.
        "abstract": f"{abstract(claims, comparable, rows, moved)} {equivalence('reproduction/')}".rstrip(),
        "board": board(claims, rows, moved),
        "details": details(rows, measured),
    }


def main() -> None:
    published, own = (results.read(RESULTS / f"rotated-mnist{part}.parquet") for part in ("", "-seed-angles"))
    split_runs = results.read(RESULTS / "split-cifar10.parquet")
    compared_runs = published.where(lambda run: _chosen(run)[0] not in TOLD_THE_TASK)
    made = compare(compared_runs)
    column = COLUMNS["rotated-mnist"]
    is_further = lambda run: column.find_row(*_chosen(run)) in column.extra_rows  # noqa: E731
    relabel(compared_runs).plot("distance", HERE / "images" / "reproduction-distance.png")
    tables = {ROTATED: made, f"{ROTATED}, seed angles": compare(own), "split-cifar10": compare(split_runs)}
    comparable = {name: table for name, table in tables.items() if name in COLUMNS}
    draw_differences(comparable, HERE / "images" / "reproduction-differences.png")
    parts = claims_parts(tables) | {
        "findings": findings(compared_runs, RESULTS),
        "cost": cost(published.where(lambda run: not is_further(run))),
        "further": further(published.where(is_further)),
        "agreement": f"{agreement(made)}\n\n{equivalence('')}".strip(),
        "published": str(render(compare(published), "markdown")),
        "told": told_the_task(published),
        "diverged": divergence(published),
        "orthogonal": f"{orthogonal(made, published)}\n\n{by_rates(tables['split-cifar10'], split_runs)}".strip(),
        "seed_cost": cost(own),
        "over_all": f"{own[0].tasks - 1}/{own[0].tasks}",
        "own": str(render(compare(own, published=False), "markdown")),
        "contents": contents(),
        "side": paper_layout(compare([*published, *split_runs])).markdown().partition("\n\n")[2],
        **{name.replace("-", "_"): split(name) for name in SPLIT},
        "precision": precision(),
        "studies": "".join(study(name) for name in STUDIES if name not in experiment_notes.NOTES),
        "experiments": "".join(study(name) for name in experiment_notes.NOTES),
        "beyond": beyond(),
        "missing": missing(),
    }
    (HERE / "reproduction.md").write_text(TEXT.format(**parts).rstrip() + "\n")
    (HERE / "reproduction").mkdir(exist_ok=True)
    for name, text in PAGES.items():
        if page := text.format(**parts).strip().replace("](images/", "](../images/"):
            (HERE / "reproduction" / f"{name}.md").write_text(f"{page}\n")


if __name__ == "__main__":
    main()
