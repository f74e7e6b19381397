"""Locality, or the size of a step? Quadratic penalties with implicit steps (docs/experiments/implicit.md).

`laplace` and `optimal-soft` have implicit steps as an option (`glocal.algorithms.implicit`), `ewc` has them only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from glocal.algorithms import Batch, Memory
from glocal.algorithms.ewc import EWC
from glocal.algorithms.implicit import eigenbasis
from glocal.networks.model import Model
from glocal.paper import table1
from glocal.paper.studies import common
from glocal.paper.studies.common import MeanInterval, column, distinct, names
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, legend
from glocal.report.summary import DEFAULT_VIEW, run_statistics
from glocal.tree import Params

FULL: WorkItem = common.FULL | {"batch_size": 128, "seeds": table1.SEEDS, "slots": 4178}
FULL |= {"lrs": [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]}
DEMO: WorkItem = common.DEMO | {"tasks": 3, "epochs": 1, "batch_size": 64, "seeds": table1.SEEDS[:2]}
DEMO |= {"lrs": [0.02, 0.1, 0.5], "slots": 3360}
"""`slots` of er: as many examples as take the memory of optimal-soft."""
REPLAY = "er"
LOW, HIGH, MARGIN = 0.005, 0.1, 2.0
"""The learning rates of the primary statistic, and how many points they may differ by."""


@dataclass(frozen=True)
class ImplicitEWC(EWC):
    """EWC with implicit steps."""

    name: ClassVar[str] = "ewc-implicit"

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        assert batch.lr is not None
        weight = batch.lr * self.penalty
        return {k: g / (1 + weight * memory["fisher"][k]) for k, g in grads.items()}


PENALTIES = ("ewc", "laplace", "optimal-soft")
ALGORITHMS = [*(row for name in PENALTIES for row in (name, f"{name}-implicit")), REPLAY, "sgd"]


class Implicit:
    """A row for every run, and for `optimal-soft` the largest eigenvalue of its penalty after every task."""

    name = "implicit"
    columns = "algorithm locality lr seed acc forgetting learning_accuracy memory_bytes t sharpness"

    def work_items(self, demo: bool) -> list[WorkItem]:
        size = DEMO if demo else FULL
        rows = [{"algorithm": name, **size} for name in ALGORITHMS]
        lr = LOW if LOW in size["lrs"] else size["lrs"][0]
        return [*rows, {"algorithm": "optimal-soft", **size, "lrs": [lr], "sharpness": True, "examples": 1}]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        if item.get("sharpness"):
            return self._measure_sharpness(item, context)
        name, base = item["algorithm"], item["algorithm"].removesuffix("-implicit")
        options = dict(table1.COLUMNS["rotated-mnist"].row(base).options)
        options |= {"slots": item["slots"]} if name == REPLAY else {}
        if name != base and base != "ewc":
            options["implicit"] = True
        algorithm = ImplicitEWC(**options) if name == ImplicitEWC.name else (base, options)
        challenge = common.make_challenge(item, context)
        runs = common.sweep_item(item, context, challenge, [algorithm], network=common.item_mlp(item))
        rows = []
        for run, values in zip(runs, run_statistics(runs, DEFAULT_VIEW), strict=True):
            values["memory_bytes"] = int(run.arrays["memory_bytes"][-1])
            rows.append(common.run_row(self.columns, item, run, values))
        return rows

    def _measure_sharpness(self, item: WorkItem, context: Context) -> list[Row]:
        rows = []
        for member, run in common.record_item(item, context, every_epochs=item["epochs"]):
            memories = {s.finished: s.memory for s in run.snapshots if "hessian" in s.memory}  # the last of each
            for t, memory in memories.items():
                values = {"t": t, "sharpness": largest_eigenvalue(memory["hessian"])}
                rows.append(common.run_row(self.columns, item, member, values))
        return rows

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Final accuracy against the learning rate, and 2 / λ_max after the first and the last task."""
        figure.set_size_inches(7.6, 4.2)
        axes, runs = figure.subplots(), rows.filter(pl.col("sharpness").is_null())
        common.plot_over_lr(axes, runs, "acc", r"final accuracy $\mathrm{ACC}(T)$ (%)")
        for limit in stability_limits(rows).values():
            axes.axvline(limit, color=FAINT, linestyle=":", linewidth=1)
        note = "dotted: 2 / λ_max of the\npenalty of optimal-soft\nafter 1 and T tasks\n"
        legend(figure, common.legend_order(runs), note=note)

    def summarize(self, rows: pl.DataFrame) -> Summary:
        all_runs = rows.filter(pl.col("sharpness").is_null())
        lrs = distinct(all_runs, "lr")
        low, high = (LOW, HIGH) if {LOW, HIGH} <= set(lrs) else (lrs[0], lrs[-1])
        table: list[Row] = []
        replay = best(all_runs, REPLAY)[1]
        for name in names(all_runs):
            runs = all_runs.filter(algorithm=name)
            best_lr, acc = best(all_runs, name)
            row: Row = {"algorithm": name, f"{high:g} − {low:g}": str(MeanInterval.of(differences(runs, low, high)))}
            row |= {f"best − {low:g}": str(MeanInterval.of(acc - accuracies(all_runs, name, low)))}
            row |= {"best accuracy": float(acc.mean()), "at lr": best_lr, f"best − {REPLAY}": "–"}
            if name != REPLAY and len(replay) == len(acc):
                row[f"best − {REPLAY}"] = str(MeanInterval.of(acc - replay))
            row |= {"memory (MB)": common.mean(runs, "memory_bytes") / 1e6}
            table.append(row | {"diverged": f"{len(runs) - len(common.finite(runs, 'acc'))} of {len(runs)}"})
        implicit_differences = differences(all_runs.filter(algorithm="optimal-soft-implicit"), low, high)
        return Summary(table, f"{verdict(implicit_differences, low, high)} {_limits_text(rows)}")


