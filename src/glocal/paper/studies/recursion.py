r"""Forgetting predicted and measured, for plain SGD over learning rates.

Eq. forgetting-quadratic predicts the forgetting of every pair of tasks, Eq. eqt:forgetting-rec its average. Both are
exact for quadratic losses: a linear network with squared error, in double precision, must agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import one_hot

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.lens.forgetting import Forgetting, forgetting, recursion
from glocal.paper.studies.common import (
    DEMO,
    FULL,
    column,
    distinct,
    drop_nonfinite,
    finite_median,
    integer_ticks,
    item_traces,
    lr_colours,
    make_challenge,
    mean,
    median,
    medians_by,
    split_seeds,
    training_cost,
    where,
)
from glocal.paper.study import Context, Row, Scalar, Summary, WorkItem
from glocal.report.style import COOL, FAINT, WARM, log_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROUNDING = 1e-9
"""The largest relative difference that double precision explains."""
TERMS = {"gradient": "gradient", "quadratic": "Hessian", "remainder": "higher orders"}


class Recursion:
    name = "recursion"
    columns = (
        "network lr seed kind task learnt measured predicted before gradient quadratic v remainder gradient_share "
        "quadratic_share remainder_share"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        return self._networks(demo) if demo else split_seeds(self._networks(demo))

    def _networks(self, demo: bool) -> list[WorkItem]:
        if demo:
            base = DEMO | {"seeds": [0, 1], "examples": 500}
            lrs, linear_lrs = [0.01, 0.03, 0.1, 0.3], [0.001, 0.01]
        else:
            base = FULL | {"seeds": [0, 1, 2, 3, 4], "examples": 2_000}
            lrs, linear_lrs = [0.001, 0.005, 0.01, 0.05, 0.1], [0.0001, 0.001, 0.01]
        # Linear regression is stable below a learning rate given by the inputs' largest second moment.
        linear = {"network": "linear"} | base | {"hidden": [], "lrs": linear_lrs}
        return [{"network": "mlp"} | base | {"lrs": lrs}, linear]

    def cost(self, demo: bool) -> str:
        items = self._networks(demo)
        runs, tasks = sum(len(item["lrs"]) * len(item["seeds"]) for item in items), items[0]["tasks"]
        products = runs * tasks * (tasks - 1) // 2
        return f"{'; '.join(training_cost(item) for item in items)}; {products:,} Hessian products"

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        challenge = make_challenge(item, context)
        linear = item["network"] == "linear"
        rows: list[Row] = []
        for member, trace in item_traces(item, context, regression(challenge) if linear else challenge):
            pairs = forgetting(trace.double() if linear else trace)
            run: Row = {"network": item["network"], "lr": member.lr, "seed": member.seed}
            rows += [run | row for row in (*_pair_rows(pairs), *_average_rows(pairs))]
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Predicted against measured, for both networks; the share of every term; the average over tasks."""
        figure.set_size_inches(10.2, 7.0)
        (pairs, exact), (shares, average) = figure.subplots(2, 2)
        _draw_predictions(pairs, where(rows, network="mlp", kind="pair"))
        pairs.set_title("Every pair of tasks, network with hidden layers", loc="left")
        _draw_predictions(exact, where(rows, network="linear", kind="pair"))
        exact.set_title("Every pair, linear network with squared error", loc="left")
        _draw_shares(shares, where(rows, network="mlp", kind="pair"))
        _draw_average(average, where(rows, network="mlp", kind="average"))

    def summarize(self, rows: Sequence[Row]) -> Summary:
        last = max(distinct(where(rows, kind="average"), "learnt"), default=0)
        table: list[Row] = []
        for network in ("mlp", "linear"):
            for lr in distinct(where(rows, network=network), "lr"):
                own = where(rows, network=network, lr=lr, kind="pair")
                line: Row = {"network": network, "lr": lr, "relative error": median(_relative_errors(own))}
                line |= {f"share, {text}": mean(own, f"{term}_share") for term, text in TERMS.items()}
                end = where(rows, network=network, lr=lr, kind="average", learnt=last)
                line |= {f"E(T), {name}": finite_median(end, name) for name in ("predicted", "measured")}
                table.append(line)
        errors = [column([row], "relative error")[0] for row in where(table, network="mlp")]
        agrees = "agrees" if len(errors) > 1 and errors[0] < errors[-1] else "does not agree"
        gap = exactness_gap(where(rows, network="linear", kind="pair"))
        exact = "exact" if gap < MAX_ROUNDING else "not exact"
        verdict = (
            f"The median relative error of the prediction is {errors[0]:.2g} at the lowest learning rate and "
            f"{errors[-1]:.2g} at the highest: {agrees} with the paper that it holds while learning is local. On "
            f"quadratic losses it is {exact} (error {gap:.1g})."
            if errors
            else "No run of the network with hidden layers."
        )
        return Summary(table, verdict)


STUDIES = (Recursion(),)


def regression(challenge: Challenge) -> Challenge:
    """Return the same tasks with squared error against one-hot targets."""

    def make_task(index: int, seed: int, device: torch.device | None = None) -> Task:
        task = challenge.task(index, seed, device)
        train, test = (Data(d.x, one_hot(d.y, challenge.outputs).float()) for d in (task.train, task.test))
        return Task(train, test, task.classes)

    return replace(challenge, make_task=make_task, loss="squared-error")


def exactness_gap(pairs: Sequence[Row]) -> float:
    """The largest error of the prediction, relative to the largest forgetting; NaN without finite rows."""
    measured, predicted = column(pairs, "measured"), column(pairs, "predicted")
    known = np.isfinite(measured)
    scale = np.abs(measured[known]).max(initial=0)
    return float(np.abs(predicted - measured)[known].max(initial=0) / scale) if scale > 0 else np.nan


