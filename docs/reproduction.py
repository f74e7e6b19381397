"""Makes docs/reproduction.md, the pages in docs/reproduction and their figures from the files in results/.

Nothing is trained.

python docs/reproduction.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import polars as pl
from matplotlib.figure import Figure

from glocal.paper import STUDIES, get_study, results
from glocal.paper.claims import IMPOSTORS, measured_locality, table_rows
from glocal.paper.comparison import MAX_Z, Comparison, compare, paper_layout, relabel, render
from glocal.paper.scoreboard import scoreboard
from glocal.paper.studies.common import MeanInterval, names
from glocal.paper.studies.retraining import MARGIN, differences, verdict_of
from glocal.paper.studies.stability import class_difference
from glocal.paper.study import Row, format_cell, read_cost, read_table
from glocal.paper.table1 import COLUMNS, Column
from glocal.report.figure import save_figure
from glocal.report.style import FAINT

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import experiment_notes  # noqa: E402
import retraining_text  # noqa: E402
import rotated_text  # noqa: E402
import split_text  # noqa: E402
from agreement_text import DIVISORS, agreement, outside_by_chance, passes, with_divisor  # noqa: E402
from claims_text import ROTATED, SEED_ANGLES, SETUP, abstract, board, conclusions, details  # noqa: E402
from markup import join  # noqa: E402
from other_findings import correlation_table, findings  # noqa: E402
from run_text import algorithm_of, cost, seeds  # noqa: E402
from study_notes import NOTES  # noqa: E402

RESULTS = HERE.parent / "results"
ALL_NOTES = NOTES | experiment_notes.NOTES
TRADEOFF = [row.algorithm for row in COLUMNS[ROTATED].rows]
"""The rows of `glocal paper tradeoff`; the file of results has more."""
FRONT_ROWS = {*IMPOSTORS, *(row.algorithm for column in COLUMNS.values() for row in column.rows if row.published)}
"""The algorithms in the first page's table: those with published numbers, plain SGD and OGD-GTL."""
TEXT = """# The paper, reproduced

{abstract}

## The paper's claims, each tested

{setup}

{board}

## What a reader may conclude

{conclusions}

## Ours and the published numbers

![Ours minus the published numbers](images/reproduction-differences.png)

Left: 90 % intervals, with initialisation and order as the only noise, and the margin of ±2 points
([retraining](reproduction/experiments.md#retraining)). Right: 2 standard errors, published ± divided by n; red: 0 is
outside.

## Table 1

Ours: mean ± standard deviation over seeds (ddof = 0), in percent; – where there are no runs. ACC is the final accuracy;
on split-cifar10, among the task's own classes. FGT is forgetting, averaged over the T−1
tasks before the last, as the published numbers are; over all T tasks, as the paper's formula says, it is
{over_all_tasks}. `sgd` and `ogd-gtl` were
not published and count in no test above.

{side}

## Experiments beyond the paper

On Rotated-MNIST, unless another benchmark is named. Question, statistic and decision were registered before each run.
Brackets: 95 % intervals.

{beyond}

## What else the results show

{findings}

## More

`python docs/reproduction.py` makes these pages from [results](../results).

{contents}

{missing}"""
PAGES = {
    "claims-by-row": """# The rows behind the claims

{details}

{variants}
## Distance and forgetting across algorithms

Spearman's rank correlation, across algorithms, of forgetting with a distance: the mean over seeds with its 95 %
t-interval, cut at ±1. The distance per task is that of the tasks after the first. With the published angles some
algorithms have their own. Diverged runs are left out: where all runs of an algorithm diverged, the others remain.

{correlations}
""",
    "rotated-mnist": """# Rotated-MNIST

Twenty rotations, five epochs each, batch 128, the MLP of 89,610 parameters, {seeds}, the published hyperparameters
and the published angles. There is no row of iCaRL, as in the paper. Several rows were trained at the same time, so that
their seconds include waiting for each other. {cost} Trained by `glocal paper table1
--device cuda`.{further}

{agreement}

![Distance from the initialisation by learning rate, and relative to plain SGD](images/reproduction-distance.png)

{published}
{told}{diverged}
## OGD and OGD-GTL

The published OGD row is what `ogd-published` computes: its gradients are, but for one direction a task, plain SGD's.
Theorem 5.1 is about `ogd`, which keeps the gradients of all outputs, and which [ogd-gtl](studies.md#ogd-gtl) compares
with the paper's cheaper OGD-GTL, those of the true labels' outputs. {orthogonal}

{by_rates}

## With angles from the seed alone

The same grid where all algorithms meet the same angles, drawn from the seed: our own result, not to be compared cell by
cell. {seed_cost} Over all T tasks, as the paper's formula has it, forgetting is {over_all} of what stands here.

{own}
""",
    "split-cifar10": "{split_cifar10}",
    "split-tinyimagenet": "{split_tinyimagenet}",
    "precision": "{precision}",
    "studies": """# The paper's other experiments

Several of these experiments, or parts of one, were measured at the same time: their seconds include waiting for each
other.

{studies}""",
    "experiments": """# Experiments beyond the paper

Question, design, statistic and what would refute the hypothesis were written down before any run. Several parts
were measured at the same time: their seconds include waiting for each other.

{experiments}""",
}
"""Pages in docs/reproduction; one without results is not written."""
ABOUT = {
    "claims-by-row": "minimum, correlation and low − high of every row of Table 1, and the scoreboard with seed angles",
    "rotated-mnist": "Table 1 beside its published numbers, OGD and OGD-GTL, and the same with angles from the seed",
    "split-cifar10": "Table 1 beside its published numbers",
    "split-tinyimagenet": "short runs, and what Table 1 would cost",
    "precision": "accuracies with fp32, tf32 and bf16",
}


