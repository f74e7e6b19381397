r"""Plastic and stable SGD (appendix, fig:sgdstable; Mirzadeh et al. 2020): forgetting, accuracy, distance travelled.

Plastic: no dropout, a constant learning rate. Stable: dropout of 0.5 and a learning rate that decays by 0.8 with every
task. Both in batches of 10, with hidden layers of 256, five epochs a task. Beside them stand dropout alone and decay
alone, to see which of the two does it. (The authors' own code adds momentum and a floor to the decay: not here.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.metrics import accuracy_of, average_accuracy, average_forgetting, learning_accuracy
from glocal.networks import mlp
from glocal.paper.studies.lr_plots import line, listed, lost, mean, names, over_lr, pens, rate_colours
from glocal.paper.studies.row_filters import distinct, told, where
from glocal.paper.studies.trained_runs import rotations
from glocal.paper.study import Piece, Place, Row
from glocal.paper.table1 import COLUMNS
from glocal.sweeps.sweep import sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = COLUMNS["rotated-mnist"]
REGIMES: dict[str, tuple[str, dict[str, float]]] = {
    "plastic": ("sgd", {}),
    "stable": ("stable-sgd", {"dropout": 0.5, "decay": 0.8}),
    "dropout alone": ("stable-sgd", {"dropout": 0.5, "decay": 1.0}),
    "decay alone": ("stable-sgd", {"dropout": 0.0, "decay": 0.8}),
}
FULL: Piece = {
    "challenge": COLUMN.challenge,
    "tasks": COLUMN.tasks,
    "epochs": COLUMN.epochs,
    "batch_size": 10,
    "hidden": 256,
    "lrs": COLUMN.lrs,
    "seeds": COLUMN.seeds[:3],
}
DEMO: Piece = FULL | {
    "challenge": "rotated-digits",
    "tasks": 5,
    "epochs": 1,
    "hidden": 32,
    "lrs": (0.01, 0.05, 0.2),
    "seeds": COLUMN.seeds[:2],
}


class Stability:
    """After every task: accuracy, forgetting, and how far θ_t is from θ_0 and from θ_{t−1}."""

    name = "stable-sgd"
    columns = "algorithm locality lr seed t acc forgetting learning_accuracy distance_from_init update_norm"

    def pieces(self, demo: bool) -> list[Piece]:
        """Regimes of one algorithm differ in numbers alone, and are trained together."""
        size = DEMO if demo else FULL
        algorithms = dict.fromkeys(algorithm for algorithm, _ in REGIMES.values())
        return [{"regimes": [r for r, (a, _) in REGIMES.items() if a == algorithm], **size} for algorithm in algorithms]

    def cost(self, demo: bool) -> str:
        size = DEMO if demo else FULL
        runs = len(REGIMES) * len(size["lrs"]) * len(size["seeds"])
        steps = f"batches of {size['batch_size']}, {size['epochs']} times over"
        return f"{size['challenge']}: {runs} runs of {size['tasks']} tasks in {steps}"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        found = sweep(
            rotations(piece, place),
            [REGIMES[regime] for regime in piece["regimes"]],
            piece["lrs"],
            piece["seeds"],
            network=partial(mlp, hidden=(piece["hidden"],) * 2),
            epochs=piece["epochs"],
            batch_size=piece["batch_size"],
            store=place.store,
            data=place.data,
            device=str(place.device),
        )
        rows: list[Row] = []
        for i, run in enumerate(found):
            regime = piece["regimes"][i // (len(piece["lrs"]) * len(piece["seeds"]))]
            R = accuracy_of(run)
            for t in range(1, run.tasks + 1):
                rows.append(
                    {
                        "algorithm": regime,
                        "locality": run.locality,
                        "lr": float(run.lr),
                        "seed": int(run.seed),
                        "t": t,
                        "acc": 100 * average_accuracy(R, t),
                        "forgetting": 100 * average_forgetting(R, t),
                        "learning_accuracy": 100 * learning_accuracy(R[: t + 1, :t]),
                        "distance_from_init": float(run.arrays["distance_from_init"][t - 1]),
                        "update_norm": float(run.arrays["update_norm"][t - 1]),
                    }
                )
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Above, forgetting and accuracy after the last task; below, the way from θ_0 of the two regimes, by task."""
        figure.set_size_inches(8.2, 5.8)
        (left, right), below = figure.subplots(2, 2)
        final, styles, colours = where(rows, t=_last(rows)), pens(rows), rate_colours(rows)
        for axes, name, text in (
            (left, "forgetting", "forgetting $E(T)$ (points)"),
            (right, "acc", r"accuracy in the end $\mathrm{ACC}(T)$ (%)"),
        ):
            over_lr(axes, final, name, styles)
            axes.set_title(text, loc="left")
        shown = [regime for regime in ("plastic", "stable") if regime in names(rows)]
        for axes, regime in zip(below, shown, strict=False):
            _travelled(axes, where(rows, algorithm=regime), colours)
        for axes in below[len(shown) :]:
            axes.set_visible(False)
        below[0].sharey(below[1])
        below[0].set_ylabel(r"$\Vert\theta_t - \theta_0\Vert_2$")
        handles, labels = left.get_legend_handles_labels()
        right.legend(handles, [label.partition(" (")[0] for label in labels], loc="best")
        lrs = distinct(rows, "lr")
        bar = figure.colorbar(colours, ax=list(below), label="learning rate", pad=0.02, ticks=lrs)
        bar.ax.set_yticklabels([f"{lr:g}" for lr in lrs])
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        final = where(rows, t=_last(rows))
        regimes = names(final)
        plastic, stable = (line(where(final, algorithm=a), "forgetting") for a in ("plastic", "stable"))
        common = [lr for lr in plastic.lrs if lr in stable.lrs]
        if not common:
            return ["The plastic and the stable regime cannot be compared: they have no learning rate in common."]
        less = [lr for lr in common if _at(stable, lr) < _at(plastic, lr)]
        said = [
            "Dropout of 0.5 and a rate that decays by 0.8 a task are the stable regime; momentum and a least rate, "
            "which its authors' own code has, are left out.",
            "The paper observes less forgetting in the stable regime at all learning rates. Here it forgets less at "
            f"{len(less)} of {len(common)}: "
            + listed([f"{_at(stable, lr):.1f} points against {_at(plastic, lr):.1f} at {lr:g}" for lr in common])
            + ".",
        ]
        trends = {a: line(where(final, algorithm=a), "forgetting") for a in regimes}
        changes = [f"{x.middle[-1] - x.middle[0]:+.1f} ({a})" for a, x in trends.items() if len(x.lrs) > 1]
        if changes:
            said.append(
                "It says that higher learning rates forget more in both. From the lowest to the highest, it changes by "
                f"{listed(changes)} points."
            )
        said.append(
            "It says that the stable way soon stays in one region: the last step ‖θ_T − θ_{T−1}‖ is, in lengths of the "
            + "second one, "
            + listed([f"{told(_shrunk(where(rows, algorithm=a)))} ({a})" for a in regimes])
            + ", and it ends from θ_0 at "
            + listed([f"{told(mean(where(final, algorithm=a), 'distance_from_init'))} ({a})" for a in regimes])
            + "."
        )
        prices = {a: where(final, algorithm=a) for a in regimes}
        said.append(
            "Over all learning rates, accuracy right after learning and in the end is "
            + listed([f"{mean(x, 'learning_accuracy'):.1f} and {mean(x, 'acc'):.1f} ({a})" for a, x in prices.items()])
            + " %."
        )
        return said + lost(rows, "acc")


