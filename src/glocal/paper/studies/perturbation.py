r"""The perturbation score around every task's solution (Eq. score-ptb; §6.2, Figures 3 and 5): how far from a solution
the loss changes more along the Hessian's eigenvectors than along random directions.

Plain SGD learns the tasks at the learning rate whose task losses are lowest at the solutions. It is trained once: the
store keeps the states after every task, and every task is a work item.

Far from its solution a network with BatchNorm depends on the statistics that it uses: the running statistics of
training, as at test time ("running"), or those of the current batch ("batch"). The first are used at all tasks, the
second at a few.

A score is a mean of ratios and becomes very large if the loss hardly changes along one random direction, so the figure
and the summary show medians over tasks and directions.

The published figures compute the Hessian on a task's first 2,000 examples, and divide the sum of test losses by the
number of training batches. Here examples are spread over the whole task, losses are means over their own examples, and
all losses are in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from torch import nn
from torch.nn.functional import avg_pool2d

from glocal import challenges
from glocal.challenges.challenge import Data
from glocal.engine.cohort import seeded_network
from glocal.engine.loader import evenly_spaced
from glocal.errors import require
from glocal.lens.inputs import trace_checkpoints
from glocal.lens.perturbation import RADII, Kind, Perturbation, Split, perturbation, with_batch_statistics
from glocal.lens.trace import TrainingTrace
from glocal.networks import ResNet18
from glocal.networks.model import MakeNetwork
from glocal.networks.preprocess import InputTransform
from glocal.paper import table1
from glocal.paper.studies.common import column, distinct, drop_nonfinite, names, sweep_item, where
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import COOL, FAINT, WARM, LineStyle
from glocal.store.run import Run
from glocal.sweeps import resolve
from glocal.sweeps.resume import ProgressReporter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

SPLITS: tuple[Split, ...] = ("train", "test")
KINDS: tuple[Kind, ...] = ("eigen", "random")
STATISTICS = {
    "running": "BatchNorm with running statistics",
    "batch": "BatchNorm with batch statistics",
    "none": "no BatchNorm",
}
ABOUT_ONE = 3.0
"""A score between 1/3 and 3 counts as 1; curves span many decades."""


class SmallResNet18(nn.Module):
    """ResNet-18 with 4 channels instead of 64, on images of half the size, for the demo."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.network = ResNet18(shape[0], outputs, width=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(avg_pool2d(x, 2))


