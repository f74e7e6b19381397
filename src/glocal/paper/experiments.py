"""The experiments that have a name: what each shows, how it is run, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from glocal.paper import icarl_buffer, table1
from glocal.paper.table1 import Column


@dataclass(frozen=True)
class Experiment:
    name: str
    description: str
    columns: tuple[Column, ...]

    @property
    def command(self) -> str:
        return f"glocal paper {self.name}"

    def costs(self) -> list[str]:
        return [cost(column) for column in self.columns] or ["nothing beyond table1"]


def cost(column: Column) -> str:
    """Runs, and steps of one run: what every machine has to do, however fast it is."""
    runs = len(column.rows) * len(column.lrs) * len(column.seeds)
    return f"{column.challenge}: {runs} runs of {column.steps:,} steps ({column.network}, batch {column.batch_size})"


def _named(experiments: Iterable[Experiment]) -> dict[str, Experiment]:
    return {experiment.name: experiment for experiment in experiments}


EXPERIMENTS: dict[str, Experiment] = _named(
    (
        Experiment(
            "table1",
            "Table 1: accuracy and forgetting over learning rates, beside the published numbers, and the paper's test",
            (*table1.COLUMNS.values(), table1.DEMO),
        ),
        Experiment(
            "distance",
            "Figure: distance from the initialisation against the learning rate, by task, from the runs of table1",
            (),
        ),
        Experiment(
            "icarl-buffer",
            "Figure: forgetting of iCaRL with herding and with random exemplars, against the learning rate",
            (*icarl_buffer.COLUMNS.values(), icarl_buffer.DEMO),
        ),
    )
)
