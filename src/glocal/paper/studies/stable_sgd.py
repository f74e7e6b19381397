r"""Plastic and stable SGD (Figure 6; Mirzadeh et al. 2020): forgetting, accuracy and distance travelled.

Plastic: no dropout, a constant learning rate. Stable: dropout of 0.5 and a learning rate that decays by 0.8 after every
task. Both use batches of 10, hidden layers of 256 and five epochs per task. Dropout alone and decay alone separate the
two effects. The authors' code also has momentum and a lower bound on the learning rate, which are left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from glocal.metrics import accuracy_of, average_accuracy, average_forgetting, learning_accuracy
from glocal.networks import mlp
from glocal.paper.studies.common import (
    curve,
    distinct,
    diverged_note,
    group,
    integer_ticks,
    line_styles,
    lr_colour_bar,
    lr_colours,
    make_challenge,
    mean,
    names,
    of_columns,
    plot_over_lr,
    run_row,
    sweep_item,
    where,
)
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.paper.table1 import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

COLUMN = COLUMNS["rotated-mnist"]
REGIMES: dict[str, tuple[str, dict[str, float]]] = {
    "plastic": ("sgd", {}),
    "stable": ("stable-sgd", {"dropout": 0.5, "decay": 0.8}),
    "dropout alone": ("stable-sgd", {"dropout": 0.5, "decay": 1.0}),
    "decay alone": ("stable-sgd", {"dropout": 0.0, "decay": 0.8}),
}
FULL: WorkItem = {"challenge": COLUMN.challenge, "angles": "published", "tasks": COLUMN.tasks, "epochs": COLUMN.epochs}
FULL |= {"batch_size": 10, "hidden": [256, 256], "lrs": COLUMN.lrs, "seeds": COLUMN.seeds[:3]}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 5, "epochs": 1, "hidden": [32, 32]}
DEMO |= {"lrs": (0.01, 0.05, 0.2), "seeds": COLUMN.seeds[:2]}


class Stability:
    """After every task: accuracy, forgetting, and the distances of θ_t from θ_0 and from θ_{t−1}."""

    name = "stable-sgd"
    columns = "algorithm locality lr seed t acc forgetting learning_accuracy distance_from_init update_norm"

    def work_items(self, demo: bool) -> list[WorkItem]:
        """One item per algorithm: its regimes differ in scalars only and train as one cohort."""
        size = DEMO if demo else FULL
        algorithms = dict.fromkeys(algorithm for algorithm, _ in REGIMES.values())
        return [{"regimes": [r for r, (a, _) in REGIMES.items() if a == algorithm], **size} for algorithm in algorithms]

    def cost(self, demo: bool) -> str:
        size = DEMO if demo else FULL
        runs = len(REGIMES) * len(size["lrs"]) * len(size["seeds"])
        steps = f"{size['epochs']} epochs in batches of {size['batch_size']}"
        return f"{size['challenge']}: {runs} runs of {size['tasks']} tasks, {steps}"

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        algorithms = [REGIMES[regime] for regime in item["regimes"]]
        network = partial(mlp, hidden=tuple(item["hidden"]))
        runs = sweep_item(item, context, make_challenge(item, context), algorithms, network=network)
        rows: list[Row] = []
        for i, run in enumerate(runs):
            regime = item["regimes"][i // (len(item["lrs"]) * len(item["seeds"]))]
            R = accuracy_of(run)
            for t in range(1, run.tasks + 1):
                row = run_row(run, regime) | {"t": t, "acc": 100 * average_accuracy(R, t)}
                row |= {"forgetting": 100 * average_forgetting(R, t)}
                row |= {"learning_accuracy": 100 * learning_accuracy(R[: t + 1, :t])}
                distances: Row = {
                    name: float(run.arrays[name][t - 1]) for name in ("distance_from_init", "update_norm")
                }
                rows.append(row | distances)
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Top: forgetting and accuracy after the last task. Bottom: the distance from θ_0 over tasks."""
        figure.set_size_inches(8.2, 5.8)
        (left, right), bottom = figure.subplots(2, 2)
        final, styles, colours = _after_last_task(rows), line_styles(rows), lr_colours(rows)
        for axes, name, text in (
            (left, "forgetting", "forgetting $E(T)$ (points)"),
            (right, "acc", r"final accuracy $\mathrm{ACC}(T)$ (%)"),
        ):
            plot_over_lr(axes, final, name, styles)
            axes.set_title(text, loc="left")
        shown = [regime for regime in ("plastic", "stable") if regime in names(rows)]
        for axes, regime in zip(bottom, shown, strict=False):
            _draw_distance(axes, where(rows, algorithm=regime), colours)
        for axes in bottom[len(shown) :]:
            axes.set_visible(False)
        bottom[0].sharey(bottom[1])
        bottom[0].set_ylabel(r"$\Vert\theta_t - \theta_0\Vert_2$")
        handles, labels = left.get_legend_handles_labels()
        right.legend(handles, [text.partition(" (")[0] for text in labels], loc="best")
        lr_colour_bar(figure, colours, bottom, rows)

    def summarize(self, rows: Sequence[Row]) -> Summary:
        final = _after_last_task(rows)
        headings = {"forgetting": "forgetting", "final accuracy": "acc", "accuracy after learning": "learning_accuracy"}
        headings |= {"‖θ_T − θ_0‖": "distance_from_init", "‖θ_T − θ_{T−1}‖": "update_norm"}
        table = group(final, "algorithm lr", of_columns(headings, mean))
        plastic, stable = (curve(where(final, algorithm=a), "forgetting") for a in ("plastic", "stable"))
        common = [lr for lr in plastic.lrs if lr in stable.lrs]
        less = sum(stable.at(lr) < plastic.at(lr) for lr in common)
        agrees = "agrees" if common and less == len(common) else "does not agree"
        verdict = (
            f"Stable SGD forgets less than plastic SGD at {less} of {len(common)} learning rates: {agrees} with the"
        )
        return Summary(table, f"{verdict} paper." + diverged_note(rows, "acc"))


STUDIES = (Stability(),)


def _after_last_task(rows: Sequence[Row]) -> list[Row]:
    return where(rows, t=max(distinct(rows, "t")))


def _draw_distance(axes: Axes, rows: Sequence[Row], colours: ScalarMappable) -> None:
    """‖θ_t − θ_0‖ over t: a thin line for every seed, a thick one for their mean."""
    for lr in distinct(rows, "lr"):
        own = where(rows, lr=lr)
        tasks = [int(t) for t in distinct(own, "t")]
        colour = colours.to_rgba(lr)  # type: ignore[arg-type]
        for seed in names(own, "seed"):
            distances = [mean(where(own, t=t, seed=seed), "distance_from_init") for t in tasks]
            axes.plot(tasks, distances, color=colour, linewidth=0.6, alpha=0.45)
        distances = [mean(where(own, t=t), "distance_from_init") for t in tasks]
        axes.plot(tasks, distances, color=colour, marker="o", markersize=3, label=f"{lr:g}")
    integer_ticks(axes)
    axes.set_xlabel("task $t$")
    axes.set_title(f"{rows[0]['algorithm']}: distance from the initialisation", loc="left")
