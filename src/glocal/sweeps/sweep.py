"""Sweeps: from what is wanted to finished runs in a store. Everything is resumed by asking for it again."""

from __future__ import annotations

import json
import math
import operator
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from glocal import __version__
from glocal.algorithms import Algorithm
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.engine.config import RunConfig
from glocal.engine.loop import Execution, Progress, Silent, Snapshot, train
from glocal.engine.memory_budget import largest_cohort
from glocal.engine.step import scalars
from glocal.errors import GlocalError, require, unknown
from glocal.networks.model import MakeNetwork
from glocal.precision import PRECISIONS, Precision
from glocal.runs import Runs
from glocal.store.store import Claim, Store
from glocal.sweeps import resolve

if TYPE_CHECKING:
    from glocal.lens.monitor import Monitor

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RunRequest:
    """One run that is asked for: its name, and what it takes to train it."""

    config: RunConfig
    member: Member

    @property
    def hash(self) -> str:
        return self.config.hash


@dataclass(frozen=True)
class Setup:
    """What all runs of a sweep have in common."""

    challenge: Challenge
    make_network: MakeNetwork
    epochs: int
    batch_size: int
    train_eval: int
    device: torch.device
    execution: Execution
    memory_budget: int | None
    largest: int | None
    precision: Precision
    monitor: float | None
    monitor_by: str | None
    monitor_every: int | None

    def cohort(self, wanted: Sequence[RunRequest]) -> Cohort:
        members = tuple(w.member for w in wanted)
        how = self.epochs, self.batch_size, self.train_eval, self.device, self.precision
        return Cohort(self.challenge, self.make_network, members, *how)


class ProgressReporter(Protocol):
    """Who watches a sweep: the command line's progress bars, or nobody."""

    def start(self, runs: int, finished: int) -> None: ...

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress: ...

    def finish_cohort(self, runs: int) -> None: ...

    def waiting(self, runs: int) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


class NullProgress:
    def start(self, runs: int, finished: int) -> None: ...

    def start_cohort(self, label: str, runs: int, tasks: int, steps: int, done: int) -> Progress:
        return Silent()

    def finish_cohort(self, runs: int) -> None: ...

    def waiting(self, runs: int) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


def sweep(
    challenge: str | Challenge,
    algorithms: str | Iterable[str | Algorithm | type[Algorithm] | tuple[str, Mapping[str, Any]]],
    lrs: Iterable[float],
    seeds: Iterable[int],
    *,
    network: str | MakeNetwork = "mlp",
    setting: str | None = None,
    tasks: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    train_eval: int = 2_000,
    store: str | Path = "runs",
    data: str | Path | None = None,
    device: str = "auto",
    precision: str = "fp32",
    keep_parameters: bool = False,
    execution: Execution = "auto",
    memory_budget: int | None = None,
    cohort_size: int | None = None,
    monitor: float | None = None,
    monitor_by: str | None = None,
    monitor_every: int | None = None,
    progress: ProgressReporter | None = None,
) -> Runs:
    """Train every algorithm at every learning rate with every seed, and return all these runs.

    monitor: an ε. Training is watched for where it leaves an old task's ε-region (`lens.monitor`), which changes
    nothing in it, and the runs' notes say what was seen. It is the region of expansions, or of what `monitor_by` names:
    'diagonal', 'kronecker', or 'own', the algorithm's own approximation. It is looked at so seldom that it costs
    little, or after every `monitor_every`-th epoch.

    Runs that the store already holds are not repeated, interrupted ones go on from their last task boundary, and what
    another process is training on the same store is waited for. On a terminal, progress bars show how far it is.
    """
    chosen = resolve.challenge(challenge, tasks, data, setting)
    made = resolve.network(network, chosen.value)
    setup = Setup(
        chosen.value,
        made.value,
        _whole("epochs", epochs, chosen.value.epochs),
        _whole("batch_size", batch_size, chosen.value.batch_size),
        _whole("train_eval", train_eval, train_eval),
        resolve.choose_device(device),
        execution,
        memory_budget,
        None if cohort_size is None else _whole("cohort_size", cohort_size, 1),
        choose_precision(precision),
        monitor,
        monitor_by,
        None if monitor_every is None else _whole("monitor_every", monitor_every, 1),
    )
    if monitor is not None:
        from glocal.lens.region import positive

        positive(monitor)
    if monitor_by is not None:
        from glocal.lens.monitor import WATCHED

        if monitor_by not in WATCHED:
            raise unknown("approximation to watch", monitor_by, WATCHED)
        require(monitor is not None, f"monitor_by='{monitor_by}' was given, and no ε to watch for: give monitor too.")
    if monitor_every is not None:
        require(
            monitor is not None, f"monitor_every={monitor_every} was given, and no ε to watch for: give monitor too."
        )
    seeds, lrs = _distinct("seeds", seeds), _distinct("lrs", lrs)
    wanted: dict[str, RunRequest] = {}
    for one in [algorithms] if isinstance(algorithms, str) else algorithms:
        name, options = one if isinstance(one, tuple) else (one, None)
        algorithm = resolve.algorithm(name, options)
        resolve.suited(algorithm.value, chosen.value)
        for seed in seeds:
            for lr in lrs:
                config = RunConfig(
                    chosen.config,
                    made.config,
                    algorithm.config,
                    _positive("lr", lr),
                    _seed(seed),
                    setup.epochs,
                    setup.batch_size,
                    setup.train_eval,
                    setup.precision,
                )
                wanted[config.hash] = RunRequest(config, Member(config.seed, config.lr, algorithm.value))
    if not wanted:
        raise GlocalError("a sweep needs at least one algorithm.")
    return _finish(Store.create(store), setup, wanted, keep_parameters, progress or default_progress())


