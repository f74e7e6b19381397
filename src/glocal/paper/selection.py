"""Train parts of Table 1, one sweep per row; runs that the store holds are not trained again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glocal.challenges import make
from glocal.challenges.challenge import Challenge
from glocal.engine.loop import Progress
from glocal.errors import GlocalError, require_known
from glocal.paper import table1
from glocal.paper.table1 import ANGLES, Angles, Column, Row
from glocal.store.run import Runs
from glocal.sweeps.resolve import choose_device
from glocal.sweeps.sweep import ProgressReporter, sweep


@dataclass(frozen=True)
class Selection:
    """Rows of a column at some learning rates and seeds; fields left out have the column's values.

    angles: for a rotated challenge, the 'published' angles of each method and seed, or angles drawn from the 'seed',
        which are the same for all algorithms.
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
        require_known("kind of angles", self.angles, ANGLES)
        if self.has_published_angles:
            angles = table1.published_angles("sgd")
            missing = [str(seed) for seed in self.all_seeds if seed not in angles]
            if missing:
                raise GlocalError(
                    f"no angles were published for seed {', '.join(missing)}, only for {', '.join(map(str, angles))}; "
                    "use --angles seed for other seeds."
                )
            available = len(next(iter(angles.values())))
            if self.all_tasks > available:
                raise GlocalError(
                    f"{self.all_tasks} tasks need as many angles, but {available} were published per seed; "
                    "use --angles seed for more tasks."
                )

    @property
    def has_published_angles(self) -> bool:
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
        """Return the challenge of a row, with the angles of all seeds, so that run names do not depend on `seeds`."""
        if not self.has_published_angles:
            return self.column.challenge
        return make(self.column.challenge, self.all_tasks, data, angles=table1.published_angles(row.angles))


def train(
    selection: Selection,
    *,
    store: str | Path,
    data: str | Path | None = None,
    device: str = "auto",
    progress: ProgressReporter | None = None,
    on_row: Callable[[Runs], object] | None = None,
) -> Runs:
    """Train all runs of a selection that the store does not hold, row by row.

    Args:
        selection: what to train.
        store: folder that keeps finished runs.
        data: folder with data sets to look in first.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        progress: where to report progress.
        on_row: called after each row with all runs so far.
    """
    column, runs = selection.column, Runs([])
    combined = None if progress is None else CombinedProgress(progress, selection.runs)
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
                precision=selection.precision or column.precision_on(choose_device(device).type),
                progress=combined,
            )
            runs = Runs([*runs, *more])
            if on_row is not None:
                on_row(runs)
    finally:
        if combined is not None:
            combined.close()
    return runs


class CombinedProgress(ProgressReporter):
    """Report several sweeps as one sweep of `runs` runs; `close` ends it."""

    def __init__(self, progress: ProgressReporter, runs: int) -> None:
        self._progress, self._runs, self._started = progress, runs, False

    def start(self, runs: int, finished: int) -> None:
        if self._started:
            self._progress.finish_cohort(finished)
        else:
            self._progress.start(self._runs, finished)
            self._started = True

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress:
        return self._progress.start_cohort(label, runs, tasks, steps, done)

    def finish_cohort(self, runs: int) -> None:
        self._progress.finish_cohort(runs)

    def waiting(self, runs: int) -> None:
        self._progress.waiting(runs)

    def message(self, text: str) -> None:
        self._progress.message(text)

    def stop(self) -> None:
        """Do nothing: another sweep may follow."""

    def close(self) -> None:
        if self._started:
            self._progress.stop()
