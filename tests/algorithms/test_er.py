"""Experience replay: the objective against the mean loss on the union, the approximation against a loop."""

from __future__ import annotations

import by_hand
import pytest
import torch
from small_problems import (
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    gradient,
    train_to_the_end,
)
from torch.nn import functional

from glocal.algorithms.algorithm import Memory, Step
from glocal.algorithms.baselines import SGD
from glocal.algorithms.replay import ER
from glocal.networks.model import Model
from glocal.tree import Params, select

BATCH = 4


def after_observing(er: ER, model: Model, params: Params, sizes: list[int]) -> tuple[Memory, list]:
    """The memory after one batch of every task, and the batches."""
    memory = er.init(model, params, batch_of(examples(BATCH, 0)))
    past = []
    for task, size in enumerate(sizes):
        past.append(examples(size, 20 + task))
        batch = batch_of(past[-1], task, task)
        memory = er.observe(memory, Step(batch, params, params, params, {}, {}, torch.tensor(0.1)))
    return memory, past


def union_gradient(model: Model, params: Params, parts: list) -> Params:
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return gradient(lambda p: functional.cross_entropy(model.outputs(p, x), y), params)


@pytest.mark.parametrize("current", [BATCH, 1], ids=["full batch", "short last batch"])
def test_with_the_whole_past_in_memory_it_follows_the_mean_loss_on_the_union(current: int) -> None:
    model, params = double_model()
    er = ER(slots=12, replay=12)
    memory, past = after_observing(er, model, params, [4, 3, 4])
    batch = batch_of(examples(current, 9), 8, 3)
    actual = gradient(lambda p: er.objective(model, p, memory, batch), params)
    expected = union_gradient(model, params, [batch[:2], *past])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_an_empty_memory_makes_it_plain_sgd() -> None:
    model, params = double_model()
    er = ER(slots=6)
    memory, _ = after_observing(er, model, params, [])
    batch = batch_of(examples(BATCH, 9))
    actual = gradient(lambda p: er.objective(model, p, memory, batch), params)
    torch.testing.assert_close(actual, union_gradient(model, params, [batch[:2]]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("replay", "drawn"), [(0, BATCH), (2, 2), (5, 5), (99, 8)])
@pytest.mark.parametrize("current", [BATCH, 2], ids=["full batch", "short last batch"])
def test_replay_is_as_large_as_asked_or_as_a_full_batch(replay: int, drawn: int, current: int) -> None:
    """With no loss on the stored examples the mean over the union shrinks by the share of the replay."""
    model, params = double_model()
    er = ER(slots=8, replay=replay)
    memory, _ = after_observing(er, model, params, [4, 4])
    memory["x"].fill_(1e4)  # all equal
    memory["y"].fill_(int(model.outputs(params, memory["x"][:1]).argmax()))
    assert float(model.loss(params, memory["x"], memory["y"])) == 0
    batch = batch_of(examples(current, 9))
    stream = float(model.loss(params, batch.x, batch.y))
    expected = stream * current / (current + drawn)
    assert float(er.objective(model, params, memory, batch)) == pytest.approx(expected, rel=1e-12)


def test_its_approximation_is_the_mean_loss_of_the_stored_examples() -> None:
    model, params = double_model()
    er = ER(slots=7)
    memory, _ = after_observing(er, model, params, [4, 4, 4])
    for at in (params, elsewhere(params)):
        for task in range(3):
            rows = [i for i in range(7) if int(memory["task"][i]) == task]
            assert rows
            values = [functional.cross_entropy(model.outputs(at, memory["x"][[i]]), memory["y"][[i]]) for i in rows]
            expected = sum(float(e) for e in values) / len(rows)
            assert float(er.approximation(model, memory, task)(at)) == pytest.approx(expected, rel=1e-12)


def test_what_it_remembers_does_not_depend_on_the_solutions() -> None:
    """Two runs with one seed and other learning rates end elsewhere, with the same approximation of the past."""
    end = train_to_the_end(cohort_of(blobs(), ER(slots=20), [(3, 0.001), (3, 0.3)])).state
    assert float((end.params["layers.0.weight"][0] - end.params["layers.0.weight"][1]).abs().max()) > 0.01
    first, second = (select(end.memory, run) for run in (0, 1))
    for part in ("x", "y", "task"):
        assert torch.equal(first[part][:-1], second[part][:-1])


def test_the_engine_offers_every_batch_of_every_epoch_to_the_reservoir() -> None:
    end = train_to_the_end(cohort_of(blobs((70, 50)), ER(slots=20), epochs=3)).state
    assert end.memory["count"].tolist() == [3 * (70 + 50)]
    assert set(end.memory["task"][0, :-1].tolist()) == {0, 1}


def test_the_engine_stores_examples_with_their_own_labels_and_tasks() -> None:
    challenge = blobs((70, 50))
    memory = select(train_to_the_end(cohort_of(challenge, ER(slots=20))).state.memory, 0)
    for x, y, task in zip(memory["x"][:-1], memory["y"][:-1], memory["task"][:-1], strict=True):
        train = challenge.task(int(task), 0).train
        where = (train.x == x).flatten(1).all(1)
        assert train.y[where].tolist() == [int(y)]


def test_a_whole_run_is_that_of_a_plain_loop() -> None:
    """The published rule: one mean loss over stream and replay; the stream enters the reservoir at every step."""
    cohort = cohort_of(blobs((70, 40)), ER(slots=45), [(1, 0.1)])
    module = by_hand.network(cohort)
    stored: list[tuple] = []
    seen = 0
    for task in range(2):
        for x, y, key in by_hand.steps(cohort, task):
            together = [(x, y)]
            if stored:
                together.append(tuple(by_hand.stacked(by_hand.drawn(stored, 32, key))))  # type: ignore[arg-type]
            both_x, both_y = (torch.cat(parts) for parts in zip(*together, strict=True))
            by_hand.follow(module, by_hand.gradient(module, functional.cross_entropy(module(both_x), both_y)), 0.1)
            seen = by_hand.algorithm_r(stored, list(zip(x, y, strict=True)), seen, 45, key)
    end = train_to_the_end(cohort).state
    by_hand.assert_same_network(module, end.params)
    x, y = by_hand.stacked(stored)
    assert torch.equal(end.memory["x"][0, :45], x) and torch.equal(end.memory["y"][0, :45], y)


def test_replay_slows_forgetting_down() -> None:
    """With the past forgotten by plain SGD, the first task's loss after the second is at least halved."""
    challenge = blobs((160, 160))
    loss = {}
    for algorithm in (SGD(), ER(slots=100)):
        record = train_to_the_end(cohort_of(challenge, algorithm, [(1, 0.2)], epochs=10)).record
        loss[algorithm.name] = record.arrays["test_class_loss"][0]
    assert loss["sgd"][2, 0] > 3 * loss["sgd"][1, 0]
    assert loss["er"][2, 0] < loss["sgd"][2, 0] / 2
