"""Train one claimed cohort of a sweep, from its beginning or from its checkpoint, and write its runs to the store."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from glocal import __version__
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member, RunConfig
from glocal.engine.loader import Loader
from glocal.engine.loop import Progress, Silent, Snapshot, train
from glocal.engine.state import State
from glocal.networks.model import MakeNetwork
from glocal.store.store import Claim, Store
from glocal.sweeps import resolve
from glocal.sweeps.options import SweepOptions

RESUMED = "not monitored: it was resumed from a checkpoint; `glocal lens STORE/runs/HASH --retrace` monitors all of it"


class ProgressReporter(Protocol):
    """Receives the progress of a sweep, for example to draw progress bars."""

    def start(self, runs: int, finished: int) -> None: ...

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress: ...

    def finish_cohort(self, runs: int) -> None: ...

    def waiting(self, runs: int) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


class NullProgress:
    """Ignores all progress."""

    def start(self, runs: int, finished: int) -> None: ...

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress:
        return Silent()

    def finish_cohort(self, runs: int) -> None: ...

    def waiting(self, runs: int) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


class MonitorSummary(NamedTuple):
    """What a monitor reports of one run.

    outcome: one sentence: where the run left an old task's ε-region, or that it did not.
    record: the measurements, as JSON: epsilon, and per measurement the number of finished tasks, the step and the
        error of each finished task (None where it is not finite).
    """

    outcome: str
    record: dict[str, Any]


class TrainingMonitor(Protocol):
    """Measures a cohort during training without changing it; `glocal.lens.monitor.Monitor` is one."""

    def __call__(self, task: int, epoch: int, state: State, loader: Loader) -> None: ...

    def summary(self, run: int) -> MonitorSummary: ...


@dataclass(frozen=True)
class RunRequest:
    """One requested run: the configuration that names it, and what the engine trains."""

    config: RunConfig
    member: Member

    @property
    def hash(self) -> str:
        return self.config.hash


@dataclass(frozen=True)
class SweepContext:
    """What all runs of a sweep share. `options.epochs` and `options.batch_size` are set."""

    challenge: Challenge
    make_network: MakeNetwork
    options: SweepOptions
    device: torch.device
    store: Store
    progress: ProgressReporter

    def cohort(self, requests: Sequence[RunRequest]) -> Cohort:
        assert self.options.epochs is not None and self.options.batch_size is not None
        return Cohort(
            self.challenge,
            self.make_network,
            tuple(request.member for request in requests),
            epochs=self.options.epochs,
            batch_size=self.options.batch_size,
            train_eval=self.options.train_eval,
            device=self.device,
            precision=self.options.precision,
        )


def train_claim(context: SweepContext, claim: Claim, requests: Mapping[str, RunRequest]) -> None:
    """Train a claimed cohort to its end, with a checkpoint at every task boundary, and write its runs.

    An interrupted cohort resumes with the runs that are requested and missing; its checkpoint stays for the others. If
    parameters are kept, all its runs resume, because the cohort's files hold them all.
    """
    store = context.store
    missing = {hash for hash in claim.hashes if not store.finished(hash, claim.parameters)}
    indices = [i for i, hash in enumerate(claim.hashes) if hash in requests and (claim.parameters or hash in missing)]
    members = [requests[claim.hashes[i]] for i in indices]
    complete = len(indices) == len(claim.hashes)
    cohort = context.cohort(members)
    monitor: TrainingMonitor | None = None
    try:
        last = claim.load(context.device, cohort.epochs, context.challenge.tasks)
        if last is not None and not complete:
            last = Snapshot(last.finished, last.state.select(indices), last.record.select(indices))
        if last is None or last.finished < context.challenge.tasks:
            monitor = _make_monitor(context, cohort) if last is None else None
            bar = _start_bar(context, cohort, last)
            for snapshot in train(cohort, last, context.options.execution, bar, monitor):
                last = snapshot
                if complete:
                    claim.save(snapshot)
        assert last is not None
        for i, request in enumerate(members):
            if request.hash in missing:
                arrays = {name: array[i] for name, array in last.record.arrays().items()}
                info = _run_info(context, cohort, last, i) | _monitor_info(context, monitor, last, i)
                store.write(request.config, arrays, info, claim.kept_parameters(indices[i]))
        context.progress.finish_cohort(len(missing & requests.keys()))
        if all(store.finished(hash, claim.parameters) for hash in claim.hashes):
            claim.finish(store)
    finally:
        claim.leave()


def _start_bar(context: SweepContext, cohort: Cohort, last: Snapshot | None) -> Progress:
    tasks, examples = context.challenge.tasks, context.challenge.task(0, cohort.members[0].seed).train.y.shape[0]
    steps = tasks * cohort.epochs * math.ceil(examples / cohort.batch_size) * len(cohort)
    label, finished = resolve.name_of(cohort.algorithm), last.finished if last else 0
    return context.progress.start_cohort(label, len(cohort), tasks, steps, finished)


def _make_monitor(context: SweepContext, cohort: Cohort) -> TrainingMonitor | None:
    """Return the monitor for this cohort, or None if monitoring is off."""
    options = context.options
    if options.monitor is None:
        return None
    from glocal.lens.monitor import Monitor

    by = options.monitor_by or ("own" if isinstance(cohort.algorithm, Partition) else "diagonal")
    return Monitor(cohort, options.monitor, by, options.monitor_every, on_violation=context.progress.message)


def _monitor_info(
    context: SweepContext, monitor: TrainingMonitor | None, snapshot: Snapshot, index: int
) -> dict[str, Any]:
    """Return the run's notes, and the monitor's measurements if there are any."""
    options, notes = context.options, snapshot.record.notes
    if options.monitor is None:
        return {"notes": notes}
    if monitor is None:
        return {"notes": [*notes, RESUMED]}
    summary = monitor.summary(index)
    by = f" by {options.monitor_by}" if options.monitor_by else ""
    note = f"monitored with ε = {options.monitor:g}{by}: {summary.outcome}"
    return {"notes": [*notes, note], "monitored": summary.record}


def _run_info(context: SweepContext, cohort: Cohort, snapshot: Snapshot, index: int) -> dict[str, Any]:
    algorithm, record = cohort.members[index].algorithm, snapshot.record
    diverged = int(snapshot.state.diverged[index])
    return {
        "label": resolve.label_of(algorithm),
        "locality": algorithm.locality,
        "setting": context.challenge.setting,
        "diverged": None if diverged < 0 else diverged,
        "steps": snapshot.state.clock,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "cost": {
            "seconds": record.seconds / len(cohort),
            "step_seconds": record.step_seconds,
            "cohort_seconds": record.seconds,
            "cohort_runs": len(cohort),
            "peak_bytes": record.peak_bytes,
            "memory_bytes": int(record.memory_bytes[index, -1]),
        },
        "versions": {
            "glocal": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": resolve.device_name(context.device),
        },
    }
