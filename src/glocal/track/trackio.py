"""Trackio: a local database, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set. Runs are resumed by their name."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import trackio

from glocal.track.tracking import RunLog


class Tracker:
    """Logs to a project, 'glocal' by default. Trackio has one run open at a time."""

    def __init__(self, where: str) -> None:
        self._project = where or "glocal"

    def write(self, log: RunLog) -> None:
        with redirect_stdout(io.StringIO()):  # it prints several lines per run
            names: dict[str, Any] = {"project": self._project, "name": log.name, "group": log.group}
            log_options: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
            run = trackio.init(**names, **log_options, config=log.settings, resume="allow")
            try:
                for step, metrics in log.steps(run._next_step - 1):  # there is no public way to ask for the last step
                    run.log(metrics, step=step)
            finally:
                trackio.finish()  # type: ignore[no-untyped-call]

    def close(self) -> None: ...
