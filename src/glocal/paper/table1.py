r"""Configurations and published numbers of Table 1, and of the figure on iCaRL's buffer (§6.1).

A `Column` is a challenge with its published training protocol, a `Row` an algorithm with its published hyperparameters.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from glocal.errors import require_known

Angles: TypeAlias = Literal["published", "seed"]
ANGLES: tuple[Angles, ...] = ("published", "seed")
SEEDS = (11, 13, 33, 21, 55)


@dataclass(frozen=True)
class PublishedCell:
    """One (challenge, algorithm, lr) of Table 1: mean and standard deviation over five seeds, in percent.

    Forgetting is averaged over the T−1 tasks before the last. The appendix states an average over all T, but then
    accuracy plus forgetting is the mean accuracy right after learning, and it would exceed 100 in twelve cells.
    """

    challenge: str
    algorithm: str
    locality: str
    lr: float
    acc_mean: float
    acc_std: float
    forgetting_mean: float
    forgetting_std: float


@cache
def published_cells() -> tuple[PublishedCell, ...]:
    """Return every cell of Table 1 that has a number."""
    return tuple(
        PublishedCell(row.pop("challenge"), row.pop("algorithm"), row.pop("locality"), *map(float, row.values()))
        for row in _read_csv("table1.csv")
    )


@cache
def published_angles(method: str) -> dict[int, list[float]]:
    """Return the 20 angles of Rotated-MNIST in degrees for each seed, as the published runs of this method had them.

    The published code drew angles and replayed examples from one random stream per seed. So the methods without replay
    ('sgd', 'ewc', 'si', 'ogd') share their angles, and 'agem' and 'er' have their own.
    """
    sequences: dict[str, dict[int, dict[int, float]]] = {}
    for row in _read_csv("rotated-mnist-angles.csv"):
        for name in row["methods"].split(", "):
            by_task = sequences.setdefault(name, {}).setdefault(int(row["seed"]), {})
            by_task[int(row["task"])] = float(row["degrees"])
    require_known("method with published angles", method, sequences)
    return {seed: [degrees for _, degrees in sorted(tasks.items())] for seed, tasks in sequences[method].items()}


def _read_csv(name: str) -> Iterator[dict[str, str]]:
    return csv.DictReader((files("glocal.paper") / "data" / name).read_text(encoding="utf-8").splitlines())


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

    def select_rows(self, algorithms: Sequence[str] = (), extra: bool = False) -> tuple[Row, ...]:
        """Return rows by name; by default the standard ones, and the extra ones if `extra` is set."""
        if algorithms:
            return tuple(self.row(name) for name in dict.fromkeys(algorithms))
        return self.all_rows if extra else self.rows

    def find_row(self, algorithm: str, options: Mapping[str, Any]) -> Row | None:
        """Return the row of this algorithm all of whose options have these values."""
        for row in self.all_rows:
            if row.algorithm == algorithm and all(options.get(k) == v for k, v in row.options.items()):
                return row
        return None

    def published_cell(self, row: Row, lr: float) -> PublishedCell | None:
        """Return the published numbers to compare a row with."""
        key = self.challenge, row.published, lr
        return next((c for c in published_cells() if (c.challenge, c.algorithm, c.lr) == key), None)

    def precision_on(self, device: str) -> str:
        """Return the column's precision on a GPU and fp32 on a CPU, which gains nothing from less."""
        return self.precision if device == "cuda" else "fp32"

    def describe_cost(self) -> str:
        runs = len(self.rows) * len(self.lrs) * len(self.seeds)
        return f"{self.challenge}: {runs} runs of {self.steps:,} steps ({self.network}, batch {self.batch_size})"


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
        extra_rows=(Row("icarl-random", _icarl(slots).options), _gem(slots), Row("derpp", {"slots": slots})),
    )


COLUMNS: dict[str, Column] = {
    column.challenge: column
    for column in (
        Column(
            "rotated-mnist",
            network="mlp",
            setting=None,
            tasks=20,
            examples=60_000,
            epochs=5,
            batch_size=128,
            lrs=(0.001, 0.005, 0.01, 0.05, 0.1),
            rows=_rows(slots=500, si=1.0, ewc=0.7, ogd=500),
            extra_rows=(
                _gem(500),
                Row("derpp", {"slots": 500, "alpha": 0.5, "beta": 1.0}),
                Row("laplace"),
                Row("optimal-soft"),
            ),
        ),
        _split("split-cifar10", tasks=5, epochs=50, slots=200, ewc=10.0),
        _split("split-tinyimagenet", tasks=10, epochs=100, slots=500, ewc=25.0),
    )
}

DEMO = Column(
    "rotated-digits",
    network="mlp",
    setting=None,
    tasks=3,
    examples=4_000,
    epochs=2,
    batch_size=128,
    lrs=(0.02, 0.05, 0.2, 0.5),
    rows=tuple(COLUMNS["rotated-mnist"].row(name) for name in ("sgd", "er", "si", "ewc", "ogd-gtl")),
    extra_rows=tuple(COLUMNS["rotated-mnist"].row(name) for name in ("agem", "ogd-published", "gem", "derpp")),
    seeds=SEEDS[:3],
    train_eval=500,
)


ICARL_ALGORITHMS = ("icarl", "icarl-random")
"""iCaRL with exemplars chosen by herding at the task's solution, and at random (§6.1, last figure).

The claim: with herding iCaRL forgets more at high learning rates than at low ones; with random exemplars it does not.
"""


def _icarl_rows(herding: Row) -> tuple[Row, ...]:
    return herding, Row("icarl-random", herding.options)


ICARL_COLUMNS: dict[str, Column] = {
    name: replace(column, rows=_icarl_rows(column.row("icarl")), extra_rows=())
    for name, column in COLUMNS.items()
    if name.startswith("split-")
}
ICARL_DEMO = Column(
    "split-digits",
    network="mlp",
    setting="task",
    tasks=5,
    examples=800,
    epochs=3,
    batch_size=64,
    lrs=(0.02, 0.05, 0.3, 1.0),
    rows=_icarl_rows(_icarl(50)),
    seeds=DEMO.seeds,
    train_eval=500,
)
