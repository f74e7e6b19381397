"""Train the runs that a store misses, in cohorts: new ones, and interrupted ones from their last checkpoint.

Several processes may work on the same store. Each claims one cohort after the other; what another process is training
is waited for, and taken over if that process stops.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from glocal import __version__, tree
from glocal.algorithms.algorithm import Algorithm
from glocal.algorithms.partition import Partition
from glocal.engine.cohort import Cohort, Member
from glocal.engine.config import RunConfig
from glocal.engine.loader import Loader
from glocal.engine.loop import Progress, Snapshot, train
from glocal.engine.memory_budget import SMALLER, is_out_of_memory, largest_cohort
from glocal.engine.state import State
from glocal.errors import GlocalError, GlocalWarning, first_line
from glocal.files import DamagedError, StorageError, read_twice
from glocal.hyperparameters import differing_in_cohorts
from glocal.networks.model import frozen_parameters
from glocal.store.lease import LeaseLost
from glocal.store.run import Run, Runs
from glocal.store.store import Claim, Store, set_aside
from glocal.sweeps import resolve
from glocal.sweeps.continuation import begin_after, cohort_after, parameters_after, parent_note, task_fingerprints
from glocal.sweeps.options import SweepOptions
from glocal.sweeps.user_code import describe_error, user_frames

POLL_SECONDS = 0.5
MAX_KILLS = 2
"""A cohort is halved if so many processes were killed, one after the other, before they finished a task of it."""
RESUMED = "not monitored: resumed from a checkpoint; `glocal lens STORE/runs/HASH --retrace epochs` measures all of it"
CONTINUED = "not monitored: another run trained its first tasks"


class ProgressReporter:
    """Receives the progress of a sweep, for example to draw progress bars; this base class ignores it."""

    def start(self, runs: int, finished: int) -> None: ...

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress:
        return Progress()

    def finish_cohort(self, runs: int) -> None: ...

    def waiting(self, runs: int) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


class TrainingMonitor(Protocol):
    """Measures a cohort during training without changing it; `glocal.lens.monitor.Monitor` is one."""

    def __call__(self, task: int, epoch: int, state: State, loader: Loader) -> None: ...

    def summary(self, run: int) -> tuple[str, dict[str, Any]]:
        """Return one run's outcome in a sentence, and its measurements as JSON."""


@dataclass(frozen=True)
class RunRequest:
    """One requested run: the configuration that names it, and what the engine trains."""

    config: RunConfig
    member: Member
    parent: Run | None = None
    """The run that it goes on from."""


@dataclass
class SweepContext:
    """What all runs of a sweep share; `cohort` has no members yet."""

    cohort: Cohort
    options: SweepOptions
    store: Store
    notes: list[str]
    """Notes of all runs, for example on their initialisation."""
    progress: ProgressReporter = field(default_factory=ProgressReporter)
    stop: Callable[[], bool] = lambda: False
    """Whether to stop at the next task boundary."""
    track: Callable[[Run, int], None] | None = None
    """Receives every run, as far as it is measured, and its number of finished tasks, when these increase."""


def train_missing(job: Job) -> Runs:
    """Train until the store holds every requested run, trained by this process or by another one.

    A cohort that fails does not stop the others; the first error is raised after them.
    """
    progress, store, trained = job.context.progress, job.context.store, job.missing()
    progress.start(len(job.requests), len(job.requests) - len(trained))
    for note in job.context.notes:
        progress.message(note)
    try:
        while missing := job.missing():
            if not job.train_next(missing):
                progress.waiting(len(missing))
                time.sleep(POLL_SECONDS)
    finally:
        progress.stop()
    for error in job.errors.values():
        raise error
    store.remove_finished(job.requests, job.keep)
    results = store.read(job.requests)
    for result in (results[hash] for hash in trained):
        if isinstance(result, GlocalError):
            raise result
    runs = _undamaged(store, results)
    return train_missing(job) if len(runs) < len(results) else runs


def _undamaged(store: Store, results: Mapping[str, Run | GlocalError]) -> Runs:
    """Return the runs that could be read, and set the damaged ones aside, which are missing from then on."""
    for hash, error in results.items():
        if isinstance(error, DamagedError):
            moved = set_aside(store.runs_path / hash)
            warnings.warn(f"{error} It was moved to '{moved}'.", GlocalWarning, stacklevel=3)
        elif isinstance(error, GlocalError):
            raise error
    return Runs(run for run in results.values() if isinstance(run, Run))


