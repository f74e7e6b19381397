r"""Theorems 4.1 and 5.1 on trained networks, over learning rates, and OGD-GTL.

Theorem 4.1 (Eq. forgetting-lowerbound) equates E(t) with ½ Δ_tᵀ \bar H_{<t} Δ_t where every θ_o is a minimum, the
solutions are close to each other, and nothing was forgotten before. The last premise always holds after the second
task, since E(1) = 0. The full second-order expansion (Eq. forgetting-quadratic) is measured as well: it only needs the
solutions to be close. Losses are training losses.

Theorem 5.1: OGD's constraint makes Δ_tᵀ G_o Δ_t, the outer-product part of Δ_tᵀ H_o Δ_t, 0 on the inputs whose
gradients it stores, and the proof neglects the functional part of H_o (Eq. eqt:opt-cond-revisited). Measured is what is
left of both on examples that are stored or not, for algorithms that meet the constraint, approximate it, or ignore it.
A longer update has a larger quadratic form in any direction, so its relative curvature Δᵀ H_o Δ / (‖Δ‖² ‖H_o‖) is
measured too; the top eigenvector has 1.

OGD-GTL (appendix): where the other labels share 1 − p_y equally, the entry of ∇²_f ℓ = diag(p) − p pᵀ at the true label
is O(1) and all others are O(1/K), so its gradient alone explains the constraint for K ≫ 1. Measured are the entries of
networks trained on K classes, with the equal split in closed form; and the forgetting of OGD with every output's
gradients, with the true label's, and with the mean output's at equal memory: full OGD stores K gradients per input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from torch import Tensor

from glocal.challenges.challenge import Challenge, Task
from glocal.challenges.split import select_classes
from glocal.lens.forgetting import average, forgetting, measured_forgetting, recursion
from glocal.lens.instruments import task_rows
from glocal.lens.record import RecordedRun
from glocal.lens.theorems import equal_split, ground_truth_of, theorem1, theorem2
from glocal.lens.training_trace import TrainingTrace
from glocal.metrics import confidence_interval, summary
from glocal.paper.studies import common
from glocal.paper.studies.common import column, distinct, finite_median, group, mean, names, of_columns
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.paper.table1 import COLUMNS
from glocal.report.style import FAINT, INK, TITLE_COLOURS, legend

EWC = dict(COLUMNS["rotated-mnist"].row("ewc").options)
DEMO_OPTIONS: dict[str, dict[str, Any]] = {
    "optimal-hard": {"rank": 10, "samples": 500},
    "optimal-soft": {"samples": 500},
    **{name: {"slots": 500} for name in ("ogd", "ogd-gtl", "ogd-published")},
}
FULL: WorkItem = common.TABLE1 | {"examples": 2_000, "steps": 20}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 3, "epochs": 2, "hidden": [22, 22]}
DEMO |= {"lrs": (0.02, 0.1, 0.5), "seeds": FULL["seeds"][:2], "examples": 300, "steps": 10}
FACTOR = 2.0
"""A prediction counts as correct if it is within this factor of E(t)."""
SIDES = ("quadratic", "measured")


class TheoremStudy(common.RecordedStudy):
    """A study of runs of several algorithms that measures some values for every task from the second on."""

    algorithms: ClassVar[dict[str, dict[str, Any]]]  # options by name

    def items(self, demo: bool) -> list[WorkItem]:
        options = {a: o | (DEMO_OPTIONS.get(a, {}) if demo else {}) for a, o in self.algorithms.items()}
        return [{"algorithm": a, "options": o, **(DEMO if demo else FULL)} for a, o in options.items()]


class Theorem1Study(TheoremStudy):
    """Both sides of the theorem and its premises."""

    name = "theorem1"
    columns = (
        "algorithm locality lr seed t "
        "measured quadratic second_order condition relative forgotten gradient_norm lowest reach"
    )
    algorithms: ClassVar = {"sgd": {}, "ewc": EWC, "optimal-hard": {}, "optimal-soft": {}, "ogd": {"slots": 500}}

    def measure_run(self, run: RecordedRun, item: WorkItem) -> list[Row]:
        sides = theorem1(run.trace, steps=item["steps"])
        premises = {"forgotten": sides.max_forgetting, "gradient_norm": sides.max_gradient}
        premises |= {"lowest": sides.min_eigenvalue, "reach": sides.max_distance_cubed}
        columns = vars(sides) | premises | {"second_order": recursion(forgetting(run.trace)).predicted}
        return task_rows(columns, "t")

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """A panel for each algorithm: E(t) against the quadratic form, in runs that did not diverge."""
        finite_rows = common.complete_runs(rows, "measured")
        algorithms = (rows if finite_rows.is_empty() else finite_rows).partition_by("algorithm", maintain_order=True)
        figure.set_size_inches(2.3 * len(algorithms) + 1.0, 2.9)
        panels, colours = figure.subplots(1, len(algorithms), squeeze=False)[0], common.lr_colours(rows)
        for axes, algorithm_rows in zip(panels, algorithms, strict=True):
            _scatter(axes, algorithm_rows, colours)
        panels[0].legend(loc="lower right", handletextpad=0.1, borderpad=0.2)
        panels[0].set_ylabel(r"forgetting $E(t)$, in loss")
        common.lr_colour_bar(figure, colours, panels, rows)

    def summarize(self, rows: pl.DataFrame) -> Summary:
        second = second_task(rows)
        later = common.complete_runs(rows, "measured").filter(pl.col("t") != 2)
        table = group(
            second.sort("lr", maintain_order=True),
            ["lr"],
            {
                **of_columns({"E(2)": "measured", "½ Δᵀ H̄ Δ": "quadratic"}),
                "E(2) < 0 (%)": lambda part: 100 * float((column(part, "measured") < 0).mean()),
                f"within a factor of {FACTOR:g} (%)": lambda part: percent_within(part, "quadratic"),
                "second order within it (%)": lambda part: percent_within(part, "second_order"),
                "rank correlation": lambda part: common.rank_correlation(*(column(part, n) for n in SIDES)),
                **of_columns({"largest ‖∇L_o(θ_o)‖": "gradient_norm"}),
                "largest distance of solutions": lambda part: finite_median(part, "reach") ** (1 / 3),
            },
        )
        if second.is_empty():
            return Summary(table, "No run has a finite loss.")
        verdict = (
            f"The quadratic form of Theorem 4.1 is within a factor of {FACTOR:g} of E(2) in "
            f"{percent_within(second, 'quadratic'):.0f} % of {len(second)} runs."
        )
        if len(later):
            verdict += f" For E(t) after later tasks it is in {percent_within(later, 'quadratic'):.0f} %."
        if note := common.diverged_note(rows, "measured"):
            verdict += f"{note[:-1]}, of E(2) those that had by then."
        return Summary(table, verdict)


def second_task(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows after the second task of all runs that had not diverged by then."""
    return rows.filter(pl.col("measured").is_finite(), t=2)