class RadiusCurve(NamedTuple):
    """Medians over tasks and directions for every radius, and the range of the middle 80 %."""

    radii: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class PerturbationScore:
    name: str
    full: WorkItem
    small: WorkItem
    statistics: str
    batch_tasks: int
    """Number of tasks measured with batch statistics as well; at most one in the demo."""
    returns_to_one: bool
    """Whether the score falls to 1 far from the solution, according to the paper."""
    columns: ClassVar = (
        "challenge network statistics seed task parameters lr split kind direction base eigenvalue residual radius "
        "loss score known"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        base = self.small if demo else self.full
        tasks = {self.statistics: base["tasks"], "batch": min(self.batch_tasks, 1 if demo else base["tasks"])}
        return [base | {"statistics": s, "task": t} for s, count in tasks.items() for t in range(count)]

    def cost(self, demo: bool) -> str:
        item, times = self.small if demo else self.full, len(self.work_items(demo))
        learnt = f"{item['tasks']} tasks of {item['challenge']}, {item['epochs']} epochs each"
        losses = 2 * len(RADII) * (item["eigenvectors"] + item["directions"])
        runs = "1 run" if len(item["lrs"]) == 1 else f"{len(item['lrs'])} runs"
        return (
            f"{runs} of {learnt}; {times} times 60 Hessian products on {item['samples']:,} examples "
            f"and {losses} losses on {item['examples']:,}"
        )

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        run = _train(item, context)
        trace, test = _solution(run, item, context)
        sizes = {k: item[k] for k in ("eigenvectors", "directions", "samples", "examples")}
        scores = perturbation(trace, 0, test, **sizes, seed=item["seed"] + item["task"])
        keys: Row = {k: item[k] for k in ("challenge", "network", "statistics", "seed", "task")}
        keys |= {"parameters": sum(p.numel() for p in trace.checkpoints[0].params.values()), "lr": run.lr}
        return [keys | row for row in _rows(scores)]

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Top: scores. Bottom: losses. On training and test data, with a section for each kind of statistics."""
        first = rows[0]
        kinds = [s for s in STATISTICS if where(rows, statistics=s)]
        figure.set_size_inches(1.2 + 6.2 * len(kinds), 6.2)
        network = f"{first['network']}, {first['parameters']:,} parameters"
        title = f"{first['challenge']} · {network} · plain SGD, learning rate {first['lr']:g}"
        figure.suptitle(title, x=0.012, ha="left", fontweight="bold")
        for kind, section in zip(kinds, figure.subfigures(1, len(kinds), squeeze=False)[0], strict=True):
            own = where(rows, statistics=kind)
            tasks = f"{len(distinct(own, 'task'))} tasks"
            section.suptitle(tasks if kind == "none" else f"{STATISTICS[kind]}, {tasks}")
            _draw_panels(section.subplots(2, 2, sharex=True, sharey="row"), own)
        handles, labels = figure.axes[2].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(kinds)))

    def summarize(self, rows: Sequence[Row]) -> Summary:
        table: list[Row] = []
        for statistics in names(rows, "statistics"):
            for radius in distinct(rows, "radius"):
                own = where(rows, statistics=statistics, radius=radius)
                row: Row = {"BatchNorm statistics": statistics, "radius": radius}
                for split in SPLITS:
                    for kind in KINDS:
                        scores = column(where(own, split=split, kind=kind), "score")
                        row[f"{kind}, {split}"] = quantiles(scores)[1]
                table.append(row)
        verdicts = [_verdict(where(rows, statistics=s), self.returns_to_one) for s in names(rows, "statistics")]
        return Summary(table, " ".join(verdicts))


def radius_curve(rows: Sequence[Row], name: str) -> RadiusCurve:
    radii = distinct(rows, "radius")
    low, middle, high = np.reshape([quantiles(column(where(rows, radius=r), name)) for r in radii], (-1, 3)).T
    return RadiusCurve(np.array(radii), middle, low, high)


def quantiles(values: np.ndarray) -> list[float]:
    """Return the 10 %, 50 % and 90 % quantiles of the values that are not NaN, without interpolation, since there is
    no middle between a number and infinity."""
    known = values[~np.isnan(values)]
    return np.quantile(known, [0.1, 0.5, 0.9], method="nearest").tolist() if known.size else [np.nan] * 3


def _train(item: WorkItem, context: Context) -> Run:
    """Return the run with the lowest training loss, averaged over tasks, each at its own solution."""
    options = {"network": _network(item), "tasks": item["tasks"], "precision": item["precision"]}
    options |= {"keep_parameters": True, "progress": ProgressReporter()}
    runs = sweep_item(item | {"seeds": [item["seed"]]}, context, item["challenge"], ["sgd"], **options)
    finished = [run for run in runs if run.diverged is None]
    require(bool(finished), f"plain SGD diverged on {item['challenge']} at every learning rate of {item['lrs']}.")
    return min(finished, key=lambda run: run.arrays["train_class_loss"].diagonal(-1).mean())


def _network(item: WorkItem) -> str | MakeNetwork:
    name: str = item["network"]
    return SmallResNet18 if name == "small-resnet18" else name


def _solution(run: Run, item: WorkItem, context: Context) -> tuple[TrainingTrace, Data]:
    """Return the item's task with its solution, and its test data."""
    challenge = challenges.make(item["challenge"], item["tasks"], context.data)
    task = challenge.task(item["task"], item["seed"])
    transform = InputTransform(challenge.normalise, device=context.device)

    def prepare(data: Data) -> Data:
        subset = evenly_spaced(data, max(item["samples"], item["examples"]))
        return Data(transform.normalize(subset.x.to(context.device)), subset.y.to(context.device))

    module = seeded_network(resolve.network(_network(item), challenge).value, challenge, item["seed"])
    states = [run.state(item["task"]), run.state(item["task"] + 1)]
    trace = trace_checkpoints(module.to(context.device), challenge.loss, [prepare(task.train)], states)
    if item["statistics"] == "batch":
        trace = replace(trace, module=with_batch_statistics(module))
    return trace, prepare(task.test)


def _rows(scores: Perturbation) -> list[Row]:
    rows: list[Row] = []
    for split in SPLITS:
        for kind in KINDS:
            losses, values = scores.losses[split][kind], scores.score(split, kind)
            known = scores.num_ratios(split, kind)
            for i in range(len(losses)):
                eigen = kind == "eigen"
                direction: Row = {"split": split, "kind": kind, "direction": i, "base": scores.base[split]}
                direction |= {"eigenvalue": float(scores.eigenvalues[i]) if eigen else None}
                direction |= {"residual": float(scores.residuals[i]) if eigen else None}
                for j, r in enumerate(scores.radii):
                    point: Row = {"radius": r, "loss": float(losses[i, j]), "score": float(values[i, j])}
                    rows.append(direction | point | {"known": int(known[i, j])})
    return rows


def _draw_panels(panels: np.ndarray, rows: Sequence[Row]) -> None:
    for split, (top, bottom) in zip(SPLITS, panels.T, strict=True):
        own = where(rows, split=split)
        _draw_curves(top, own, "score")
        _draw_curves(bottom, own, "loss")
        top.axhline(1, color=FAINT, linewidth=0.9)
        base = float(np.median(column(own, "base")))
        bottom.axhline(base, color=FAINT, linewidth=0.9, linestyle=":", label=r"$L_t(\theta_t)$, median of tasks")
        top.set_title("training data" if split == "train" else "test data", loc="left")
        bottom.set_xlabel("radius  $r$")
    panels[0, 0].set_ylabel(r"perturbation score  $\mathfrak{s}(r)$")
    panels[1, 0].set_ylabel(r"loss  $L_t(\theta_t + r\,v)$")


def _draw_curves(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """The median and its band for each kind of direction; a thin line for each eigenvector."""
    looks = {"eigen": (WARM[1], "-", "eigenvectors"), "random": (COOL[0], "--", "random directions")}
    band = "median and 80 % of tasks and directions"
    for kind in KINDS:
        own, (colour, dashes, label) = where(rows, kind=kind), looks[kind]
        curve = radius_curve(own, name)
        shown = np.isfinite(curve.middle)
        high = np.where(np.isfinite(curve.high), curve.high, curve.middle)
        axes.fill_between(curve.radii[shown], curve.low[shown], high[shown], color=colour, alpha=0.16, linewidth=0)
        for direction in distinct(own, "direction") if kind == "eigen" else ():
            one = radius_curve(where(own, direction=direction), name)
            points = drop_nonfinite(one.radii, one.middle)
            text = "each eigenvector" if direction == 0 else None
            axes.plot(*points, color=colour, linewidth=0.6, alpha=0.6, label=text)
        style = LineStyle(colour, dashes, "o" if kind == "eigen" else "s")
        points = drop_nonfinite(curve.radii, curve.middle)
        axes.plot(*points, **style.line(), **style.point(), markersize=4, label=f"{label}: {band}")
    if any(np.isfinite(line.get_ydata()).any() for line in axes.lines):  # a logarithmic axis needs a finite value
        axes.set_xscale("log")
        axes.set_yscale("log", nonpositive="mask")


def _verdict(rows: Sequence[Row], expected: bool) -> str:
    """Compare with the paper: the score rises with small r, and does or does not return to 1."""
    scores = radius_curve(where(rows, split="train", kind="eigen"), "score")
    middle = scores.middle[~np.isnan(scores.middle)]
    statistics = str(rows[0]["statistics"])
    prefix = "" if statistics == "none" else f"{STATISTICS[statistics]}: "
    if not len(middle):
        return f"{prefix}No score is finite."
    rises = middle.max() > ABOUT_ONE * middle[0]
    returns = 1 / ABOUT_ONE <= middle[-1] <= ABOUT_ONE
    agrees = "agrees" if rises and returns == expected else "does not agree"
    return (
        f"{prefix}The median score of eigenvectors is {middle[0]:.3g} at the smallest radius, at most "
        f"{middle.max():.3g}, and {middle[-1]:.3g} at the largest: {agrees} with the paper that it rises and "
        f"{'returns' if expected else 'does not return'} to 1."
    )


def _item(column: table1.Column, examples: int, samples: int = 2_000, directions: int = 10) -> WorkItem:
    fields = ("challenge", "network", "tasks", "epochs", "batch_size", "precision")
    item: WorkItem = {name: getattr(column, name) for name in fields}
    sizes = {"eigenvectors": directions, "directions": directions, "samples": samples, "examples": examples}
    return item | {"lrs": list(column.lrs), "seed": column.seeds[0]} | sizes


_MNIST, _CIFAR10 = table1.COLUMNS["rotated-mnist"], table1.COLUMNS["split-cifar10"]
_DIGITS = replace(table1.DEMO, lrs=(0.1, 0.5))
_IMAGES = replace(_DIGITS, challenge="split-digits", network="small-resnet18", tasks=2, lrs=(0.05,), batch_size=32)

STUDIES = (
    PerturbationScore(
        "perturbation-cifar10",
        _item(replace(_CIFAR10, lrs=(0.01, 0.1)), examples=1_000),
        _item(replace(_IMAGES, epochs=2), examples=50, samples=50, directions=4),
        "running",
        batch_tasks=3,
        returns_to_one=True,
    ),
    PerturbationScore(
        "perturbation-mnist",
        _item(_MNIST, examples=10_000),
        _item(_DIGITS, examples=500, samples=500),
        "none",
        batch_tasks=0,
        returns_to_one=False,
    ),
)