@dataclass
class Job:
    """Requested runs, and their training cohort by cohort.

    retry: also train cohorts that failed in another process, or earlier.
    errors: why runs have failed, in this process or, without `retry`, in another one.
    """

    context: SweepContext
    requests: Mapping[str, RunRequest]
    retry: bool = True
    errors: dict[str, Exception] = field(default_factory=dict)

    @property
    def keep(self) -> frozenset[str]:
        return self.context.options.kept

    @cached_property
    def groups(self) -> list[Group]:
        return make_groups(self.context, self.requests.values())

    def missing(self, hashes: Collection[str] | None = None) -> set[str]:
        """Return which requested runs, or which of these, are neither in the store nor known to have failed."""
        candidates = self.requests if hashes is None else hashes
        return self.context.store.missing(candidates, self.keep) - self.errors.keys()

    def finished(self) -> Runs:
        """Return the requested runs that the store holds, and set damaged ones aside."""
        store, missing = self.context.store, self.context.store.missing(self.requests, self.keep)
        return _undamaged(store, store.read([hash for hash in self.requests if hash not in missing]))

    def retry_failed(self) -> None:
        """Let workers train cohorts again that failed earlier."""
        store, missing = self.context.store, self.missing()
        for cohort in store.cohorts():
            if cohort.failed is not None and not missing.isdisjoint(cohort.hashes):
                claim = store.take(cohort)
                if claim is not None:
                    claim.leave()

    def train_next(self, missing: set[str]) -> bool:
        """Train one cohort with missing runs, and return False if other processes train all of them."""
        claim = self._claim(missing)
        if claim is None:
            return bool(missing & self.errors.keys())
        try:
            if claim.killed_attempts() >= MAX_KILLS and len(claim.hashes) > 1:
                reason = f"{MAX_KILLS} processes that trained {len(claim.hashes)} runs together were killed"
                self._halve(claim, f"{reason}, perhaps for want of memory: the runs")
            elif not self._train(claim):
                self._halve(claim, f"{len(claim.hashes)} runs did not fit into memory together, and")
        except LeaseLost as lost:
            self.context.progress.message(str(lost))
        except StorageError:  # the next cohort would meet it too
            raise
        except Exception as error:
            self._fail(claim, error)
        finally:
            claim.leave()
        return True

    def _train(self, claim: Claim) -> bool:
        """Train a cohort, and return False if its runs do not fit into memory together."""
        try:
            train_claim(self.context, claim, self.requests)
        except Exception as error:
            if not is_out_of_memory(error) or len(claim.hashes) == 1:
                raise
            return False  # without the error, whose traceback holds the cohort's tensors
        return True

    def _halve(self, claim: Claim, reason: str) -> None:
        """Replace a cohort by two halves, which go on from its last checkpoint, and say why."""
        gc.collect()
        torch.cuda.empty_cache()
        store, last = self.context.store, _load(claim, torch.device("cpu"))
        hashes = [hash for hash in claim.hashes if not store.finished(hash, self._kept(claim))]
        middle = (len(hashes) + 1) // 2
        for part in (hashes[:middle], hashes[middle:]):
            half = store.claim(part, claim.parameters) if part else None
            if half is None:  # nothing is left for it, or another process has made it
                continue
            try:
                if last is not None:
                    half.copy(claim, last)
            finally:
                half.leave()
        claim.finish()
        message = f"{reason} continue in cohorts of up to {middle}. Give --cohort-size {middle} to start with these."
        warnings.warn(message, GlocalWarning, stacklevel=2)

    def _kept(self, claim: Claim) -> frozenset[str]:
        return self.keep | ({"parameters"} if claim.parameters else set())

    def _fail(self, claim: Claim, error: Exception) -> None:
        """Leave a cohort that cannot be trained, and tell other processes why. A cohort in the store has not failed."""
        if not self.context.store.missing(claim.hashes, self._kept(claim)):
            claim.finish()
            warnings.warn(f"an error followed when the runs were stored: {error!r}.", GlocalWarning, stacklevel=2)
            return
        if is_out_of_memory(error):
            config = next(self.requests[hash].config for hash in claim.hashes if hash in self.requests)
            run = f"one run of {config.algorithm['name']} on {config.challenge['name']}"
            error = GlocalError(f"{run} does not fit into memory: {first_line(error)}. {SMALLER}")
        traceback.clear_frames(error.__traceback__)  # they hold the cohort's tensors
        claim.leave(failed=failure(error))
        self.errors.update(dict.fromkeys(claim.hashes, error))

    def _claim(self, missing: set[str]) -> Claim | None:
        """Claim a cohort with missing runs that no process trains: an interrupted one, or else a new one.

        A cohort that keeps parameters is only resumed if all of its runs are requested: its files hold them all.
        """
        store, unfinished, parameters = self.context.store, self.context.store.cohorts(), "parameters" in self.keep
        for cohort in unfinished:
            suitable = self.requests.keys() >= set(cohort.hashes) if cohort.parameters else not parameters
            if cohort.last.held or not suitable or missing.isdisjoint(cohort.hashes):
                continue
            if cohort.failed is not None and not self.retry:
                self.errors.update(dict.fromkeys(cohort.hashes, GlocalError(cohort.failed)))
            elif (claim := store.take(cohort)) is not None:
                return claim
        free = missing - {hash for cohort in unfinished if cohort.last.held for hash in cohort.hashes}
        free -= self.errors.keys()
        for group in self.groups:
            if free.isdisjoint(group.hashes):
                continue
            try:
                cohorts, error = group.cohorts, None
            except Exception as raised:  # a step is tried to measure its memory
                cohorts, error = [group.hashes], raised
            free = self._free(free)  # another process may have claimed some meanwhile
            for hashes in cohorts:
                free_hashes = [hash for hash in hashes if hash in free]
                claim = store.claim(free_hashes, parameters) if free_hashes else None
                if claim is not None and error is not None:
                    self._fail(claim, error)
                elif claim is not None:
                    return claim
        return None

    def _free(self, hashes: set[str]) -> set[str]:
        """Return those of the runs that are missing and that no process trains."""
        held = {hash for cohort in self.context.store.cohorts() if cohort.last.held for hash in cohort.hashes}
        return self.missing(hashes) - held


