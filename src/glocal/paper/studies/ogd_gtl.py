r"""OGD-GTL (appendix, "On the validity of OGD-GTL"): is the true label's gradient enough, and what is lost?

The appendix: where the other labels share 1 − p_y equally, the entry of ∇²_f ℓ = diag(p) − p pᵀ at the true label is
O(1) and all others are O(1/K), so that its gradient alone explains the constraint when K ≫ 1. Measured here are the
entries of networks that were trained on K classes, beside the equal split in closed form; and the forgetting of OGD
with every output's gradients, with the true label's, and with the mean output's, at equal memory: full OGD has K
gradients of an input where the others have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.lens.theorem2 import GroundTruth, equal_split, ground_truth_of
from glocal.metrics import confidence_interval, summary
from glocal.paper.studies.lr_plots import line, listed, log_y, lost, mean, names, order, over_lr, pens, rate_colours
from glocal.paper.studies.row_filters import column, distinct, told, where
from glocal.paper.studies.trained_runs import rotations, watched
from glocal.paper.study import Piece, Place, Row
from glocal.paper.table1 import COLUMNS
from glocal.report.style import FAINT, legend
from glocal.sweeps.sweep import sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = COLUMNS["rotated-mnist"]
ALGORITHMS = ("sgd", "ogd", "ogd-gtl", "ogd-ave", "ogd-published")
CLASSES = (2, 5, 10)
FULL: Piece = {
    "challenge": COLUMN.challenge,
    "tasks": COLUMN.tasks,
    "epochs": COLUMN.epochs,
    "batch_size": COLUMN.batch_size,
    "lrs": COLUMN.lrs,
    "seeds": COLUMN.seeds,
    "examples": COLUMN.train_eval,
    "slots": 500,
}
DEMO: Piece = FULL | {
    "challenge": "rotated-digits",
    "tasks": 3,
    "epochs": 1,
    "lrs": (0.02, 0.1, 0.5),
    "seeds": COLUMN.seeds[:2],
    "examples": 500,
    "slots": 200,
}
CLOSED: Piece = {"part": "equal split", "classes": (2, 3, 5, 10, 20, 50, 100, 200), "confidences": (0.5, 0.9, 0.99)}
ENTRIES = ("confidence", "dominance", "of_trace", "of_squares", "of_total_trace")
RUN = ("acc", "forgetting", "learning_accuracy")


class TrueLabel:
    """Rows of three kinds: entries in closed form, entries of trained networks, forgetting of runs; NaN elsewhere."""

    name = "ogd-gtl"
    columns = (
        "part classes algorithm locality lr seed confidence dominance of_trace of_squares of_total_trace acc "
        "forgetting learning_accuracy"
    )

    def pieces(self, demo: bool) -> list[Piece]:
        size = DEMO if demo else FULL
        entries = [{"part": "entries", "classes": k, **size} for k in CLASSES]
        runs = [{"part": "forgetting", "classes": k, "algorithm": a, **size} for k in CLASSES for a in ALGORITHMS]
        return [CLOSED, *entries, *runs]

    def cost(self, demo: bool) -> str:
        size = DEMO if demo else FULL
        runs = len(CLASSES) * (len(ALGORITHMS) + 1) * len(size["lrs"]) * len(size["seeds"])
        classes = listed([str(k) for k in CLASSES])
        return f"{size['challenge']}: {runs} runs of {size['tasks']} tasks of {classes} classes"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        if piece["part"] == "equal split":
            return [_closed(k, p) for k in piece["classes"] for p in piece["confidences"]]
        challenge = restricted(rotations(piece, place), piece["classes"])
        return _entries(piece, challenge, place) if piece["part"] == "entries" else _runs(piece, challenge, place)

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Above, the entry's weight against K; below, a panel for each K: forgetting beside that of plain SGD with the
        same seed, for angles differ between seeds by more than algorithms do."""
        runs = where(rows, part="forgetting")
        classes = [int(k) for k in distinct(runs, "classes")]
        wide = max(3, len(classes))
        figure.set_size_inches(2.75 * wide + 1.9, 5.8)
        above, below = figure.subplots(2, wide, squeeze=False)
        for axes in (*above[3:], *below[len(classes) :]):
            axes.set_visible(False)
        titles = "true label's entry / next largest", "a sample's share of the trace (%)", "of all squares (%)"
        for axes, name, text in zip(above, ("dominance", "of_trace", "of_squares"), titles, strict=False):
            _against_classes(axes, rows, name, text)
        styles = pens(runs)
        for axes, k in zip(below, classes, strict=False):
            own = where(runs, classes=k)
            over_lr(axes, beside_sgd(own), "forgetting", styles)
            base = line(where(own, algorithm="sgd"), "forgetting").middle
            said = f" (sgd: {base.min():.1f} to {base.max():.1f})" if base.size else ""
            axes.set_title(f"$K = {k}${said}", loc="left")
        below[0].set_ylabel("forgetting − that of sgd (points)")
        legend(figure, order(runs), note="forgetting at\nequal memory\n")

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        entries, runs = where(rows, part="entries"), where(rows, part="forgetting")
        said = []
        if entries:
            each = {int(k): where(entries, classes=k) for k in distinct(entries, "classes")}
            largest = max(each)
            said += [
                "The appendix says that the true label's entry of ∇²_f ℓ is the largest by a factor of the order of K, "
                "K − 1 where a sure network's other labels are equal. Of trained networks it is, in the median, "
                + listed([f"{told(mean(own, 'dominance'))} times the next at K = {k}" for k, own in each.items()])
                + f": {_verdict(mean(each[largest], 'dominance'), largest)}.",
                "It never has more than half of the trace, and has here, over all samples, "
                + listed([f"{100 * mean(own, 'of_total_trace'):.0f} % at K = {k}" for k, own in each.items()])
                + ".",
            ]
        for k in distinct(runs, "classes"):
            said += _compared(where(runs, classes=k), int(k))
        return said + lost(runs, "forgetting")


