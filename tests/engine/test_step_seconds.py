"""What a step took: the median over epochs, without what is done once a task, on a clock that is set by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import glocal
from glocal.algorithms import SGD
from glocal.challenges import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.engine.evaluate import Evaluator
from glocal.engine.executors import Sequential
from glocal.engine.loader import Loader
from glocal.engine.loop import Snapshot, train
from glocal.networks import mlp
from glocal.paper import results
from glocal.store.store import Claim

SLOW = 1e6
"""Seconds of all that is no epoch."""


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Mapping[tuple[int, int], float]) -> None:
        """seconds: those of every epoch, by (task, epoch)."""
        self.now = 0.0
        epoch = Sequential.epoch

        def timed(
            executor: Sequential, state: Any, loader: Loader, number: int, tick: Any, on_step: Any
        ) -> torch.Tensor:
            self.now += seconds[int(loader.task), number]
            return epoch(executor, state, loader, number, tick, on_step)

        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Sequential, "epoch", timed)
        for kind, name in ((Loader, "load_task"), (Sequential, "consolidate"), (Evaluator, "measure")):
            monkeypatch.setattr(kind, name, self.slow(getattr(kind, name)))

    def slow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*given: Any, **named: Any) -> Any:
            self.now += SLOW
            return function(*given, **named)

        return slowly

    def watch(self, *_: object) -> None:
        self.now += SLOW


def small() -> Challenge:
    """Two tasks of 40 examples."""
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    return glocal.from_tasks("small", [(data, data)] * 2, setting="domain", outputs=3)


def last(clock: Clock, epochs: int) -> Snapshot:
    """Two runs, trained with steps of at most 16 examples."""
    members = tuple(Member(seed, 0.1, SGD()) for seed in (0, 1))
    cohort = Cohort(small(), mlp, members, epochs, batch_size=16)
    *_, end = train(cohort, execution="sequential", watch=clock.watch)
    return end


def test_it_is_the_median_over_epochs_without_the_first_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between 18 and 24 s for 3 steps of 2 runs: 3.5 s; what is watched, consolidated and measured does not count."""
    seconds = {(0, 0): 600, (0, 1): 36, (0, 2): 12, (0, 3): 18, (1, 0): 600, (1, 1): 24, (1, 2): 30, (1, 3): 6}
    record = last(Clock(monkeypatch, seconds), 4).record
    assert record.epoch_step_seconds == [6, 2, 3, 4, 5, 1]
    assert record.step_seconds == 3.5
    assert record.seconds > 8 * SLOW


def test_only_epochs_of_their_tasks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert last(Clock(monkeypatch, {(0, 0): 12, (1, 0): 24}), 1).record.step_seconds == 3


def test_some_runs_take_as_long_a_step_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    record = last(Clock(monkeypatch, {(0, 0): 12, (1, 0): 24}), 1).record
    part = record.select([1])
    assert part.step_seconds == record.step_seconds == 3
    part.epoch_step_seconds.append(100.0)
    assert record.epoch_step_seconds == [2, 4]


def sweep(store: Path, *lrs: float) -> list[float | None]:
    """step_seconds of the runs, of which every epoch has 8 steps."""
    how: dict[str, Any] = {"tasks": 2, "epochs": 2, "batch_size": 500, "execution": "sequential", "device": "cpu"}
    runs = glocal.sweep("rotated-digits", ["sgd"], lrs, [1], store=store, **how)
    (kept,) = results.read(results.write(runs[:1], store / "results.parquet"))
    assert kept.info["cost"] == runs[0].info["cost"]
    return [run.info["cost"]["step_seconds"] for run in runs]


def interrupt(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop two runs after their first task."""
    save = Claim.save

    def save_then_die(self: Claim, snapshot: Snapshot) -> None:
        save(self, snapshot)
        if snapshot.finished == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Claim, "save", save_then_die)
        with pytest.raises(KeyboardInterrupt):
            sweep(store, 0.1, 0.2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """With 8 steps, two runs take 1 and 3 seconds per step, one takes 2 and 6."""
    return Clock(monkeypatch, {(0, 0): 800, (0, 1): 16, (1, 0): 800, (1, 1): 48})


def test_runs_that_go_on_keep_it(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    interrupt(store, monkeypatch)
    assert sweep(store, 0.1, 0.2) == sweep(tmp_path / "whole", 0.1, 0.2) == [2, 2]


def test_a_run_that_goes_on_alone_shares_no_more(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    interrupt(store, monkeypatch)
    assert sweep(store, 0.2) == [3.5], "half of its epochs were shared"
