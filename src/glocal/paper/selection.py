"""A part of an experiment, perhaps at another size, and how it is trained: one sweep a row, resumed by asking again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glocal.challenges import make
from glocal.challenges.challenge import Challenge
from glocal.engine.loop import Progress
from glocal.errors import GlocalError, unknown
from glocal.paper import published
from glocal.paper.table1 import ANGLES, Angles, Column, Row
from glocal.store.run import Runs
from glocal.sweeps.resolve import choose_device
from glocal.sweeps.sweep import sweep
from glocal.sweeps.training import ProgressReporter


@dataclass(frozen=True)
class Selection:
    """Rows of a column, at these rates and seeds; tasks, epochs and precision are the column's own unless given.

    angles: of a rotated challenge, those published for every method and seed, or drawn from the seed alone, the same
        for all algorithms.
    """

    column: Column
    rows: tuple[Row, ...]
    lrs: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    tasks: int | None = None
    epochs: int | None = None
    angles: Angles = "published"
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.angles not in ANGLES:
            raise unknown("kind of angles", self.angles, ANGLES)
        if self.rotated:
            known = published.angles("sgd")
            strange = [str(seed) for seed in self.all_seeds if seed not in known]
            if strange:
                raise GlocalError(
                    f"no angles were published for seed {', '.join(strange)}, only for {', '.join(map(str, known))}; "
                    "with --angles seed any seed will do."
                )
            longest = len(next(iter(known.values())))
            if self.all_tasks > longest:
                raise GlocalError(
                    f"{self.all_tasks} tasks were asked for; {longest} angles were published for a seed. "
                    "With --angles seed any number of tasks will do."
                )

    @property
    def rotated(self) -> bool:
        """Whether the challenge depends on published angles."""
        return self.column.challenge.startswith("rotated-") and self.angles == "published"

    @property
    def all_lrs(self) -> tuple[float, ...]:
        return self.lrs or self.column.lrs

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds or self.column.seeds

    @property
    def all_tasks(self) -> int:
        return self.column.tasks if self.tasks is None else self.tasks

    @property
    def runs(self) -> int:
        return len(self.rows) * len(set(self.all_lrs)) * len(set(self.all_seeds))

    def challenge(self, row: Row, data: str | Path | None) -> str | Challenge:
        """What the row's runs meet: the angles of all seeds, so that a run's name does not depend on who else runs."""
        if not self.rotated:
            return self.column.challenge
        return make(self.column.challenge, self.all_tasks, data, angles=published.angles(row.angles))


def train(
    selection: Selection,
    *,
    store: str | Path,
    data: str | Path | None = None,
    device: str = "auto",
    progress: ProgressReporter | None = None,
    finished: Callable[[Runs], None] | None = None,
) -> Runs:
    """All runs of a selection, row by row; `finished` is told what there is after each row."""
    column, runs = selection.column, Runs([])
    together = None if progress is None else Together(progress, selection.runs)
    try:
        for row in selection.rows:
            challenge = selection.challenge(row, data)
            more = sweep(
                challenge,
                [(row.algorithm, row.options)],
                selection.all_lrs,
                selection.all_seeds,
                network=column.network,
                setting=column.setting,
                tasks=selection.all_tasks if isinstance(challenge, str) else None,
                epochs=column.epochs if selection.epochs is None else selection.epochs,
                batch_size=column.batch_size,
                train_eval=column.train_eval,
                store=store,
                data=data,
                device=device,
                precision=selection.precision or precision_on(column, choose_device(device).type),
                progress=together,
            )
            runs = Runs([*runs, *more])
            if finished is not None:
                finished(runs)
    finally:
        if together is not None:
            together.close()
    return runs


def precision_on(column: Column, device: str) -> str:
    """The column's own on a GPU; a CPU gains nothing by less than fp32."""
    return column.precision if device == "cuda" else "fp32"


class Together:
    """Watches several sweeps as if they were one of so many runs."""

    def __init__(self, progress: ProgressReporter, runs: int) -> None:
        self._progress, self._runs, self._begun = progress, runs, False

    def start(self, runs: int, finished: int) -> None:
        if self._begun:
            self._progress.finish_cohort(finished)
        else:
            self._progress.start(self._runs, finished)
            self._begun = True

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress:
        return self._progress.start_cohort(label, runs, tasks, steps, done)

    def finish_cohort(self, runs: int) -> None:
        self._progress.finish_cohort(runs)

    def waiting(self, runs: int) -> None:
        self._progress.waiting(runs)

    def message(self, text: str) -> None:
        self._progress.message(text)

    def stop(self) -> None:
        """Of one sweep: others follow."""

    def close(self) -> None:
        if self._begun:
            self._progress.stop()


def selected(
    columns: Sequence[Column],
    rows: Callable[[Column], tuple[Row, ...]],
    lrs: Sequence[float] = (),
    seeds: Sequence[int] = (),
    tasks: int | None = None,
    epochs: int | None = None,
    angles: Angles = "published",
    precision: str | None = None,
) -> list[Selection]:
    """The same choice on several challenges."""
    choice = tuple(lrs), tuple(seeds), tasks, epochs, angles, precision
    return [Selection(column, rows(column), *choice) for column in columns]