def _last(rows: Sequence[Row]) -> int:
    return int(max(distinct(rows, "t")))


def _at(found: Any, lr: float) -> float:
    return float(found.middle[list(found.lrs).index(lr)])


def _shrunk(rows: Sequence[Row]) -> float:
    """How long the last task's step is beside the second task's, which no longer begins at random."""
    second, last = (mean(where(rows, t=t), "update_norm") for t in (min(2, _last(rows)), _last(rows)))
    return last / second if second else np.nan


def _travelled(axes: Axes, rows: Sequence[Row], colours: Any) -> None:
    """‖θ_t − θ_0‖ over t: a thin line for every seed, a thick one through their mean."""
    from matplotlib.ticker import MaxNLocator

    for lr in distinct(rows, "lr"):
        own = where(rows, lr=lr)
        steps = [int(t) for t in distinct(own, "t")]
        for seed in names(own, "seed"):
            way = [mean(where(own, t=t, seed=seed), "distance_from_init") for t in steps]
            axes.plot(steps, way, color=colours.to_rgba(lr), linewidth=0.6, alpha=0.45)
        middle = [mean(where(own, t=t), "distance_from_init") for t in steps]
        axes.plot(steps, middle, color=colours.to_rgba(lr), marker="o", markersize=3, label=f"{lr:g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("task $t$")
    axes.set_title(f"{rows[0]['algorithm']}: distance from the start", loc="left")


STUDIES = (Stability(),)
