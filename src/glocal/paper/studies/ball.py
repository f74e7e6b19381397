"""Is it the distance? Algorithms whose parameters stay in a ball around the last solution (docs/experiments/ball.md).

The paper's learning rates change the size of a step and the distance that θ moves together. After every step, θ is
projected onto ‖θ − θ_{t−1}‖ ≤ ρ, so the distance no longer depends on the rate. At equal learning rate and learning
accuracy, how much does forgetting rise with the distance, and does it rise faster for local algorithms? A smaller
check asks the same of ResNet-18 on Split CIFAR-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
import polars as pl
import torch
from matplotlib.figure import Figure

from glocal.algorithms import Algorithm, Batch, Memory, Step
from glocal.algorithms.baselines import SGD
from glocal.algorithms.ewc import EWC
from glocal.algorithms.gem import AGEM
from glocal.algorithms.ogd import OGDGTL
from glocal.algorithms.replay import ER
from glocal.algorithms.si import SI
from glocal.networks.model import Model
from glocal.paper import table1
from glocal.paper.studies import common
from glocal.paper.studies.common import MeanInterval, column, names
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import legend
from glocal.report.summary import DEFAULT_VIEW, run_statistics
from glocal.tree import Params, norm

FULL: WorkItem = common.FULL | {"batch_size": 128, "lrs": [0.005, 0.02, 0.1], "seeds": table1.SEEDS}
FULL |= {"radii": [0.5, 1.0, 2.0, 4.0, 0.0]}
DEMO: WorkItem = common.DEMO | {"tasks": 3, "epochs": 1, "batch_size": 64, "lrs": [0.05, 0.1, 0.2]}
DEMO |= {"radii": [0.5, 1.0, 0.0], "seeds": table1.SEEDS[:2]}
CIFAR10: WorkItem = {"challenge": "split-cifar10", "setting": "task", "tasks": 5, "epochs": 5, "batch_size": 32}
CIFAR10 |= {"network": "resnet18", "precision": "bf16", "lrs": [0.01, 0.1], "radii": [1.0, 3.0, 0.0]}
CIFAR10 |= {"seeds": table1.SEEDS[:3]}
CIFAR10_DEMO: WorkItem = DEMO | {"challenge": "split-digits", "setting": "task"}
ALSO_LOCAL = "si"
"""Declared global; local by the experiment on Definition 3.1."""


@dataclass(frozen=True)
class Ball(Algorithm):
    """Project θ onto ‖θ − θ_{t−1}‖ ≤ radius after every step of the tasks after the first."""

    radius: float = 0.0
    """ρ, the largest distance from the last solution; 0: no limit."""

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        direction = super().direction(model, grads, params, memory, batch)
        if "centre" not in memory:
            return direction
        assert batch.lr is not None
        lr = batch.lr
        delta = {k: p - lr * direction[k] - memory["centre"][k] for k, p in params.items()}
        distance = norm(delta)
        radius = torch.as_tensor(self.radius, dtype=distance.dtype, device=distance.device)
        excess = torch.where(radius > 0, 1 - (radius / distance).clamp(max=1), 0)
        return {k: direction[k] + excess * d / lr for k, d in delta.items()}

    def observe(self, memory: Memory, step: Step) -> Memory:
        centre = {k: memory[k] for k in ("centre",) if k in memory}
        return super().observe(_without_centre(memory), step) | centre

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return super().consolidate(model, params, _without_centre(memory), data) | {"centre": params}


def _without_centre(memory: Memory) -> Memory:
    return {k: part for k, part in memory.items() if k != "centre"}


@dataclass(frozen=True)
class BallSGD(Ball, SGD):
    name: ClassVar[str] = "ball-sgd"


@dataclass(frozen=True)
class BallER(Ball, ER):
    name: ClassVar[str] = "ball-er"


@dataclass(frozen=True)
class BallAGEM(Ball, AGEM):
    name: ClassVar[str] = "ball-agem"


@dataclass(frozen=True)
class BallSI(Ball, SI):
    name: ClassVar[str] = "ball-si"

    def observe(self, memory: Memory, step: Step) -> Memory:
        """The importance integrates the clipped gradient of the loss, without the way back to the ball."""
        return super().observe(memory, step._replace(direction={k: g.clamp(-1, 1) for k, g in step.grads.items()}))


@dataclass(frozen=True)
class BallEWC(Ball, EWC):
    name: ClassVar[str] = "ball-ewc"


@dataclass(frozen=True)
class BallOGD(Ball, OGDGTL):
    name: ClassVar[str] = "ball-ogd-gtl"


ALGORITHMS: dict[str, type[Ball]] = {
    kind.name.removeprefix("ball-"): kind for kind in (BallSGD, BallER, BallAGEM, BallSI, BallEWC, BallOGD)
}


@dataclass(frozen=True)
class BallStudy:
    """A row for every run: forgetting and accuracies in points, and the mean distance that later tasks moved θ."""

    name: str
    full: WorkItem
    demo: WorkItem
    algorithms: tuple[str, ...]
    columns: ClassVar = "algorithm locality lr seed radius distance forgetting learning_accuracy acc"

    def work_items(self, demo: bool) -> list[WorkItem]:
        """One item per algorithm: its runs differ in scalars only and train together."""
        return [{"algorithm": name, **(self.demo if demo else self.full)} for name in self.algorithms]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        published_options = table1.COLUMNS[self.full["challenge"]].row(item["algorithm"]).options
        algorithms = [ALGORITHMS[item["algorithm"]](**published_options, radius=radius) for radius in item["radii"]]
        network = common.item_mlp(item) if "hidden" in item else item["network"]
        options = {"network": network, "precision": item.get("precision", "fp32")}
        runs = common.sweep_item(item, context, common.make_challenge(item, context), algorithms, **options)
        rows = []
        for run, values in zip(runs, run_statistics(runs, DEFAULT_VIEW), strict=True):
            values |= {"distance": float(np.mean(run.arrays["update_norm"][1:]))}
            values |= {"radius": run.config["algorithm"]["options"]["radius"] or np.inf}
            rows.append(common.run_row(self.columns, item, run, values))
        return rows

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Forgetting against the distance, a panel for each learning rate."""
        lrs = common.distinct(rows, "lr")
        figure.set_size_inches(3.4 * len(lrs) + 1.6, 3.6)
        panels = np.atleast_1d(figure.subplots(1, len(lrs), sharey=True))
        for axes, lr in zip(panels, lrs, strict=True):
            for runs, line in common.by_algorithm(rows.filter(pl.col("forgetting").is_finite(), lr=lr)):
                means = runs.group_by("radius").agg(pl.col("distance", "forgetting").mean()).sort("distance")
                style = {**line.line(), **line.point()}
                axes.plot(means["distance"], means["forgetting"], **style, label=common.label(runs))
            axes.set(title=f"learning rate {lr:g}", xlabel=r"mean distance $\Vert\theta_t - \theta_{t-1}\Vert_2$")
            axes.set_xscale("log", base=2)
        panels[0].set_ylabel("forgetting (points)")
        legend(figure, common.legend_order(rows))

    def summarize(self, rows: pl.DataFrame) -> Summary:
        algorithms = names(rows)
        locality = {name: str(rows.filter(algorithm=name)["locality"][0]) for name in algorithms}
        by_distance, by_rate = fit(rows, {name: name for name in algorithms})
        table: list[Row] = []
        for name in algorithms:
            slopes = [str(MeanInterval.of(slopes[name])) for slopes in (by_distance, by_rate)]
            row: Row = {"algorithm": name, "locality": locality[name]}
            table.append(row | {"per doubling of the distance": slopes[0], "of the learning rate": slopes[1]})
        if len(set(locality.values())) < 2:
            return Summary(table, "Local and global algorithms are needed.")
        local = {name for name, kind in locality.items() if kind == "local"}
        (distance, rate), distance_with_si = interactions(rows, local), interactions(rows, local | {ALSO_LOCAL})[0]
        by_class = [{kind: MeanInterval.of(values) for kind, values in part.items()} for part in fit(rows, locality)]
        as_large, labelings = count_labelings(rows, local)
        verdict = (
            "At equal learning rate and learning accuracy, a doubling of the distance changes forgetting by "
            f"{by_class[0]['local']} points for local algorithms and by {by_class[0]['global']} for global ones, a "
            f"difference of {distance}: by the registered rule the hypothesis is "
            f"{'supported' if distance.low > 0 else 'not supported'}. With {ALSO_LOCAL} counted as local, the "
            f"difference is {distance_with_si}. Of the {labelings} ways to call {len(local)} of the {len(algorithms)} "
            f"algorithms local, {as_large}, this one included, give as large a difference. At equal distance, a "
            f"doubling of the learning rate changes forgetting by {by_class[1]['local']} points for local algorithms "
            f"and by {by_class[1]['global']} for global ones, a difference of {rate}."
        )
        return Summary(table, verdict + common.diverged_note(rows, "forgetting"))


