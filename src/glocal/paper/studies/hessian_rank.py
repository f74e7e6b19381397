r"""The rank of the average Hessian \bar H_{<t} = (1/t) Σ_{o<t} H_o as tasks are learnt (§4.1; Figure 4): the dimension
of the space in which an update forgets.

Plain SGD on rotations, with a network so small that Hessians are dense matrices in double precision. The result depends
on what counts as zero, so all definitions of `lens.rank` are shown: |λ| above thresholds, above fractions of the
largest, effective rank, participation ratio; and the numerical rank in single precision, |λ| > P ε |λ|_max with
ε = 2⁻²³, as in torch.linalg.matrix_rank. The paper names no learning rate; 0.1 is its highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from glocal.lens.rank import THRESHOLDS, Ranks, rank
from glocal.networks import MLP
from glocal.paper.studies.common import (
    column,
    distinct,
    drop_nonfinite,
    finite,
    item_traces,
    power_law,
    training_cost,
    where,
)
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.paper.table1 import SEEDS
from glocal.report.style import COOL, FAINT, INK, MARKERS, WARM, LineStyle

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

FULL: WorkItem = {"challenge": "rotated-mnist", "tasks": 5, "epochs": 5, "batch_size": 128, "lrs": [0.1]}
FULL |= {"hidden": [22, 22], "pool": 1, "examples": 2_000}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "hidden": [16, 16], "pool": 4, "examples": 500}
NAMES = {"numerical": "numerical rank", "effective": "effective rank", "participation": "participation ratio"}


class PooledMLP(nn.Module):
    """An MLP on images average-pooled by `pool`."""

    def __init__(self, shape: Sequence[int], outputs: int, pool: int, hidden: Sequence[int]) -> None:
        super().__init__()
        channels, height, width = shape
        self.pool, self.network = pool, MLP(channels * (height // pool) * (width // pool), outputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(avg_pool2d(x, self.pool))


class HessianRank:
    name = "hessian-rank"
    columns = "challenge seed lr parameters tasks kind threshold rank top"

    def work_items(self, demo: bool) -> list[WorkItem]:
        return [DEMO | {"seeds": [s]} for s in SEEDS[:3]] if demo else [FULL | {"seeds": [s]} for s in SEEDS]

    def cost(self, demo: bool) -> str:
        items = self.work_items(demo)
        item, parameters = items[0], "1,242" if demo else "18,006"
        return (
            f"{training_cost(item, len(items))}; eigenvalues of {len(items) * item['tasks']} dense Hessians of "
            f"{parameters} parameters on {item['examples']:,} examples"
        )

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        network = partial(PooledMLP, pool=item["pool"], hidden=item["hidden"])
        rows: list[Row] = []
        for member, trace in item_traces(item, context, network=network):
            numerical = trace.num_params * torch.finfo(torch.float32).eps
            ranks = rank(trace.double(), relative=(*THRESHOLDS, numerical))
            run: Row = {"challenge": item["challenge"], "seed": member.seed, "lr": member.lr}
            run |= {"parameters": trace.num_params}
            rows += [run | row for row in _rows(ranks)]
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Ranks against the number of tasks in the average: means and ranges over seeds; and relative growth."""
        figure.set_size_inches(11.2, 4.6)
        first, seeds, most = rows[0], len(distinct(rows, "seed")), int(max(distinct(rows, "tasks")))
        title = f"{first['challenge']} · {most} tasks · {first['parameters']:,} parameters · {seeds} seeds"
        figure.suptitle(f"{title} · plain SGD, learning rate {first['lr']:g}", x=0.012, ha="left", fontweight="bold")
        left, middle, right = figure.subplots(1, 3)
        for definition, style in _styles(rows).items():
            axes = left if definition.kind == "absolute" else middle
            tasks, mean, low, high = definition.curve(rows)
            line = {**style.line(), **style.point(), "markersize": 4.5}
            axes.plot(*drop_nonfinite(tasks, mean), **line, label=definition.label)
            axes.fill_between(tasks, low, high, color=style.colour, alpha=0.14, linewidth=0)
            if np.isfinite(mean[0]) and mean[0] > 0:
                right.plot(*drop_nonfinite(tasks, mean / mean[0]), **line)
        right.plot([1, most], [1, most], color=FAINT, linestyle=":", linewidth=1.2)
        right.annotate("linear", (most, most), (-4, 0), textcoords="offset points", color=FAINT, ha="right")
        left.set_ylabel(r"rank of $\bar H_{<t}$")
        titles = r"eigenvalues with larger $|\lambda|$", "independent of the scale", "growth"
        for axes, text in zip((left, middle, right), titles, strict=True):
            axes.set_title(text, loc="left")
            axes.set_xlabel("tasks in the average, $t - 1$")
            axes.set_xticks(range(1, most + 1))
        right.set_ylabel("rank relative to the first")
        for axes in (panel for panel in (left, middle) if panel.lines):
            if axes.dataLim.height > 0:  # a logarithmic axis needs a positive value
                axes.set_yscale("log", nonpositive="mask")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, handlelength=2.6)

    def summarize(self, rows: Sequence[Row]) -> Summary:
        parameters = column(rows, "parameters")[0]
        table: list[Row] = []
        for definition in _definitions(rows):
            tasks, mean, _, _ = definition.curve(rows)
            line: Row = {"definition": definition.label, "after 1 task": mean[0], f"after {tasks[-1]:.0f}": mean[-1]}
            line |= {"% of parameters": 100 * mean[-1] / parameters, "exponent": power_law(tasks, mean)}
            table.append(line)
        exponents = finite(table, "exponent")
        sublinear = int((exponents < 1).sum())
        agrees = "agrees" if sublinear == len(exponents) else "does not agree"
        verdict = (
            f"By {sublinear} of {len(exponents)} definitions the rank grows less than linearly with the tasks, with "
            f"exponents of {exponents.min():.2f} to {exponents.max():.2f}: {agrees} with the paper."
            if len(exponents)
            else "No rank is finite."
        )
        return Summary(table, verdict)


