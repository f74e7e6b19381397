"""Sweeps: train every algorithm at every learning rate with every seed, and keep the runs in a store.

A sweep is a set of requested runs. Those that the store misses are trained (`glocal.sweeps.resume`), so asking again
resumes what was interrupted.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from glocal.algorithms import Algorithm
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.engine.config import RunConfig
from glocal.errors import GlocalWarning, require
from glocal.optimizers import Optimizer
from glocal.rng import GLOBAL_STATE
from glocal.store.run import Runs
from glocal.store.store import Store
from glocal.sweeps import resolve
from glocal.sweeps.context import ProgressReporter, RunRequest, SweepContext
from glocal.sweeps.continuation import Parents
from glocal.sweeps.options import MAX_RUNS, SweepOptions, convert, require_count, require_option
from glocal.sweeps.resume import Job, train_missing

if TYPE_CHECKING:
    from glocal.sweeps.plan import Plan

AlgorithmSpec: TypeAlias = str | Algorithm | type[Algorithm] | tuple[str, Mapping[str, Any]]
OptimizerSpec: TypeAlias = str | Optimizer | type[Optimizer] | tuple[str, Mapping[str, Any]]


def sweep(
    challenge: str | Challenge,
    algorithms: str | Iterable[AlgorithmSpec],
    lrs: Iterable[float],
    seeds: Iterable[int],
    *,
    optimizer: OptimizerSpec | Iterable[OptimizerSpec] = "sgd",
    progress: ProgressReporter | None = None,
    **options: Any,
) -> Runs:
    """Train every algorithm with every optimiser, learning rate and seed, and return these runs.

    Runs that the store already holds are not repeated. Interrupted runs resume at their last task boundary. Runs that
    another process is training in the same store are waited for. Sweeps in threads of one process take turns. With
    `on="slurm"`, jobs are submitted, and the runs that are finished already are returned at once; with `on="ray"`, the
    runs are trained on a cluster of Ray and waited for.

    Args:
        challenge: a name from `glocal list challenges`, path.py:function, or a `Challenge`.
        algorithms: names from `glocal list algorithms`, path.py:Name, classes, instances, or (name, options) pairs.
        lrs: learning rates.
        seeds: seeds of the initialisation, the order of the data and all other random draws.
        optimizer: sgd (the default, as in the paper), adam, adamw, path.py:Name, a class or an instance of an
            `Optimizer`, a (name, options) pair, or several of these.
        progress: receives the progress; by default progress bars on a terminal, and nothing elsewhere.
        **options: fields of `glocal.SweepOptions`, e.g. `epochs=2, store="runs", keep_parameters=True, monitor=0.1`.

    Returns:
        The runs in the order of algorithms, optimisers, seeds and learning rates.

    Example:
        >>> import glocal
        >>> runs = glocal.sweep("split-digits", ["sgd", "er"], lrs=[0.01, 0.1], seeds=[11], tasks=2, epochs=1)
        >>> runs
        <4 runs: er, sgd>
        >>> runs.table()["algorithm"].to_list()
        ['er', 'er', 'sgd', 'sgd']
        >>> adam = [("adamw", {"weight_decay": decay, "schedule": "cosine"}) for decay in (0.0, 0.1)]
        >>> runs = glocal.sweep("split-digits", ["er"], [0.001], [11], optimizer=adam, tasks=2, epochs=1)
        >>> [run.algorithm for run in runs]
        ['er · adamw weight_decay=0 schedule=cosine', 'er · adamw weight_decay=0.1 schedule=cosine']
    """
    from glocal.cluster.worker import start_workers, worker_devices
    from glocal.sweeps.plan import write_plan
    from glocal.track.tracking import tracking

    chosen = check_options(options)
    this_machine = chosen.on == "here"
    devices = (
        worker_devices(chosen.device, chosen.workers)
        if this_machine
        else ["auto" if chosen.on == "slurm" else chosen.device.replace("all", "auto")]
    )
    options |= {"device": devices[0], "workers": len(devices) if this_machine else chosen.workers}
    if progress is None and sys.stderr.isatty():
        from glocal.report.progress import Bars

        progress = Bars()
    with GLOBAL_STATE, tracking(chosen.track, chosen.store) as track:
        if not this_machine:
            from glocal.cluster import ray

            plan, job = write_plan(challenge, algorithms, lrs, seeds, optimizer=optimizer, **options)
            if chosen.on == "slurm":
                return _submit(plan, job, chosen, progress or ProgressReporter())
            runs = ray.train(plan, job, progress or ProgressReporter())
        elif len(devices) == 1:
            job = prepare(challenge, algorithms, lrs, seeds, optimizer=optimizer, **options)
        else:
            plan, job = write_plan(challenge, algorithms, lrs, seeds, optimizer=optimizer, **options)
            arguments = ["--code", *plan.code] if plan.code else []
            arguments += ["--track", chosen.track] if chosen.track else []
            job.retry_failed()
            status = start_workers(job.context.store.path, devices, arguments)
            job.retry = False
            if status:
                message = f"a worker ended with exit status {status}: see its output above."
                warnings.warn(message, GlocalWarning, stacklevel=2)
        if this_machine:
            job.context.progress, job.context.track = progress or ProgressReporter(), track
            runs = train_missing(job)
        if track is not None:
            for run in runs:  # those too that were in the store, or that other processes trained
                track(run, run.tasks)
        return runs


def prepare(
    challenge: str | Challenge,
    algorithms: str | Iterable[AlgorithmSpec],
    lrs: Iterable[float],
    seeds: Iterable[int],
    *,
    optimizer: OptimizerSpec | Iterable[OptimizerSpec] = "sgd",
    **options: Any,
) -> Job:
    """Return the runs that the arguments of `sweep` ask for, ready to be trained."""
    lrs, parts = _distinct("lrs", lrs, float), list(itertools.product(pairs(algorithms), pairs(optimizer)))
    require(bool(parts), "a sweep needs at least one algorithm and one optimizer.")
    return prepare_configurations(challenge, [(*part, lrs) for part in parts], seeds, **options)


def prepare_configurations(
    challenge: str | Challenge, configurations: Sequence[tuple[Any, Any, list[float]]], seeds: Any, **options: Any
) -> Job:
    """Return the runs of some configurations: pairs of an algorithm and of an optimiser, with learning rates."""
    chosen = check_options(options)
    default = torch.get_default_dtype()
    remedy = "call torch.set_default_dtype(torch.float32) before"
    require(default == torch.float32, f"torch makes tensors of {default} by default; runs need float32: {remedy}.")
    resolved = resolve.challenge(
        challenge, chosen.tasks, chosen.data, chosen.setting, chosen.validation, chosen.evaluate
    )
    network = resolve.network(chosen.network, resolved.value, chosen.init)
    shared: dict[str, Any] = {
        "epochs": chosen.epochs or resolved.value.epochs,
        "batch_size": chosen.batch_size or resolved.value.batch_size,
        "train_eval": chosen.train_eval,
        "precision": chosen.precision,
        "horizon": chosen.horizon,
        "patience": chosen.patience,
    }
    resolve.check_batches(network.value, resolved.value, shared["batch_size"])
    patience_message = f"patience = {chosen.patience} needs validation data: set validation, or give triples of data."
    require(chosen.patience is None or resolved.value.validation is not None, patience_message)
    horizon_message = (
        f"horizon = {chosen.horizon} was given; it must be at least the number of tasks, {resolved.value.tasks}."
    )
    require(chosen.horizon is None or chosen.horizon >= resolved.value.tasks, horizon_message)
    device = resolve.choose_device(chosen.device)
    seeds = _distinct("seeds", seeds, int)
    require_count(len(seeds) * sum(len(lrs) for *_, lrs in configurations))
    lowest = min(lr for *_, lrs in configurations for lr in lrs)
    require(lowest > 0, f"lr = {lowest} was given; it must be positive.")
    require(min(seeds) >= 0, f"seed = {min(seeds)} was given; it must be at least 0.")
    parents = None
    if chosen.after is not None:
        parents = Parents(Store.open(chosen.after), resolved.value, chosen.kept, Store(chosen.store))
    requests: dict[str, RunRequest] = {}
    for algorithm_pair, optimizer_pair, lrs in configurations:
        algorithm, chosen_optimizer = resolve.algorithm(*algorithm_pair), resolve.optimizer(*optimizer_pair)
        resolve.check_setting(algorithm.value, resolved.value)
        early = f"{resolve.name_of(algorithm.value)} needs all epochs of a task: leave patience out."
        require(chosen.patience is None or not algorithm.value.needs_all_epochs, early)
        resolve.check_optimizer(algorithm.value, chosen_optimizer.value)
        parts: dict[str, Any] = {"algorithm": algorithm.config, "optimizer": chosen_optimizer.config or None}
        for seed, lr in itertools.product(seeds, lrs):
            config = RunConfig(resolved.config, network.config, lr=lr, seed=seed, **parts, **shared)
            config, parent = (config, None) if parents is None else parents.find(config)
            requests[config.hash] = RunRequest(
                config, Member(seed, lr, algorithm.value, chosen_optimizer.value), parent
            )
    cohort = Cohort(resolved.value, network.value, (), device=device, **shared)
    notes = [network.note] if network.note else []
    return Job(SweepContext(cohort, chosen, Store.create(chosen.store), notes), requests)


def check_options(options: Mapping[str, Any]) -> SweepOptions:
    """Return the options of a sweep, checked."""
    for option in options:
        require_option("option of a sweep", option, ["optimizer", *(field.name for field in fields(SweepOptions))])
    return SweepOptions(**options)


def pairs(specs: Any) -> list[tuple[Any, Any]]:
    """Return one or several specifications of algorithms or optimisers as (what, options) pairs."""

    def is_pair(spec: Any) -> bool:
        return isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], Mapping | None)

    require(not isinstance(specs, Mapping), f"{specs!r} was given; write a pair: (name, {{option: value}}).")
    single = is_pair(specs) or not isinstance(specs, Iterable) or isinstance(specs, str)
    return [spec if is_pair(spec) else (spec, None) for spec in ([specs] if single else specs)]


def _submit(plan: Plan, job: Job, options: SweepOptions, progress: ProgressReporter) -> Runs:
    """Submit a plan to Slurm, unless nothing is left of it, and return the runs that are finished."""
    from glocal.cluster import slurm
    from glocal.report.summary import format_range

    runs = job.stored_runs()
    if job.missing():
        slurm.submit(job.context.store.path, list(plan.code), options)
        job.retry_failed()
        finished = f"finished already: {len(runs)} of {format_range([len(job.requests)], 'run')}"
        progress.message(
            f"Submitted {format_range([options.workers or 1], 'worker')}; {finished}. "
            f"`glocal status {options.store}` shows how far they are."
        )
    else:
        plan.remove(job.context.store)
        progress.message("Nothing is left to train: no workers were submitted.")
    return runs


def _distinct(name: str, values: Iterable[Any], kind: type) -> list[Any]:
    """Return the values as numbers of this kind without repetitions, in their order."""
    many = isinstance(values, Iterable) and not isinstance(values, str)
    items = list(itertools.islice(values, MAX_RUNS + 1)) if many else values
    flat = isinstance(items, list) and not any(isinstance(value, list | tuple) for value in items)
    require(flat, f"{name} = {items!r} was given; it must be a flat list of numbers, such as [1].")
    distinct = list(dict.fromkeys(convert(name.removesuffix("s"), kind, value) for value in items))
    require(bool(distinct), f"{name} = [] was given; it must contain at least one number.")
    return distinct