def fit(
    rows: pl.DataFrame, groups: dict[str, str], common_accuracy: bool = True
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the slopes of forgetting per doubling of the distance and of the learning rate, by group and seed.

    Least squares for every seed, with a constant for every algorithm, both slopes for every group of algorithms, and
    one slope for the learning accuracy, or one for every algorithm; NaN if the cells do not determine them.
    """
    algorithms, kinds = list(groups), sorted(set(groups.values()))
    slopes = []
    for seed_rows in rows.sort("seed").partition_by("seed", maintain_order=True):
        cells = seed_rows.filter(pl.col("forgetting").is_finite() & (pl.col("distance") > 0))
        is_algorithm = np.array([[name == a for a in algorithms] for name in cells["algorithm"]], dtype=float)
        in_group = np.array([[groups[name] == kind for kind in kinds] for name in cells["algorithm"]], dtype=float)
        logs = [np.log2(column(cells, name))[:, None] * in_group for name in ("distance", "lr")]
        accuracy = column(cells, "learning_accuracy")[:, None] * (1 if common_accuracy else is_algorithm)
        X = np.column_stack([*logs, accuracy, is_algorithm])
        full_rank = len(X) > X.shape[1] and np.linalg.matrix_rank(X) == X.shape[1]
        solution = np.linalg.lstsq(X, column(cells, "forgetting"))[0] if full_rank else np.full(X.shape[1], np.nan)
        slopes.append(solution[: 2 * len(kinds)])
    parts = np.split(np.array(slopes), 2, axis=1)
    return tuple({kind: part[:, i] for i, kind in enumerate(kinds)} for part in parts)  # type: ignore[return-value]


def interactions(rows: pl.DataFrame, local: set[str]) -> tuple[MeanInterval, MeanInterval]:
    """Return local minus global slopes over seeds, per doubling of the distance and of the learning rate."""
    slopes = fit(rows, {name: "local" if name in local else "global" for name in names(rows)})
    distance, rate = (MeanInterval.of(part["local"] - part["global"]) for part in slopes)
    return distance, rate


def count_labelings(rows: pl.DataFrame, local: set[str]) -> tuple[int, int]:
    """Count the choices of as many algorithms whose difference is at least that of `local`, and all choices."""
    observed = interactions(rows, local)[0].mean
    differences = [interactions(rows, set(labeling))[0].mean for labeling in combinations(names(rows), len(local))]
    return sum(value >= observed - 1e-9 for value in differences), len(differences)


STUDIES = (
    BallStudy("ball", FULL, DEMO, tuple(ALGORITHMS)),
    BallStudy("ball-cifar10", CIFAR10, CIFAR10_DEMO, ("sgd", "er", "si", "ewc", "ogd-gtl")),
)
