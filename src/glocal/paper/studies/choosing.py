"""What does honest selection do to the ranking? Learning rates chosen by five protocols (docs/experiments/choosing.md).

Table 1 shows every learning rate. Who compares algorithms picks one of them for each, usually the best on test data. A
practitioner cannot: validation data of the first tasks, or of the task at hand, is all there is. One sweep serves all
protocols, since each is a function of the accuracies that every run stores.
"""

from __future__ import annotations

from itertools import combinations
from typing import TypeAlias

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from glocal.paper import table1
from glocal.paper.studies import common
from glocal.paper.studies.common import MeanInterval, names
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, legend
from glocal.selection import ORACLE, choose, criterion, kendall_tau, optimism

ALGORITHMS = ("sgd", "er", "agem", "si", "ewc", "ogd-gtl")
PROTOCOLS = {
    "first_task": "first-task",
    "first_three": "first-k=3",
    "per_task": "per-task",
    "all_validation": "all-validation",
    "oracle_test": ORACLE,
}
"""Columns of the table, and the protocols whose criteria they hold, in percent."""
PRIMARY = "first_three"
FULL: WorkItem = common.FULL | {"batch_size": 128, "lrs": table1.COLUMNS["rotated-mnist"].lrs, "seeds": table1.SEEDS}
FULL |= {"validation": 0.1}
DEMO: WorkItem = common.DEMO | {"epochs": 1, "batch_size": 128, "lrs": [0.05, 0.2, 0.5], "seeds": table1.SEEDS[:2]}
DEMO |= {"validation": 0.1}
Scores: TypeAlias = dict[float, dict[int, float]]  # of a learning rate and a seed; NaN if the run diverged


class Choosing:
    """A row for every run: the criterion of each protocol."""

    name = "choosing"
    columns = " ".join(["algorithm locality lr seed", *PROTOCOLS])

    def work_items(self, demo: bool) -> list[WorkItem]:
        return [{"algorithm": name, **(DEMO if demo else FULL)} for name in (ALGORITHMS[:-1] if demo else ALGORITHMS)]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        algorithm = (item["algorithm"], table1.COLUMNS["rotated-mnist"].row(item["algorithm"]).options)
        options = {"network": common.item_mlp(item), "validation": item["validation"]}
        runs = common.sweep_item(item, context, common.make_challenge(item, context), [algorithm], **options)
        criteria = [{name: criterion(run, protocol) for name, protocol in PROTOCOLS.items()} for run in runs]
        return [common.run_row(self.columns, item, run, row) for run, row in zip(runs, criteria, strict=True)]

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """The test accuracy of every algorithm's choice under each protocol, and the oracle's optimism."""
        figure.set_size_inches(10.5, 3.8)
        results, losses = figure.subplots(1, 2)
        x, protocols = np.arange(len(PROTOCOLS)), list(PROTOCOLS)
        parts = common.by_algorithm(rows)
        for number, (runs, line) in enumerate(parts):
            accuracies = choices(runs)
            style = {**line.line(), **line.point()}
            means = [MeanInterval.of(np.array([*accuracies[name].values()])).mean for name in protocols]
            results.plot(x, means, **style, label=common.label(runs))
            gaps = [MeanInterval.of(np.array([*lost(runs, name).values()])) for name in protocols[:-1]]
            shift = x[:-1] + 0.7 * (number - (len(parts) - 1) / 2) / len(parts)
            bars = np.abs([(gap.mean - gap.low, gap.high - gap.mean) for gap in gaps]).T
            losses.errorbar(
                shift, [gap.mean for gap in gaps], bars, color=line.colour, **line.point(), linestyle="none"
            )
        losses.axhline(0, color=FAINT, linewidth=0.9)
        results.set(ylabel="test accuracy of the choice (%)", xticks=x)
        losses.set(ylabel="optimism of the oracle (points)", xticks=x[:-1])
        for axes in (results, losses):
            axes.set_xticklabels([PROTOCOLS[protocols[int(t)]] for t in axes.get_xticks()])
        legend(figure, common.legend_order(rows))

    def summarize(self, rows: pl.DataFrame) -> Summary:
        parts = {str(runs["algorithm"][0]): runs for runs in rows.partition_by("algorithm", maintain_order=True)}
        table: list[Row] = []
        for name, runs in parts.items():
            row: Row = {"algorithm": name, "locality": runs["locality"][0]}
            for column, protocol in PROTOCOLS.items():
                gap = MeanInterval.of(np.array([*lost(runs, column).values()]))
                row[protocol] = f"lr {choose(scores(runs, column)):g}{f': {gap}' if gap.mean else ''}"
            table.append(row)
        if len(parts) < 2:
            return Summary(table, "Two algorithms are needed for a ranking.")
        taus = [f"{protocol} {ranking(rows, column)}" for column, protocol in list(PROTOCOLS.items())[:-1]]
        pairs = reversals(rows, PRIMARY)
        finding = f"reverses {', '.join(pairs)}" if pairs else "reverses no pair of algorithms beyond doubt"
        verdict = (
            f"Selection by {PROTOCOLS[PRIMARY]} {finding}: the hypothesis that the ranking survives is "
            f"{'refuted' if pairs else 'not refuted'}. Kendall's τ with the oracle's ranking: {'; '.join(taus)}."
        )
        local = {name for name, runs in parts.items() if runs["locality"][0] == "local"}
        if local and local != set(parts):
            gaps = [f"{protocol} {local_minus_global(parts, local, c)}" for c, protocol in list(PROTOCOLS.items())[:-1]]
            verdict += f" Optimism for local minus global algorithms, in points: {'; '.join(gaps)}."
        return Summary(table, verdict + common.diverged_note(rows, "oracle_test"))


