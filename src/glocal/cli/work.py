"""`glocal work`: train what the plans of a store ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from glocal.cli.common import command
from glocal.errors import GlocalError, require

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


@command
class Work:
    """Train what the plans of a store ask for (`glocal sweep ... --plan`), until nothing is left.

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
    """Seconds without a sign of life after which other workers take over what this one is training."""

    def __call__(self) -> None:
        from glocal.cluster.worker import start_workers, work, worker_devices
        from glocal.report.progress import Bars
        from glocal.store.store import Store

        seconds = None if self.time is None else parse_time(self.time)
        require(self.workers is None or self.workers > 0, f"workers = {self.workers} was given; it must be positive.")
        require(self.lease > 0, f"lease = {self.lease:g} was given; it must be positive.")
        store = Store.open(self.store)
        devices = worker_devices(self.device, self.workers)
        if len(devices) > 1:
            arguments = [text for path in self.code for text in ("--code", str(path))]
            arguments += ["--for", self.time] if self.time else []
            arguments += ["--retry-failed"] if self.retry_failed else []
            status = start_workers(self.store, devices, [*arguments, "--lease", str(self.lease)])
            require(status == 0, "a worker failed: see its output above.")
            return
        store.lease_seconds = self.lease
        left, problems = work(store, devices[0], seconds, self.code, self.retry_failed, Bars())
        if problems:
            more = f" ({len(problems) - 1} more: `glocal status {self.store}`)" if len(problems) > 1 else ""
            raise GlocalError(f"{problems[0]}{more}")
        print(f"Stopped: {left} runs are left." if left else "Nothing is left to train.")


def parse_time(text: str) -> float:
    """Return the seconds of a time such as 3h50m."""
    parts = re.findall(r"(\d+)([dhms])", text)
    valid = "".join(number + unit for number, unit in parts) == text and 0 < len(text) < 20
    require(valid, f"time = '{text}' was given; write days, hours, minutes and seconds as in 1d, 3h50m or 90s.")
    return float(sum(int(number) * UNITS[unit] for number, unit in parts))
