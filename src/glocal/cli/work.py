"""`glocal work` and `glocal status`: train the runs planned in a store, and show the progress."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from glocal.cli.common import StoreToRead, command
from glocal.errors import GlocalError, printable, require
from glocal.sweeps.options import check_tracker, format_time, parse_time

if TYPE_CHECKING:
    from rich.text import Text

    from glocal.cluster.status import Status as StoreStatus

WATCH_SECONDS = 2.0


@command
class Work:
    """Train the runs planned in a store (`glocal sweep ... --plan`) until none is left.

    Any number of workers may share a store, on any machines that see its folder. At a signal (SIGTERM, SIGINT, SIGUSR1
    or SIGUSR2) and before its time is up a worker stops at the end of a task; others go on from there.

    For example: glocal work runs --for 3h50m --device cuda:0
    """

    store: Positional[Path] = Path("runs")
    """The store with the plans."""
    time: Annotated[
        str | None, tyro.conf.arg(name="for", metavar="TIME", help="Stop after this time: 3h50m, 45m, 1d.")
    ] = None
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; all: a process for every GPU."""
    workers: int | None = None
    """Start N processes."""
    code: tuple[Path, ...] = ()
    """Python files of your own that the plans name. Nothing else is loaded."""
    retry_failed: bool = False
    """Train cohorts again that have failed."""
    lease: float = 60.0
    """Seconds without a heartbeat after which other workers take over this worker's cohort."""
    track: str | None = None
    """Log runs after every task: tensorboard[:FOLDER], mlflow[:URI], wandb[:PROJECT] or trackio[:PROJECT]."""

    def __call__(self) -> None:
        from glocal.cluster.status import read_status
        from glocal.cluster.worker import start_workers, work, worker_devices
        from glocal.report.progress import Bars
        from glocal.report.summary import format_range
        from glocal.store.store import Store

        seconds = None if self.time is None else parse_time(self.time)
        require(self.workers is None or self.workers > 0, f"workers = {self.workers} was given; it must be positive.")
        if self.track is not None:
            check_tracker(self.track)
        require(0 < self.lease <= 86_400, f"lease = {self.lease:g} was given; it must be positive, and at most a day.")
        store = Store.open(self.store)
        devices = worker_devices(self.device, self.workers)
        if len(devices) > 1:
            arguments = ["--code", *map(str, self.code)] if self.code else []
            arguments += ["--for", self.time] if self.time else []
            arguments += ["--retry-failed"] if self.retry_failed else []
            arguments += ["--track", self.track] if self.track else []
            status = start_workers(self.store, devices, [*arguments, "--lease", str(self.lease)])
            require(status == 0, "a worker failed: see its output above.")
            return
        store.lease_seconds = self.lease
        runs_left, problems = work(store, devices[0], seconds, self.code, self.retry_failed, Bars(), track=self.track)
        if problems:
            more = f" ({len(problems) - 1} more: `glocal status {self.store}`)" if len(problems) > 1 else ""
            raise GlocalError(f"{problems[0]}{more}")
        if runs_left:
            print(f"Stopped: {format_range([runs_left], 'run')} left.")
        elif waiting := read_status(store).waiting:
            count = format_range([waiting], "run")
            print(f"All planned runs are finished. {count} of interrupted sweeps have no plan: repeat their commands.")
        else:
            print("Nothing is left to train.")


@command
class Status:
    """Show what is finished, in training, waiting, failed and diverged in a store, and an estimate of the time left."""

    store: StoreToRead = Path("runs")
    watch: bool = False
    """Refresh until all runs are finished or Ctrl-C is pressed."""

    def __call__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        from glocal.cluster.status import read_status
        from glocal.store.store import Store

        store, console = Store.open(self.store), Console()
        status = read_status(store)
        if not self.watch:
            console.print(render_status(status, self.store))
            return
        with suppress(KeyboardInterrupt), Live(render_status(status, self.store), console=console) as live:
            while status.running or status.waiting:
                time.sleep(WATCH_SECONDS)
                status = read_status(store)
                live.update(render_status(status, self.store))


def render_status(status: StoreStatus, path: Path) -> Text:
    """Return the counts, a line for every cohort in training, and the messages of those that failed."""
    from rich.text import Text

    from glocal.cluster.status import count, elapsed, retry_advice
    from glocal.report.summary import format_range

    names = ("finished", "running", "waiting", "failed", "diverged")
    estimate = "" if status.seconds_left is None else f"; about {format_time(status.seconds_left)} left"
    lines = [", ".join(f"{getattr(status, name)} {name}" for name in names) + estimate]
    for cohort in status.cohorts:
        label, host, pid, device = (cohort.last.about.get(name, "?") for name in ("label", "host", "pid", "device"))
        progress = f"{count(cohort, 'finished')} of {count(cohort, 'tasks')} tasks in {format_time(elapsed(cohort))}"
        lines.append(
            f"{label} · {format_range([len(cohort.hashes)], 'run')}: {progress} on {host}, process {pid}, {device}"
        )
    lines += [f"{format_range([len(cohort.hashes)], 'run')} failed: {cohort.failed}" for cohort in status.failures]
    lines += status.damaged_plans
    if status.failures:
        lines.append(retry_advice(path))
    return Text("\n".join(map(printable, lines)))
