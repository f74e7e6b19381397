"""iCaRL's buffer (§6.1, last figure): exemplars chosen by herding, at the task's solution, or by chance, as data.

The claim: with herding iCaRL forgets more at high learning rates than at low ones; with random exemplars it does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from glocal.errors import unknown
from glocal.paper import table1
from glocal.paper.table1 import Column, Row
from glocal.store.run import Run, Runs

ALGORITHMS = ("icarl", "icarl-random")


def _rows(herding: Row) -> tuple[Row, ...]:
    """The same hyperparameters for both."""
    return herding, Row("icarl-random", herding.options)


COLUMNS: dict[str, Column] = {
    name: replace(column, rows=_rows(column.named("icarl")), further=())
    for name, column in table1.COLUMNS.items()
    if name.startswith("split-")
}

DEMO = Column(
    "split-digits",
    network="mlp",
    setting="task",
    tasks=5,
    examples=800,
    epochs=3,
    batch_size=64,
    lrs=(0.02, 0.05, 0.3, 1.0),
    rows=_rows(table1.icarl(50)),
    seeds=table1.DEMO.seeds,
    train_eval=500,
)


def only(runs: Iterable[Run]) -> Runs:
    """Of the runs of a whole table, those of the figure."""
    return Runs([run for run in runs if run.config["algorithm"]["name"] in ALGORITHMS])


def column(challenge: str) -> Column:
    if challenge not in COLUMNS:
        raise unknown("challenge of icarl-buffer:", challenge, COLUMNS)
    return COLUMNS[challenge]
