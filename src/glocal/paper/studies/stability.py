r"""Stability and plasticity.

Stable SGD (Figure 6; Mirzadeh et al. 2020): forgetting, accuracy and distance travelled of plastic SGD, without dropout
and at a constant learning rate, and of stable SGD, with dropout of 0.5 and a learning rate that decays by 0.8 after
every task. Both use batches of 10, hidden layers of 256 and five epochs per task. To separate the effects of dropout,
of decay and of small batches, every combination of them is trained, with batches of 128, as in Table 1, as the large
ones. The authors' code also has momentum and a lower bound on the learning rate, left out here.

Tradeoff (§6.1): accuracy against forgetting, from low learning rates to high. The paper: higher learning rates make a
network more plastic; global algorithms gain most, since their forgetting stays the same, and local ones pay with
forgetting. The study takes the runs of Table 1, and its columns are those of a file of results:
`--results results/rotated-mnist.parquet` draws the figure without training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glocal.metrics import (
    END_LRS,
    accuracy_of,
    average_accuracy,
    average_forgetting,
    learning_accuracy,
    low_minus_high_by_seed,
)
from glocal.paper import table1
from glocal.paper.claims import Permutation, interaction_by_seed, permutation_test
from glocal.paper.studies import common
from glocal.paper.studies.common import (
    MeanInterval,
    agreement,
    column,
    curve,
    distinct,
    diverged_note,
    mean,
    of_columns,
    rank_correlation,
)
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, LineStyle, draw_path, legend
from glocal.report.summary import DEFAULT_VIEW, run_statistics

REGIMES: dict[str, tuple[str, dict[str, float]]] = {
    "plastic": ("sgd", {}),
    "stable": ("stable-sgd", {"dropout": 0.5, "decay": 0.8}),
    "dropout alone": ("stable-sgd", {"dropout": 0.5, "decay": 1.0}),
    "decay alone": ("stable-sgd", {"dropout": 0.0, "decay": 0.8}),
}
BATCH_SIZES = (10, 128)
"""The batch size of both regimes, and that of Table 1."""
PARTS = {"dropout": ("dropout alone", "stable"), "decay": ("decay alone", "stable")}
"""The regimes that have a part of stable SGD; small batches are the third part."""
FULL: WorkItem = common.TABLE1 | {"hidden": [256, 256]}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 5, "epochs": 1, "hidden": [32, 32]}
DEMO |= {"lrs": (0.01, 0.05, 0.2), "seeds": table1.SEEDS[:2]}
AFTER_LAST_TASK = pl.col("t") == pl.col("t").max()


class Stability:
    """After every task: accuracy, forgetting, and the distances of θ_t from θ_0 and from θ_{t−1}."""

    name = "stable-sgd"
    columns = "algorithm locality batch_size lr seed t acc forgetting learning_accuracy distance_from_init update_norm"

    def work_items(self, demo: bool) -> list[WorkItem]:
        """One item per batch size and algorithm: its regimes differ in scalars only and train as one cohort."""
        size = DEMO if demo else FULL
        regimes = [[r for r, (a, _) in REGIMES.items() if a == b] for b in ("sgd", "stable-sgd")]
        return [size | {"regimes": group, "batch_size": batch} for batch in BATCH_SIZES for group in regimes]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        algorithms = [REGIMES[regime] for regime in item["regimes"]]
        network = common.item_mlp(item)
        runs = common.sweep_item(item, context, common.make_challenge(item, context), algorithms, network=network)
        rows: list[Row] = []
        for i, run in enumerate(runs):
            regime = item["regimes"][i // (len(item["lrs"]) * len(item["seeds"]))]
            R = accuracy_of(run)
            for t in range(1, run.tasks + 1):
                row: Row = {"algorithm": regime, "t": t, "acc": 100 * average_accuracy(R, t)}
                row |= {"forgetting": 100 * average_forgetting(R, t)}
                row |= {"learning_accuracy": 100 * learning_accuracy(R[: t + 1, :t])}
                row |= {k: float(run.arrays[k][t - 1]) for k in ("distance_from_init", "update_norm")}
                rows.append(common.run_row(self.columns, item, run, row))
        return rows

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """With small batches, top: forgetting and accuracy at the end; bottom: the distance from θ_0 over tasks."""
        rows = small_batches(rows)
        figure.set_size_inches(8.2, 5.8)
        (left, right), bottom = figure.subplots(2, 2)
        final, colours = rows.filter(AFTER_LAST_TASK), common.lr_colours(rows)
        titles = {"forgetting": "forgetting $E(T)$ (points)", "acc": r"final accuracy $\mathrm{ACC}(T)$ (%)"}
        for axes, (name, title) in zip((left, right), titles.items(), strict=True):
            common.plot_over_lr(axes, final, name, title)
        for axes, regime in zip(bottom, ("plastic", "stable"), strict=True):
            for lr in distinct(regime_rows := rows.filter(algorithm=regime), "lr"):
                distances = curve(regime_rows.filter(lr=lr), "distance_from_init", x="t")
                distances.plot(axes, color=colours.to_rgba(np.array(lr)), marker="o", markersize=3, label=f"{lr:g}")
            common.integer_ticks(axes)
            axes.set(title=f"{regime}: distance from the initialisation", xlabel="task $t$")
        bottom[0].sharey(bottom[1])
        bottom[0].set_ylabel(r"$\Vert\theta_t - \theta_0\Vert_2$")
        handles, labels = left.get_legend_handles_labels()
        right.legend(handles, [text.partition(" (")[0] for text in labels], loc="best")
        common.lr_colour_bar(figure, colours, bottom, rows)

    def summarize(self, rows: pl.DataFrame) -> Summary:
        final = rows.filter(AFTER_LAST_TASK)
        headings = {"forgetting": "forgetting", "final accuracy": "acc", "accuracy after learning": "learning_accuracy"}
        headings |= {"‖θ_T − θ_0‖": "distance_from_init", "‖θ_T − θ_{T−1}‖": "update_norm"}
        table = common.group(final, ["batch_size", "algorithm", "lr"], of_columns(headings, mean))
        small = small_batches(final)
        regimes = {name: curve(small.filter(algorithm=name), "forgetting") for name in ("plastic", "stable")}
        plastic, stable = regimes.values()
        _, at_plastic, at_stable = np.intersect1d(plastic.x, stable.x, return_indices=True)
        wins, total = int((stable.middle[at_stable] < plastic.middle[at_plastic]).sum()), len(at_plastic)
        orders = (f"{rank_correlation(regime.x, regime.middle):.2f} ({name})" for name, regime in regimes.items())
        verdict = (
            f"Stable SGD forgets less than plastic SGD at {wins} of {total} learning rates: "
            f"{agreement(wins == total > 0)} on that. Rank correlation of forgetting with the learning rate: "
            f"{', '.join(orders)}. Averaged over learning rates and the other parts, "
            f"{'; '.join(f'{part} changes forgetting by {effect}' for part, effect in effects(final).items())} points."
        )
        return Summary(table, verdict + diverged_note(rows, "acc"))


def small_batches(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("batch_size") == pl.col("batch_size").min())


def effects(final: pl.DataFrame, name: str = "forgetting") -> dict[str, MeanInterval]:
    """Return what each part of stable SGD adds to a column, over seeds: the mean with it minus the mean without it.

    The means are over learning rates and all combinations of the other parts; a seed with a diverged run is left out.
    """
    has_part = {part: pl.col("algorithm").is_in(regimes) for part, regimes in PARTS.items()}
    has_part["a small batch"] = pl.col("batch_size") == pl.col("batch_size").min()
    values, intervals = pl.col(name), {}
    for part, condition in has_part.items():
        difference = values.filter(condition).mean() - values.filter(~condition).mean()
        intervals[part] = MeanInterval.of(column(final.group_by("seed", maintain_order=True).agg(difference), name))
    return intervals


COLUMN = {True: table1.DEMO, False: table1.COLUMNS["rotated-mnist"]}  # by whether it is the demo
SIZES = ("tasks", "epochs", "lrs", "seeds")
PANELS = {"learning_accuracy": "accuracy right after learning (%)", "acc": r"final accuracy, $\mathrm{ACC}(T)$ (%)"}
HEADINGS = {"Δ accuracy after learning": "learning_accuracy", "Δ forgetting": "forgetting", "Δ final accuracy": "acc"}


class Tradeoff:
    """A row for every run of a column of Table 1: accuracies and forgetting in percent."""

    name = "tradeoff"
    columns = (
        "challenge algorithm locality lr seed acc forgetting backward_transfer forward_transfer learning_accuracy "
        "distance"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        column = COLUMN[demo]
        size: WorkItem = {"demo": demo} | {k: getattr(column, k) for k in ("challenge", *SIZES)}
        return [size | {"algorithm": row.algorithm} for row in column.rows]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        part = COLUMN[item["demo"]].select([item["algorithm"]], **{k: item[k] for k in SIZES})
        runs = table1.train([part], store=context.store, data=context.data, device=str(context.device))
        values = run_statistics(runs, DEFAULT_VIEW)
        return [common.run_row(self.columns, item, run, row) for run, row in zip(runs, values, strict=True)]

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """A curve for each algorithm from its lowest learning rate to its highest, with growing points."""
        figure.set_size_inches(9.6, 4.3)
        lrs = distinct(rows, "lr")
        for axes, (name, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
            points = [_draw_curve(axes, runs, name, line, lrs) for runs, line in common.by_algorithm(rows)]
            _set_limits(axes, np.concatenate(points))
            axes.set(title=title, xlabel="forgetting $E(T)$ (points, over $T - 1$ tasks)")
            axes.text(
                1,
                1.02,
                r"$\nwarrow$ better",
                transform=axes.transAxes,
                color=FAINT,
                fontsize=8,
                ha="right",
                va="bottom",
            )
        rates = ", ".join(f"{lr:g}" for lr in lrs)
        legend(
            figure,
            common.legend_order(rows),
            note=f"points grow with\nthe learning rate:\n{rates};\nbars at the last: one\nstandard deviation\n",
        )

    def summarize(self, rows: pl.DataFrame) -> Summary:
        lrs = distinct(rows.filter(pl.col("acc").is_finite()), "lr")
        count = min(END_LRS, len(lrs) // 2)
        if not count:
            return Summary([], "Runs at two or more learning rates are needed.")

        def change(runs: pl.DataFrame, name: str) -> float:
            """The mean at the high learning rates minus that at the low ones; NaN if a rate has no finite run."""
            low, high = ([mean(runs.filter(lr=lr), name) for lr in end] for end in (lrs[:count], lrs[-count:]))
            return float(np.mean(high) - np.mean(low))

        def best(runs: pl.DataFrame, name: str) -> float:
            """The highest mean accuracy of a learning rate, or that rate."""
            means = runs.filter(pl.col("acc").is_finite()).group_by("lr").agg(pl.col("acc").mean()).sort("lr")
            index = means["acc"].arg_max()
            return np.nan if index is None else means[name][index]

        statistics = of_columns(HEADINGS, change) | of_columns({"best final accuracy": "acc", "at lr": "lr"}, best)
        table = common.group(rows, ["algorithm", "locality"], statistics)
        by_kind = {kind: pl.DataFrame(table).filter(locality=kind) for kind in ("global", "local")}
        gain = {kind: mean(algorithms, "Δ final accuracy") for kind, algorithms in by_kind.items()}
        verdict = (
            f"From the {count} lowest learning rates to the {count} highest the final accuracy of global algorithms "
            f"changes by {gain['global']:+.1f} points and that of local ones by {gain['local']:+.1f}"
            f"{_difference(rows)}."
        )
        return Summary(table, verdict + diverged_note(rows, "acc"))


STUDIES = (Stability(), Tradeoff())


def class_difference(rows: pl.DataFrame) -> tuple[MeanInterval, Permutation, int] | None:
    """Compare how accuracy changes from low to high rates: that of local algorithms minus that of global ones.

    Returns:
        The difference with seeds as units, paired; with algorithms as units; and the number of seeds. None if a class
        has no algorithm with a seed at all four rates.
    """
    lrs = distinct(rows, "lr")
    sides: list[dict[str, Any]] = []
    for kind in ("local", "global"):
        parts = rows.filter(pl.col("acc").is_finite(), locality=kind).partition_by("algorithm")
        values = {
            str(part["algorithm"][0]): {lr: dict(part.filter(lr=lr).select("seed", "acc").iter_rows()) for lr in lrs}
            for part in parts
        }
        complete = len(lrs) >= 2 * END_LRS
        sides.append({name: by_lr for name, by_lr in values.items() if complete and low_minus_high_by_seed(by_lr)})
    if not all(sides):
        return None
    difference, seeds = interaction_by_seed(*(list(side.values()) for side in sides))
    changes = {
        name: -float(np.mean(list(low_minus_high_by_seed(by_lr).values())))
        for side in sides
        for name, by_lr in side.items()
    }
    return difference, permutation_test(changes, set(sides[0])), seeds


def _difference(rows: pl.DataFrame) -> str:
    """Say whether the classes differ for these algorithms, by seeds, and for others, by algorithms."""
    differences = class_difference(rows)
    if differences is None:
        return ""
    by_seed, by_algorithm, seeds = differences
    if seeds < 2:
        return ": no two seeds, so no interval"
    verdict = by_seed.phrase(agreement(False), agreement(True), "not settled")
    text = (
        f". The difference, local − global, over {seeds} seeds with its 95 % interval, is {by_seed}: {verdict} for "
        "these algorithms"
    )
    other_verdict = by_algorithm.phrase(
        agreement(False), agreement(True), "not settled", "not testable, they are too few"
    )
    return (
        f"{text}. With algorithms as units it is {by_algorithm}: {other_verdict} for other algorithms of these classes"
    )


def _draw_curve(axes: Axes, rows: pl.DataFrame, name: str, style: LineStyle, lrs: list[float]) -> np.ndarray:
    finite_rows = rows.filter(pl.col("acc").is_finite())
    x, y = curve(finite_rows, "forgetting"), curve(finite_rows, name)
    sizes = [16 + 64 * lrs.index(lr) / max(len(lrs) - 1, 1) for lr in x.x]
    x_path, y_path = (np.array([part.middle, part.high - part.middle]) for part in (x, y))
    draw_path(axes, x_path, y_path, style, sizes, common.label(rows))
    return np.stack([x.middle, y.middle], axis=1)


def _set_limits(axes: Axes, points: np.ndarray) -> None:
    """Fit the limits to the means: the error bar of one collapsed run would be as long as all curves together."""
    points = points[np.isfinite(points).all(1)]
    if len(points):
        (left, low), (right, high) = points.min(0), points.max(0)
        dx, dy = 0.06 * (right - left or 1), 0.06 * (high - low or 1)
        axes.set(xlim=(left - dx, right + dx), ylim=(low - dy, high + dy))
