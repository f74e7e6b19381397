"""What studies share: training the runs of a work item, selecting rows, and plotting over the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy import stats

from glocal import challenges
from glocal.algorithms import ALGORITHMS
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.lens.record import train_traces
from glocal.lens.trace import TrainingTrace
from glocal.networks import mlp
from glocal.networks.model import MakeNetwork
from glocal.paper import table1
from glocal.paper.study import Context, Row, Scalar, WorkItem
from glocal.report import style
from glocal.report.style import LineStyle, log_lr
from glocal.store.run import Run, Runs
from glocal.sweeps.sweep import sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

Spread: TypeAlias = Literal["deviation", "range"]
FULL: WorkItem = {"challenge": "rotated-mnist", "tasks": 20, "epochs": 5, "hidden": [100, 100]}
DEMO: WorkItem = {"challenge": "rotated-digits", "tasks": 4, "epochs": 2, "hidden": [32, 32]}
"""Default training of a study; its items add learning rates, seeds and their own keys."""


def make_challenge(item: WorkItem, context: Context) -> Challenge:
    """Return the item's challenge; with angles="published", with the paper's angles for plain SGD.

    The runs of a cohort share the tasks of a seed, so the tasks are cached.
    """
    options = {"angles": table1.published_angles("sgd")} if item.get("angles") == "published" else {}
    challenge = challenges.make(item["challenge"], item["tasks"], context.data, **options)
    return replace(challenge, make_task=lru_cache(maxsize=challenge.tasks)(challenge.make_task))


def make_cohort(
    item: WorkItem, context: Context, challenge: Challenge | None = None, network: MakeNetwork | None = None
) -> Cohort:
    """Return one run for each of the item's seeds and learning rates.

    Args:
        item: Has `seeds`, `lrs`, `epochs` and `hidden`; optionally `algorithm` ("sgd"), `options` and `batch_size`.
        context: Where to train.
        challenge: Used instead of the item's challenge.
        network: Used instead of an MLP with the item's hidden layers.
    """
    challenge = challenge or make_challenge(item, context)
    algorithm = ALGORITHMS[item.get("algorithm", "sgd")](**item.get("options", {}))
    members = tuple(Member(seed, lr, algorithm) for seed in item["seeds"] for lr in item["lrs"])
    make = network or partial(mlp, hidden=tuple(item["hidden"]))
    batch_size = item.get("batch_size", challenge.batch_size)
    return Cohort(challenge, make, members, item["epochs"], batch_size, train_eval=1, device=context.device)


def item_traces(
    item: WorkItem, context: Context, challenge: Challenge | None = None, network: MakeNetwork | None = None
) -> Iterator[tuple[Member, TrainingTrace]]:
    """Train the item's runs and return each with θ_0 … θ_T and `examples` training examples per task."""
    cohort = make_cohort(item, context, challenge, network)
    return zip(cohort.members, train_traces(cohort, item["examples"]), strict=True)