def restricted(challenge: Challenge, classes: int) -> Challenge:
    """The same tasks with their first classes alone; all of them are the challenge itself."""
    if classes == challenge.outputs:
        return challenge

    def first(data: Data) -> Data:
        kept = data.y < classes
        return Data(data.x[kept], data.y[kept])

    def make_task(index: int, seed: int, device: torch.device | None = None) -> Task:
        whole = challenge.task(index, seed, device)
        return Task(first(whole.train), first(whole.test), tuple(range(classes)))

    options = {**challenge.options, "classes": classes}
    name = f"{challenge.name}-{classes}"
    return replace(challenge, name=name, outputs=classes, make_task=make_task, options=options)


def _row(part: str, classes: int, **known: Any) -> Row:
    """A row with all names: what is not known is NaN, or no name at all."""
    words = {"algorithm": "", "locality": ""}
    values: Row = {"part": part, "classes": int(classes), **words, "lr": np.nan, "seed": -1}
    return values | dict.fromkeys((*ENTRIES, *RUN), np.nan) | known


def _closed(classes: int, confidence: float) -> Row:
    found = equal_split(torch.tensor([confidence], dtype=torch.float64), classes)
    return _row("equal split", classes, **_weights(found))


def _weights(found: GroundTruth) -> dict[str, float]:
    """Medians over the samples, of those whose matrix does not underflow."""
    medians = {name: float(getattr(found, name).nanmedian()) for name in ENTRIES[:-1]}
    return medians | {"of_total_trace": float(found.of_total_trace)}


def _entries(piece: Piece, challenge: Challenge, place: Place) -> list[Row]:
    """At every θ_o of plain SGD, averaged over its tasks."""
    rows = []
    trained: Piece = piece | {"algorithm": "sgd", "options": {}, "hidden": 100}
    for member, subject, _ in watched(trained, challenge, place.device):
        each = [_weights(ground_truth_of(subject, task)) for task in range(challenge.tasks)]
        means = {name: float(np.mean([weights[name] for weights in each])) for name in ENTRIES}
        who = {"algorithm": "sgd", "locality": member.algorithm.locality}
        rows.append(_row("entries", piece["classes"], **who, lr=float(member.lr), seed=int(member.seed), **means))
    return rows


def _runs(piece: Piece, challenge: Challenge, place: Place) -> list[Row]:
    """Runs of the store: those of Table 1 are among them."""
    options = {} if piece["algorithm"] == "sgd" else {"slots": piece["slots"]}
    runs = sweep(
        challenge,
        [(piece["algorithm"], options)],
        piece["lrs"],
        piece["seeds"],
        epochs=piece["epochs"],
        batch_size=piece["batch_size"],
        train_eval=piece["examples"],
        store=place.store,
        data=place.data,
        device=str(place.device),
    )
    rows = []
    for run in runs:
        percent = {name: 100 * summary(run)[name] for name in RUN}
        who = {"algorithm": piece["algorithm"], "locality": run.locality}
        rows.append(_row("forgetting", piece["classes"], **who, lr=float(run.lr), seed=int(run.seed), **percent))
    return rows


