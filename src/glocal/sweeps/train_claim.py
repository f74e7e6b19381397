"""Train a cohort that a process has claimed, and write its runs into the store."""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch

from glocal import __version__, tree
from glocal.algorithms.algorithm import Algorithm
from glocal.algorithms.partition import Partition
from glocal.engine.cohort import Cohort
from glocal.engine.config import RunConfig
from glocal.engine.loop import Snapshot, train
from glocal.errors import GlocalError, GlocalWarning
from glocal.files import DamagedError, read_twice
from glocal.networks.model import frozen_parameters
from glocal.store.run import Run
from glocal.store.store import Claim, Store, required_files
from glocal.sweeps import resolve
from glocal.sweeps.context import RunRequest, SweepContext, TrainingMonitor, cohort_of
from glocal.sweeps.continuation import begin_after, parameters_after, parent_note, task_fingerprints
from glocal.sweeps.options import SweepOptions

RESUMED = "not monitored: resumed from a checkpoint; `glocal lens STORE/runs/HASH --retrace epochs` measures all of it"
CONTINUED = "not monitored: another run trained its first tasks"


def train_claim(context: SweepContext, claim: Claim, requests: Mapping[str, RunRequest]) -> None:
    """Train a claimed cohort to its end, with a checkpoint at every task boundary, and write its runs.

    An interrupted cohort resumes with the runs that are requested and missing; its checkpoint stays for the others. If
    parameters are kept, all its runs resume, because the cohort's files hold them all.
    """
    store, kept_files = context.store, required_files(context.options.kept, claim.parameters)
    missing = {hash for hash in claim.hashes if not store.finished(hash, kept_files)}
    if not missing:
        return claim.finish()
    indices = [i for i, hash in enumerate(claim.hashes) if hash in requests and (claim.parameters or hash in missing)]
    if not indices:  # another process has just written them
        return None
    claimed = ClaimedCohort(context, claim, [requests[claim.hashes[i]] for i in indices], indices)
    try:
        last = claimed.begin()
        monitor = _make_monitor(context, claimed.cohort) if last is None else None
        if last is None or last.finished < claimed.tasks:
            last = claimed.train(last, monitor)
        if last.finished < claimed.tasks:  # it was asked to stop
            return None
        claimed.write(last, monitor, missing, with_state="state" in kept_files)
        if all(store.finished(hash, kept_files) for hash in claim.hashes):
            claim.finish()
        context.progress.finish_cohort(len(missing & requests.keys()))
    except GlocalError:
        claim.lease.check()  # an error of reading or writing may be the work of a successor
        raise


@dataclass
class ClaimedCohort:
    """The runs of a claimed cohort that are trained; `indices` are their places in it."""

    context: SweepContext
    claim: Claim
    requests: list[RunRequest]
    indices: list[int]

    @cached_property
    def cohort(self) -> Cohort:
        return cohort_of(self.context, self.requests)

    @property
    def complete(self) -> bool:
        return len(self.indices) == len(self.claim.hashes)

    @property
    def tasks(self) -> int:
        return self.cohort.challenge.tasks

    def begin(self) -> Snapshot | None:
        """Return where training goes on: the last checkpoint, or the ends of the runs' parents, or None."""
        last = load_checkpoint(self.claim, self.cohort.device)
        if last is not None and not self.complete:
            last = Snapshot(last.finished, last.state.select(self.indices), last.record.select(self.indices))
        parents = [request.parent for request in self.requests if request.parent is not None]
        if last is None and parents:
            last = begin_after(self.cohort, parents)
            for task in range(last.finished if self.claim.parameters else 0):
                self.claim.keep(task, *parameters_after(task, parents, last.state))
        return last

    def train(self, begin: Snapshot | None, monitor: TrainingMonitor | None) -> Snapshot:
        """Train until the end, or until the context asks to stop; save every snapshot, and return the last one."""
        cohort, context, claim = self.cohort, self.context, self.claim
        label, begun = resolve.name_of(cohort.algorithm), begin.finished if begin else 0
        examples = cohort.challenge.task(0, cohort.members[0].seed).train.y.shape[0]
        steps = self.tasks * cohort.epochs * math.ceil(examples / cohort.batch_size) * len(cohort)
        bar = context.progress.start_cohort(label, len(cohort), self.tasks, steps, begun)
        claim.lease.note(label=label, tasks=self.tasks, begun=begun, finished=begun, device=str(cohort.device))
        last = begin
        for last in train(cohort, begin, context.options.execution, bar, monitor):
            claim.lease.note(finished=last.finished)
            if self.complete:
                claim.save(last)
            unfinished = last.finished < self.tasks
            if unfinished and context.track is not None:
                for i, request in enumerate(self.requests):
                    info = _run_info(cohort, last, i)
                    context.track(_run(context.store, request.config, last, i, info), last.finished)
            if unfinished and context.stop():
                break
        assert last is not None
        return last

    def write(
        self, last: Snapshot, monitor: TrainingMonitor | None, missing: Collection[str], with_state: bool
    ) -> None:
        """Write the runs that the store misses."""
        cohort, store = self.cohort, self.context.store
        frozen = {k: p for k, p in frozen_parameters(cohort.shared_network).items() if k not in last.state.buffers}
        notes = [*last.record.notes, *self.context.notes]
        unwritten = [i for i, request in enumerate(self.requests) if request.config.hash in missing]
        all_parameters = self.claim.kept_parameters([self.indices[i] for i in unwritten], self.tasks, frozen)
        fingerprints = cache(partial(task_fingerprints, cohort.challenge))
        for i, parameters in zip(unwritten, all_parameters, strict=True):
            config, parent = self.requests[i].config, self.requests[i].parent
            arrays = {name: array[i] for name, array in last.record.arrays.items()}
            run_notes = notes if parent is None else [*notes, parent_note(parent)]
            unmonitored = RESUMED if parent is None else CONTINUED
            info = _run_info(cohort, last, i) | _monitor_info(self.context.options, monitor, run_notes, i, unmonitored)
            state = None
            if with_state:
                state = tree.flatten(tree.select(last.state.as_tree(), i))
                state["task_fingerprints"] = fingerprints(config.seed if cohort.challenge.seeded else 0)
            store.write(config, arrays, info, {"parameters": parameters, "state": state})
            if self.context.track is not None:
                self.context.track(_run(store, config, last, i, info), self.tasks)


