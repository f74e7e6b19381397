r"""Table 1 (§6.1): accuracy and forgetting of local and global algorithms over learning rates, as data.

A `Column` is a challenge with its published protocol, a `Row` an algorithm with its published hyperparameters. On a
machine without the command line's libraries: `python -m glocal.paper.table1 --help`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from glocal.errors import unknown
from glocal.paper.published import SEEDS, Cell, cells

Angles: TypeAlias = Literal["published", "seed"]
ANGLES: tuple[Angles, ...] = ("published", "seed")


@dataclass(frozen=True)
class Row:
    """An algorithm with its options, and the name of the published row that it is compared with, if there is one.

    angles: whose published angles it meets; who has none of its own meets those of plain SGD.
    """

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    published: str | None = None
    angles: str = "sgd"


@dataclass(frozen=True)
class Column:
    """A challenge, how its tasks are trained, and its rows: the standard ones, and further ones on demand."""

    challenge: str
    network: str
    setting: str | None
    tasks: int
    examples: int
    """Training examples of a task."""
    epochs: int
    batch_size: int
    lrs: tuple[float, ...]
    rows: tuple[Row, ...]
    further: tuple[Row, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    train_eval: int = 2_000
    precision: str = "fp32"
    """On a GPU: bf16 for ResNet-18, where it is far faster; parameters and statistics stay fp32."""

    @property
    def steps(self) -> int:
        """Steps of one run."""
        return self.tasks * self.epochs * math.ceil(self.examples / self.batch_size)

    @property
    def all_rows(self) -> tuple[Row, ...]:
        return (*self.rows, *self.further)

    def named(self, algorithm: str) -> Row:
        every = {row.algorithm: row for row in self.all_rows}
        if algorithm not in every:
            raise unknown(f"row of table 1 on {self.challenge}:", algorithm, every)
        return every[algorithm]


def _rows(slots: int, si: float, ewc: float, ogd: int, **normalised: str) -> tuple[Row, ...]:
    """The rows that all challenges have. λ of the published EWC goes with no ½: here it is twice as large.

    The published OGD row was measured with a procedure that is plain SGD in all but name (`ogd-published`); the
    paper's OGD-GTL is a row of its own, with as many samples. `normalised` are options that matter to networks with
    BatchNorm, whose statistics the published EWC and OGD disturb.
    """
    return (
        Row("sgd"),
        Row("agem", {"slots": slots, "filling": "batch"}, "agem", angles="agem"),
        Row("er", {"slots": slots}, "er", angles="er"),
        Row("si", {"penalty": si, "damping": 1.0, "importance": "published"}, "si", angles="si"),
        Row("ewc", {"penalty": 2 * ewc, "fisher": "published", **normalised}, "ewc", angles="ewc"),
        Row("ogd-published", {"slots": ogd, **normalised}, "ogd", angles="ogd"),
        Row("ogd-gtl", {"slots": ogd}, angles="ogd"),
    )


def icarl(slots: int) -> Row:
    return Row("icarl", {"slots": slots, "features": "raw"}, "icarl")


def _further(slots: int) -> tuple[Row, ...]:
    """Rows that the paper does not have on the split challenges, but for `icarl-random`, which is in a figure."""
    return (
        Row("icarl-random", icarl(slots).options),
        Row("gem", {"slots": slots, "margin": 0.5, "damping": 0.001}),
        Row("derpp", {"slots": slots}),
    )


SPLIT_LRS = (0.0001, 0.001, 0.01, 0.05, 0.1)

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
            further=(
                Row("gem", {"slots": 500, "margin": 0.5, "damping": 0.001}),
                Row("derpp", {"slots": 500, "alpha": 0.5, "beta": 1.0}),
                Row("laplace"),
                Row("optimal-soft"),
            ),
        ),
        Column(
            "split-cifar10",
            network="resnet18",
            setting="task",
            tasks=5,
            examples=10_000,
            epochs=50,
            batch_size=32,
            precision="bf16",
            lrs=SPLIT_LRS,
            rows=(*_rows(slots=200, si=0.5, ewc=10.0, ogd=200, statistics="published"), icarl(200)),
            further=_further(200),
        ),
        Column(
            "split-tinyimagenet",
            network="resnet18",
            setting="task",
            tasks=10,
            examples=10_000,
            epochs=100,
            batch_size=32,
            precision="bf16",
            lrs=SPLIT_LRS,
            rows=(*_rows(slots=500, si=0.5, ewc=25.0, ogd=200, statistics="published"), icarl(500)),
            further=_further(500),
        ),
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
    rows=tuple(COLUMNS["rotated-mnist"].named(name) for name in ("sgd", "er", "si", "ewc", "ogd-gtl")),
    further=tuple(COLUMNS["rotated-mnist"].named(name) for name in ("agem", "ogd-published", "gem", "derpp")),
    seeds=SEEDS[:3],
    train_eval=500,
)


def column(challenge: str) -> Column:
    if challenge not in COLUMNS:
        raise unknown("challenge of table 1:", challenge, COLUMNS)
    return COLUMNS[challenge]


def grid() -> Iterator[tuple[Column, Row, float]]:
    """Every (challenge, row, learning rate) of the whole table, the further rows included."""
    for column in COLUMNS.values():
        for row in column.all_rows:
            for lr in column.lrs:
                yield column, row, lr


def cell(column: Column, row: Row, lr: float) -> Cell | None:
    """The published numbers that a configuration is compared with."""
    key = column.challenge, row.published, lr
    return next((c for c in cells() if (c.challenge, c.algorithm, c.lr) == key), None)


def row_of(column: Column, algorithm: str, options: Mapping[str, Any]) -> Row | None:
    """The row that an algorithm with these options belongs to: its own name, and every option the row fixes."""
    for row in column.all_rows:
        if row.algorithm == algorithm and all(options.get(k) == v for k, v in row.options.items()):
            return row
    return None


def chosen(column: Column, algorithms: Sequence[str] = (), further: bool = False) -> tuple[Row, ...]:
    """Rows by name; without names the standard ones, and the further ones where they are asked for."""
    if algorithms:
        return tuple(column.named(name) for name in dict.fromkeys(algorithms))
    return column.all_rows if further else column.rows


if __name__ == "__main__":
    from glocal.cli.table1 import main

    sys.exit(main())