def _pair_rows(pairs: Forgetting) -> Iterator[Row]:
    """Task o after task t, both counted from 0, for o < t."""
    matrices = {name: getattr(pairs, name) for name in ("measured", "predicted", "remainder", "gradient", "quadratic")}
    matrices |= {f"{term}_share": share for term, share in pairs.shares.items()}
    for t in range(1, len(pairs.measured)):
        for o in range(t):
            yield _row("pair", task=o, learnt=t + 1, **{name: float(matrix[t, o]) for name, matrix in matrices.items()})


def _average_rows(pairs: Forgetting) -> Iterator[Row]:
    """E(t) over t tasks, and what the update Δ_t adds to it."""
    average = recursion(pairs)
    terms = ("measured", "predicted", "before", "gradient", "quadratic", "v")
    vectors = {name: getattr(average, name) for name in terms}
    vectors |= {"remainder": average.measured - average.predicted}
    for t in range(1, len(pairs.measured)):
        yield _row("average", learnt=t + 1, **{name: float(vector[t]) for name, vector in vectors.items()})


def _row(kind: str, **values: Scalar) -> Row:
    """kind: pair or average. learnt: number of tasks learnt."""
    terms = ("measured", "predicted", "before", "gradient", "quadratic", "v", "remainder")
    shares = ("gradient_share", "quadratic_share", "remainder_share")
    return {"kind": kind} | dict.fromkeys(("task", "learnt", *terms, *shares)) | values


def _relative_errors(rows: Sequence[Row]) -> np.ndarray:
    """|predicted − measured| / |measured|; inf where it is not a number."""
    measured, predicted = column(rows, "measured"), column(rows, "predicted")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.abs(predicted - measured) / np.abs(measured), nan=np.inf, posinf=np.inf)


def _draw_predictions(axes: Axes, rows: Sequence[Row]) -> None:
    """A point for each pair, coloured by learning rate, and the line where prediction and measurement agree."""
    colours = lr_colours(rows)
    for lr in distinct(rows, "lr"):
        x, y = (column(where(rows, lr=lr), name) for name in ("measured", "predicted"))
        axes.scatter(x, y, s=14, color=[colours.to_rgba(np.array(lr))], alpha=0.75, linewidths=0, label=f"{lr:g}")
    limits = _symlog(axes, np.concatenate([column(rows, name) for name in ("measured", "predicted")]), "xy")
    axes.plot(limits, limits, color=FAINT, linewidth=0.9, linestyle=":", zorder=0)
    axes.set(xlim=limits, ylim=limits, xlabel="measured  $L_o(\\theta_t) - L_o(\\theta_o)$", ylabel="predicted")
    legend = axes.legend(title="learning rate", handletextpad=0.2, markerscale=1.6, loc="center left")
    legend.set_bbox_to_anchor((1.01, 0.5))


def _symlog(axes: Axes, values: np.ndarray, which: str) -> tuple[float, float]:
    """Use symmetric logarithmic axes over three decades, since forgetting may be negative; return the limits."""
    from matplotlib.ticker import NullLocator, SymmetricalLogLocator

    known = values[np.isfinite(values)]
    linear = 10.0 ** (np.ceil(np.log10(float(np.abs(known).max(initial=1e-9)))) - 3)
    for name in which:
        getattr(axes, f"set_{name}scale")("symlog", linthresh=linear)
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear))
        axis.set_minor_locator(NullLocator())
    return 1.6 * min(float(known.min(initial=0)), -linear / 2), 1.6 * max(float(known.max(initial=0)), linear)


def _draw_shares(axes: Axes, rows: Sequence[Row]) -> None:
    """The mean share of every term, stacked."""
    lrs = distinct(rows, "lr")
    bottom = np.zeros(len(lrs))
    for (term, label), colour in zip(TERMS.items(), (COOL[2], COOL[0], WARM[1]), strict=True):
        share = np.nan_to_num([mean(where(rows, lr=lr), f"{term}_share") for lr in lrs])
        axes.fill_between(lrs, bottom, bottom + share, color=colour, alpha=0.85, linewidth=0, label=label)
        bottom = bottom + share
    log_lr(axes, lrs)
    axes.set(ylabel="mean share of the magnitudes", ylim=(0, 1), xlim=(lrs[0], lrs[-1]))
    axes.set_title("Terms of forgetting", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.2)


def _draw_average(axes: Axes, rows: Sequence[Row]) -> None:
    """E(t) as measured, and as Eq. eqt:forgetting-rec predicts it."""
    colours, lrs = lr_colours(rows), distinct(rows, "lr")
    values = []
    for lr in dict.fromkeys((lrs[0], lrs[len(lrs) // 2], lrs[-1])):
        colour = colours.to_rgba(np.array(lr))
        for name, dashes in (("measured", "-"), ("predicted", "--")):
            x, y = drop_nonfinite(*medians_by(where(rows, lr=lr), "learnt", name))
            axes.plot(x, y, color=colour, linestyle=dashes, marker="o", markersize=3.5)
            values.append(y)
        axes.plot([], [], color=colour, label=f"learning rate {lr:g}")
    for name, dashes in (("measured", "-"), ("predicted", "--")):
        axes.plot([], [], color=FAINT, linestyle=dashes, label=name)
    axes.set_ylim(_symlog(axes, np.concatenate(values), "y"))
    integer_ticks(axes)
    axes.set(xlabel="tasks learnt  $t$", ylabel="average forgetting  $E(t)$")
    axes.set_title("The average, task by task", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, columnspacing=1.2)
