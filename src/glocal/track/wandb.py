"""Weights & Biases: a run's id is its hash. Offline, unless WANDB_MODE is set or an API key is stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
import wandb

from glocal.track.tracking import RunLog

FINISHED = "glocal-project"
"""File in the folder of a finished run, with the project's name."""


class Tracker:
    """Logs to a project, 'glocal' by default. All runs of a cohort are open at the same time.

    An offline run cannot be read back, so it is written again as a whole if it was not finished.
    """

    def __init__(self, where: str) -> None:
        online = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        self._project, self._mode = where or "glocal", None if online else "offline"
        self._folder = Path(wandb.setup().settings.wandb_dir)
        self._runs: dict[str, tuple[wandb.Run, int]] = {}

    def write(self, log: RunLog) -> None:
        if log.run.hash not in self._runs:
            marks = self._folder.glob(f"*run-*-{log.run.hash}/{FINISHED}")
            if any(mark.read_text() == self._project for mark in marks):
                return
            self._runs[log.run.hash] = self._open(log)
        run, last = self._runs[log.run.hash]
        for step, metrics in log.steps(last):
            run.log(metrics, step=step)
        self._runs[log.run.hash] = run, max(last, log.last_step)
        if log.status != "running":
            run.summary["status"] = log.status
            run.finish(exit_code=0 if log.status == "finished" else 1)
            (Path(run.settings.sync_dir) / FINISHED).write_text(self._project)
            del self._runs[log.run.hash]

    def _open(self, log: RunLog) -> tuple[wandb.Run, int]:
        # Nothing but metrics: collecting the rest takes longer than a short run.
        options: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
        options |= {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}
        names: dict[str, Any] = {"project": self._project, "id": log.run.hash, "name": log.name, "group": log.group}
        names |= {"mode": self._mode, "config": log.settings, "settings": wandb.Settings(**options)}
        run = wandb.init(**names, reinit="create_new", resume="allow")
        return run, run.starting_step - 1

    def close(self) -> None:
        for run, _ in self._runs.values():
            run.finish(exit_code=1)
