"""What studies share: training the runs of a work item, statistics of rows, and plots over the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from glocal import challenges
from glocal.algorithms import ALGORITHMS
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.lens.record import RecordedRun, record
from glocal.metrics import confidence_interval
from glocal.networks import mlp
from glocal.networks.model import MakeNetwork
from glocal.paper import table1
from glocal.paper.study import Context, Row, Study, WorkItem
from glocal.report import style
from glocal.report.style import LineStyle, option_axis
from glocal.report.table import signed
from glocal.store.run import Run, Runs
from glocal.sweeps.sweep import sweep

Statistic: TypeAlias = Callable[[pl.DataFrame], float]
Spread: TypeAlias = Callable[[np.ndarray], tuple[float, float, float]]  # middle, low and high of some values
FULL: WorkItem = {"challenge": "rotated-mnist", "tasks": 20, "epochs": 5, "hidden": [100, 100]}
DEMO: WorkItem = {"challenge": "rotated-digits", "tasks": 4, "epochs": 2, "hidden": [32, 32]}
"""Default training of a study; its items add learning rates, seeds and their own keys."""
_COLUMN = table1.COLUMNS["rotated-mnist"]
TABLE1: WorkItem = FULL | {"angles": "published", "batch_size": _COLUMN.batch_size}
TABLE1 |= {"lrs": _COLUMN.lrs, "seeds": _COLUMN.seeds}
"""Training as for Table 1."""


def make_challenge(item: WorkItem, context: Context) -> Challenge:
    """Return the item's challenge; with angles="published", with the paper's angles for plain SGD.

    The runs of a cohort share the tasks of a seed, so the tasks are cached.
    """
    options: dict[str, Any] = {"setting": item["setting"]} if "setting" in item else {}
    options |= {"angles": table1.published_angles("sgd")} if item.get("angles") == "published" else {}
    challenge = challenges.make(item["challenge"], item["tasks"], context.data, **options)
    return replace(challenge, make_task=lru_cache(maxsize=challenge.tasks)(challenge.make_task))


def record_item(
    item: WorkItem,
    context: Context,
    challenge: Challenge | None = None,
    network: MakeNetwork | None = None,
    every_epochs: int = 0,
) -> Iterator[tuple[Member, RecordedRun]]:
    """Train and record one run for each of the item's seeds and learning rates, by default of plain SGD.

    A challenge or a network is used instead of the item's challenge or of an MLP with its `hidden` layers. Memory is
    kept if there are snapshots during training.
    """
    challenge = challenge or make_challenge(item, context)
    algorithm = ALGORITHMS[item.get("algorithm", "sgd")](**item.get("options", {}))
    members = tuple(Member(seed, lr, algorithm) for seed in item["seeds"] for lr in item["lrs"])
    make_network = network or item_mlp(item)
    batch_size = item.get("batch_size", challenge.batch_size)
    cohort = Cohort(challenge, make_network, members, item["epochs"], batch_size, train_eval=1, device=context.device)
    recorded_runs = record(cohort, every_epochs, keep_memory=every_epochs > 0, examples=item["examples"])
    return zip(members, recorded_runs, strict=True)


def item_mlp(item: WorkItem) -> MakeNetwork:
    """Return the MLP with the item's `hidden` layers."""
    return partial(mlp, hidden=tuple(item["hidden"]))


