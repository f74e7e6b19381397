"""Sweeps: train every algorithm at every learning rate with every seed, and keep the runs in a store.

A sweep is a set of requested runs. Those that the store misses are trained in cohorts, which this process claims one
after the other; several processes may work on the same store. Asking again resumes what was interrupted.
"""

from __future__ import annotations

import json
import operator
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from glocal.algorithms import Algorithm
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Member, RunConfig
from glocal.engine.memory_budget import largest_cohort
from glocal.engine.step import scalars
from glocal.errors import GlocalError
from glocal.store.run import Runs
from glocal.store.store import Claim, Store
from glocal.sweeps import resolve
from glocal.sweeps.options import SweepOptions, positive_number
from glocal.sweeps.training import NullProgress, ProgressReporter, RunRequest, SweepContext, train_claim

POLL_SECONDS = 0.5


def sweep(
    challenge: str | Challenge,
    algorithms: str | Iterable[str | Algorithm | type[Algorithm] | tuple[str, Mapping[str, Any]]],
    lrs: Iterable[float],
    seeds: Iterable[int],
    *,
    progress: ProgressReporter | None = None,
    **options: Any,
) -> Runs:
    """Train every algorithm at every learning rate with every seed, and return these runs.

    Runs that the store already holds are not repeated. Interrupted runs resume at their last task boundary. Runs that
    another process is training in the same store are waited for.

    Args:
        challenge: a name from `glocal list challenges`, path.py:function, or a `Challenge`.
        algorithms: names from `glocal list algorithms`, path.py:Name, classes, instances, or (name, options) pairs.
        lrs: learning rates.
        seeds: seeds of the initialisation, the order of the data and all other random draws.
        progress: receives the progress; by default progress bars on a terminal, and nothing elsewhere.
        **options: fields of `glocal.SweepOptions`, e.g. `epochs=2, store="runs", keep_parameters=True, monitor=0.1`.

    Returns:
        The runs in the order of algorithms, seeds and learning rates.

    Example:
        >>> runs = glocal.sweep("rotated-digits", ["er", "ewc"], [0.01, 0.1], [11, 13], tasks=3)  # doctest: +SKIP
        >>> runs.table()  # doctest: +SKIP
    """
    context, requests = _plan(challenge, algorithms, lrs, seeds, SweepOptions.from_mapping(options), progress)
    return _train_missing(context, requests)


def load(store: str | Path) -> Runs:
    """Return all finished runs of a store."""
    return Runs(Store.open(store).runs())


def _plan(
    challenge: str | Challenge,
    algorithms: str | Iterable[str | Algorithm | type[Algorithm] | tuple[str, Mapping[str, Any]]],
    lrs: Iterable[float],
    seeds: Iterable[int],
    options: SweepOptions,
    progress: ProgressReporter | None,
) -> tuple[SweepContext, dict[str, RunRequest]]:
    """Resolve all names; return what the runs share, and the requested runs by hash."""
    learnt = resolve.challenge(challenge, options.tasks, options.data, options.setting)
    network = resolve.network(options.network, learnt.value)
    epochs, batch_size = options.epochs or learnt.value.epochs, options.batch_size or learnt.value.batch_size
    options = replace(options, epochs=epochs, batch_size=batch_size)
    device = resolve.choose_device(options.device)
    rates = [positive_number("lr", lr) for lr in _distinct("lrs", lrs)]
    integer_seeds = [_seed(seed) for seed in _distinct("seeds", seeds)]
    requests: dict[str, RunRequest] = {}
    for entry in [algorithms] if isinstance(algorithms, str) else algorithms:
        name, choices = entry if isinstance(entry, tuple) else (entry, None)
        algorithm = resolve.algorithm(name, choices)
        resolve.check_setting(algorithm.value, learnt.value)
        for seed in integer_seeds:
            for lr in rates:
                config = RunConfig(
                    challenge=learnt.config,
                    network=network.config,
                    algorithm=algorithm.config,
                    lr=lr,
                    seed=seed,
                    epochs=epochs,
                    batch_size=batch_size,
                    train_eval=options.train_eval,
                    precision=options.precision,
                )
                requests[config.hash] = RunRequest(config, Member(seed, lr, algorithm.value))
    if not requests:
        raise GlocalError("a sweep needs at least one algorithm.")
    store = Store.create(options.store)
    context = SweepContext(learnt.value, network.value, options, device, store, progress or _default_progress())
    return context, requests