STUDIES = (HessianRank(),)


class Definition(NamedTuple):
    """A kind of rank and its threshold."""

    kind: str
    threshold: float | None

    @property
    def label(self) -> str:
        if self.kind in NAMES:
            return NAMES[self.kind]
        return f"|λ| > {self.threshold:g}" + (" of the largest" if self.kind == "relative" else "")

    def curve(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the number of tasks, and the mean, lowest and highest finite rank over seeds."""
        own = where(rows, kind=self.kind, threshold=self.threshold)
        points = []
        for tasks in distinct(own, "tasks"):
            known = finite(where(own, tasks=tasks), "rank")
            points.append((tasks, *((known.mean(), known.min(), known.max()) if known.size else (np.nan,) * 3)))
        return np.array(points).T


def _rows(ranks: Ranks) -> list[Row]:
    """A row for each number of tasks and each definition."""
    *fractions, numerical = ranks.relative
    definitions = [("absolute", x, estimate) for x, estimate in ranks.absolute.items()]
    definitions += [("relative", x, ranks.relative[x]) for x in fractions]
    definitions += [("numerical", numerical, ranks.relative[numerical])]
    others = [("effective", None, ranks.effective), ("participation", None, ranks.participation)]
    rows: list[Row] = []
    for kind, threshold, estimate in [*definitions, *others]:
        for tasks in range(len(ranks.top)):
            row: Row = {"tasks": tasks + 1, "kind": kind, "threshold": threshold}
            rows.append(row | {"rank": float(estimate.value[tasks]), "top": float(ranks.top[tasks])})
    return rows


def _definitions(rows: Sequence[Row]) -> list[Definition]:
    return list(dict.fromkeys(Definition(str(row["kind"]), row["threshold"]) for row in rows))  # type: ignore[arg-type]


def _styles(rows: Sequence[Row]) -> dict[Definition, LineStyle]:
    """Cool for thresholds, warm for fractions of the largest, dark for the others."""
    styles: dict[Definition, LineStyle] = {}
    for definition in _definitions(rows):
        hues, dashes = {"absolute": (COOL, "-"), "relative": (WARM, "--")}.get(
            definition.kind, ((INK, FAINT, WARM[4]), "-.")
        )
        index = sum(style.dashes == dashes for style in styles.values())
        styles[definition] = LineStyle(hues[index], dashes, MARKERS["local" if dashes == "--" else "global"][index])
    return styles