def percent_within(rows: pl.DataFrame, name: str) -> float:
    """Return how many percent of E(t) are positive and within FACTOR of a column."""
    measured, predicted = column(rows, "measured"), column(rows, name)
    correct = (measured > 0) & (predicted >= measured / FACTOR) & (predicted <= measured * FACTOR)
    return 100 * float(correct.mean())


def _scatter(axes: Axes, rows: pl.DataFrame, colours: ScalarMappable) -> None:
    """Both sides of the theorem: the band is what counts as correct, points with a border are of t = 2."""
    _, highest = common.plot_agreement(axes, rows, *SIDES, colours)
    diagonal = np.linspace(0, highest, 2_000)  # many points: these lines are curved on these axes
    axes.fill_between(diagonal, diagonal / FACTOR, diagonal * FACTOR, color=FAINT, alpha=0.12, linewidth=0)
    x, y = (column(rows.filter(t=2), name) for name in SIDES)
    axes.scatter(x, y, s=22, facecolors="none", edgecolors=INK, linewidths=0.7, label="$t = 2$")
    axes.set_xlim(left=-highest / 1_000)
    axes.set_title(common.label(rows), color=TITLE_COLOURS[rows["locality"][0]])
    axes.set_xlabel(r"$\frac{1}{2}\,\Delta_t^\top \bar H_{<t}\,\Delta_t$")


PANELS = {
    "hessian": r"$\Delta_t^\top H_o\,\Delta_t$",
    "outer": r"its outer-product part $\Delta_t^\top G_o\,\Delta_t$",
    "functional_share": "its functional part's share (%)",
    "length": r"length $\Vert\Delta_t\Vert$",
    "relative": r"curvature $\Delta_t^\top H_o\,\Delta_t\;/\;\Vert\Delta_t\Vert^2\,\Vert H_o\Vert$",
    "forgetting": "forgetting $E(t)$, in loss",
}
HEADINGS = ("Δᵀ H Δ", "Δᵀ G Δ", "functional part (%)", "‖Δ‖", "relative curvature", "E(t)")


