"""Sweeps: train every algorithm at every learning rate with every seed, and keep the runs in a store.

A sweep is a set of requested runs. Those that the store misses are trained (`glocal.sweeps.resume`), so asking again
resumes what was interrupted.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from glocal.algorithms import Algorithm
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member, RunConfig
from glocal.errors import require
from glocal.store.run import Runs
from glocal.store.store import Store
from glocal.sweeps import resolve
from glocal.sweeps.options import SweepOptions, convert, require_option
from glocal.sweeps.resume import ProgressReporter, RunRequest, SweepContext, train_missing

AlgorithmSpec: TypeAlias = str | Algorithm | type[Algorithm] | tuple[str, Mapping[str, Any]]


def sweep(
    challenge: str | Challenge,
    algorithms: str | Iterable[AlgorithmSpec],
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
    allowed = [field.name for field in fields(SweepOptions)]
    for option in options:
        require_option("option of a sweep", option, allowed)
    chosen = SweepOptions(**options)
    learnt = resolve.challenge(challenge, chosen.tasks, chosen.data, chosen.setting, chosen.validation)
    network = resolve.network(chosen.network, learnt.value, chosen.init)
    shared: dict[str, Any] = {
        "epochs": chosen.epochs or learnt.value.epochs,
        "batch_size": chosen.batch_size or learnt.value.batch_size,
        "train_eval": chosen.train_eval,
        "precision": chosen.precision,
    }
    device = resolve.choose_device(chosen.device)
    lrs, seeds = _distinct("lrs", lrs, float), _distinct("seeds", seeds, int)
    require(min(lrs) > 0, f"lr = {min(lrs)} was given; it must be positive.")
    require(min(seeds) >= 0, f"seed = {min(seeds)} was given; it must be at least 0.")
    requests: dict[str, RunRequest] = {}
    for entry in [algorithms] if isinstance(algorithms, str) else algorithms:
        name, choices = entry if isinstance(entry, tuple) else (entry, None)
        algorithm = resolve.algorithm(name, choices)
        resolve.check_setting(algorithm.value, learnt.value)
        for seed, lr in itertools.product(seeds, lrs):
            config = RunConfig(learnt.config, network.config, algorithm.config, lr, seed, **shared)
            requests[config.hash] = RunRequest(config, Member(seed, lr, algorithm.value))
    require(bool(requests), "a sweep needs at least one algorithm.")
    if progress is None and sys.stderr.isatty():
        from glocal.report.progress import Bars

        progress = Bars()
    cohort = Cohort(learnt.value, network.value, (), device=device, **shared)
    store, notes = Store.create(chosen.store), [network.note] if network.note else []
    context = SweepContext(cohort, chosen, store, progress or ProgressReporter(), notes)
    return train_missing(context, requests)


def load(store: str | Path) -> Runs:
    """Return all finished runs of a store, by algorithm, learning rate and seed."""
    return Runs(sorted(Store.open(store).runs(), key=lambda run: (run.algorithm, run.lr, run.seed)))


def _distinct(name: str, values: Iterable[Any], kind: type) -> list[Any]:
    """Return the values as numbers of this kind without repetitions, in their order."""
    given = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else values
    flat = isinstance(given, list) and not any(isinstance(value, list | tuple) for value in given)
    require(flat, f"{name} = {given!r} was given; it must be a flat list of numbers, such as [1].")
    distinct = list(dict.fromkeys(convert(name.removesuffix("s"), kind, value) for value in given))
    require(bool(distinct), f"{name} = [] was given; it must contain at least one number.")
    return distinct