def _default_progress() -> ProgressReporter:
    """Return progress bars on a terminal, if rich is installed."""
    if not sys.stderr.isatty():
        return NullProgress()
    try:
        from glocal.report.progress import Bars
    except ImportError:
        return NullProgress()
    return Bars()


def _train_missing(context: SweepContext, requests: Mapping[str, RunRequest]) -> Runs:
    """Train until the store holds every requested run, trained by this process or by another one."""
    store, keep = context.store, context.options.keep_parameters
    cohort_sizes: dict[str, int] = {}
    context.progress.start(len(requests), sum(store.finished(hash, keep) for hash in requests))
    try:
        while missing := [request for hash, request in requests.items() if not store.finished(hash, keep)]:
            with store.claiming():
                claim = _claim_interrupted(context, requests, missing)
                groups = [] if claim else _group(missing, store.busy())
            if claim is None and groups:
                group, key = groups[0], _cohort_key(groups[0][0])
                if key not in cohort_sizes:
                    cohort_sizes[key] = _cohort_size(context, group)
                with store.claiming():
                    busy = store.busy()
                    free = [r.hash for r in group if r.hash not in busy and not store.finished(r.hash, keep)]
                    claim = store.claim(free[: cohort_sizes[key]], keep) if free else None
            if claim is not None:
                train_claim(context, claim, requests)
            elif not groups:
                context.progress.waiting(len(missing))
                time.sleep(POLL_SECONDS)
    finally:
        context.progress.stop()
    return Runs([store.run(hash) for hash in requests])


def _claim_interrupted(
    context: SweepContext, requests: Mapping[str, RunRequest], missing: list[RunRequest]
) -> Claim | None:
    """Claim an interrupted cohort with missing runs.

    A cohort that keeps parameters is only resumed if all of its runs are requested, because its files hold them all.
    """
    hashes = {request.hash for request in missing}
    chosen: Claim | None = None
    for claim in context.store.interrupted():
        complete = set(claim.hashes) <= requests.keys()
        suitable = complete if claim.parameters else not context.options.keep_parameters
        if chosen is None and suitable and hashes & set(claim.hashes):
            chosen = claim
        else:
            claim.leave()
    return chosen


def _group(requests: Iterable[RunRequest], busy: set[str]) -> list[list[RunRequest]]:
    """Group runs that can train in one cohort, each group in the order of its seeds."""
    groups: dict[str, list[RunRequest]] = {}
    for request in requests:
        if request.hash not in busy:
            groups.setdefault(_cohort_key(request), []).append(request)
    return [sorted(g, key=lambda r: (r.config.seed, r.config.lr, r.hash)) for g in groups.values()]


def _cohort_key(request: RunRequest) -> str:
    """Return what runs of a cohort share: all but seed, learning rate and scalar hyperparameters."""
    config = request.config.as_dict()
    scalar_names = scalars(request.member.algorithm)
    options = {k: v for k, v in config["algorithm"]["options"].items() if k not in scalar_names}
    shared = config | {"lr": None, "seed": None, "algorithm": config["algorithm"] | {"options": options}}
    return json.dumps(shared, sort_keys=True)


def _cohort_size(context: SweepContext, group: list[RunRequest]) -> int:
    """Return how many runs of a group fit into memory together."""
    if len(group) == 1:
        return 1
    fitting = largest_cohort(context.cohort(group), context.options.memory_budget)
    return max(1, min(len(group), fitting, context.options.cohort_size or len(group)))


def _seed(value: int) -> int:
    seed = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if seed is None or seed < 0:
        raise GlocalError(f"a seed must be a whole number of at least 0; {value} was given.")
    return seed


def _distinct(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the values without repetitions, in their order."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise GlocalError(f"{name} must be a list of numbers; {values!r} was given.")
    distinct = list(dict.fromkeys(values))
    if not distinct:
        raise GlocalError(f"{name} must contain at least one value; none was given.")
    return distinct