class Theorem2Study(TheoremStudy):
    """The quadratic forms of every update, averaged over the tasks before it, and the forgetting."""

    name = "theorem2"
    columns = (
        "algorithm locality lr seed t hessian outer functional functional_share rayleigh relative length forgetting"
    )
    algorithms: ClassVar = {
        "sgd": {},
        "ewc": EWC,
        **{name: {"slots": 2_000} for name in ("ogd", "ogd-gtl", "ogd-published")},
        "optimal-hard": {},
    }

    def measure_run(self, run: RecordedRun, item: WorkItem) -> list[Row]:
        forms, measured = theorem2(run.trace, steps=item["steps"]), average(measured_forgetting(run.trace), "t")
        means = ("hessian", "outer", "functional", "functional_share", "rayleigh", "relative")
        columns = {name: _mean_over_old(getattr(forms, name)) for name in means}
        columns["functional_share"] *= 100
        return task_rows(columns | {"length": forms.lengths, "forgetting": measured}, "t")

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Panels over the learning rate: medians over tasks and seeds, bands over seeds."""
        figure.set_size_inches(10.2, 5.4)
        runs = _by_run(rows)
        for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            common.plot_over_lr(axes, runs, name, title, common.median_range)
            if name not in ("functional_share", "forgetting"):
                common.log_axis(axes)
        legend(figure, common.legend_order(rows), note="medians over tasks\nand seeds; bands\nover seeds\n")

    def summarize(self, rows: pl.DataFrame) -> Summary:
        runs = _by_run(rows)
        table = group(runs, ["algorithm", "lr"], of_columns(dict(zip(HEADINGS, PANELS, strict=True))))
        lr = max(distinct(runs, "lr"))
        ogd, sgd = (runs.filter(algorithm=a, lr=lr) for a in ("ogd", "sgd"))
        if ogd.is_empty() or sgd.is_empty():
            return Summary(table, "Runs of ogd and sgd are needed for a verdict.")
        form, forgetting = (finite_median(ogd, n) / finite_median(sgd, n) for n in ("outer", "forgetting"))
        verdict = (
            f"At learning rate {lr:g} OGD's constraint leaves {form:.2g} of SGD's Δᵀ G Δ on all inputs and "
            f"{forgetting:.2g} of its forgetting; Theorem 5.1 has 0 for both."
        )
        return Summary(table, verdict + common.diverged_note(rows, "hessian"))


def _mean_over_old(pairs: Tensor) -> Tensor:
    """The mean over the tasks o < t of a matrix [t, o], for every t; NaN for the first."""
    old = torch.ones_like(pairs, dtype=torch.bool).tril(-1)
    return torch.where(old, pairs, 0.0).sum(1) / old.sum(1)


def _by_run(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per run: the medians over its tasks; NaN if one of them is NaN."""
    medians = [pl.when(~pl.col(n).is_nan().any()).then(pl.col(n).median()).otherwise(np.nan).alias(n) for n in PANELS]
    return rows.group_by("algorithm", "locality", "lr", "seed", maintain_order=True).agg(medians)


VARIANTS = ("sgd", "ogd", "ogd-gtl", "ogd-ave", "ogd-published")
CLASSES = (2, 5, 10)
GTL_FULL: WorkItem = common.TABLE1 | {"examples": 2_000, "slots": 500}
GTL_DEMO: WorkItem = GTL_FULL | {"challenge": "rotated-digits", "tasks": 3, "epochs": 1, "lrs": (0.02, 0.1, 0.5)}
GTL_DEMO |= {"seeds": GTL_FULL["seeds"][:2], "examples": 500, "slots": 200}
CLOSED: WorkItem = {"part": "equal split", "classes": (2, 3, 5, 10, 20, 50, 100, 200), "confidences": (0.5, 0.9, 0.99)}
ENTRIES = ("confidence", "dominance", "of_trace", "of_squares", "of_total_trace")
RUN = ("acc", "forgetting", "learning_accuracy")
UNKNOWN: Row = {"algorithm": "", "locality": "", "lr": np.nan, "seed": -1}
UNKNOWN |= dict.fromkeys((*ENTRIES, *RUN), np.nan)