def split_seeds(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Return one item per seed, so that an interrupted study loses at most the runs of one seed."""
    return [item | {"seeds": [seed]} for item in items for seed in item["seeds"]]


def training_cost(item: WorkItem, items: int = 1) -> str:
    """Describe the training of so many items like this one."""
    runs = items * len(item["lrs"]) * len(item["seeds"])
    return f"{runs} runs of {item['tasks']} tasks of {item['challenge']}, {item['epochs']} epochs each"


def sweep_item(
    item: WorkItem, context: Context, challenge: str | Challenge, algorithms: Sequence[Any], **options: Any
) -> Runs:
    """Train the item's learning rates and seeds, or take the runs from the store."""
    options |= {"epochs": item["epochs"], "batch_size": item["batch_size"]}
    options |= {"store": context.store, "data": context.data, "device": str(context.device)}
    return sweep(challenge, algorithms, item["lrs"], item["seeds"], **options)


def run_row(run: Member | Run, algorithm: str) -> Row:
    """Return the columns that identify a run."""
    locality = run.locality if isinstance(run, Run) else run.algorithm.locality
    return {"algorithm": algorithm, "locality": locality, "lr": float(run.lr), "seed": int(run.seed)}


def where(rows: Iterable[Row], **values: Scalar) -> list[Row]:
    """Select the rows that have these values in these columns."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def column(rows: Iterable[Row], name: str) -> np.ndarray:
    """Return a column as floats; None becomes NaN."""
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=float)


def finite(rows: Iterable[Row], name: str) -> np.ndarray:
    """Return the finite values of a column."""
    values = column(rows, name)
    return values[np.isfinite(values)]


def distinct(rows: Iterable[Row], name: str) -> list[float]:
    """Return the finite values of a column, sorted, each once."""
    return sorted(set(finite(rows, name).tolist()))


def names(rows: Iterable[Row], name: str = "algorithm") -> list[Any]:
    """Return the values of a column in order of first appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def mean(rows: Iterable[Row], name: str) -> float:
    """Return the mean of a column's finite values; NaN if there are none."""
    values = finite(rows, name)
    return float(values.mean()) if values.size else np.nan


def median(values: Sequence[float] | np.ndarray) -> float:
    """Return the median, counting NaN (a diverged run) as larger than every number; NaN of nothing."""
    ordered = np.sort(np.nan_to_num(np.asarray(values, dtype=float), nan=np.inf, posinf=np.inf))
    count = len(ordered)
    return float(ordered[(count - 1) // 2 : count // 2 + 1].mean()) if count else np.nan


def finite_median(rows: Iterable[Row], name: str) -> float:
    """Return the median of a column's finite values; NaN if there are none."""
    values = finite(rows, name)
    return float(np.median(values)) if values.size else np.nan


def medians_by(rows: Sequence[Row], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of x, and the median of y at each."""
    values = distinct(rows, x)
    return np.array(values), np.array([median(column(where(rows, **{x: value}), y)) for value in values])


def drop_nonfinite(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the points whose y is finite."""
    return x[np.isfinite(y)], y[np.isfinite(y)]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's ρ over the pairs that are finite; NaN for fewer than three or a constant variable."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    return float(stats.spearmanr(x, y).statistic) if len(x) > 2 and np.ptp(x) and np.ptp(y) else np.nan


def power_law(x: np.ndarray, y: np.ndarray) -> float:
    """Fit y ∝ xᵖ by least squares of logarithms over finite positive values, and return p; NaN for fewer than two."""
    known = np.isfinite(y) & (y > 0)
    return float(np.polyfit(np.log(x[known]), np.log(y[known]), 1)[0]) if known.sum() > 1 else np.nan


def group(
    rows: Iterable[Row], by: str | Sequence[str], values: Mapping[str, Callable[[list[Row]], Scalar]]
) -> list[Row]:
    """Return one row per group, with its keys and the given functions of its rows."""
    keys = by.split() if isinstance(by, str) else by
    groups: dict[tuple[Scalar, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    return [
        dict(zip(keys, key, strict=True)) | {name: f(members) for name, f in values.items()}
        for key, members in groups.items()
    ]


def of_columns(
    columns: Mapping[str, str], statistic: Callable[..., float] = finite_median
) -> dict[str, Callable[[list[Row]], Scalar]]:
    """Return functions for `group`: a statistic of columns; `columns` maps headings to column names."""
    return {heading: partial(statistic, name=name) for heading, name in columns.items()}


def diverged_note(rows: Sequence[Row], name: str) -> str:
    """Return a note on the runs whose column is not finite, to append to a verdict; "" if there are none."""
    runs = {tuple(row.get(k) for k in ("classes", "algorithm", "lr", "seed")): row for row in rows}
    diverged = sum(not len(finite([row], name)) for row in runs.values())
    return f" {diverged} of {len(runs)} runs diverged and are left out." if diverged else ""


class Curve(NamedTuple):
    """A statistic over seeds at every learning rate, and a band around it."""

    lrs: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, lr: float) -> float:
        return float(self.middle[list(self.lrs).index(lr)])


def curve(rows: Sequence[Row], name: str, spread: Spread = "deviation") -> Curve:
    """Return mean ± standard deviation (ddof = 0) of the finite values at each learning rate, or median and range."""
    points = []
    for lr in distinct(rows, "lr"):
        values = finite(where(rows, lr=lr), name)
        if values.size and spread == "range":
            points.append((lr, np.median(values), values.min(), values.max()))
        elif values.size:
            points.append((lr, values.mean(), values.mean() - values.std(), values.mean() + values.std()))
    return Curve(*np.array(points, dtype=np.float64).reshape(-1, 4).T)


def line_styles(rows: Sequence[Row]) -> dict[str, LineStyle]:
    """Return a line style for each algorithm: cool and solid if global, warm and dashed if local."""
    algorithms = {(str(row["algorithm"]), str(row["locality"])) for row in rows}
    return {name: line for (name, _), line in style.line_styles(algorithms).items()}


def label(rows: Sequence[Row]) -> str:
    """Return an algorithm's name and locality, for a legend."""
    return f"{rows[0]['algorithm']} ({rows[0]['locality']})"


def legend_order(rows: Sequence[Row]) -> list[str]:
    """Return the labels of all algorithms, global ones first."""
    return [label(where(rows, algorithm=a)) for _, a in sorted({(r["locality"], r["algorithm"]) for r in rows})]


def plot_over_lr(
    axes: Axes, rows: Sequence[Row], name: str, styles: Mapping[str, LineStyle], spread: Spread = "deviation"
) -> None:
    """Plot a column against the learning rate: a line and a band for each algorithm."""
    for algorithm in names(rows):
        own, line = where(rows, algorithm=algorithm), styles[algorithm]
        points = curve(own, name, spread)
        axes.plot(points.lrs, points.middle, **line.line(), **line.point(), label=label(own))
        axes.fill_between(points.lrs, points.low, points.high, color=line.colour, alpha=0.12, linewidth=0)
    log_lr(axes, distinct(rows, "lr"), crowded=True)


def log_y(axes: Axes) -> None:
    """Use a logarithmic y axis with plain numbers; does nothing if no value is positive."""
    from matplotlib.ticker import LogLocator, NullLocator

    if not axes.dataLim.y1 > 0:
        return
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def integer_ticks(axes: Axes, which: Literal["x", "y"] = "x", count: int | Literal["auto"] = "auto") -> None:
    """Put ticks at integers only."""
    from matplotlib.ticker import MaxNLocator

    getattr(axes, f"{which}axis").set_major_locator(MaxNLocator(count, integer=True))


def lr_colours(rows: Iterable[Row]) -> ScalarMappable:
    """Return a colour map over learning rates, brighter for higher ones."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    lrs = distinct(rows, "lr")
    return ScalarMappable(LogNorm(lrs[0], lrs[-1] if len(lrs) > 1 else 2 * lrs[0]), style.dark_plasma(0.88))


def lr_colour_bar(figure: Figure, colours: ScalarMappable, axes: Sequence[Axes], rows: Iterable[Row]) -> None:
    """Draw a colour bar with the learning rates as ticks beside some axes."""
    lrs = distinct(rows, "lr")
    bar = figure.colorbar(colours, ax=list(axes), label="learning rate", pad=0.02, ticks=lrs)
    bar.ax.set_yticklabels([f"{lr:g}" for lr in lrs])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def join(words: Sequence[str]) -> str:
    """Join as "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