def load_checkpoint(claim: Claim, device: torch.device) -> Snapshot | None:
    """Read the last checkpoint. A damaged one is set aside: training again from the beginning gives the same runs."""
    try:
        return read_twice(claim.load, device)
    except DamagedError as error:
        message = f"{error}It was moved to '{claim.set_aside()}', and its runs start again."
        warnings.warn(message, GlocalWarning, stacklevel=2)
        return None


def _make_monitor(context: SweepContext, cohort: Cohort) -> TrainingMonitor | None:
    """Return the monitor for this cohort, or None if monitoring is off."""
    options = context.options
    if options.monitor is None:
        return None
    from glocal.lens.monitor import Monitor

    by = options.monitor_by or ("own" if isinstance(cohort.algorithm, Partition) else "diagonal")
    return Monitor(cohort, options.monitor, by, options.monitor_every, on_violation=context.progress.message)


def _monitor_info(
    options: SweepOptions, monitor: TrainingMonitor | None, notes: list[str], index: int, unmonitored: str
) -> dict[str, Any]:
    """Return the run's notes, and the monitor's measurements if there are any."""
    if options.monitor is None:
        return {"notes": notes}
    if monitor is None:
        return {"notes": [*notes, unmonitored]}
    outcome, measurements = monitor.summary(index)
    by = f" by {options.monitor_by}" if options.monitor_by else ""
    note = f"monitored with ε = {options.monitor:g}{by}: {outcome}"
    return {"notes": [*notes, note], "monitored": measurements}


def _run(store: Store, config: RunConfig, snapshot: Snapshot, index: int, info: Mapping[str, Any]) -> Run:
    """Return a run as far as it is measured; the store may not hold it yet."""
    arrays = {name: array[index].numpy() for name, array in snapshot.record.arrays.items()}
    return Run(config.as_dict(), arrays, info, store.runs_path / config.hash)


def _keeps_network(algorithm: Algorithm) -> bool:
    """Return whether the trained network is the user's, so that the lens needs no code of the algorithm."""
    return type(algorithm).network is Algorithm.network and not isinstance(algorithm, Partition)


def _run_info(cohort: Cohort, snapshot: Snapshot, index: int) -> dict[str, Any]:
    member, record = cohort.members[index], snapshot.record
    diverged = int(snapshot.state.diverged[index])
    return {
        "label": resolve.label_of(member.algorithm, member.optimizer),
        "locality": member.algorithm.locality,
        "setting": cohort.challenge.setting,
        "plain_network": _keeps_network(member.algorithm),
        "diverged": None if diverged < 0 else diverged,
        "steps": snapshot.state.clock,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "cost": {
            "seconds": record.seconds / len(cohort),
            "step_seconds": record.step_seconds,
            "cohort_seconds": record.seconds,
            "cohort_runs": len(cohort),
            "executor": record.executor,
            "peak_bytes": record.peak_bytes,
            "memory_bytes": int(record.arrays["memory_bytes"][index, -1]),
        },
        "versions": {
            "glocal": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": resolve.device_name(cohort.device),
        },
    }