class TrueLabel:
    """Rows of three parts: entries in closed form, entries of trained networks, forgetting of runs; NaN elsewhere."""

    name = "ogd-gtl"
    columns = f"part classes algorithm locality lr seed {' '.join(ENTRIES)} {' '.join(RUN)}"

    def work_items(self, demo: bool) -> list[WorkItem]:
        size = GTL_DEMO if demo else GTL_FULL
        entries = [{"part": "entries", "classes": k, **size} for k in CLASSES]
        runs = [{"part": "forgetting", "classes": k, "algorithm": a, **size} for k in CLASSES for a in VARIANTS]
        return [CLOSED, *entries, *runs]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        if item["part"] == "equal split":
            cases = [(k, torch.tensor([p], dtype=torch.float64)) for k in item["classes"] for p in item["confidences"]]
            base_rows: list[Row] = [{"part": "equal split", "classes": k} for k, _ in cases]
            return [row | UNKNOWN | equal_split(p, k).medians() for row, (k, p) in zip(base_rows, cases, strict=True)]
        challenge = restrict_classes(common.make_challenge(item, context), item["classes"])
        item = UNKNOWN | {"algorithm": "sgd"} | item
        if item["part"] == "entries":
            recorded_runs = common.record_item(item, context, challenge)
            return [common.run_row(self.columns, item, m, _mean_entries(run.trace)) for m, run in recorded_runs]
        algorithm = item["algorithm"], {} if item["algorithm"] == "sgd" else {"slots": item["slots"]}
        runs = common.sweep_item(item, context, challenge, [algorithm], train_eval=item["examples"])
        return [common.run_row(self.columns, item, run, {k: 100 * summary(run)[k] for k in RUN}) for run in runs]

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
            axes.set_title(title)
        for axes, k in zip(bottom, classes, strict=True):
            class_runs = runs.filter(classes=k)
            base = common.curve(class_runs.filter(algorithm="sgd"), "forgetting").middle
            note = f" (sgd: {base.min():.1f} to {base.max():.1f})" if base.size else ""
            common.plot_over_lr(axes, relative_to_sgd(class_runs), "forgetting", f"$K = {k:g}${note}")
        bottom[0].set_ylabel("forgetting − that of sgd (points)")
        legend(figure, common.legend_order(runs), note="forgetting at\nequal memory\n")

    def summarize(self, rows: pl.DataFrame) -> Summary:
        runs, table, parts = rows.filter(part="forgetting"), [], []
        for k in distinct(runs, "classes"):
            class_runs, entries = runs.filter(classes=k), rows.filter(part="entries", classes=k)
            line: Row = {"classes": int(k)}
            line |= {f"forgetting, {a}": mean(class_runs.filter(algorithm=a), "forgetting") for a in names(runs)}
            line |= {"entry / next": mean(entries, "dominance")}
            table.append(line | {"% of the trace": 100 * mean(entries, "of_total_trace")})
            low, high = confidence_interval(variant_differences(class_runs))
            sign = "more" if low > 0 else "less" if high < 0 else "neither more nor less (95 % interval)"
            parts.append(f"{sign} at K = {k:g}")
        verdict = f"OGD-GTL forgets {', '.join(parts)} than full OGD at equal memory."
        return Summary(table, verdict + common.diverged_note(runs, "forgetting"))


STUDIES = (Theorem1Study(), Theorem2Study(), TrueLabel())


def restrict_classes(challenge: Challenge, classes: int) -> Challenge:
    """Return the same tasks with their first classes only."""
    if classes == challenge.outputs:
        return challenge

    def make_task(index: int, seed: int, device: torch.device | None = None) -> Task:
        task, labels = challenge.task(index, seed, device), tuple(range(classes))
        return Task(select_classes(task.train, labels), select_classes(task.test, labels), labels)

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
    seeds = [seed_runs for _, seed_runs in runs.group_by("seed", maintain_order=True)]
    label, full = (
        [mean(seed_runs.filter(algorithm=a), "forgetting") for seed_runs in seeds] for a in ("ogd-gtl", "ogd")
    )
    differences = np.subtract(label, full)
    return differences[np.isfinite(differences)].tolist()


def _mean_entries(trace: TrainingTrace) -> dict[str, float]:
    """The entries at every θ_o, averaged over tasks."""
    tasks = [ground_truth_of(trace, task).medians() for task in range(len(trace.tasks))]
    return {name: float(np.mean([entries[name] for entries in tasks])) for name in ENTRIES}


def _draw_entries(axes: Axes, rows: pl.DataFrame, name: str) -> None:
    """The equal split as lines, one for each confidence; trained networks as points coloured by learning rate."""
    factor = 1 if name == "dominance" else 100
    closed, entries = rows.filter(part="equal split"), rows.filter(part="entries")
    for confidence, dashes in zip(distinct(closed, "confidence"), ((0, (1, 1)), (0, (4, 1.5)), "-"), strict=False):
        confidence_rows = closed.filter(confidence=confidence)
        style: dict[str, Any] = {"color": FAINT, "linewidth": 1.1, "label": f"equal split, $p_y = {confidence:g}$"}
        axes.plot(confidence_rows["classes"], factor * confidence_rows[name], linestyle=dashes, **style)
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
