"""Progress bars for sweeps: all runs, and the cohort in training."""

from __future__ import annotations

import io
import sys
import time
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from glocal.engine import loop
from glocal.sweeps.context import ProgressReporter

REFRESH_SECONDS = 0.1
QUIET_SECONDS = 10
"""Minimum time between two progress lines of a cohort when the output is not a terminal."""


class Stderr(io.TextIOBase):
    """Standard error, ignored after the first failed write, so that a closed pipe does not stop training."""

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stderr

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # ValueError: it is closed
                self._stream = None
        return len(text)


class Bars(ProgressReporter):
    """Report the progress of a sweep: bars on a terminal, otherwise a line now and then and per finished cohort."""

    def __init__(self) -> None:
        self._stderr = Stderr()
        self._console = Console(file=cast(TextIO, self._stderr), markup=False, emoji=False)
        self._live = self._console.is_terminal
        text = TextColumn("{task.description}", markup=False)
        state = TextColumn("{task.fields[state]}", markup=False)
        columns = (text, BarColumn(), state, TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._live)
        self._cohort: CohortBar | None = None

    def start(self, runs: int, finished: int) -> None:
        self._runs, self._finished = runs, finished
        self._all = self._progress.add_task("all", total=runs, completed=finished, state=f"{finished}/{runs} runs")
        self._progress.start()

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> CohortBar:
        self._close()
        description = f"{label} · {runs} run{'s' if runs > 1 else ''}"
        bar = self._progress.add_task(description, total=steps, completed=steps * done // tasks, state="")
        self._cohort = CohortBar(self._progress, bar, description, tasks, self._stderr)
        return self._cohort

    def finish_cohort(self, runs: int) -> None:
        self._finished += runs
        state = f"{self._finished}/{self._runs} runs"
        if not self._live:
            bar, now = self._cohort, time.perf_counter()
            print(f"{bar.description}: {now - bar.started:.1f} s" if bar else state, file=self._stderr)
        self._close()
        self._progress.update(self._all, completed=self._finished, state=state)

    def waiting(self, runs: int) -> None:
        self._progress.update(self._all, state=f"waiting for {runs} runs of another process")

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._close()
        self._progress.stop()

    def _close(self) -> None:
        if self._cohort is not None:
            self._progress.remove_task(self._cohort.bar)
            self._cohort = None


class CohortBar(loop.Progress):
    """Progress bar of one cohort: its task, its steps and their speed."""

    def __init__(self, progress: Progress, bar: TaskID, description: str, tasks: int, stderr: Stderr) -> None:
        self._stderr = stderr
        self.bar, self.description, self.started = bar, description, time.perf_counter()
        self._progress, self._tasks, self._task = progress, tasks, 0
        self._pending, self._shown = 0, self.started

    def task(self, task: int) -> None:
        self._task, now = task, time.perf_counter()
        if self._progress.disable and task and now - self._shown > QUIET_SECONDS:
            self._shown = now
            print(f"{self.description}: {task}/{self._tasks} tasks, {now - self.started:.0f} s", file=self._stderr)

    def steps(self, count: int) -> None:
        self._pending += count
        now = time.perf_counter()
        if not self._progress.disable and now - self._shown > REFRESH_SECONDS:
            state = f"task {self._task + 1}/{self._tasks} · {self._pending / (now - self._shown):,.0f} steps/s"
            self._progress.update(self.bar, advance=self._pending, state=state)
            self._pending, self._shown = 0, now
