r"""OGD-GTL (appendix, "On the validity of OGD-GTL"): is the true label's gradient enough, and what is lost?

The appendix: where the other labels share 1 − p_y equally, the entry of ∇²_f ℓ = diag(p) − p pᵀ at the true label is
O(1) and all others are O(1/K), so its gradient alone explains the constraint for K ≫ 1. Measured are the entries of
networks trained on K classes, with the equal split in closed form; and the forgetting of OGD with every output's
gradients, with the true label's, and with the mean output's at equal memory: full OGD stores K gradients per input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.lens.theorems import GroundTruth, equal_split, ground_truth_of
from glocal.metrics import confidence_interval, summary
from glocal.paper.studies import common
from glocal.paper.studies.common import column, curve, distinct, mean, names, run_row
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, legend

ALGORITHMS = ("sgd", "ogd", "ogd-gtl", "ogd-ave", "ogd-published")
CLASSES = (2, 5, 10)
FULL: WorkItem = common.TABLE1 | {"examples": 2_000, "slots": 500}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 3, "epochs": 1, "lrs": (0.02, 0.1, 0.5)}
DEMO |= {"seeds": FULL["seeds"][:2], "examples": 500, "slots": 200}
CLOSED: WorkItem = {"part": "equal split", "classes": (2, 3, 5, 10, 20, 50, 100, 200), "confidences": (0.5, 0.9, 0.99)}
ENTRIES = ("confidence", "dominance", "of_trace", "of_squares", "of_total_trace")
RUN = ("acc", "forgetting", "learning_accuracy")


class TrueLabel:
    """Rows of three parts: entries in closed form, entries of trained networks, forgetting of runs; NaN elsewhere."""

    name = "ogd-gtl"
    columns = f"part classes algorithm locality lr seed {' '.join(ENTRIES)} {' '.join(RUN)}"

    def work_items(self, demo: bool) -> list[WorkItem]:
        size = DEMO if demo else FULL
        entries = [{"part": "entries", "classes": k, **size} for k in CLASSES]
        runs = [{"part": "forgetting", "classes": k, "algorithm": a, **size} for k in CLASSES for a in ALGORITHMS]
        return [CLOSED, *entries, *runs]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        if item["part"] == "equal split":
            cases = [(k, torch.tensor([p], dtype=torch.float64)) for k in item["classes"] for p in item["confidences"]]
            return [_row("equal split", k, **_medians(equal_split(p, k))) for k, p in cases]
        challenge = restrict_classes(common.make_challenge(item, context), item["classes"])
        rows = _entry_rows if item["part"] == "entries" else _forgetting_rows
        return rows(item, challenge, context)

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Top: the entry's weight against K. Bottom: a panel for each K with forgetting relative to plain SGD with the
        same seed, since angles differ between seeds by more than algorithms do."""
        runs = rows.filter(part="forgetting")
        classes = distinct(runs, "classes")
        figure.set_size_inches(2.75 * max(3, len(classes)) + 1.9, 5.8)
        upper, lower = figure.subfigures(2, 1, squeeze=False)[:, 0]
        top, bottom = upper.subplots(1, 3), lower.subplots(1, len(classes), squeeze=False)[0]
        titles = "true label's entry / next largest", "a sample's share of the trace (%)", "of all squares (%)"
        for axes, name, title in zip(top, ("dominance", "of_trace", "of_squares"), titles, strict=True):
            _draw_entries(axes, rows, name)
            axes.set_title(title, loc="left")
        for axes, k in zip(bottom, classes, strict=True):
            own = runs.filter(classes=k)
            common.plot_over_lr(axes, relative_to_sgd(own), "forgetting")
            base = curve(own.filter(algorithm="sgd"), "forgetting").middle
            note = f" (sgd: {base.min():.1f} to {base.max():.1f})" if base.size else ""
            axes.set_title(f"$K = {k:g}${note}", loc="left")
        bottom[0].set_ylabel("forgetting − that of sgd (points)")
        legend(figure, common.legend_order(runs), note="forgetting at\nequal memory\n")

    def summarize(self, rows: pl.DataFrame) -> Summary:
        runs, table, parts = rows.filter(part="forgetting"), [], []
        for k in distinct(runs, "classes"):
            own, entries = runs.filter(classes=k), rows.filter(part="entries", classes=k)
            line: Row = {"classes": int(k)}
            line |= {f"forgetting, {a}": mean(own.filter(algorithm=a), "forgetting") for a in names(runs)}
            line |= {"entry / next": mean(entries, "dominance")}
            table.append(line | {"% of the trace": 100 * mean(entries, "of_total_trace")})
            low, high = confidence_interval(variant_differences(own))
            sign = "more" if low > 0 else "less" if high < 0 else "neither more nor less (95 % interval)"
            parts.append(f"{sign} at K = {k:g}")
        verdict = f"OGD-GTL forgets {', '.join(parts)} than full OGD at equal memory."
        return Summary(table, verdict + common.diverged_note(runs, "forgetting"))