def split_seeds(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Return one item per seed, so that an interrupted study loses at most the runs of one seed."""
    return [item | {"seeds": [seed]} for item in items for seed in item["seeds"]]


def sweep_item(
    item: WorkItem, context: Context, challenge: str | Challenge, algorithms: Sequence[Any], **options: Any
) -> Runs:
    """Train the item's learning rates and seeds, or take the runs from the store."""
    options |= {"epochs": item["epochs"], "batch_size": item["batch_size"]}
    options |= {"store": context.store, "data": context.data, "device": str(context.device)}
    return sweep(challenge, algorithms, item["lrs"], item["seeds"], **options)


def run_row(columns: str, item: WorkItem, run: Member | Run, measured: Row) -> Row:
    """Return a row with these columns: what was measured, else the run's value, else the item's, else None."""
    locality = run.locality if isinstance(run, Run) else run.algorithm.locality
    values = item | {"locality": locality, "lr": float(run.lr), "seed": int(run.seed)} | measured
    return {name: values.get(name) for name in columns.split()}


class RecordedStudy(Study, Protocol):
    """A study whose rows are measured on the item's runs, one by one; one item per seed, except in the demo."""

    def items(self, demo: bool) -> list[WorkItem]: ...

    def options(self, item: WorkItem, context: Context) -> dict[str, Any]:
        """Return options of `record_item`."""
        return {}

    def measure_run(self, run: RecordedRun, item: WorkItem) -> Iterable[Row]: ...

    def work_items(self, demo: bool) -> list[WorkItem]:
        return self.items(demo) if demo else split_seeds(self.items(demo))

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        runs = record_item(item, context, **self.options(item, context))
        return [run_row(self.columns, item, m, row) for m, run in runs for row in self.measure_run(run, item)]


def column(rows: pl.DataFrame, name: str) -> np.ndarray:
    """Return a column as floats; missing values become NaN."""
    return rows[name].cast(pl.Float64).to_numpy()


def finite(rows: pl.DataFrame, name: str) -> np.ndarray:
    """Return the finite values of a column."""
    values = column(rows, name)
    return values[np.isfinite(values)]


def distinct(rows: pl.DataFrame, name: str) -> list[float]:
    """Return the finite values of a column, sorted, each once."""
    return np.unique(finite(rows, name)).tolist()


def names(rows: pl.DataFrame, name: str = "algorithm") -> list[Any]:
    """Return the values of a column in order of first appearance."""
    return rows[name].unique(maintain_order=True).to_list()


def mean(rows: pl.DataFrame, name: str) -> float:
    """Return the mean of a column's finite values; NaN if there are none."""
    values = finite(rows, name)
    return float(values.mean()) if values.size else np.nan


def finite_median(rows: pl.DataFrame, name: str) -> float:
    """Return the median of a column's finite values; NaN if there are none."""
    values = finite(rows, name)
    return float(np.median(values)) if values.size else np.nan


def median(values: Sequence[float] | np.ndarray) -> float:
    """Return the median, counting NaN (a diverged run) as larger than every number; NaN of nothing."""
    numbers = np.nan_to_num(np.asarray(values, dtype=float), nan=np.inf, posinf=np.inf)
    return float(np.median(numbers)) if len(numbers) else np.nan


def medians_by(rows: pl.DataFrame, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of x, and the median of y at each."""
    values = distinct(rows, x)
    return np.array(values), np.array([median(column(rows.filter(pl.col(x) == value), y)) for value in values])


def drop_nonfinite(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the points whose y is finite."""
    return x[np.isfinite(y)], y[np.isfinite(y)]


def plot_medians(axes: Axes, rows: pl.DataFrame, x: str, y: str, **style: Any) -> np.ndarray:
    """Plot the finite medians of y at every x, and return them."""
    points = drop_nonfinite(*medians_by(rows, x, y))
    axes.plot(*points, **style)
    return points[1]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's ρ over the pairs that are finite; NaN for fewer than three or a constant variable."""
    both_finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[both_finite], y[both_finite]
    return float(stats.spearmanr(x, y).statistic) if len(x) > 2 and np.ptp(x) and np.ptp(y) else np.nan


def group(rows: pl.DataFrame, by: Sequence[str], statistics: Mapping[str, Statistic]) -> list[Row]:
    """Return one row per group, with its keys and the given statistics of its rows."""
    groups = rows.partition_by(by, maintain_order=True)
    return [part.select(by).row(0, named=True) | {name: f(part) for name, f in statistics.items()} for part in groups]


def of_columns(columns: Mapping[str, str], statistic: Callable[..., float] = finite_median) -> dict[str, Statistic]:
    """Return functions for `group`: a statistic of columns; `columns` maps headings to column names."""
    return {heading: partial(statistic, name=name) for heading, name in columns.items()}


class MeanInterval(NamedTuple):
    """A mean over seeds and its 95 % t-interval; NaN where there are fewer than two values."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> MeanInterval:
        """Return it of the finite values."""
        numbers = values[np.isfinite(values)]
        return cls(float(numbers.mean()) if numbers.size else np.nan, *confidence_interval(numbers.tolist()))

    def __str__(self) -> str:
        bounds = f" [{signed(self.low)}, {signed(self.high)}]" if np.isfinite(self.low) else ""
        return f"{signed(self.mean)}{bounds}"

    def phrase(self, above: str, below: str, unclear: str) -> str:
        """Return the phrase for an interval above 0, below 0, or neither; `unclear` also if there is no interval."""
        return above if self.low > 0 else below if self.high < 0 else unclear


def agreement(holds: bool) -> str:
    return f"{'agrees' if holds else 'does not agree'} with the paper"


def complete_runs(rows: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return the rows of those runs whose column is finite in every row: of the ones that did not diverge."""
    return rows.filter(pl.col(name).is_finite().all().over("algorithm", "lr", "seed"))


def diverged_note(rows: pl.DataFrame, name: str) -> str:
    """Return a note on the runs whose column is not finite, to append to a verdict; "" if there are none."""
    run_keys = ("classes", "algorithm", "batch_size", "lr", "seed", "sequence", "radius")
    keys = [key for key in run_keys if key in rows.columns]
    runs = rows.unique(keys, keep="last")
    diverged = len(runs) - len(finite(runs, name))
    return f" {diverged} of {len(runs)} runs diverged and are left out." if diverged else ""


def mean_deviation(values: np.ndarray) -> tuple[float, float, float]:
    """Return mean, and mean ∓ standard deviation (ddof = 0)."""
    return values.mean(), values.mean() - values.std(), values.mean() + values.std()


def median_range(values: np.ndarray) -> tuple[float, float, float]:
    return float(np.median(values)), values.min(), values.max()


class Curve(NamedTuple):
    """A statistic of the rows at every x, and a band around it."""

    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def plot(self, axes: Axes, alpha: float = 0.12, **style: Any) -> None:
        """Plot the line, and the band in the same colour."""
        axes.plot(self.x, self.middle, **style)
        axes.fill_between(self.x, self.low, self.high, color=style["color"], alpha=alpha, linewidth=0)


def curve(rows: pl.DataFrame, name: str, spread: Spread = mean_deviation, x: str = "lr") -> Curve:
    """Return the spread of a column's finite values at each x; an x without finite values is left out."""
    parts = [(value, finite(rows.filter(pl.col(x) == value), name)) for value in distinct(rows, x)]
    points = [(value, *spread(values)) for value, values in parts if values.size]
    return Curve(*np.array(points, dtype=np.float64).reshape(-1, 4).T)


def by_algorithm(rows: pl.DataFrame) -> list[tuple[pl.DataFrame, LineStyle]]:
    """Return the rows of each algorithm and its line style: cool and solid if global, warm and dashed if local."""
    styles = style.line_styles(rows.select("algorithm", "locality").unique().rows())
    parts = rows.partition_by("algorithm", maintain_order=True)
    return [(part, styles[part["algorithm"][0], part["locality"][0]]) for part in parts]


def label(rows: pl.DataFrame) -> str:
    """Return an algorithm's name and locality, for a legend."""
    return f"{rows['algorithm'][0]} ({rows['locality'][0]})"


def legend_order(rows: pl.DataFrame) -> list[str]:
    """Return the labels of all algorithms, global ones first."""
    algorithms = sorted(rows.select("locality", "algorithm").unique().rows())
    return [f"{algorithm} ({locality})" for locality, algorithm in algorithms]


def plot_over_lr(axes: Axes, rows: pl.DataFrame, name: str, title: str, spread: Spread = mean_deviation) -> None:
    """Plot a column against the learning rate: a line and a band for each algorithm."""
    axes.set_title(title)
    for algorithm_rows, line in by_algorithm(rows):
        curve(algorithm_rows, name, spread).plot(axes, **line.line(), **line.point(), label=label(algorithm_rows))
    option_axis(axes, distinct(rows, "lr"), "lr", crowded=True)


def log_axis(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """Use a logarithmic axis; does nothing if no value is positive."""
    if getattr(axes.dataLim, f"{which}1") > 0:
        getattr(axes, f"set_{which}scale")("log", nonpositive="mask")


def symlog(axes: Axes, values: np.ndarray, which: str) -> tuple[float, float]:
    """Use symmetric logarithmic axes over three decades, since forgetting may be negative; return the limits."""
    numbers = values[np.isfinite(values)]
    linear = 10.0 ** (np.ceil(np.log10(float(np.abs(numbers).max(initial=1e-9)))) - 3)
    for name in which:
        getattr(axes, f"set_{name}scale")("symlog", linthresh=linear)
    return 1.6 * min(float(numbers.min(initial=0)), -linear / 2), 1.6 * max(float(numbers.max(initial=0)), linear)


def plot_agreement(axes: Axes, rows: pl.DataFrame, x: str, y: str, colours: ScalarMappable) -> tuple[float, float]:
    """Plot two columns against each other, coloured by learning rate, and the line where they agree."""
    limits = symlog(axes, np.concatenate([column(rows, x), column(rows, y)]), "xy")
    axes.plot(limits, limits, color=style.FAINT, linewidth=0.9, linestyle=":", zorder=0)
    colour = colours.to_rgba(column(rows, "lr"))
    axes.scatter(column(rows, x), column(rows, y), s=14, c=colour, alpha=0.75, linewidths=0)
    axes.set(xlim=limits, ylim=limits)
    return limits


def integer_ticks(axes: Axes) -> None:
    """Put ticks of the x axis at integers only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def lr_colours(rows: pl.DataFrame) -> ScalarMappable:
    """Return a colour map over learning rates, brighter for higher ones."""
    lrs = distinct(rows, "lr")
    return ScalarMappable(LogNorm(lrs[0], lrs[-1] if len(lrs) > 1 else 2 * lrs[0]), style.dark_plasma(0.88))


def lr_colour_bar(figure: Figure, colours: ScalarMappable, axes: Sequence[Axes], rows: pl.DataFrame) -> None:
    """Draw a colour bar with the learning rates as ticks beside some axes."""
    lrs = distinct(rows, "lr")
    bar = figure.colorbar(colours, ax=list(axes), label="learning rate", pad=0.02, ticks=lrs)
    bar.ax.set_yticklabels([f"{lr:g}" for lr in lrs])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