def failure(error: Exception) -> str:
    """Return why runs have failed, with the line of the user's code that raised the error, if it did."""
    if isinstance(error, GlocalError):
        return first_line(error)
    return describe_error(error) if user_frames(error) else f"{type(error).__name__}: {first_line(error)}"


@dataclass
class Group:
    """Requested runs that could train in one cohort, in the order of their seeds."""

    context: SweepContext
    requests: list[RunRequest]
    parts: int
    """Cohorts to cut it into, at least."""

    @cached_property
    def hashes(self) -> list[str]:
        return [request.config.hash for request in self.requests]

    @cached_property
    def fitting(self) -> int:
        """How many of its runs fit into the memory budget together."""
        return max(1, largest_cohort(_cohort(self.context, self.requests), self.context.options.memory_budget))

    @cached_property
    def cohorts(self) -> list[list[str]]:
        """The group in cohorts that fit into memory: with equal memory the same ones, whatever is finished."""
        options, runs = self.context.options, len(self.requests)
        parts = min(runs, max(self.parts, math.ceil(runs / (options.cohort_size or runs))))
        if parts < runs:
            while math.ceil(runs / parts) > self.fitting:
                parts = min(runs, 2 * parts)
        bounds = [runs * part // parts for part in range(parts + 1)]
        return [self.hashes[start:end] for start, end in itertools.pairwise(bounds)]


def make_groups(context: SweepContext, requests: Iterable[RunRequest]) -> list[Group]:
    """Return the requests that can train in one cohort together, in at least as many parts as there are workers."""
    groups: dict[str, list[RunRequest]] = {}
    for request in requests:
        groups.setdefault(_cohort_key(request), []).append(request)
    ordered = [sorted(g, key=lambda r: (r.config.seed, r.config.lr, r.config.hash)) for g in groups.values()]
    return [Group(context, group, math.ceil((context.options.workers or 1) / len(ordered))) for group in ordered]


def _cohort_key(request: RunRequest) -> str:
    """Return what runs of a cohort share: all but seed, learning rate and scalar hyperparameters."""
    config, member = request.config.as_dict() | {"lr": None, "seed": None}, request.member
    differing = differing_in_cohorts(member.algorithm)
    options = {k: v for k, v in config["algorithm"]["options"].items() if k not in differing}
    shared = {"algorithm": config["algorithm"] | {"options": options}, "optimizer": member.optimizer.structure()}
    if request.parent is not None:
        shared["parent"] = request.parent.tasks, request.parent.config.get("horizon")
    return json.dumps(config | shared, sort_keys=True)


def _cohort(context: SweepContext, requests: Sequence[RunRequest]) -> Cohort:
    cohort = context.cohort.only([request.member for request in requests])
    parents = [request.parent for request in requests if request.parent is not None]
    return cohort_after(cohort, parents) if parents else cohort


def train_claim(context: SweepContext, claim: Claim, requests: Mapping[str, RunRequest]) -> None:
    """Train a claimed cohort to its end, with a checkpoint at every task boundary, and write its runs.

    An interrupted cohort resumes with the runs that are requested and missing; its checkpoint stays for the others. If
    parameters are kept, all its runs resume, because the cohort's files hold them all.
    """
    store, kept_files = context.store, context.options.kept | ({"parameters"} if claim.parameters else set())
    missing = {hash for hash in claim.hashes if not store.finished(hash, kept_files)}
    if not missing:
        return claim.finish()
    indices = [i for i, hash in enumerate(claim.hashes) if hash in requests and (claim.parameters or hash in missing)]
    if not indices:  # another process has just written them
        return None
    members = [requests[claim.hashes[i]] for i in indices]
    complete = len(indices) == len(claim.hashes)
    cohort = _cohort(context, members)
    tasks = cohort.challenge.tasks
    parents = [request.parent for request in members if request.parent is not None]
    monitor: TrainingMonitor | None = None
    try:
        last = _load(claim, cohort.device)
        if last is not None and not complete:
            last = Snapshot(last.finished, last.state.select(indices), last.record.select(indices))
        if last is None and parents:
            last = begin_after(cohort, parents)
            for task in range(last.finished if claim.parameters else 0):
                claim.keep(task, *parameters_after(task, parents, last.state))
        if last is None or last.finished < tasks:
            monitor = _make_monitor(context, cohort) if last is None else None
            examples = cohort.challenge.task(0, cohort.members[0].seed).train.y.shape[0]
            steps = tasks * cohort.epochs * math.ceil(examples / cohort.batch_size) * len(cohort)
            entry = resolve.name_of(cohort.algorithm), len(cohort), tasks, steps, last.finished if last else 0
            bar = context.progress.start_cohort(*entry)
            claim.lease.note(
                label=entry[0], tasks=tasks, begun=entry[-1], finished=entry[-1], device=str(cohort.device)
            )
            for snapshot in train(cohort, last, context.options.execution, bar, monitor):
                last = snapshot
                claim.lease.note(finished=last.finished)
                if complete:
                    claim.save(snapshot)
                if context.track is not None and last.finished < tasks:
                    for i, request in enumerate(members):
                        context.track(_run(store, request.config, last, i, _run_info(cohort, last, i)), last.finished)
                if context.stop() and last.finished < tasks:
                    return
        assert last is not None
        frozen = {k: p for k, p in frozen_parameters(cohort.shared_network).items() if k not in last.state.buffers}
        notes = [*last.record.notes, *context.notes]
        unwritten = [i for i, request in enumerate(members) if request.config.hash in missing]
        all_parameters = claim.kept_parameters([indices[i] for i in unwritten], tasks, frozen)
        fingerprints = cache(partial(task_fingerprints, cohort.challenge))
        for i, parameters in zip(unwritten, all_parameters, strict=True):
            config, parent = members[i].config, members[i].parent
            arrays = {name: array[i] for name, array in last.record.arrays.items()}
            run_notes = notes if parent is None else [*notes, parent_note(parent)]
            unmonitored = RESUMED if parent is None else CONTINUED
            info = _run_info(cohort, last, i) | _monitor_info(context.options, monitor, run_notes, i, unmonitored)
            state = None
            if "state" in kept_files:
                state = tree.flatten(tree.select(last.state.as_tree(), i))
                state["task_fingerprints"] = fingerprints(config.seed if cohort.challenge.seeded else 0)
            store.write(config, arrays, info, {"parameters": parameters, "state": state})
            if context.track is not None:
                context.track(_run(store, config, last, i, info), tasks)
        if all(store.finished(hash, kept_files) for hash in claim.hashes):
            claim.finish()
        context.progress.finish_cohort(len(missing & requests.keys()))
    except GlocalError:
        claim.lease.check()  # an error of reading or writing may be the work of a successor
        raise


def _load(claim: Claim, device: torch.device) -> Snapshot | None:
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