STUDIES = (TrueLabel(),)


def restrict_classes(challenge: Challenge, classes: int) -> Challenge:
    """Return the same tasks with their first classes only."""
    if classes == challenge.outputs:
        return challenge

    def first(data: Data) -> Data:
        kept = data.y < classes
        return Data(data.x[kept], data.y[kept])

    def make_task(index: int, seed: int, device: torch.device | None = None) -> Task:
        task = challenge.task(index, seed, device)
        return Task(first(task.train), first(task.test), tuple(range(classes)))

    options = {**challenge.options, "classes": classes}
    name = f"{challenge.name}-{classes}"
    return replace(challenge, name=name, outputs=classes, make_task=make_task, options=options)


def relative_to_sgd(runs: pl.DataFrame) -> pl.DataFrame:
    """Subtract the forgetting of plain SGD at the same learning rate and seed, for the runs of one K."""
    keys = ["lr", "seed"]
    base = runs.filter(algorithm="sgd").select(*keys, base="forgetting")
    joined = runs.join(base, on=keys, how="left", maintain_order="left")
    return joined.with_columns(forgetting=pl.col("forgetting") - pl.col("base"))


def variant_differences(runs: pl.DataFrame) -> list[float]:
    """Return the forgetting of OGD-GTL minus that of full OGD for every seed, averaged over learning rates."""
    seeds = [own for _, own in runs.group_by("seed", maintain_order=True)]
    label, full = ([mean(own.filter(algorithm=a), "forgetting") for own in seeds] for a in ("ogd-gtl", "ogd"))
    differences = np.subtract(label, full)
    return differences[np.isfinite(differences)].tolist()


def _row(part: str, classes: int, **known: Any) -> Row:
    """Return a row with all columns; unknown numbers are NaN."""
    row: Row = {"part": part, "classes": classes, "algorithm": "", "locality": "", "lr": np.nan, "seed": -1}
    return row | dict.fromkeys((*ENTRIES, *RUN), np.nan) | known


def _medians(entries: GroundTruth) -> dict[str, float]:
    """Medians over the samples whose matrix does not underflow."""
    medians = {name: float(getattr(entries, name).nanmedian()) for name in ENTRIES[:-1]}
    return medians | {"of_total_trace": float(entries.of_total_trace)}


def _entry_rows(item: WorkItem, challenge: Challenge, context: Context) -> list[Row]:
    """At every θ_o of plain SGD, averaged over tasks."""
    rows = []
    for member, trace in common.item_traces(item | {"algorithm": "sgd"}, context, challenge):
        tasks = [_medians(ground_truth_of(trace, task)) for task in range(challenge.tasks)]
        means = {name: float(np.mean([weights[name] for weights in tasks])) for name in ENTRIES}
        rows.append(_row("entries", item["classes"], **run_row(member, "sgd"), **means))
    return rows


def _forgetting_rows(item: WorkItem, challenge: Challenge, context: Context) -> list[Row]:
    """Runs of the store, among them those of Table 1."""
    algorithm = item["algorithm"], {} if item["algorithm"] == "sgd" else {"slots": item["slots"]}
    rows = []
    for run in common.sweep_item(item, context, challenge, [algorithm], train_eval=item["examples"]):
        percent = {name: 100 * summary(run)[name] for name in RUN}
        rows.append(_row("forgetting", item["classes"], **run_row(run, item["algorithm"]), **percent))
    return rows


def _draw_entries(axes: Axes, rows: pl.DataFrame, name: str) -> None:
    """The equal split as lines, one for each confidence; trained networks as points coloured by learning rate."""
    factor = 1 if name == "dominance" else 100
    closed, entries = rows.filter(part="equal split"), rows.filter(part="entries")
    for confidence, dashes in zip(distinct(closed, "confidence"), ((0, (1, 1)), (0, (4, 1.5)), "-"), strict=False):
        own = closed.filter(confidence=confidence)
        style: dict[str, Any] = {"color": FAINT, "linewidth": 1.1, "linestyle": dashes}
        label = f"equal split, $p_y = {confidence:g}$"
        axes.plot(own["classes"], factor * own[name], **style, label=label)
    if len(entries):
        style = {"c": common.lr_colours(entries).to_rgba(column(entries, "lr")), "edgecolors": "white"}
        style |= {"s": 16, "linewidths": 0.4, "zorder": 3, "label": "trained networks"}
        axes.scatter(entries["classes"], factor * entries[name], **style)
    axes.set_xscale("log")
    if name == "dominance":
        common.log_axis(axes)
        axes.legend(fontsize=7, loc="upper left", labelspacing=0.3, handlelength=2.2)
        note = "brighter points:\nhigher learning rates"
        axes.text(0.97, 0.05, note, transform=axes.transAxes, fontsize=7, color=FAINT, ha="right")
    else:
        axes.set_ylim(0, 104)
    axes.set_xticks(ticks := [2, 5, 10, 50, 200], [str(k) for k in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("classes $K$")
