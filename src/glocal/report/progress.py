"""Progress bars for sweeps: all runs, and the cohort in training."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from glocal.sweeps.resume import ProgressReporter

REFRESH_SECONDS = 0.1
QUIET_SECONDS = 10
"""Minimum time between two progress lines of a cohort when the output is not a terminal."""


class StepsPerSecond(ProgressColumn):
    """Show training steps per second, except on the bar that counts runs."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not task.fields.get("steps") or speed is None:
            return Text("")
        return Text(f"{speed:,.0f} steps/s", style="progress.data.speed")


class Bars(ProgressReporter):
    """Report the progress of a sweep: bars on a terminal, otherwise a line now and then and per finished cohort."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            StepsPerSecond(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._cohort: CohortBar | None = None

    def start(self, runs: int, finished: int) -> None:
        self._runs, self._finished = runs, finished
        if self.live:
            state = f"{finished}/{runs} runs"
            self._all = self._progress.add_task("all", total=runs, completed=finished, state=state)
            self._progress.start()

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> CohortBar:
        description = f"{label} · {runs} run{'s' if runs > 1 else ''}"
        self._close()
        self._cohort = CohortBar(self._progress if self.live else None, description, tasks, steps, done)
        return self._cohort

    def finish_cohort(self, runs: int) -> None:
        if self._cohort is not None and not self.live:
            print(f"{self._cohort.description}: {time.perf_counter() - self._cohort.started:.1f} s", file=sys.stderr)
        self._close()
        self._finished += runs
        if self.live:
            self._progress.update(self._all, completed=self._finished, state=f"{self._finished}/{self._runs} runs")

    def waiting(self, runs: int) -> None:
        if self.live:
            self._progress.update(self._all, state=f"waiting for {runs} runs of another process")

    def message(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._close()
        if self.live:
            self._progress.stop()

    def _close(self) -> None:
        if self._cohort is not None:
            self._cohort.close()
            self._cohort = None


class CohortBar:
    """Progress bar of one cohort: its task and its steps."""

    def __init__(self, progress: Progress | None, description: str, tasks: int, steps: int, done: int) -> None:
        self.description, self.started = description, time.perf_counter()
        self._progress, self._tasks = progress, tasks
        self._pending, self._shown = 0, self.started
        self._bar: Any = None
        if progress is not None:
            completed = steps * done // tasks
            self._bar = progress.add_task(description, total=steps, completed=completed, state="", steps=True)

    def task(self, task: int) -> None:
        if self._progress is not None:
            self._progress.update(self._bar, state=f"task {task + 1}/{self._tasks}")
        elif task and time.perf_counter() - self._shown > QUIET_SECONDS:
            self._shown = time.perf_counter()
            print(
                f"{self.description}: {task}/{self._tasks} tasks, {self._shown - self.started:.0f} s", file=sys.stderr
            )

    def steps(self, count: int) -> None:
        self._pending += count
        now = time.perf_counter()
        if self._progress is not None and now - self._shown > REFRESH_SECONDS:
            self._progress.advance(self._bar, self._pending)
            self._pending, self._shown = 0, now

    def close(self) -> None:
        if self._progress is not None and self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
