"""The settings that a sweep's runs share, its requested runs, and the interface for progress reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from glocal.engine.cohort import Cohort, Member
from glocal.engine.config import RunConfig
from glocal.engine.loader import Loader
from glocal.engine.loop import Progress
from glocal.engine.state import State
from glocal.store.run import Run
from glocal.store.store import Store
from glocal.sweeps.continuation import cohort_after
from glocal.sweeps.options import SweepOptions


class ProgressReporter:
    """Receives the progress of a sweep, for example to draw progress bars; this base class ignores it."""

    def start(self, runs: int, finished: int) -> None: ...

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress:
        return Progress()

    def finish_cohort(self, runs: int) -> None: ...

    def waiting(self, runs: int) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


class TrainingMonitor(Protocol):
    """Measures a cohort during training without changing it; `glocal.lens.monitor.Monitor` is one."""

    def __call__(self, task: int, epoch: int, state: State, loader: Loader) -> None: ...

    def summary(self, run: int) -> tuple[str, dict[str, Any]]:
        """Return one run's outcome in a sentence, and its measurements as JSON."""


@dataclass(frozen=True)
class RunRequest:
    """One requested run: the configuration that names it, and what the engine trains."""

    config: RunConfig
    member: Member
    parent: Run | None = None
    """The run that it goes on from."""


@dataclass
class SweepContext:
    """What all runs of a sweep share; `cohort` has no members yet."""

    cohort: Cohort
    options: SweepOptions
    store: Store
    notes: list[str]
    """Notes of all runs, for example on their initialisation."""
    progress: ProgressReporter = field(default_factory=ProgressReporter)
    stop: Callable[[], bool] = lambda: False
    """Whether to stop at the next task boundary."""
    track: Callable[[Run, int], None] | None = None
    """Receives every run, as far as it is measured, and its number of finished tasks, when these increase."""


def cohort_of(context: SweepContext, requests: Sequence[RunRequest]) -> Cohort:
    """Return the cohort of some requests, which goes on from their parents if they have any."""
    cohort = context.cohort.only([request.member for request in requests])
    parents = [request.parent for request in requests if request.parent is not None]
    return cohort_after(cohort, parents) if parents else cohort