def differences(rows: pl.DataFrame, low: float, high: float) -> np.ndarray:
    """Return the final accuracy at the high learning rate minus that at the low one, for every seed."""
    ends = [rows.filter(lr=lr).sort("seed") for lr in (low, high)]
    return column(ends[1], "acc") - column(ends[0], "acc")


def accuracies(rows: pl.DataFrame, name: str, lr: float) -> np.ndarray:
    """Return the final accuracies of an algorithm by seed; NaN if the run diverged."""
    return column(rows.filter(algorithm=name, lr=lr).sort("seed"), "acc")


def complete(rows: pl.DataFrame, name: str) -> dict[float, np.ndarray]:
    """Return an algorithm's accuracies at the learning rates at which no run diverged."""
    by_lr = {lr: accuracies(rows, name, lr) for lr in distinct(rows, "lr")}
    return {lr: acc for lr, acc in by_lr.items() if acc.size and np.isfinite(acc).all()}


def best(rows: pl.DataFrame, name: str) -> tuple[float, np.ndarray]:
    """Return the learning rate with the best mean accuracy of those at which no run diverged, and its accuracies."""
    by_lr = complete(rows, name)
    if not by_lr:
        return np.nan, np.full(rows["seed"].n_unique(), np.nan)
    best_lr = max(by_lr, key=lambda lr: by_lr[lr].mean())
    return best_lr, by_lr[best_lr]


def answer(found: np.ndarray) -> str:
    """Say by the registered rule if the explicit step is why an algorithm fails, from its paired differences."""
    interval = MeanInterval.of(found)
    if not np.isfinite(found).all() or interval.high < -MARGIN:
        return "no"
    return "yes" if interval.low > -MARGIN else "not decided"


def verdict(found: np.ndarray, low: float, high: float) -> str:
    """Return the registered conclusion from the paired differences of optimal-soft with implicit steps."""
    interval, diverged = MeanInterval.of(found), int((~np.isfinite(found)).sum())
    change = f"changes by {interval} points from the learning rate {low:g} to {high:g}"
    text = f"With implicit steps, the final accuracy of optimal-soft {change}"
    text += f", and {diverged} of {len(found)} pairs diverged" if diverged else ""
    conclusions = {
        "yes": "its failure at high learning rates is one of the explicit step, not of locality",
        "no": "its failure is not one of the step",
        "not decided": "this does not decide",
    }
    return f"{text}: {conclusions[answer(found)]}."


def largest_eigenvalue(factors: Memory) -> float:
    """Return λ_max of a matrix of Kronecker products."""
    return max(float(values.max()) for values in eigenbasis(factors)["values"].values())


def stability_limits(rows: pl.DataFrame) -> dict[int, float]:
    """Return 2 / λ_max of optimal-soft's penalty after the first and the last task, as the median over seeds."""
    sharpness = rows.filter(pl.col("sharpness").is_not_null())
    tasks = distinct(sharpness, "t")
    ends = {int(t): common.finite_median(sharpness.filter(t=t), "sharpness") for t in (tasks[:1] + tasks[-1:])}
    return {t: 2 / value for t, value in ends.items() if value > 0}


def _limits_text(rows: pl.DataFrame) -> str:
    limits = " and ".join(f"{limit:.3g} after task {t}" for t, limit in stability_limits(rows).items())
    explicit_runs = rows.filter(pl.col("sharpness").is_null() & (pl.col("algorithm") == "optimal-soft"))
    diverged_runs = explicit_runs.filter(~pl.col("acc").is_finite())
    counts = [
        f"{len(diverged_runs.filter(lr=lr))} of {len(explicit_runs.filter(lr=lr))} at {lr:g}"
        for lr in distinct(diverged_runs, "lr")
    ]
    return (
        f"2 / λ_max of its penalty is {limits}; runs with explicit steps that diverged, by learning rate: "
        f"{', '.join(counts) or 'none'}."
    )


STUDIES = (Implicit(),)