def _verdict(dominance: float, classes: int) -> str:
    """Nearer to K − 1 or to 1, in logarithms."""
    if not np.isfinite(dominance):
        return "which is not known"
    if dominance >= np.sqrt(classes - 1):
        return f"as is said, nearer to K − 1 = {classes - 1} than to 1"
    return f"nearer to 1 than to K − 1 = {classes - 1}, for they do not share what is left equally"


def _compared(runs: Sequence[Row], classes: int) -> list[str]:
    """Mean forgetting over learning rates and seeds, and the difference of the two variants, seed by seed."""
    each = {a: mean(where(runs, algorithm=a), "forgetting") for a in names(runs)}
    text = f"At K = {classes} and equal memory, forgetting is " + listed([f"{x:.1f} ({a})" for a, x in each.items()])
    if not {"ogd", "ogd-gtl"} <= each.keys():
        return [f"{text}, over all learning rates."]
    full, label = (where(runs, algorithm=a) for a in ("ogd", "ogd-gtl"))
    seeds = [int(seed) for seed in distinct(runs, "seed")]
    apart = [mean(where(label, seed=s), "forgetting") - mean(where(full, seed=s), "forgetting") for s in seeds]
    apart = [x for x in apart if np.isfinite(x)]
    low, high = confidence_interval(apart)
    sure = f" (95 % interval {_points(low)} to {_points(high)})" if np.isfinite(low) else ""
    difference = float(np.mean(apart)) if apart else np.nan
    verdict = "forgets more" if low > 0 else "forgets less" if high < 0 else "is not settled to forget more or less"
    return [f"{text}: ogd-gtl {verdict} than full OGD, {_points(difference)} points{sure}."]


def _points(difference: float) -> str:
    return f"{difference:+.1f}" if abs(difference) >= 0.1 else f"{difference:+.1g}"


def beside_sgd(runs: Sequence[Row]) -> list[Row]:
    """The runs of one K with their forgetting less that of plain SGD at the same learning rate with the same seed."""
    base = {(row["lr"], row["seed"]): column([row], "forgetting")[0] for row in where(runs, algorithm="sgd")}
    lost = column(runs, "forgetting") - [base.get((row["lr"], row["seed"]), np.nan) for row in runs]
    return [row | {"forgetting": float(x)} for row, x in zip(runs, lost, strict=True)]


def _against_classes(axes: Axes, rows: Sequence[Row], name: str, text: str) -> None:
    """The equal split as lines, one for each confidence; measured networks as points in the colours of their rates."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    factor = 1 if name == "dominance" else 100
    closed, entries = where(rows, part="equal split"), where(rows, part="entries")
    for confidence, dots in zip(distinct(closed, "confidence"), ((1, 1), (4, 1.5), (1, 0)), strict=False):
        own = where(closed, confidence=confidence)
        x, y = column(own, "classes"), factor * column(own, name)
        label = f"equal split, $p_y = {confidence:g}$"
        axes.plot(x, y, color=FAINT, linewidth=1.1, linestyle=(0, dots) if dots[1] else "-", label=label)
    if entries:
        x, y, lr = column(entries, "classes"), factor * column(entries, name), column(entries, "lr")
        colours = rate_colours(entries).to_rgba(lr)
        axes.scatter(x, y, s=16, c=colours, edgecolors="white", linewidths=0.4, zorder=3, label="trained networks")
    axes.set_xscale("log")
    if name == "dominance":
        log_y(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, loc="upper left", labelspacing=0.3, handlelength=2.2)
        note = "brighter points:\nhigher learning rates"
        axes.text(0.97, 0.05, note, transform=axes.transAxes, fontsize=7, color=FAINT, ha="right")
    else:
        axes.set_ylim(0, 104)
    shown = [2, 5, 10, 50, 200]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FixedFormatter([str(k) for k in shown]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("classes $K$")
    axes.set_title(text, loc="left")


STUDIES = (TrueLabel(),)