def table_of(name: str) -> Path:
    """Where a study's rows are; stability and plasticity are read from table 1's."""
    return RESULTS / f"{'rotated-mnist' if name == 'tradeoff' else name}.parquet"


def study(name: str) -> str:
    """A section for a study whose table is in results: note, verdict, summary table and figure."""
    file = table_of(name)
    if not file.exists():
        return ""
    experiment, paper_study = STUDIES[name], get_study(name)
    rows, cost = read_table(file, paper_study.columns.split(), f"a table of {name}"), read_cost(file)
    rows = rows.filter(pl.col("algorithm").is_in(TRADEOFF)) if name == "tradeoff" else rows
    summary = paper_study.summarize(rows)
    picture = save_figure(partial(paper_study.draw, rows), HERE / "images" / f"{name}.png")
    duration = "" if cost is None else f" {cost.seconds:.0f} s on {cost.device}, finished on {cost.finished[:10]}."
    parts = (
        f"## {name}",
        f"{experiment.reference}: {experiment.title}. `{experiment.command}`: {experiment.cost}.{duration}",
        f"{ALL_NOTES[name](rows, summary.table).strip()}{measured_classes(rows) if name == 'tradeoff' else ''}",
        f"**{summary.verdict}**",
        markdown_table(summary.table),
        f"![{experiment.title}](images/{picture.name})",
    )
    return "\n\n".join(parts) + "\n\n"


def measured_classes(rows: pl.DataFrame) -> str:
    """Repeat the comparison of local and global algorithms with the classes that the study `locality` finds."""
    classes = measured_locality(read_table(RESULTS / "locality.parquet"), ROTATED)
    comparison = class_difference(rows.with_columns(locality=pl.col("algorithm").replace_strict(classes)))
    assert comparison is not None
    by_seed, by_algorithm, _ = comparison
    words = "contradicts the paper", "agrees with the paper", "not settled"
    return (
        f"\n\nWith the [measured classes](#locality) the difference is {by_seed} over seeds: {by_seed.phrase(*words)}. "
        f"With algorithms as units it is {by_algorithm}: {by_algorithm.phrase(*words, 'they are too few')}."
    )


