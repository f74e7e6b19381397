r"""Forgetting and the quadratic approximation: predicted for every pair of tasks, and from the flatness of solutions.

Recursion: Eq. forgetting-quadratic predicts the forgetting of every pair of tasks, Eq. eqt:forgetting-rec its average,
for plain SGD over learning rates. Both are exact for quadratic losses: a linear network with squared error, in double
precision, must agree to rounding.

Flatness (§4, "flatter local minima"): an update Δ forgets ½ Δᵀ H_o Δ: at most ½ λ_max ‖Δ‖², and ½ (tr H_o / P) ‖Δ‖² for
a random direction. So forgetting should grow with λ_max and with the trace as long as learning is local and updates
have one length; over learning rates neither holds. Plain SGD is compared with stable SGD, a regime designed to find
flat solutions. Its authors use batches of 16 for it and of 64 for plain SGD on five rotations; here both have both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.nn.functional import one_hot

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.lens.forgetting import flatness, forgetting, recursion
from glocal.lens.record import RecordedRun
from glocal.paper.studies import common
from glocal.paper.studies.common import RecordedStudy, agreement, column, distinct, group, lr_colours, mean
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.paper.table1 import SEEDS
from glocal.report.style import FAINT

MAX_ROUNDING = 1e-9
"""The largest relative difference that double precision explains."""
RELATIVE_ERROR = (pl.col("predicted") - pl.col("measured")).abs() / pl.col("measured").abs()
TERMS = {"gradient": "gradient", "quadratic": "Hessian", "remainder": "higher orders"}
DASHES = {"measured": "-", "predicted": "--"}


class RecursionStudy(RecordedStudy):
    name = "recursion"
    columns = (
        "network lr seed kind task learnt measured predicted before gradient quadratic v remainder gradient_share "
        "quadratic_share remainder_share"
    )

    def items(self, demo: bool) -> list[WorkItem]:
        base = common.FULL | {"seeds": [0, 1, 2, 3, 4], "examples": 2_000, "lrs": [0.001, 0.005, 0.01, 0.05, 0.1]}
        if demo:
            base = common.DEMO | {"seeds": [0, 1], "examples": 500, "lrs": [0.01, 0.03, 0.1, 0.3]}
        # Linear regression is stable below a learning rate given by the inputs' largest second moment.
        linear = {"hidden": [], "lrs": [0.001, 0.01] if demo else [0.0001, 0.001, 0.01]}
        return [{"network": "mlp"} | base, {"network": "linear"} | base | linear]

    def options(self, item: WorkItem, context: Context) -> dict[str, Any]:
        return {"challenge": regression(common.make_challenge(item, context))} if item["network"] == "linear" else {}

    def measure_run(self, run: RecordedRun, item: WorkItem) -> list[Row]:
        """Rows of pairs, task o after task t > o, and of averages, E(t) and what the update Δ_t adds to it."""
        pairs = forgetting(run.trace.double() if item["network"] == "linear" else run.trace)
        average = recursion(pairs)
        matrices = vars(pairs) | {"predicted": pairs.predicted, "remainder": pairs.remainder}
        matrices |= {f"{term}_share": share for term, share in pairs.shares.items()}
        vectors = vars(average) | {"remainder": average.measured - average.predicted}
        later = range(1, len(pairs.measured))
        rows: list[Row] = [
            {"kind": "pair", "task": o, "learnt": t + 1} | {k: float(matrix[t, o]) for k, matrix in matrices.items()}
            for t in later
            for o in range(t)
        ]
        values = {t: {k: float(vector[t]) for k, vector in vectors.items()} for t in later}
        return rows + [{"kind": "average", "learnt": t + 1} | row for t, row in values.items()]

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Predicted against measured, for both networks; the average over tasks."""
        figure.set_size_inches(12.4, 4.0)
        *panels, average = figure.subplots(1, 3)
        titles = {"mlp": "Every pair of tasks, hidden layers", "linear": "Every pair, linear with squared error"}
        for axes, (network, title) in zip(panels, titles.items(), strict=True):
            pairs = rows.filter(network=network, kind="pair")
            common.plot_agreement(axes, pairs, "measured", "predicted", lr_colours(pairs))
            axes.set(title=title, xlabel=r"measured  $L_o(\theta_t) - L_o(\theta_o)$", ylabel="predicted")
            common.lr_colour_bar(figure, lr_colours(pairs), [axes], pairs)
        _draw_average(average, rows.filter(network="mlp", kind="average"))

    def summarize(self, rows: pl.DataFrame) -> Summary:
        last = rows["learnt"].max()
        sorted_rows = rows.sort("network", "lr", descending=[True, False], maintain_order=True)
        table: list[Row] = []
        for part in sorted_rows.partition_by("network", "lr", maintain_order=True):
            line: Row = part.select("network", "lr").row(0, named=True)
            pairs, end = part.filter(kind="pair"), part.filter(kind="average", learnt=last)
            line |= {"relative error": common.median(column(pairs.select(error=RELATIVE_ERROR), "error"))}
            line |= {f"share, {text}": mean(pairs, f"{term}_share") for term, text in TERMS.items()}
            table.append(line | {f"E(T), {k}": common.finite_median(end, k) for k in ("predicted", "measured")})
        errors = [row["relative error"] for row in table if row["network"] == "mlp"]
        gap = exactness_gap(rows.filter(network="linear", kind="pair"))
        verdict = (
            f"The median relative error of the prediction is {errors[0]:.2g} at the lowest learning rate and "
            f"{errors[-1]:.2g} at the highest: {agreement(errors[0] < errors[-1])} that it is better where learning is "
            f"local. At the lowest rate it predicts E(T) = {table[0]['E(T), predicted']:.2g} where "
            f"{table[0]['E(T), measured']:.2g} is measured. "
            f"On quadratic losses it is {'exact' if gap < MAX_ROUNDING else 'not exact'} (error {gap:.1g})."
        )
        return Summary(table, verdict)