def default_progress() -> ProgressReporter:
    """Bars on a terminal, where rich is installed; nobody elsewhere."""
    if not sys.stderr.isatty():
        return NullProgress()
    try:
        from glocal.report.progress import Bars
    except ImportError:
        return NullProgress()
    return Bars()


def load(store: str | Path) -> Runs:
    """All finished runs of a store."""
    return Runs(Store.open(store).runs())


def _finish(
    store: Store, setup: Setup, wanted: Mapping[str, RunRequest], parameters: bool, progress: ProgressReporter
) -> Runs:
    """Train until every wanted run is in the store, by this process or by another one."""
    sizes: dict[str, int] = {}
    progress.start(len(wanted), sum(store.finished(h, parameters) for h in wanted))
    try:
        while remaining := [w for h, w in wanted.items() if not store.finished(h, parameters)]:
            with store.claiming():
                claim = _resume(store, wanted, remaining, parameters)
                groups = [] if claim else _groups(remaining, store.busy())
            if claim is None and groups:
                group = groups[0]
                key = _cohort_key(group[0])
                if key not in sizes:
                    sizes[key] = _size(setup, group)
                with store.claiming():
                    busy = store.busy()
                    free = [w for w in group if w.hash not in busy and not store.finished(w.hash, parameters)]
                    claim = store.claim([w.hash for w in free[: sizes[key]]], parameters) if free else None
            if claim is not None:
                _train(store, setup, claim, wanted, progress)
            elif not groups:
                progress.waiting(len(remaining))
                time.sleep(POLL_SECONDS)
    finally:
        progress.stop()
    return Runs([store.run(h) for h in wanted])


def _resume(
    store: Store, wanted: Mapping[str, RunRequest], remaining: list[RunRequest], parameters: bool
) -> Claim | None:
    """Take up an interrupted cohort that holds runs we miss; all of it, where its parameters are kept."""
    missing = {w.hash for w in remaining}
    found: Claim | None = None
    for claim in store.interrupted():
        whole = set(claim.hashes) <= wanted.keys()
        fits = whole if claim.parameters else not parameters
        if found is None and fits and missing & set(claim.hashes):
            found = claim
        else:
            claim.leave()
    return found


def _groups(remaining: Iterable[RunRequest], busy: set[str]) -> list[list[RunRequest]]:
    """Runs that can train together, in the order of their seeds."""
    groups: dict[str, list[RunRequest]] = {}
    for run in remaining:
        if run.hash not in busy:
            groups.setdefault(_cohort_key(run), []).append(run)
    return [sorted(g, key=lambda w: (w.config.seed, w.config.lr, w.hash)) for g in groups.values()]


def _cohort_key(run: RunRequest) -> str:
    """What runs of a cohort have in common: all but seed, learning rate and scalar hyperparameters."""
    config = run.config.as_dict()
    varying = scalars(run.member.algorithm)
    options = {k: v for k, v in config["algorithm"]["options"].items() if k not in varying}
    common = config | {"lr": None, "seed": None, "algorithm": config["algorithm"] | {"options": options}}
    return json.dumps(common, sort_keys=True)


def _size(setup: Setup, group: list[RunRequest]) -> int:
    if len(group) == 1:
        return 1
    fits = largest_cohort(setup.cohort(group), setup.memory_budget)
    return max(1, min(len(group), fits, setup.largest or len(group)))


def _train(
    store: Store, setup: Setup, claim: Claim, wanted: Mapping[str, RunRequest], progress: ProgressReporter
) -> None:
    """Train a claimed cohort to its end, with a checkpoint at every task boundary, and write its runs.

    Of an interrupted cohort, those that are wanted and not finished yet go on; the checkpoint stays for the rest. Where
    parameters are kept all go on, for the cohort's files hold them all.
    """
    missing = {h for h in claim.hashes if not store.finished(h, claim.parameters)}
    ours = [i for i, h in enumerate(claim.hashes) if h in wanted and (claim.parameters or h in missing)]
    members = [wanted[claim.hashes[i]] for i in ours]
    whole = len(ours) == len(claim.hashes)
    cohort = setup.cohort(members)
    watch: Monitor | None = None
    try:
        last = claim.load(setup.device, setup.epochs, setup.challenge.tasks)
        if last is not None and not whole:
            last = Snapshot(last.finished, last.state.select(ours), last.record.select(ours))
        if last is None or last.finished < setup.challenge.tasks:
            bar = _progress(setup, cohort, last, progress)
            watch = _monitor(setup, cohort, last, progress)
            for snapshot in train(cohort, last, setup.execution, bar, watch):
                last = snapshot
                if whole:
                    claim.save(snapshot)
        assert last is not None
        seen = _seen(setup, watch)
        for i, run in enumerate(members):
            if run.hash in missing:
                arrays = {k: v[i] for k, v in last.record.arrays().items()}
                store.write(
                    run.config, arrays, _info(setup, cohort, run, last, i, seen(i)), claim.kept_parameters(ours[i])
                )
        progress.finish_cohort(len(missing & wanted.keys()))
        if all(store.finished(h, claim.parameters) for h in claim.hashes):
            claim.finish(store)
    finally:
        claim.leave()


