"""Sweeps over spaces that are too large for a grid: Optuna proposes configurations, a batch at a time.

There is no database besides the store. The sampler has a fixed seed, and is asked and told the same trials again
whenever a sweep is repeated: those in the store are not trained, so an interrupted sweep resumes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from glocal.errors import GlocalError, require, require_known
from glocal.rng import GLOBAL_STATE
from glocal.selection import check_protocol, criterion
from glocal.store.run import Run, Runs
from glocal.sweeps import resolve
from glocal.sweeps.context import ProgressReporter
from glocal.sweeps.options import convert, parse_range
from glocal.sweeps.resume import train_missing
from glocal.sweeps.sweep import check_options, pairs, prepare_configurations

Spec: TypeAlias = tuple[Any, Mapping[str, Any] | None]
Configuration: TypeAlias = tuple[Spec, Spec, float]  # algorithm and optimiser with options, learning rate
PROTOCOL = "all-validation"
"""What a sampler maximises by default."""
DIGITS = 3
"""Significant digits of sampled numbers, so that names of runs can be read."""


def sample(
    challenge: Any,
    algorithms: Any,
    lrs: Iterable[Any],
    seeds: Iterable[int],
    *,
    trials: int,
    sampler: Literal["tpe", "random"] = "tpe",
    parallel: int = 8,
    protocol: str = PROTOCOL,
    optimizer: Any = "sgd",
    progress: ProgressReporter | None = None,
    **options: Any,
) -> Runs:
    """Train `trials` configurations of every algorithm that a sampler proposes, and return their runs.

    The sampler maximises the mean over seeds of the protocol's criterion; a configuration of which a run diverged ranks
    last. Every algorithm with every optimiser has its own sampler. All other arguments are those of `glocal.sweep`.

    Args:
        algorithms: (name, options) pairs. An option's value may be a list to choose from, or a range 'LOW..HIGH':
            logarithmic if LOW > 0, otherwise uniform; of whole numbers if the option is one.
        lrs: learning rates to choose from, or one range, as in ['1e-4..1'].
        trials: number of configurations. A sweep with more trials begins with the same ones.
        sampler: 'tpe', which learns from earlier trials, or 'random'.
        parallel: configurations that are proposed at a time and train together.
        protocol: name from `glocal.selection.PROTOCOLS`.
        optimizer: (name, options) pairs, as for algorithms.
    """
    from glocal.track.tracking import tracking

    try:
        import optuna
    except ImportError as error:
        raise GlocalError(f"the sampler {sampler} needs optuna: pip install 'glocal[optuna]'.") from error
    require_known("sampler", sampler, ("random", "tpe"))
    require(min(trials, parallel) > 0, f"trials = {trials}, parallel = {parallel} were given; both must be positive.")
    chosen = check_options(options)
    hint = "a sampler trains in this process: leave on, workers and device='all' out. For several GPUs, start this "
    here = chosen.on == "here" and chosen.workers is None and chosen.device != "all"
    require(here, f"{hint}command on each.")
    runs, lrs, seeds = dict[Any, Run](), list(lrs), list(seeds)
    with GLOBAL_STATE, tracking(chosen.track, chosen.store) as track:
        for algorithm, optimizer_spec in itertools.product(pairs(algorithms), pairs(optimizer)):
            space, study = _space(algorithm, optimizer_spec, lrs), _study(sampler)
            for start in range(0, trials, parallel):
                batch = [study.ask(space) for _ in range(min(parallel, trials - start))]
                configs = [_configuration(algorithm, optimizer_spec, trial) for trial in batch]
                trained = _train(challenge, configs, seeds, protocol, progress, track, options)
                for trial, group in zip(batch, trained, strict=True):
                    values = [criterion(run, protocol) for run in group]
                    if np.isfinite(values).all():
                        study.tell(trial, float(np.mean(values)))
                    else:
                        study.tell(trial, state=optuna.trial.TrialState.PRUNED)  # which TPE ranks last
                    runs |= {run.path: run for run in group}
    return Runs(runs.values())


def _study(sampler: str) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of constant_liar in Optuna 4
        tpe, random = optuna.samplers.TPESampler, optuna.samplers.RandomSampler
        optuna_sampler = tpe(seed=0, constant_liar=True) if sampler == "tpe" else random(seed=0)
    return optuna.create_study(direction="maximize", sampler=optuna_sampler)


def _space(algorithm: Spec, optimizer: Spec, lrs: list[Any]) -> dict[str, Any]:
    """Return Optuna's distributions of 'lr', 'algorithm.NAME' and 'optimizer.NAME'."""
    space = {"lr": _distribution("lr", lrs)}
    parts = (("algorithm.", resolve.algorithm, algorithm), ("optimizer.", resolve.optimizer, optimizer))
    for prefix, make, (spec, options) in parts:
        listed = {k: list(v) if isinstance(v, list | tuple) and v else [v] for k, v in (options or {}).items()}
        example = make(spec, {name: (parse_range(v[0]) or v)[0] for name, v in listed.items()}).value
        for name, values in listed.items():
            space[prefix + name] = _distribution(name, values, type(getattr(example, name)) is int)
    return space


def _distribution(name: str, values: list[Any], integral: bool = False) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    ranges = [ends for value in values if (ends := parse_range(value)) is not None]
    message = f"{name} = {', '.join(map(str, values))} was given; a sampler takes values, or one range LOW..HIGH"
    require(bool(values) and (not ranges or len(values) == 1), f"{message}.")
    if not ranges:
        return CategoricalDistribution(values)
    low, high = (convert(name, int if integral else float, end) for end in ranges[0])
    require(low < high, f"{message} with LOW < HIGH.")
    return IntDistribution(low, high, log=low > 0) if integral else FloatDistribution(low, high, log=low > 0)


def _configuration(algorithm: Spec, optimizer: Spec, trial: Any) -> Configuration:
    values: dict[str, dict[str, Any]] = {"lr": {}, "algorithm": {}, "optimizer": {}}
    for key, value in trial.params.items():
        kind, _, name = key.partition(".")
        sampled = hasattr(trial.distributions[key], "low") and isinstance(value, float)
        values[kind][name] = float(f"{value:.{DIGITS}g}") if sampled else value
    lr = convert("lr", float, values["lr"][""])
    return (algorithm[0], values["algorithm"]), (optimizer[0], values["optimizer"]), lr


def _train(
    challenge: Any,
    configurations: list[Configuration],
    seeds: Iterable[int],
    protocol: str,
    progress: Any,
    track: Any,
    options: Any,
) -> list[list[Run]]:
    """Train configurations together, and return the runs of each."""
    job = prepare_configurations(challenge, [(a, o, [lr]) for a, o, lr in configurations], seeds, **options)
    job_challenge = job.context.cohort.challenge
    check_protocol(protocol, job_challenge.validation is not None, job_challenge.tasks, job_challenge.name)
    job.context.progress, job.context.track = progress or ProgressReporter(), track
    runs = train_missing(job)
    for run in runs if track is not None else []:
        track(run, run.tasks)
    members = [request.member for request in job.requests.values()]
    parts = [(m.algorithm, m.optimizer, m.lr) for m in members]
    wanted = [(resolve.algorithm(*a).value, resolve.optimizer(*o).value, lr) for a, o, lr in configurations]
    return [[run for run, part in zip(runs, parts, strict=True) if part == one] for one in wanted]
