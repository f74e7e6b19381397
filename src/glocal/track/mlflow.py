"""MLflow: one experiment per challenge, glocal/CHALLENGE; tags of a run are its hash and its last step."""

from __future__ import annotations

import os
import time
from contextlib import suppress

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # by default training would wait for minutes
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from glocal.track.tracking import RunLog

MAX_BATCH = 1_000
"""Metrics in one call, at most; servers refuse more."""


class Tracker:
    """Logs to a tracking URI; by default to the library's own."""

    def __init__(self, where: str) -> None:
        self._client = MlflowClient(where or None)
        self._experiments: dict[str, str] = {}
        self._runs: dict[str, tuple[str, int]] = {}
        """By hash: MLflow's name of the run, and its last step."""

    def write(self, log: RunLog) -> None:
        if log.run.hash not in self._runs:
            self._runs[log.run.hash] = self._find(log)
        run_id, last = self._runs[log.run.hash]
        if last >= log.last_step:
            return
        now = int(time.time() * 1000)
        metrics = [Metric(k, v, now, step) for step, values in log.steps(last) for k, v in values.items()]
        params = [Param(k, str(v)) for k, v in log.settings.items()] if last < 0 else []
        for start in range(0, len(metrics), MAX_BATCH):
            end = start + MAX_BATCH
            tags = [RunTag("glocal.step", str(log.last_step))] if end >= len(metrics) else []
            self._client.log_batch(run_id, metrics[start:end], params, tags)
        if log.status != "running":
            self._client.set_terminated(run_id, "FINISHED" if log.status == "finished" else "FAILED")
        self._runs[log.run.hash] = run_id, log.last_step

    def _find(self, log: RunLog) -> tuple[str, int]:
        """Return the run of this hash and its last step; create what is not there."""
        name = f"glocal/{log.group}"
        if name not in self._experiments:
            with suppress(MlflowException):  # it exists, perhaps since this moment
                self._client.create_experiment(name)
            if (existing := self._client.get_experiment_by_name(name)) is not None:
                self._experiments[name] = existing.experiment_id
        experiment = self._experiments[name]
        for run in self._client.search_runs([experiment], f"tags.`glocal.hash` = '{log.run.hash}'", max_results=1):
            return run.info.run_id, int(run.data.tags.get("glocal.step", -1))
        created = self._client.create_run(experiment, run_name=log.name, tags={"glocal.hash": log.run.hash})
        return created.info.run_id, -1

    def close(self) -> None: ...