def _progress(setup: Setup, cohort: Cohort, last: Snapshot | None, progress: ProgressReporter) -> Progress:
    tasks, examples = setup.challenge.tasks, setup.challenge.task(0, cohort.members[0].seed).train.y.shape[0]
    steps = tasks * setup.epochs * math.ceil(examples / setup.batch_size) * len(cohort)
    return progress.start_cohort(
        resolve.name_of(cohort.algorithm), len(cohort), tasks, steps, last.finished if last else 0
    )


def _monitor(setup: Setup, cohort: Cohort, last: Snapshot | None, progress: ProgressReporter) -> Monitor | None:
    """Who watches this cohort, if somebody is to, and if he has been there from its beginning."""
    if setup.monitor is None or last is not None:
        return None
    from glocal.lens.monitor import Monitor

    by = setup.monitor_by or ("own" if isinstance(cohort.algorithm, Partition) else "diagonal")
    return Monitor(cohort, setup.monitor, by, setup.monitor_every, tell=progress.message)  # type: ignore[arg-type]


def _seen(setup: Setup, watch: Monitor | None) -> Callable[[int], Seen]:
    """What a monitor says of a run in the end."""
    if setup.monitor is None:
        return lambda run: Seen([], None)
    if watch is None:
        said = (
            "not monitored: it went on from an earlier checkpoint; glocal lens STORE/runs/HASH --retrace sees all of it"
        )
        return lambda run: Seen([said], None)

    def told(run: int) -> Seen:
        found, along = watch.assumption(run), watch.curves(run)
        said = f"{found.first_break}"
        if found.first_break is None:
            most = float(found.smallest.max()) if len(found.smallest) else 0.0
            said = f"inside every old task's region, with errors up to {most:.3g}"
        looks = {"finished": along.finished.tolist(), "step": along.step.tolist()}
        errors = [
            [x if math.isfinite(x) else None for x in row[:t]]
            for row, t in zip(along.error.tolist(), looks["finished"], strict=True)
        ]
        kept = {"epsilon": found.epsilon, **looks, "errors": errors}
        by = f" by {setup.monitor_by}" if setup.monitor_by else ""
        return Seen([f"monitored with ε = {found.epsilon:g}{by}: {said}"], kept)

    return told


class Seen(NamedTuple):
    """Notes for a run, and what a monitor saw of it: at which steps, with how many finished tasks, and ξ_o of each;
    None where that is beyond numbers."""

    notes: list[str]
    monitored: dict[str, Any] | None


def _info(setup: Setup, cohort: Cohort, run: RunRequest, snapshot: Snapshot, index: int, seen: Seen) -> dict[str, Any]:
    diverged = int(snapshot.state.diverged[index])
    record = snapshot.record
    return {
        "label": resolve.label_of(run.member.algorithm),
        "locality": run.member.algorithm.locality,
        "setting": setup.challenge.setting,
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
            "device": resolve.device_name(setup.device),
        },
        "notes": [*record.notes, *seen.notes],
        **({} if seen.monitored is None else {"monitored": seen.monitored}),
    }


def choose_precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise unknown("precision", name, PRECISIONS)
    return name


def _whole(name: str, value: int | None, default: int) -> int:
    chosen = default if value is None else value
    if isinstance(chosen, bool) or not isinstance(chosen, int) or chosen < 1:
        raise GlocalError(f"{name} must be a whole number of at least 1; {chosen} was given.")
    return chosen


def _positive(name: str, value: float) -> float:
    number = math.nan if isinstance(value, bool | str) else float(value)
    if not math.isfinite(number) or number <= 0:
        raise GlocalError(f"{name} must be a positive number; {value} was given.")
    return number


def _seed(value: int) -> int:
    whole = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if whole is None or whole < 0:
        raise GlocalError(f"a seed must be a whole number of at least 0; {value} was given.")
    return whole


def _distinct(name: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise GlocalError(f"{name} must be a list of numbers; {values!r} was given.")
    distinct = list(dict.fromkeys(values))
    if not distinct:
        raise GlocalError(f"{name} must name at least one value; none was given.")
    return distinct