def regression(challenge: Challenge) -> Challenge:
    """Return the same tasks with squared error against one-hot targets."""

    def make_task(index: int, seed: int, device: torch.device | None = None) -> Task:
        task = challenge.task(index, seed, device)
        train, test = (Data(d.x, one_hot(d.y, challenge.outputs).float()) for d in (task.train, task.test))
        return Task(train, test, task.classes)

    return replace(challenge, make_task=make_task, loss="squared-error")


def exactness_gap(pairs: pl.DataFrame) -> float:
    """The largest error of the prediction, relative to the largest forgetting; NaN without finite rows."""
    finite_pairs = pairs.filter(pl.col("measured").is_finite())
    measured, predicted = column(finite_pairs, "measured"), column(finite_pairs, "predicted")
    scale = np.abs(measured).max(initial=0)
    return float(np.abs(predicted - measured).max(initial=0) / scale) if scale > 0 else np.nan


def _draw_average(axes: Axes, rows: pl.DataFrame) -> None:
    """E(t) as measured, and as Eq. eqt:forgetting-rec predicts it."""
    colours, lrs = lr_colours(rows), distinct(rows, "lr")
    values = []
    for lr in dict.fromkeys((lrs[0], lrs[len(lrs) // 2], lrs[-1])):
        style: dict[str, Any] = {"color": colours.to_rgba(np.array(lr)), "marker": "o", "markersize": 3.5}
        for name, dashes in DASHES.items():
            values.append(common.plot_medians(axes, rows.filter(lr=lr), "learnt", name, linestyle=dashes, **style))
        axes.plot([], [], color=style["color"], label=f"learning rate {lr:g}")
    for name, dashes in DASHES.items():
        axes.plot([], [], color=FAINT, linestyle=dashes, label=name)
    axes.set_ylim(common.symlog(axes, np.concatenate(values), "y"))
    common.integer_ticks(axes)
    axes.set(title="The average, task by task", xlabel="tasks learnt  $t$", ylabel="average forgetting  $E(t)$")
    axes.legend(loc="lower right", ncols=2, columnspacing=1.2)


REGIMES: dict[str, dict[str, float]] = {"sgd": {}, "stable-sgd": {"dropout": 0.5, "decay": 0.8}}
BATCH_SIZES = (16, 64)
FULL: WorkItem = {"challenge": "rotated-mnist", "tasks": 5, "epochs": 5, "hidden": [100, 100], "examples": 2_000}
FULL |= {"lrs": [0.001, 0.005, 0.01, 0.05, 0.1], "seeds": sorted(SEEDS), "steps": 30, "probes": 20}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 3, "epochs": 2, "hidden": [32, 32], "examples": 200}
DEMO |= {"lrs": [0.01, 0.05, 0.2], "seeds": sorted(SEEDS[:2]), "steps": 20, "probes": 10}
PREDICTORS = {
    "λ_max": (r"$\lambda_{\max}(H_o)$", pl.col("top")),
    "trace": (r"$\mathrm{tr}\,H_o$", pl.col("trace")),
    "½ λ_max ‖θ_T − θ_o‖²": (
        r"$\frac{1}{2}\lambda_{\max}\Vert\theta_T-\theta_o\Vert^2$",
        pl.col("top") * pl.col("moved") ** 2 / 2,
    ),
    "‖θ_T − θ_o‖": (r"$\Vert\theta_T-\theta_o\Vert$", pl.col("moved")),
}
"""Symbol and value of every predictor of forgetting."""


class FlatMinima(RecordedStudy):
    name = "flatness"
    columns = "challenge algorithm batch_size lr seed task top top_error trace trace_error after_next at_end moved"

    def items(self, demo: bool) -> list[WorkItem]:
        regimes = [{"algorithm": name, "options": options} for name, options in REGIMES.items()]
        size = DEMO if demo else FULL
        return [regime | {"batch_size": batch} | size for batch in BATCH_SIZES for regime in regimes]

    def measure_run(self, run: RecordedRun, item: WorkItem) -> list[Row]:
        columns = vars(flatness(run.trace, item["steps"], item["probes"]))
        return [{"task": o} | {k: float(v[o]) for k, v in columns.items()} for o in range(item["tasks"])]

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """A point for each solution: forgetting after the last task against its predictors."""
        figure.set_size_inches(14.2, 4.2)
        panels = figure.subplots(1, len(PREDICTORS), sharey=True)
        for axes, (symbol, value) in zip(panels, PREDICTORS.values(), strict=True):
            _scatter(axes, rows.filter(pl.col("at_end").is_finite()).with_columns(x=value))
            axes.set_xlabel(symbol)
        panels[0].set_ylabel(r"forgetting  $L_o(\theta_T) - L_o(\theta_o)$")
        handles, labels = panels[0].get_legend_handles_labels()
        if labels:
            note = "regime and\nlearning rate;\nlarge points:\nlarge batches"
            figure.legend(handles, labels, loc="outside right center", title=note, alignment="left")

    def summarize(self, rows: pl.DataFrame) -> Summary:
        medians = common.of_columns({"λ_max": "top", "forgetting": "at_end", "‖θ_T − θ_o‖": "moved"})
        rows = rows.with_columns(value.alias(name) for name, (_, value) in PREDICTORS.items())
        statistics = common.of_columns({f"ρ with {name}": name for name in PREDICTORS}, _correlation) | medians
        table = group(rows, ["algorithm", "batch_size", "lr"], statistics)
        total_row: Row = {"algorithm": "all", "batch_size": None, "lr": None}
        total_row |= {name: f(rows) for name, f in statistics.items()}
        pairs = paired(rows)
        num_flatter, num_less = (int((pairs[name] > pairs[f"{name}_stable"]).sum()) for name in ("top", "at_end"))
        positive = sum(row["ρ with λ_max"] > 0 for row in table)
        verdict = (
            f"Sharper solutions forget more (ρ with λ_max > 0) in {positive} of {len(table)} combinations of regime, "
            f"batch size and learning rate; at equal batch size stable SGD is flatter than plain SGD in "
            f"{num_flatter} of {len(pairs)} pairs and forgets less in {num_less}: "
            f"{agreement(2 * min(num_flatter, num_less) > len(pairs))} on that."
        )
        return Summary([*table, total_row], verdict)


STUDIES = (RecursionStudy(), FlatMinima())


def paired(rows: pl.DataFrame) -> pl.DataFrame:
    """Join plain and stable solutions of equal batch size, learning rate, seed and task, whose forgetting is finite."""
    plain, stable = (rows.filter(pl.col("at_end").is_finite(), algorithm=name) for name in REGIMES)
    return plain.join(stable, on=["batch_size", "lr", "seed", "task"], suffix="_stable")


def _correlation(rows: pl.DataFrame, name: str) -> float:
    return common.rank_correlation(column(rows, name), column(rows, "at_end"))


def _scatter(axes: Axes, rows: pl.DataFrame) -> None:
    for algorithm, marker in (("sgd", "o"), ("stable-sgd", "X")):
        for lr in distinct(rows, "lr"):
            points = rows.filter(pl.col("x").is_finite(), pl.col("x") > 0, algorithm=algorithm, lr=lr)
            style: dict[str, Any] = {"color": [lr_colours(rows).to_rgba(np.array(lr))], "marker": marker, "alpha": 0.8}
            sizes = 10 + 26 * (column(points, "batch_size") > min(BATCH_SIZES))
            axes.scatter(points["x"], points["at_end"], s=sizes, linewidths=0, label=f"{algorithm} {lr:g}", **style)
    common.log_axis(axes, "x")
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    by_rate = group(rows, ["algorithm", "batch_size", "lr"], common.of_columns({"rho": "x"}, _correlation))
    mean_correlation = mean(pl.DataFrame(by_rate, schema_overrides={"rho": pl.Float64}), "rho") if by_rate else np.nan
    axes.set_title(f"rank correlation {_correlation(rows, 'x'):+.2f}, within settings {mean_correlation:+.2f}")
