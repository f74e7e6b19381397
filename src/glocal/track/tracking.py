"""What is logged of a run, and how it reaches a tracker: while it trains, or afterwards from a store.

Both ways log what `RunLog.steps` returns, so they give the same log. A tracker names a run by its hash and writes only
what it does not have: runs that are logged twice, or resumed, are never duplicated.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from glocal import metrics
from glocal.errors import GlocalError, GlocalWarning, first_line
from glocal.files import lock_file, user_path
from glocal.store.conditions import as_text
from glocal.store.run import Run
from glocal.sweeps.options import check_tracker


@dataclass(frozen=True)
class RunLog:
    """The log of a run that has finished so many of its tasks."""

    run: Run
    finished: int

    @property
    def name(self) -> str:
        """A name that is unique and can be a folder's: algorithm, learning rate, seed and hash."""
        parts = self.run.settings["algorithm"], f"lr{self.run.lr:g}", f"seed{self.run.seed}", self.run.hash
        return re.sub(r"[^\w.+-]+", "-", "-".join(parts))

    @property
    def group(self) -> str:
        return re.sub(r"[^\w.+-]+", "-", self.run.challenge)

    @property
    def settings(self) -> dict[str, str | int | float | bool]:
        """`Run.settings`, the hash, and the version of glocal; what is no number is text."""
        settings = {**self.run.settings, "hash": self.run.hash, "glocal": self.run.info["versions"]["glocal"]}
        return {k: v if isinstance(v, bool | int | float) else as_text(v) for k, v in settings.items()}

    @property
    def status(self) -> Literal["running", "finished", "diverged"]:
        if self.finished < self.run.tasks:
            return "running"
        return "finished" if self.run.diverged is None else "diverged"

    @property
    def last_step(self) -> int:
        return self.finished * int(self.run.config["epochs"])

    def steps(self, after: int = -1) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, metrics) for the steps beyond `after`; a step is the number of epochs trained, 0 is θ_0.

        Every epoch has its mean objective, and the last one of a task what is measured after this task. Values that are
        not finite are left out.
        """
        from glocal.report.summary import DEFAULT_VIEW, run_statistics

        run, epochs = self.run, int(self.run.config["epochs"])
        for step in range(after + 1, self.last_step + 1):
            values: dict[str, Any] = {}
            if step:
                values["objective"] = run.arrays["epoch_loss"][(step - 1) // epochs, (step - 1) % epochs]
            if step % epochs == 0:
                values |= after_task(run, step // epochs)
            if step == run.tasks * epochs:
                final = {**run_statistics([run], DEFAULT_VIEW)[0], "seconds": run.info["cost"]["seconds"]}
                values |= {f"final/{k}": v for k, v in final.items()} | {"final/diverged": run.diverged is not None}
            if finite := {k: float(v) for k, v in values.items() if math.isfinite(v)}:
                yield step, finite


def after_task(run: Run, t: int) -> dict[str, Any]:
    """Return what is measured after t tasks, on test data and on validation data if there are any.

    Accuracies are in percent; without classes, losses take their place.
    """
    by, R, width = metrics.measure_of(run), metrics.shown_matrix(run), len(str(run.tasks))
    values: dict[str, Any] = {"task": t} | {f"{by}/task_{o + 1:0{width}}": R[t, o] for o in range(run.tasks)}
    if metrics.choice_split(run) == "validation":
        held_out = metrics.shown_matrix(run, split="validation")
        values |= {f"validation_{by}/task_{o + 1:0{width}}": held_out[t, o] for o in range(run.tasks)}
        values |= {f"average_validation_{by}": metrics.average_accuracy(held_out, t)} if t else {}
    if t:
        losses = run.arrays[f"test_{metrics.scope_of(run)}_loss"]
        values |= {"average_loss": metrics.average_accuracy(losses, t), f"average_{by}": metrics.average_accuracy(R, t)}
        values["forgetting"] = metrics.average_forgetting(R, t, by=by)
        for name in ("distance_from_init", "update_norm", "memory_bytes"):
            values[name] = run.arrays[name][t - 1]
    return values


class Tracker(Protocol):
    """Writes logs of runs with a library. Each module of this folder has one, called `Tracker`."""

    def __init__(self, where: str) -> None:
        """Take a folder, a URI or a project; '' is the default."""

    def write(self, log: RunLog) -> None:
        """Write the steps that the tracker does not have, and end the run unless its status is 'running'."""

    def close(self) -> None:
        """Leave runs that are not finished, so that they can be resumed."""


def open_tracker(to: str) -> Tracker:
    """Return the tracker for NAME or NAME:WHERE."""
    name, destination = check_tracker(to)
    try:
        tracker: Tracker = import_module(f"glocal.track.{name}").Tracker(destination)
    except ImportError as error:
        raise GlocalError(f"{first_line(error)}: pip install 'glocal[{name}]'") from error
    return tracker


class LiveTracking:
    """Logs runs during training. If the tracker fails, it warns once and logs nothing more; training goes on."""

    def __init__(self, to: str, store: str | Path) -> None:
        self._to, self._store, self._failed = to, store, False
        self._tracker: Tracker | None = None
        self._finished: set[str] = set()

    def __call__(self, run: Run, finished: int) -> None:
        """Log a run that has finished so many tasks."""
        log = RunLog(run, finished)
        if self._failed or log.run.hash in self._finished:
            return
        try:
            if self._tracker is None:
                with lock_file(user_path(self._store) / ".track.lock"):  # two workers must not create one database
                    self._tracker = open_tracker(self._to)
            self._tracker.write(log)
            if log.status != "running":
                self._finished.add(log.run.hash)
        except Exception as error:
            self._failed = True
            later = f"`glocal track {self._store} --to {self._to}` logs finished runs later."
            message = f"{describe_failure(self._to, error)} Training goes on without it; {later}"
            warnings.warn(message, GlocalWarning, stacklevel=3)

    def close(self) -> None:
        with suppress(Exception):
            if self._tracker is not None:
                self._tracker.close()


@contextmanager
def tracking(to: str | None, store: str | Path) -> Iterator[LiveTracking | None]:
    """Yield what logs runs during training, or None."""
    if to is None:
        yield None
        return
    live = LiveTracking(to, store)
    try:
        yield live
    finally:
        live.close()


def track_runs(runs: Iterable[Run], to: str) -> None:
    """Log finished runs to a tracker."""
    check_tracker(to)
    try:
        tracker = open_tracker(to)
        for run in runs:
            tracker.write(RunLog(run, run.tasks))
        tracker.close()
    except Exception as error:
        raise GlocalError(describe_failure(to, error)) from error


def describe_failure(to: str, error: Exception) -> str:
    """Return a sentence on why a tracker failed."""
    kind = "" if isinstance(error, GlocalError) else f"{type(error).__name__}: "
    return f"tracking with '{to}' failed ({kind}{first_line(error).rstrip('.')})."
