r"""The Hessian at the tasks' solutions.

Perturbation score (Eq. score-ptb; §6.2, Figures 3 and 5): how far from a solution the loss changes more along the
Hessian's eigenvectors than along random directions, for plain SGD at the learning rate with the lowest task losses.
Far from its solution a network with BatchNorm depends on the statistics that it uses: the running statistics of
training, as at test time, are used at all tasks, those of the current batch at a few. A score is a mean of ratios and
becomes very large if the loss hardly changes along one random direction, so medians over seeds, tasks and directions
are shown. The published figures compute the Hessian on a task's first 2,000 examples, and divide the sum of test losses
by the number of training batches. Here examples are spread over the whole task, and losses are means over their
examples.

Rank of the average Hessian \bar H_{<t} = (1/t) Σ_{o<t} H_o as tasks are learnt (§4.1; Figure 4): the dimension of the
space in which an update forgets, for a network so small that Hessians are dense matrices in double precision. The rank
depends on what counts as zero, so all definitions of `lens.rank` are shown, and the numerical rank in single precision,
|λ| > P ε |λ|_max with ε = 2⁻²³, as in torch.linalg.matrix_rank. The paper names no learning rate; 0.1 is its highest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from glocal import challenges
from glocal.challenges.challenge import Data
from glocal.engine.cohort import seeded_network
from glocal.engine.loader import evenly_spaced
from glocal.errors import require
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.perturbation import Kind, Perturbation, Split, perturbation, with_batch_statistics
from glocal.lens.rank import THRESHOLDS, rank
from glocal.lens.record import RecordedRun
from glocal.lens.training_trace import TrainingTrace
from glocal.networks import MLP, ResNet18
from glocal.networks.preprocess import InputTransform
from glocal.paper import table1
from glocal.paper.studies import common
from glocal.paper.studies.common import Curve, agreement, column, distinct, drop_nonfinite, finite, names
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import COOL, FAINT, INK, MARKERS, WARM, LineStyle
from glocal.store.run import Run
from glocal.sweeps import resolve
from glocal.sweeps.context import ProgressReporter

SPLITS: tuple[Split, ...] = ("train", "test")
KINDS: tuple[Kind, ...] = ("eigen", "random")
STATISTICS = {
    "running": "BatchNorm with running statistics",
    "batch": "BatchNorm with batch statistics",
    "none": "no BatchNorm",
}
SEEDS = table1.SEEDS[:3]  # of perturbation scores
ABOUT_ONE = 3.0
"""A score between 1/3 and 3 counts as 1; curves span many decades."""


def small_resnet18(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a ResNet-18 with 4 channels instead of 64, on images of half the size, for the demo."""
    return nn.Sequential(nn.AvgPool2d(2), ResNet18(shape[0], outputs, width=4))


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
        base, seeds = (self.small, SEEDS[:1]) if demo else (self.full, SEEDS)
        tasks = {self.statistics: base["tasks"], "batch": min(self.batch_tasks, 1 if demo else base["tasks"])}
        kinds = [{"statistics": s, "task": t} for s, count in tasks.items() for t in range(count)]
        return [base | {"seed": seed} | kind for seed in seeds for kind in kinds]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        run = _train(item, context)
        trace, test = _solution(run, item, context)
        sizes = {k: item[k] for k in ("eigenvectors", "directions", "samples", "examples")}
        scores = perturbation(trace, 0, test, **sizes, seed=item["seed"] + item["task"])
        base_row: Row = item | {"parameters": trace.num_params}
        return [common.run_row(self.columns, base_row, run, row) for row in _score_rows(scores)]

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Top: scores. Bottom: losses. On training and test data, with a section for each kind of statistics.

        Radii at which a loss exceeds the range of single precision, which the paper computes in, are left out.
        """
        kinds = [s for s in STATISTICS if s in names(rows, "statistics")]
        figure.set_size_inches(1.2 + 6.2 * len(kinds), 6.2)
        for kind, section in zip(kinds, figure.subfigures(1, len(kinds), squeeze=False)[0], strict=True):
            kind_rows = rows.filter(statistics=kind)
            solutions = len(kind_rows.unique(["seed", "task"]))
            rates = " or ".join(f"{lr:g}" for lr in distinct(kind_rows, "lr"))
            radii, title = float32_radii(kind_rows), f"{solutions} solutions, learning rate {rates}"
            larger_radii = [radius for radius in distinct(kind_rows, "radius") if radius not in radii]
            note = f"\nfrom r = {larger_radii[0]:g} on losses exceed single precision" if larger_radii else ""
            section.suptitle(f"{STATISTICS[kind]}, {title}{note}")
            kind_rows = kind_rows.filter(pl.col("radius").is_in(radii))
            _draw_panels(section.subplots(2, 2, sharex=True, sharey="row"), kind_rows)
        handles, labels = figure.axes[2].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(kinds)))

    def summarize(self, rows: pl.DataFrame) -> Summary:
        table: list[Row] = []
        for statistics in names(rows, "statistics"):
            for radius in distinct(rows, "radius"):
                radius_rows = rows.filter(statistics=statistics, radius=radius)
                by_kind = {
                    f"{k}, {s}": column(radius_rows.filter(split=s, kind=k), "score") for s in SPLITS for k in KINDS
                }
                line: Row = {"BatchNorm statistics": statistics, "radius": radius}
                table.append(line | {name: quantiles(scores)[1] for name, scores in by_kind.items()})
        verdicts = [
            _verdict(part, self.returns_to_one) for part in rows.partition_by("statistics", maintain_order=True)
        ]
        return Summary(table, " ".join(verdicts))


def radius_curve(rows: pl.DataFrame, name: str) -> Curve:
    """Medians over seeds, tasks and directions for every radius, and the range of the middle 80 %."""
    radii = distinct(rows, "radius")
    low, middle, high = np.reshape([quantiles(column(rows.filter(radius=r), name)) for r in radii], (-1, 3)).T
    return Curve(np.array(radii), middle, low, high)


def float32_radii(rows: pl.DataFrame) -> list[float]:
    """Return the radii below the first at which a loss exceeds the largest number of single precision."""
    largest = [(radius, column(rows.filter(radius=radius), "loss").max()) for radius in distinct(rows, "radius")]
    return [radius for radius, _ in takewhile(lambda pair: not pair[1] > torch.finfo(torch.float32).max, largest)]


def float32_scores(rows: pl.DataFrame, saturate: bool) -> Curve:
    """Return what the scores of eigenvectors on training data would be if losses were rounded to single precision.

    A loss out of range becomes inf, or the largest number if `saturate`. inf / inf is NaN, as in `lens.perturbation`.
    """
    train = rows.filter(split="train")
    train = train.with_columns(pl.col("loss").clip(upper_bound=torch.finfo(torch.float32).max)) if saturate else train
    scores: list[Row] = []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for part in train.partition_by("seed", "task", "radius", maintain_order=True):
            base = np.float32(part["base"][0])
            eigen, random = (np.abs(column(part.filter(kind=kind), "loss").astype(np.float32) - base) for kind in KINDS)
            means = torch.from_numpy(eigen[:, None] / random).nanmean(1).tolist()
            scores += [{"radius": part["radius"][0], "score": score} for score in means]
    return radius_curve(pl.DataFrame(scores), "score")


def quantiles(values: np.ndarray) -> list[float]:
    """Return the 10 %, 50 % and 90 % quantiles of the values that are not NaN, without interpolation, since there is
    no middle between a number and infinity."""
    numbers = values[~np.isnan(values)]
    return np.quantile(numbers, [0.1, 0.5, 0.9], method="nearest").tolist() if numbers.size else [np.nan] * 3


def _train(item: WorkItem, context: Context) -> Run:
    """Return the run with the lowest training loss, averaged over tasks, each at its own solution."""
    options = {"network": _network(item), "progress": ProgressReporter()}
    options |= {name: item[name] for name in ("tasks", "setting", "precision")} | {"keep_parameters": True}
    runs = common.sweep_item(item | {"seeds": [item["seed"]]}, context, item["challenge"], ["sgd"], **options)
    finished_runs = [run for run in runs if run.diverged is None]
    require(bool(finished_runs), f"plain SGD diverged on {item['challenge']} at every learning rate of {item['lrs']}.")
    return min(finished_runs, key=lambda run: run.arrays["train_class_loss"].diagonal(-1).mean())


def _network(item: WorkItem) -> Any:
    return small_resnet18 if item["network"] == "small-resnet18" else item["network"]


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


def _score_rows(scores: Perturbation) -> Iterator[Row]:
    for split in SPLITS:
        for kind in KINDS:
            columns = {"loss": scores.losses[split][kind], "score": scores.score(split, kind)}
            columns |= {"known": scores.num_ratios(split, kind)}
            for i in range(len(columns["loss"])):
                row: Row = {"split": split, "kind": kind, "direction": i, "base": scores.base[split]}
                row |= {"eigenvalue": float(scores.eigenvalues[i]) if kind == "eigen" else None}
                row |= {"residual": float(scores.residuals[i]) if kind == "eigen" else None}
                for j, r in enumerate(scores.radii):
                    yield row | {"radius": r} | {name: values[i, j].item() for name, values in columns.items()}


def _draw_panels(panels: np.ndarray, rows: pl.DataFrame) -> None:
    for split, (top, bottom) in zip(SPLITS, panels.T, strict=True):
        split_rows = rows.filter(split=split)
        _draw_curves(top, split_rows, "score")
        _draw_curves(bottom, split_rows, "loss")
        top.axhline(1, color=FAINT, linewidth=0.9)
        base = float(np.median(column(split_rows, "base")))
        bottom.axhline(base, color=FAINT, linewidth=0.9, linestyle=":", label=r"$L_t(\theta_t)$, median of tasks")
        top.set_title("training data" if split == "train" else "test data")
        bottom.set_xlabel("radius  $r$")
    panels[0, 0].set_ylabel(r"perturbation score  $\mathfrak{s}(r)$")
    panels[1, 0].set_ylabel(r"loss  $L_t(\theta_t + r\,v)$")


def _draw_curves(axes: Axes, rows: pl.DataFrame, name: str) -> None:
    """The median and its band for each kind of direction; a thin line for each eigenvector."""
    eigen = ("eigen", "eigenvectors", LineStyle(WARM[1], "-", "o"))
    for kind, text, style in (eigen, ("random", "random directions", LineStyle(COOL[0], "--", "s"))):
        kind_rows = rows.filter(kind=kind)
        curve = radius_curve(kind_rows, name)
        x, middle, low, high = (part[np.isfinite(curve.middle)] for part in curve)
        band = Curve(x, middle, low, np.where(np.isfinite(high), high, middle))
        for direction in distinct(kind_rows, "direction") if kind == "eigen" else ():
            direction_curve = radius_curve(kind_rows.filter(direction=direction), name)
            thin: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.6, "label": None if direction else "each eigenvector"}
            axes.plot(*drop_nonfinite(direction_curve.x, direction_curve.middle), color=style.colour, **thin)
        label = f"{text}: median and 80 % of seeds, tasks and directions"
        band.plot(axes, 0.16, **style.line(), **style.point(), markersize=4, label=label)
    common.log_axis(axes, "x")
    common.log_axis(axes)


def _verdict(rows: pl.DataFrame, expected: bool) -> str:
    """Compare with the paper: the score rises with small r, and does or does not return to 1."""
    scores = radius_curve(rows.filter(split="train", kind="eigen"), "score")
    middle = scores.middle[~np.isnan(scores.middle)]
    statistics = rows["statistics"][0]
    prefix = "" if statistics == "none" else f"{STATISTICS[statistics]}: "
    if not len(middle):
        return f"{prefix}No score is finite."
    rises = middle.max() > ABOUT_ONE * middle[0]
    returns = 1 / ABOUT_ONE <= middle[-1] <= ABOUT_ONE
    return (
        f"{prefix}The median score of eigenvectors is {middle[0]:.3g} at the smallest radius, at most "
        f"{middle.max():.3g}, and {middle[-1]:.3g} at the largest: {agreement(rises and returns == expected)} that it "
        f"rises and {'returns' if expected else 'does not return'} to 1."
    )


def _item(column: table1.Column, examples: int, samples: int = 2_000, directions: int = 10) -> WorkItem:
    fields = ("challenge", "setting", "network", "tasks", "epochs", "batch_size", "precision")
    item: WorkItem = {name: getattr(column, name) for name in fields}
    sizes = {"eigenvectors": directions, "directions": directions, "samples": samples, "examples": examples}
    return item | {"lrs": list(column.lrs)} | sizes


CIFAR10 = _item(replace(table1.COLUMNS["split-cifar10"], lrs=(0.01, 0.1)), examples=1_000)
CIFAR10_DEMO = _item(replace(table1.DEMO, tasks=2, lrs=(0.05,), batch_size=32), examples=50, samples=50, directions=4)
CIFAR10_DEMO |= {"challenge": "split-digits", "network": "small-resnet18"}
MNIST = _item(table1.COLUMNS["rotated-mnist"], examples=10_000)
MNIST_DEMO = _item(replace(table1.DEMO, lrs=(0.1, 0.5)), examples=500, samples=500)

FULL: WorkItem = {"challenge": "rotated-mnist", "tasks": 5, "epochs": 5, "batch_size": 128, "lrs": [0.1]}
FULL |= {"hidden": [22, 22], "pool": 1, "examples": 2_000}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "hidden": [16, 16], "pool": 4, "examples": 500}
LABELS = {
    "absolute": "|λ| > {:g}",
    "relative": "|λ| > {:g} of the largest",
    "numerical": "numerical rank",
    "effective": "effective rank",
    "participation": "participation ratio",
}


def pooled_mlp(shape: Sequence[int], outputs: int, pool: int, hidden: Sequence[int]) -> nn.Module:
    """Return an MLP on images average-pooled by `pool`."""
    channels, height, width = shape
    return nn.Sequential(nn.AvgPool2d(pool), MLP(channels * (height // pool) * (width // pool), outputs, hidden))


class HessianRank(common.RecordedStudy):
    name = "hessian-rank"
    columns = "challenge seed lr parameters tasks kind threshold rank top"

    def items(self, demo: bool) -> list[WorkItem]:
        item, seeds = (DEMO, table1.SEEDS[:3]) if demo else (FULL, table1.SEEDS)
        return common.split_seeds([item | {"seeds": seeds}])

    def options(self, item: WorkItem, context: Context) -> dict[str, Any]:
        return {"network": partial(pooled_mlp, pool=item["pool"], hidden=item["hidden"])}

    def measure_run(self, run: RecordedRun, item: WorkItem) -> Iterator[Row]:
        """A row for each definition and each number of tasks."""
        parameters = run.trace.num_params
        numerical = parameters * torch.finfo(torch.float32).eps
        ranks = rank(run.trace.double(), relative=(*THRESHOLDS, numerical))
        definitions = [
            *(("absolute", x, estimate) for x, estimate in ranks.absolute.items()),
            *(("relative" if x in THRESHOLDS else "numerical", x, e) for x, e in ranks.relative.items()),
            ("effective", None, ranks.effective),
            ("participation", None, ranks.participation),
        ]
        for kind, threshold, estimate in definitions:
            row: Row = {"parameters": parameters, "kind": kind, "threshold": threshold}
            for t, (value, top) in enumerate(zip(estimate.value.tolist(), ranks.top.tolist(), strict=True)):
                yield row | {"tasks": t + 1, "rank": float(value), "top": float(top)}

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Ranks against the number of tasks in the average: means and ranges over seeds."""
        figure.set_size_inches(8.8, 4.6)
        left, right = figure.subplots(1, 2)
        looks = {"absolute": zip(COOL, MARKERS["global"]), "relative": zip(WARM, MARKERS["local"])}  # noqa: B905
        other_looks = zip((INK, FAINT, WARM[4]), MARKERS["global"], strict=False)
        for part in rows.partition_by("kind", "threshold", maintain_order=True):
            kind = part["kind"][0]
            colour, marker = next(looks.get(kind, other_looks))
            style = LineStyle(colour, {"absolute": "-", "relative": "--"}.get(kind, "-."), marker)
            line: dict[str, Any] = {**style.line(), **style.point(), "markersize": 4.5, "label": _label(part)}
            _rank_curve(part).plot(left if kind == "absolute" else right, **line)
        left.set_ylabel(r"rank of $\bar H_{<t}$")
        for axes, text in ((left, r"eigenvalues with larger $|\lambda|$"), (right, "independent of the scale")):
            ticks = range(1, int(column(rows, "tasks").max()) + 1)
            axes.set(title=text, xlabel="tasks in the average, $t - 1$", xticks=ticks)
            if axes.lines:
                common.log_axis(axes)
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, handlelength=2.6)

    def summarize(self, rows: pl.DataFrame) -> Summary:
        table: list[Row] = []
        for part in rows.partition_by("kind", "threshold", maintain_order=True):
            tasks, means, _, _ = _rank_curve(part)
            if not len(tasks):
                return Summary([], "No rank is finite.")
            positive = means > 0
            power = np.polyfit(np.log(tasks[positive]), np.log(means[positive]), 1)[0] if positive.sum() > 1 else np.nan
            line: Row = {"definition": _label(part), "after 1 task": means[0], f"after {tasks[-1]:.0f}": means[-1]}
            parameters = part["parameters"][0]
            line |= {"% of parameters": 100 * means[-1] / parameters, "after 1 task, in √P": means[0] / parameters**0.5}
            table.append(line | {"exponent": power})
        exponents = finite(pl.DataFrame(table), "exponent")
        sublinear = int((exponents < 1).sum())
        verdict = (
            f"By {sublinear} of {len(exponents)} definitions the rank grows less than linearly with the tasks, with "
            f"exponents of {exponents.min():.2f} to {exponents.max():.2f}: {agreement(sublinear == len(exponents))}."
        )
        return Summary(table, verdict)


STUDIES = (
    PerturbationScore("perturbation-cifar10", CIFAR10, CIFAR10_DEMO, "running", batch_tasks=3, returns_to_one=True),
    PerturbationScore("perturbation-mnist", MNIST, MNIST_DEMO, "none", batch_tasks=0, returns_to_one=False),
    HessianRank(),
)


def _label(rows: pl.DataFrame) -> str:
    return LABELS[rows["kind"][0]].format(rows["threshold"][0])


def _rank_curve(rows: pl.DataFrame) -> Curve:
    """Return the mean, lowest and highest rank over seeds for each number of tasks."""
    return common.curve(rows, "rank", lambda ranks: (ranks.mean(), ranks.min(), ranks.max()), x="tasks")