def markdown_table(rows: Sequence[Row]) -> str:
    """A summary table; numbers are aligned right."""
    header = [str(name).replace("|", "\\|") for name in rows[0]]
    numeric = [not isinstance(value, str) for value in rows[0].values()]
    lines = [header, ["---:" if right else "---" for right in numeric]]
    lines += [[format_cell(value).replace("|", "\\|") for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def contents() -> str:
    """A line for each other page that has results, and one for the paper's other experiments."""
    lines = [
        f"- [{name}](reproduction/{name}.md): {description}"
        for name, description in ABOUT.items()
        if _has_results(name)
    ]
    study_names = [name for name in STUDIES if table_of(name).exists() and name not in experiment_notes.NOTES]
    links = (f"[{name}](reproduction/studies.md#{name})" for name in study_names)
    return "\n".join([*lines, f"- The paper's other experiments: {', '.join(links)}"])


def own_experiments() -> str:
    """A line for each of our own experiments."""
    lines = []
    for name, line in experiment_notes.LINES.items():
        if not table_of(name).exists():
            continue
        registration = STUDIES[name].reference.rpartition("docs/")[2]
        links = f"[Result](reproduction/experiments.md#{name}), [registration]({registration})."
        lines.append(f"- {line(read_table(table_of(name)))} {links}")
    return "\n".join(lines)


def equivalence() -> str:
    """What the standard errors on Rotated-MNIST include, and what retraining finds without it; "" if it was not run."""
    if not table_of("retraining").exists():
        return ""
    counts = retraining_text.counts(read_table(table_of("retraining")))
    return (
        "On Rotated-MNIST the errors include the spread of the angles, which both sides share. If it is left out of "
        f"them, {counts}: see [retraining](experiments.md#retraining)."
    )


def agreement_verdict(tables: Mapping[str, Comparison]) -> str:
    """Say whether our numbers agree with the published ones.

    They do if all are equivalent where they were retrained, by the registered assumption, and if elsewhere, by either
    divisor of the published ±, no more are outside than equal means would put there.
    """
    agree, parts = True, []
    for name, comparison in tables.items():
        if name == ROTATED and table_of("retraining").exists():
            passed, total = retraining_text.equivalence_counts(read_table(table_of("retraining")))
            agree &= passed == total
            condition = "if published runs vary as ours do"
            parts.append(f"{passed} of {total} are equivalent within ±{MARGIN:g} points {condition} ({name})")
            continue
        variants = {divisor: with_divisor(divisor, comparison) for divisor in DIVISORS}
        within, total = zip(*(passes(variant)[0] for variant in variants.values()), strict=True)
        outside = [outside_by_chance(variant) for variant in variants.values()]
        agree &= all(n - passed <= x for passed, n, x in zip(within, total, outside, strict=True))
        parts.append(
            f"{within[0]} of {total[0]}, {within[1]} if ± divides by {DIVISORS[1]}, are within {MAX_Z:g} standard "
            f"errors, with equal means {total[0] - outside[0]:.0f} ({name})"
        )
    return f"**{'Our' if agree else 'Not all of our'} numbers agree with the paper's**: {'; '.join(parts)}."


def _has_results(page: str) -> bool:
    return page in ("claims-by-row", "studies", "experiments") or (RESULTS / f"{page}.parquet").exists()


class Point(NamedTuple):
    """A number of Table 1: its name, ours minus the published one with an interval, and whether they differ."""

    name: str
    difference: MeanInterval
    differs: bool


def compared_points(comparison: Comparison, measure: str) -> list[Point]:
    """Return the differences with 2 standard errors."""
    points = []
    for row in comparison.rows:
        cell = row.acc if measure == "acc" else row.forgetting["t-1"]
        if cell.difference is not None and cell.standard_error is not None:
            bounds = (cell.difference + sign * MAX_Z * cell.standard_error for sign in (-1, 1))
            interval = MeanInterval(cell.difference, *bounds)
            points.append(Point(f"{row.algorithm} {row.lr:g}", interval, cell.differs))
    return points


def retrained_points(measure: str) -> list[Point]:
    """Return the differences with initialisation and order as the only noise."""
    intervals = differences(read_table(table_of("retraining")), measure)
    return [Point(f"{name} {lr:g}", x, verdict_of(x) == "different") for (name, lr), x in intervals.items()]


def draw_differences(tables: Mapping[str, Comparison], path: Path) -> Path:
    """Draw our numbers minus the published ones by the strictest test, a panel for each column and measure."""

    def fill(figure: Figure) -> None:
        figure.set_size_inches(9.6, 6.4)
        panels = figure.subplots(1, 2 * len(tables))
        for i, (name, comparison) in enumerate(tables.items()):
            retrained = name == ROTATED and table_of("retraining").exists()
            panels[2 * i + 1].sharex(panels[2 * i])
            for axes, measure in zip(panels[2 * i : 2 * i + 2], retraining_text.TITLES, strict=True):
                points = retrained_points(measure) if retrained else compared_points(comparison, measure)
                axes.axvline(0, color=FAINT, linewidth=0.9)
                if retrained:
                    axes.axvspan(-MARGIN, MARGIN, color=FAINT, alpha=0.15, linewidth=0)
                for place, (_, (mean, low, high), differs) in enumerate(points):
                    error, color = [[mean - low], [high - mean]], "C3" if differs else "C0"
                    axes.errorbar(mean, place, xerr=error, fmt="o", markersize=3.5, color=color)
                axes.set(title=f"{name}: {retraining_text.TITLES[measure]}", xlabel="ours − published (points)")
                axes.set_yticks(range(len(points)), [point.name for point in points] if measure == "acc" else [])
                axes.invert_yaxis()
                axes.tick_params(labelsize=7)

    return save_figure(fill, path)


def missing_results() -> str:
    """Columns and studies that have no results, and the rows that a column lacks."""
    absent = [f"`{name}`{_done_so_far(name)}" for name in (*split_text.SPLIT, *STUDIES) if not table_of(name).exists()]
    absent += [missing_rows(COLUMNS[name]) for name in ("rotated-mnist", *split_text.SPLIT) if table_of(name).exists()]
    listing = ", ".join(filter(None, absent))
    return f"## Not here yet\n\nIn place, but not run at full size: {listing}.\n" if listing else ""


def _done_so_far(name: str) -> str:
    """The algorithms whose runs of an unfinished study are there; no conclusion is drawn from them."""
    file = RESULTS / "unfinished" / f"{name}.parquet"
    if not file.exists():
        return ""
    return f" (so far {join(f'`{x}`' for x in names(read_table(file)))})"


def missing_rows(column: Column) -> str:
    if column.challenge in split_text.MEASURED:
        return f"all of {column.challenge}"
    algorithms = {run.config["algorithm"]["name"] for run in results.read(table_of(column.challenge))}
    rows = [f"`{row.algorithm}`" for row in column.all_rows if row.algorithm not in algorithms]
    return f"of {column.challenge} {' and '.join(filter(None, (', '.join(rows[:-1]), rows[-1])))}" if rows else ""


def claims_parts(tables: Mapping[str, Comparison]) -> dict[str, str]:
    """The abstract, the scoreboard, conclusions, and the statistics of each row."""
    locality_rows = read_table(RESULTS / "locality.parquet", ["challenge", "algorithm", "found"], "a table of locality")
    rows = {name: table_rows(comparison) for name, comparison in tables.items()}
    classes_by_column = {name: measured_locality(locality_rows, name) for name in tables}
    claims = [
        claim for name, column_rows in rows.items() for claim in scoreboard(name, column_rows, classes_by_column[name])
    ]
    published_rows = [
        (row, classes_by_column[name]) for name, column_rows in rows.items() for row in column_rows if row.published
    ]
    reclassified = sorted({row.algorithm for row, classes in published_rows if classes[row.algorithm] != row.locality})
    comparable = {name: comparison for name, comparison in tables.items() if name in COLUMNS}
    # Both sides of the published angles share their spread, so that there nearly every row is within its errors.
    informative_tables = {
        k: comparison for k, comparison in comparable.items() if k != ROTATED or not table_of("retraining").exists()
    }
    variant_claims = [claim for claim in claims if claim.column not in COLUMNS]
    variants = (
        f"## With seed angles\n\n{board(variant_claims, rows, reclassified, notes=False)}\n" if variant_claims else ""
    )
    return {
        "abstract": abstract(claims, rows, reclassified, agreement_verdict(comparable)),
        "board": board([claim for claim in claims if claim.column in COLUMNS], rows, reclassified),
        "variants": variants,
        "conclusions": conclusions(claims, informative_tables, rows, reclassified),
        "details": details(rows, classes_by_column),
    }


def main() -> None:
    rotated_runs, seed_angle_runs = (
        results.read(RESULTS / f"rotated-mnist{part}.parquet") for part in ("", "-seed-angles")
    )
    split_runs = results.read(RESULTS / "split-cifar10.parquet")
    compared_runs = rotated_runs.where(lambda run: algorithm_of(run)[0] not in rotated_text.TOLD_THE_TASK)
    comparison = compare(compared_runs)
    column = COLUMNS["rotated-mnist"]
    is_extra = lambda run: column.find_row(*algorithm_of(run)) in column.extra_rows  # noqa: E731
    relabel(compared_runs).plot("distance", HERE / "images" / "reproduction-distance.png")
    tables = {
        ROTATED: comparison,
        SEED_ANGLES: compare(seed_angle_runs),
        "split-cifar10": compare(split_runs),
    }
    comparable = {name: table for name, table in tables.items() if name in COLUMNS}
    draw_differences(comparable, HERE / "images" / "reproduction-differences.png")
    parts = claims_parts(tables) | {
        "setup": SETUP,
        "over_all_tasks": join(f"{1 - 1 / COLUMNS[name].tasks:g} times as much on {name}" for name in comparable),
        "findings": findings(compared_runs, seed_angle_runs, RESULTS),
        "correlations": correlation_table(compared_runs, seed_angle_runs),
        "cost": cost(rotated_runs.where(lambda run: not is_extra(run))),
        "seeds": seeds(rotated_runs),
        "further": rotated_text.extra_rows_cost(rotated_runs.where(is_extra)),
        "agreement": f"{agreement(comparison)}\n\n{equivalence()}".strip(),
        "published": str(render(compare(rotated_runs), "markdown")),
        "told": rotated_text.excluded_rows(rotated_runs),
        "diverged": rotated_text.divergence(rotated_runs),
        "orthogonal": rotated_text.orthogonality(comparison, rotated_runs),
        "by_rates": rotated_text.gtl_minus_sgd(split_runs),
        "seed_cost": cost(seed_angle_runs),
        "over_all": f"{seed_angle_runs[0].tasks - 1}/{seed_angle_runs[0].tasks}",
        "own": str(render(compare(seed_angle_runs, published=False), "markdown")),
        "contents": contents(),
        "side": paper_layout(compare(run for run in (*rotated_runs, *split_runs) if algorithm_of(run)[0] in FRONT_ROWS))
        .markdown()
        .split("\n\n")[1],  # without its title and notes
        **{name.replace("-", "_"): split_text.split(name) for name in split_text.SPLIT},
        "precision": split_text.precision(),
        "studies": "".join(study(name) for name in STUDIES if name not in experiment_notes.NOTES),
        "experiments": "".join(study(name) for name in experiment_notes.NOTES),
        "beyond": own_experiments(),
        "missing": missing_results(),
    }
    (HERE / "reproduction.md").write_text(TEXT.format(**parts).rstrip() + "\n")
    (HERE / "reproduction").mkdir(exist_ok=True)
    for name, text in PAGES.items():
        if page := text.format(**parts).strip().replace("](images/", "](../images/"):
            (HERE / "reproduction" / f"{name}.md").write_text(f"{page}\n")


if __name__ == "__main__":
    main()
