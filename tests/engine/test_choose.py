"""The executor of a cohort: the first that works and is right, the fastest for long trainings, kept on resuming."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from glocal.algorithms import ER
from glocal.challenges import from_tasks
from glocal.engine import choose as choosing
from glocal.engine.choose import choose
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Sequential, Vectorised
from glocal.engine.loader import Loader
from glocal.engine.loop import Snapshot, train
from glocal.engine.state import State
from glocal.networks.mlp import mlp
from glocal.tree import map_tree


class Slow(Vectorised):
    def epoch(self, *args: Any, **options: Any) -> Tensor:
        time.sleep(0.2)
        return super().epoch(*args, **options)


class Failing(Vectorised):
    def epoch(self, *args: Any, **options: Any) -> Tensor:
        raise RuntimeError("no rule for this operation")


class Wrong(Vectorised):
    """Steps uphill, as with gradients of a wrong sign."""

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        self.hyper = {**self.hyper, "lr": -self.hyper["lr"]}


class NotFinite(Vectorised):
    def epoch(self, *args: Any, **options: Any) -> Tensor:
        return super().epoch(*args, **options) * torch.nan


@pytest.fixture
def cohort() -> Cohort:
    draw = torch.Generator().manual_seed(0)

    def part() -> tuple[Tensor, Tensor]:
        return torch.randn(24, 5, generator=draw), torch.arange(24) % 3

    challenge = from_tasks("noise", [(part(), part()), (part(), part())], setting="domain")
    return Cohort(challenge, mlp, tuple(Member(1, lr, ER(slots=6)) for lr in (0.5, 1.0)), 1, 8)


def chosen(cohort: Cohort, monkeypatch: pytest.MonkeyPatch, first: type[Vectorised], **settings: Any) -> Any:
    monkeypatch.setattr(choosing, "EAGER", {"vectorised": first, "sequential": Sequential})
    monkeypatch.setattr(choosing, "LONG", settings.pop("long", 1e9))
    monkeypatch.setitem(choosing.STEPS, "cpu", 3)
    loader = Loader(cohort)
    loader.load_task(0)
    return choose(cohort, loader, **settings)


def test_the_first_that_works_is_taken_for_a_short_training(cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = chosen(cohort, monkeypatch, Slow)
    assert isinstance(executor, Slow) and executor.name == "vectorised" and not executor.note


def test_the_fastest_is_taken_for_a_long_training(cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = chosen(cohort, monkeypatch, Slow, long=0)
    assert isinstance(executor, Sequential) and not executor.note
    assert chosen(cohort, monkeypatch, Slow, long=0, execution="vectorised").name == "vectorised"


@pytest.mark.parametrize("first", [Failing, Wrong, NotFinite])
def test_what_fails_or_is_wrong_is_passed_over_with_a_note(
    first: type[Vectorised], cohort: Cohort, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = chosen(cohort, monkeypatch, first)
    assert isinstance(executor, Sequential) and executor.note
    with pytest.raises(Exception, match=r"no rule|losses"):
        chosen(cohort, monkeypatch, first, execution="vectorised")


def test_a_resumed_training_keeps_its_executor_and_its_bits(cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[Snapshot] = []
    for snapshot in train(cohort, execution="sequential"):
        state = State.from_tree(map_tree(torch.clone, snapshot.state.as_tree()), snapshot.state.clock)
        whole.append(Snapshot(snapshot.finished, state, snapshot.record))
    assert {snapshot.record.executor for snapshot in whole} == {"sequential"}
    monkeypatch.setattr(choosing, "EAGER", {"vectorised": Failing, "sequential": Sequential})
    *_, resumed = train(cohort, whole[1])
    assert resumed.record.executor == "sequential" and not resumed.record.notes
    for name, expected in whole[-1].state.params.items():
        assert resumed.state.params[name].equal(expected)
