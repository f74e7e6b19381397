r"""Configurations and published numbers of Table 1 and of the figure on iCaRL's buffer (§6.1), and how to train them.

A `Column` is a challenge with its published training protocol, a `Row` an algorithm with its published hyperparameters.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from glocal.challenges import make
from glocal.challenges.challenge import Challenge
from glocal.errors import require, require_known
from glocal.store.run import Runs
from glocal.sweeps.resolve import choose_device
from glocal.sweeps.sweep import sweep

Angles: TypeAlias = Literal["published", "seed"]
ANGLES: tuple[Angles, ...] = ("published", "seed")
SEEDS = (11, 13, 33, 21, 55)


@cache
def published_cells() -> list[dict[str, Any]]:
    """Return the cells of Table 1: mean and standard deviation over five seeds of acc and forgetting, in percent.

    Forgetting is averaged over the T−1 tasks before the last. The appendix states an average over all T, but then
    accuracy plus forgetting is the mean accuracy right after learning, and it would exceed 100 in twelve cells.
    """
    text = ("challenge", "algorithm", "locality")
    return [{k: v if k in text else float(v) for k, v in row.items()} for row in _read_csv("table1.csv")]


@cache
def published_angles(method: str) -> dict[int, list[float]]:
    """Return the 20 angles of Rotated-MNIST in degrees for each seed, as the published runs of this method had them.

    The published code drew angles and replayed examples from one random stream per seed. So the methods without replay
    ('sgd', 'ewc', 'si', 'ogd') share their angles, and 'agem' and 'er' have their own.
    """
    sequences: dict[str, dict[int, list[float]]] = {}
    for row in _read_csv("rotated-mnist-angles.csv"):  # ordered by task
        for name in row["methods"].split(", "):
            sequences.setdefault(name, {}).setdefault(int(row["seed"]), []).append(float(row["degrees"]))
    require_known("method with published angles", method, sequences)
    return sequences[method]


def _read_csv(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((files("glocal.paper") / "data" / name).read_text("utf-8").splitlines()))


@dataclass(frozen=True)
class Row:
    """An algorithm with its options.

    published: name of the published row to compare with, if there is one.
    angles: method whose published angles to use; methods without published angles use those of plain SGD.
    """

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    published: str | None = None
    angles: str = "sgd"


@dataclass(frozen=True)
class Column:
    """A challenge, its training protocol and its rows; `extra_rows` are not in the paper's table."""

    challenge: str
    network: str
    setting: str | None
    tasks: int
    examples: int
    """Training examples per task."""
    epochs: int
    batch_size: int
    lrs: tuple[float, ...]
    rows: tuple[Row, ...]
    extra_rows: tuple[Row, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    train_eval: int = 2_000
    precision: str = "fp32"
    """Precision on a GPU: bf16 for ResNet-18, where it is much faster; parameters and statistics stay fp32."""

    @property
    def steps(self) -> int:
        """Training steps of one run."""
        return self.tasks * self.epochs * math.ceil(self.examples / self.batch_size)

    @property
    def all_rows(self) -> tuple[Row, ...]:
        return (*self.rows, *self.extra_rows)

    def row(self, algorithm: str) -> Row:
        by_name = {row.algorithm: row for row in self.all_rows}
        require_known(f"row of table 1 on {self.challenge}:", algorithm, by_name)
        return by_name[algorithm]

    def select(self, algorithms: Sequence[str] = (), extra: bool = False, **sizes: Any) -> Column:
        """Return a part of the column.

        Args:
            algorithms: rows by name; all by default.
            extra: also select the rows that the paper's table does not have.
            **sizes: `lrs`, `seeds`, `tasks` and `epochs` instead of the column's; None or empty keeps the column's.
        """
        rows = tuple(self.row(name) for name in dict.fromkeys(algorithms)) if algorithms else self.rows
        rows = self.all_rows if extra and not algorithms else rows
        return replace(self, rows=rows, **{name: value for name, value in sizes.items() if value not in (None, (), [])})

    def find_row(self, algorithm: str, options: Mapping[str, Any]) -> Row | None:
        """Return the row of this algorithm all of whose options have these values."""
        candidates = (row for row in self.all_rows if row.algorithm == algorithm)
        return next((row for row in candidates if all(options.get(k) == v for k, v in row.options.items())), None)

    def published_cell(self, row: Row, lr: float) -> dict[str, Any] | None:
        """Return the published numbers to compare a row with."""
        key = {"challenge": self.challenge, "algorithm": row.published, "lr": lr}
        return next((cell for cell in published_cells() if key.items() <= cell.items()), None)


def train(
    columns: Sequence[Column],
    *,
    angles: Angles = "published",
    precision: str | None = None,
    on_row: Callable[[Runs], object] | None = None,
    **options: Any,
) -> Runs:
    """Train the rows of columns, one sweep per row; runs that the store holds are not trained again.

    Args:
        columns: what to train; `extra_rows` are left out.
        angles: for rotated challenges, the 'published' angles of each method and seed, or angles drawn from the 'seed',
            which are the same for all algorithms.
        precision: of matrix products; by default the column's on a GPU and fp32 on a CPU.
        on_row: called after each row with all runs so far.
        **options: `store`, `data`, `device` and `progress` of `glocal.sweep`.
    """
    gpu = choose_device(options.get("device", "auto")).type == "cuda"
    parts = [(c, row, row_challenge(c, row, angles, options.get("data"))) for c in columns for row in c.rows]
    runs = Runs([])
    for column, row, challenge in parts:
        names = ("network", "setting", "epochs", "batch_size", "train_eval")
        protocol = {name: getattr(column, name) for name in names}
        protocol |= {"tasks": column.tasks if isinstance(challenge, str) else None}
        protocol |= {"precision": precision or (column.precision if gpu else "fp32")}
        row_runs = sweep(challenge, [(row.algorithm, row.options)], column.lrs, column.seeds, **protocol, **options)
        runs = Runs([*runs, *row_runs])
        if on_row is not None:
            on_row(runs)
    return runs


def row_challenge(column: Column, row: Row, angles: Angles, data: str | Path | None = None) -> str | Challenge:
    """Return the challenge of a row, with the angles of all seeds, so that run names do not depend on the seeds."""
    require_known("kind of angles", angles, ANGLES)
    if angles == "seed" or not column.challenge.startswith("rotated-"):
        return column.challenge
    angles_by_seed = published_angles(row.angles)
    missing_seeds = ", ".join(str(seed) for seed in column.seeds if seed not in angles_by_seed)
    hint = f"only for {', '.join(map(str, angles_by_seed))}; use --angles seed for others"
    require(not missing_seeds, f"no angles were published for seed {missing_seeds}, {hint}.")
    num_angles = len(angles_by_seed[SEEDS[0]])
    hint = f"{num_angles} were published per seed; use --angles seed for more"
    require(column.tasks <= num_angles, f"{column.tasks} tasks need as many angles, but {hint}.")
    return make(column.challenge, column.tasks, data, angles=angles_by_seed)


def _rows(slots: int, si: float, ewc: float, ogd: int, **batchnorm: str) -> tuple[Row, ...]:
    """Return the rows that all challenges have.

    The published EWC penalty has no factor ½, so ours is twice as large. The code behind the published OGD row is
    nearly plain SGD (`ogd-published`); the paper's OGD-GTL is a row of its own with as many samples. `batchnorm` are
    options for networks with BatchNorm, whose statistics the published EWC and OGD change.
    """
    return (
        Row("sgd"),
        Row("agem", {"slots": slots, "filling": "batch"}, "agem", angles="agem"),
        Row("er", {"slots": slots}, "er", angles="er"),
        Row("si", {"penalty": si, "damping": 1.0, "importance": "published"}, "si", angles="si"),
        Row("ewc", {"penalty": 2 * ewc, "fisher": "published", **batchnorm}, "ewc", angles="ewc"),
        Row("ogd-published", {"slots": ogd, **batchnorm}, "ogd", angles="ogd"),
        Row("ogd-gtl", {"slots": ogd}, angles="ogd"),
    )


def _icarl(slots: int) -> Row:
    return Row("icarl", {"slots": slots, "features": "raw"}, "icarl")


def _gem(slots: int) -> Row:
    return Row("gem", {"slots": slots, "margin": 0.5, "damping": 0.001})


def _split(challenge: str, tasks: int, epochs: int, slots: int, ewc: float) -> Column:
    """Return a column of a split challenge; `icarl-random` is in one of the paper's figures."""
    return Column(
        challenge,
        network="resnet18",
        setting="task",
        tasks=tasks,
        examples=10_000,
        epochs=epochs,
        batch_size=32,
        precision="bf16",
        lrs=(0.0001, 0.001, 0.01, 0.05, 0.1),
        rows=(*_rows(slots=slots, si=0.5, ewc=ewc, ogd=200, statistics="published"), _icarl(slots)),
        extra_rows=(
            Row("icarl-random", _icarl(slots).options),
            _gem(slots),
            Row("derpp", {"slots": slots}),
            *_OTHERS,
        ),
    )


_OTHERS = tuple(Row(name) for name in ("laplace", "optimal-soft", "pnn", "packnet", "hat"))
"""Rows with their default options."""
_DERPP = Row("derpp", {"slots": 500, "alpha": 0.5, "beta": 1.0})
_ROTATED = Column(
    "rotated-mnist",
    network="mlp",
    setting=None,
    tasks=20,
    examples=60_000,
    epochs=5,
    batch_size=128,
    lrs=(0.001, 0.005, 0.01, 0.05, 0.1),
    rows=_rows(slots=500, si=1.0, ewc=0.7, ogd=500),
    extra_rows=(_gem(500), _DERPP, *_OTHERS),
)
_CIFAR10 = _split("split-cifar10", tasks=5, epochs=50, slots=200, ewc=10.0)
_TINYIMAGENET = _split("split-tinyimagenet", tasks=10, epochs=100, slots=500, ewc=25.0)
COLUMNS: dict[str, Column] = {column.challenge: column for column in (_ROTATED, _CIFAR10, _TINYIMAGENET)}

DEMO = replace(
    _ROTATED,
    challenge="rotated-digits",
    tasks=3,
    examples=4_000,
    epochs=2,
    lrs=(0.02, 0.05, 0.2, 0.5),
    rows=tuple(_ROTATED.row(name) for name in ("sgd", "er", "si", "ewc", "ogd-gtl")),
    extra_rows=tuple(_ROTATED.row(name) for name in ("agem", "ogd-published", "gem", "derpp")),
    seeds=SEEDS[:3],
    train_eval=500,
)

ICARL_ALGORITHMS = ("icarl", "icarl-random")
"""iCaRL with exemplars chosen by herding at the task's solution, and at random (§6.1, last figure).

The claim: with herding iCaRL forgets more at high learning rates than at low ones; with random exemplars it does not.
"""
ICARL_COLUMNS: dict[str, Column] = {
    column.challenge: replace(column.select(ICARL_ALGORITHMS), extra_rows=()) for column in (_CIFAR10, _TINYIMAGENET)
}
ICARL_DEMO = replace(
    DEMO,
    challenge="split-digits",
    setting="task",
    tasks=5,
    examples=800,
    epochs=3,
    batch_size=64,
    lrs=(0.02, 0.05, 0.3, 1.0),
    rows=(_icarl(50), Row("icarl-random", _icarl(50).options)),
    extra_rows=(),
)