def scores(rows: pl.DataFrame, column: str) -> Scores:
    """Return one algorithm's criterion by learning rate and seed."""
    by_lr: Scores = {}
    for lr, seed, value in rows.sort("lr", "seed").select("lr", "seed", column).iter_rows():
        by_lr.setdefault(lr, {})[seed] = np.nan if value is None else value
    return by_lr


def choices(rows: pl.DataFrame) -> dict[str, dict[int, float]]:
    """Return the test accuracies, by seed, of the learning rate that each protocol chooses for one algorithm."""
    test = scores(rows, "oracle_test")
    return {name: test[choose(scores(rows, name))] for name in PROTOCOLS}


def lost(rows: pl.DataFrame, column: str) -> dict[int, float]:
    """Return the oracle's optimism over a protocol's choice by seed."""
    return optimism(scores(rows, "oracle_test"), choose(scores(rows, column)))


def results(rows: pl.DataFrame, column: str) -> np.ndarray:
    """Return the test accuracies of a protocol's choices: algorithms × seeds."""
    accuracies = [choices(rows.filter(algorithm=name))[column] for name in names(rows)]
    return np.array([[values.get(seed, np.nan) for seed in sorted(set(rows["seed"]))] for values in accuracies])


def ranking(rows: pl.DataFrame, column: str) -> str:
    """Return Kendall's τ between the rankings by mean accuracy, and its mean and interval over the seeds' rankings."""
    accuracies, oracle = results(rows, column), results(rows, "oracle_test")
    by_seed = np.array([kendall_tau(a, b) for a, b in zip(accuracies.T, oracle.T, strict=True)])
    tau = kendall_tau(*(np.ma.masked_invalid(x).mean(axis=1).filled(np.nan) for x in (accuracies, oracle)))
    return f"{tau:.2f} (by seed {MeanInterval.of(by_seed)})"


def reversals(rows: pl.DataFrame, column: str) -> list[str]:
    """Return the pairs that a protocol ranks the other way round than the oracle, with intervals that exclude 0."""
    accuracies, oracle, algorithms = results(rows, column), results(rows, "oracle_test"), names(rows)
    pairs = []
    for a, b in combinations(range(len(algorithms)), 2):
        difference, oracle_difference = (MeanInterval.of(x[a] - x[b]) for x in (accuracies, oracle))
        if (difference.low > 0 and oracle_difference.high < 0) or (difference.high < 0 and oracle_difference.low > 0):
            pairs.append(f"{algorithms[a]} and {algorithms[b]}")
    return pairs


def local_minus_global(parts: dict[str, pl.DataFrame], local: set[str], column: str) -> MeanInterval:
    """Return the mean optimism of local algorithms minus that of global ones, over the seeds that all have."""
    gaps = {name: lost(runs, column) for name, runs in parts.items()}
    seeds = sorted(set.intersection(*(set(gap) for gap in gaps.values())))
    means = [np.array([[gaps[n][s] for s in seeds] for n in gaps if (n in local) is kind]) for kind in (True, False)]
    return MeanInterval.of(means[0].mean(axis=0) - means[1].mean(axis=0))


STUDIES = (Choosing(),)
