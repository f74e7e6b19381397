"""Train the runs that a store misses, in cohorts: new ones, and interrupted ones from their last checkpoint.

Several processes may work on the same store. Each claims one cohort after the other; what another process is training
is waited for, and taken over if that process stops.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
import traceback
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from glocal.engine.memory_budget import SMALLER, is_out_of_memory, largest_cohort
from glocal.errors import GlocalError, GlocalWarning, first_line
from glocal.files import DamagedError, StorageError
from glocal.hyperparameters import differing_in_cohorts
from glocal.store.lease import LeaseLost
from glocal.store.run import Run, Runs
from glocal.store.store import Claim, Store, required_files, set_aside
from glocal.sweeps.context import RunRequest, SweepContext, cohort_of
from glocal.sweeps.train_claim import load_checkpoint, train_claim
from glocal.sweeps.user_code import describe_error, user_frames

POLL_SECONDS = 0.5
MAX_KILLS = 2
"""A cohort is halved if so many processes were killed, one after the other, before they finished a task of it."""


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
    store.remove_finished(job.requests, job.kept)
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
    def kept(self) -> frozenset[str]:
        return self.context.options.kept

    @cached_property
    def groups(self) -> list[Group]:
        return make_groups(self.context, self.requests.values())

    def missing(self, hashes: Collection[str] | None = None) -> set[str]:
        """Return which requested runs, or which of these, are neither in the store nor known to have failed."""
        candidates = self.requests if hashes is None else hashes
        return self.context.store.missing(candidates, self.kept) - self.errors.keys()

    def stored_runs(self) -> Runs:
        """Return the requested runs that the store holds, and set damaged ones aside."""
        store, missing = self.context.store, self.context.store.missing(self.requests, self.kept)
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
        store, last = self.context.store, load_checkpoint(claim, torch.device("cpu"))
        hashes = [
            hash for hash in claim.hashes if not store.finished(hash, required_files(self.kept, claim.parameters))
        ]
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

    def _fail(self, claim: Claim, error: Exception) -> None:
        """Leave a cohort that cannot be trained, and tell other processes why. A cohort in the store has not failed."""
        if not self.context.store.missing(claim.hashes, required_files(self.kept, claim.parameters)):
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
        store, unfinished, parameters = self.context.store, self.context.store.cohorts(), "parameters" in self.kept
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
    def max_cohort_size(self) -> int:
        """How many of its runs fit into the memory budget together."""
        return max(1, largest_cohort(cohort_of(self.context, self.requests), self.context.options.memory_budget))

    @cached_property
    def cohorts(self) -> list[list[str]]:
        """The group in cohorts that fit into memory: with equal memory the same ones, whatever is finished."""
        options, runs = self.context.options, len(self.requests)
        parts = min(runs, max(self.parts, math.ceil(runs / (options.cohort_size or runs))))
        if parts < runs:
            while math.ceil(runs / parts) > self.max_cohort_size:
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
    optimizer = member.optimizer.structure(), config.get("optimizer", {}).get("source")
    shared = {"algorithm": config["algorithm"] | {"options": options}, "optimizer": optimizer}
    if request.parent is not None:
        shared["parent"] = request.parent.tasks, request.parent.config.get("horizon")
    return json.dumps(config | shared, sort_keys=True)
