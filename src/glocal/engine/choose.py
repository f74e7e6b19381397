"""Choose how a cohort is executed: rehearse what would run, time it, and take the fastest executor that works."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from glocal import accelerate, tree
from glocal.engine.cohort import Cohort
from glocal.engine.executors import Executor, Sequential, Vectorised, keep_freed_memory
from glocal.engine.loader import Loader
from glocal.engine.memory_budget import is_out_of_memory
from glocal.engine.network_check import TOLERANCE, NetworkCheck
from glocal.engine.state import State
from glocal.engine.step import ImpureError
from glocal.errors import GlocalError, first_line, require
from glocal.rng import seeded_only

Execution = Literal["auto", "vectorised", "sequential"]
Ladder: TypeAlias = Mapping[str, Callable[[Cohort], Executor]]

EAGER: Ladder = {"vectorised": Vectorised, "sequential": Sequential}
"""Executors by name; those that are fast more often come first."""
STEPS = {"cpu": 1, "cuda": 5}
"""Steps of a rehearsal."""
TIMINGS = {"cpu": 1, "cuda": 3}
"""How often they are timed for a long training; the shortest time counts."""
LONG = 20.0
"""Seconds of training from which on it pays to time all executors; before, the first that works is taken."""
GAIN = 1.05
"""How many times as fast a later executor must be to be preferred."""


def choose(cohort: Cohort, loader: Loader, execution: Execution = "auto", earlier: str = "") -> Executor:
    """Return an executor for the cohort, with its name, and a note if one that is usually faster does not work.

    A network that no executor trains as plain PyTorch does is refused.

    Args:
        cohort: what to train.
        loader: its loader, with a task loaded.
        execution: 'vectorised' and 'sequential' leave only those.
        earlier: the name of the executor that trained the tasks before, which is kept where it works.
    """
    on_gpu = cohort.device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
    check = NetworkCheck(cohort, loader)
    check.check_single_run()
    check_steps(cohort, loader)
    if execution == "sequential" or (len(cohort) == 1 and execution == "auto" and not on_gpu):
        return with_name("sequential", Sequential(cohort))
    captured = accelerate.find("step.captured") if on_gpu else None
    failures: dict[str, Exception] = {}
    for ladder in (captured() if captured else {}, EAGER):
        allowed = {k: make for k, make in ladder.items() if execution == "auto" or k.startswith(execution)}
        order = sorted(allowed, key=lambda name: name != earlier)
        seconds = _rehearse_all({name: allowed[name] for name in order}, cohort, loader, check, failures, earlier)
        if seconds:
            for error in failures.values():
                error.__traceback__ = None  # its frames hold the executor's graphs and states
            first = next(iter(seconds))
            best = min(seconds, key=lambda name: seconds[name] * (1 if name == first else GAIN))
            return with_name(best, allowed[best](cohort), _note(best, failures) if best == first else "")
    raise list(failures.values())[-1]


def with_name(name: str, executor: Executor, note: str = "") -> Executor:
    executor.name, executor.note = name, note
    return executor


def _note(name: str, failures: Mapping[str, Exception]) -> str:
    if not failures:
        return ""
    failed, error = next(iter(failures.items()))
    return f"{name}, because {failed} is not possible: {first_line(error)}"


def _rehearse_all(
    ladder: Ladder,
    cohort: Cohort,
    loader: Loader,
    check: NetworkCheck,
    failures: dict[str, Exception],
    earlier: str,
) -> dict[str, float]:
    """Return the seconds of an epoch of every executor that works, or of the first one if training is short."""
    seconds: dict[str, float] = {}
    loader.load_epoch(0)
    for name, make in ladder.items():
        try:
            executor = make(cohort)
            if executor.vectorised:
                check.check_vectorised()
            seconds[name] = rehearse(executor, cohort.initial_state(loader.example()), loader)
        except Exception as error:
            if is_out_of_memory(error) and len(cohort) > 1 and not seconds:
                raise  # fewer runs together are faster than one after the other
            failures[name] = error
            if cohort.device.type == "cuda":
                torch.cuda.synchronize(cohort.device)
        else:
            if name == earlier or not is_long(cohort, seconds[name]):
                break
    return seconds


def rehearse(executor: Executor, state: State, loader: Loader) -> float:
    """Take some steps, consolidate a few examples, take steps with that memory, and predict, on a separate state.

    Torch's rules for `vmap` have mistakes, so the first losses of the run with the smallest learning rate must be those
    that it has alone.

    Returns:
        The seconds that an epoch would take.
    """
    cohort = executor.cohort
    short_loader = copy.copy(loader)
    short_loader.steps = min(loader.steps, STEPS[cohort.device.type])
    run = min(range(len(cohort)), key=lambda run: cohort.members[run].lr)

    def epoch() -> Tensor:
        return executor.epoch(state, short_loader, 0, lambda steps: None).cpu()  # waits for the device

    executor.arrange(state)
    executor.before_epoch(state, 0)
    if type(executor) is Sequential:
        epoch()
    else:
        expected, losses = losses_of(run, cohort, state, short_loader), epoch()[run]
        same = torch.allclose(losses, expected, rtol=0.1, atol=0.01, equal_nan=True)
        require(same, f"its first losses are {losses.tolist()}, but {expected.tolist()} where a run is trained alone")
    with torch.no_grad():
        executor.consolidate(state, loader, limit=8)
    executor.arrange(state)
    seconds = timed(epoch) * loader.steps / short_loader.steps
    if is_long(cohort, seconds):  # or only the first of these steps is, which may be captured
        seconds = min(timed(epoch) for _ in range(TIMINGS[cohort.device.type])) * loader.steps / short_loader.steps
    with torch.no_grad():
        executor.predict(state, slice(0, len(cohort)), loader.x[None, :2], 0)
    if executor.note:  # it works, but not as it should
        raise RuntimeError(executor.note.partition(": ")[2])
    return seconds


def check_steps(cohort: Cohort, loader: Loader) -> None:
    """Raise an error if the first steps of a run, repeated, would give other losses."""
    name = cohort.algorithm.name
    short_loader = copy.copy(loader)
    short_loader.steps = min(loader.steps, 2)
    loader.load_epoch(0)
    alone = cohort.only(cohort.members[:1])
    vars(alone).update(draws=cohort.draws, shared_network=cohort.shared_network)  # those of the first member

    def steps() -> tuple[Tensor, Tensor]:
        state, executor = alone.initial_state(loader.example()), Sequential(alone, checked=True)
        executor.before_epoch(state, 0)
        copies = [State.from_tree(tree.map_tree(torch.clone, state.as_tree()), state.clock) for _ in range(2)]
        first = executor.epoch(copies[0], short_loader, 0, lambda steps: None)
        with torch.no_grad():
            for method in (
                lambda: executor.consolidate(state, loader, limit=8),
                lambda: executor.epoch(state, short_loader, 0, lambda steps: None),  # with that memory
                lambda: executor.predict(state, slice(0, 1), loader.x[None, :2], 0),
            ):
                try:
                    method()
                except ImpureError:
                    raise
                except Exception:  # eight examples may be too few
                    continue
        second = executor.epoch(copies[1], short_loader, 0, lambda steps: None)
        return first, second

    try:
        first, second = seeded_only(steps, name, "batch.key (glocal.rng) or torch's generator")
    except GlocalError:
        raise
    except Exception:  # training meets the error too, and reports it
        return
    same = torch.allclose(first, second, rtol=TOLERANCE, equal_nan=True)
    reason = "it keeps state outside of its memory, or draws from a generator of its own"
    require(same, f"{name} gives different losses for the same step: {reason}. Runs would depend on each other.")


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def is_long(cohort: Cohort, epoch_seconds: float) -> bool:
    """Return whether training takes so long that it pays to compare executors."""
    return epoch_seconds * cohort.epochs * cohort.challenge.tasks > LONG


def losses_of(run: int, cohort: Cohort, state: State, loader: Loader) -> Tensor:
    """Return the objectives of one run's next steps, trained alone; the state is not changed."""
    run_state = State.from_tree(tree.map_tree(torch.clone, state.select(run).as_tree()), state.clock)
    executor = Sequential(cohort)
    hyper = tree.select(executor.hyper, run)
    losses = [
        executor.step(run_state, loader.with_scheduled_lr(hyper, i, run), batch)
        for i, batch in enumerate(loader.batches_of(run))
    ]
    return torch.stack(losses).cpu()
