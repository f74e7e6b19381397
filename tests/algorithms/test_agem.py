"""A-GEM: the direction solves min ‖d − g‖² subject to d·r ≥ 0, and every task stores an equal share."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from small_problems import (
    FEATURES,
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    flat,
    gradient,
    train_to_the_end,
)
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from glocal.algorithms.algorithm import Memory
from glocal.algorithms.gem import AGEM, Filling
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.tree import Params, select, stack

QUICK = settings(deadline=None, max_examples=40, derandomize=True)
BATCH = 4


def after_tasks(agem: AGEM, model: Model, params: Params, finished: int) -> Memory:
    memory = agem.init(model, params, batch_of(examples(BATCH, 0)))
    for task in range(finished):
        data = batch_of(examples(11, 60 + task), task, task)
        memory = agem.consolidate(model, params, memory, data)
    return memory


def reference_gradient(model: Model, params: Params, x: Tensor, y: Tensor) -> Tensor:
    return flat(gradient(lambda p: functional.cross_entropy(model.outputs(p, x), y), params))


def directed(agem: AGEM, model: Model, params: Params, memory: Memory, grads: Params, seed: int = 0) -> Tensor:
    x, y = examples(BATCH, 9)
    batch = batch_of((x.to(memory["x"].dtype), y), seed, 2)
    return flat(agem.direction(model, grads, params, memory, batch))


@QUICK
@given(st.integers(0, 10_000), st.floats(-3, 3), st.sampled_from([1e-6, 1.0, 1e4]))
def test_its_direction_is_the_closest_one_that_does_not_raise_the_memorys_loss(
    seed: int, along: float, scale: float
) -> None:
    """The optimality conditions: d = g + μ r, μ ≥ 0, d·r ≥ 0, μ (d·r) = 0."""
    model, params = double_model()
    params = elsewhere(params, seed)
    agem = AGEM(slots=9, replay=9)
    memory = after_tasks(agem, model, params, 3)
    r = reference_gradient(model, params, memory["x"][:9], memory["y"][:9])
    noise = elsewhere({k: torch.zeros_like(p) for k, p in params.items()}, seed + 1, by=1.0)
    towards = dict(zip(params, r.split([p.numel() for p in params.values()]), strict=True))
    grads = {k: scale * (noise[k] + along * towards[k].view_as(noise[k]) / r.norm()) for k in params}
    g, d = flat(grads), directed(agem, model, params, memory, grads)
    assert float(d @ r) >= -1e-10 * float(g.norm() * r.norm())
    overlap = float(g @ r)
    if overlap >= 0:
        assert torch.equal(d, g)
    else:
        multiplier = -overlap / float(r @ r)
        torch.testing.assert_close(d, g + multiplier * r, rtol=1e-10, atol=1e-12 * scale)
        assert float((d - g).norm()) == pytest.approx(-overlap / float(r.norm()), rel=1e-9)


def test_in_single_precision_it_does_not_raise_the_memorys_loss_either() -> None:
    model, params = double_model()
    params = {k: p.float() for k, p in params.items()}
    agem = AGEM(slots=9, replay=9)
    memory = after_tasks(agem, model, params, 3)
    memory["x"] = memory["x"].float()
    r = reference_gradient(model, params, memory["x"][:9], memory["y"][:9])
    for seed in range(20):
        grads = elsewhere({k: torch.zeros_like(p) for k, p in params.items()}, seed, by=1.0)
        d = directed(agem, model, params, memory, grads)
        assert float(d @ r) >= -1e-6 * float(d.norm() * r.norm())


def test_the_reference_is_taken_on_the_drawn_examples() -> None:
    """As many slots are drawn as a full batch has; here the stream's batch is short."""
    model, params = double_model()
    agem = AGEM(slots=9)
    memory = after_tasks(agem, model, params, 3)
    drawn = by_hand.chosen(12, "replay", 9, BATCH)
    r = reference_gradient(model, params, memory["x"][drawn], memory["y"][drawn])
    against = dict(zip(params, (-r).split([p.numel() for p in params.values()]), strict=True))
    noise = elsewhere({k: torch.zeros_like(p) for k, p in params.items()}, 3, by=0.01)
    grads = {k: against[k].view_as(p) + noise[k] for k, p in params.items()}
    short = batch_of(examples(2, 9), 12, 2)
    g, d = flat(grads), flat(agem.direction(model, grads, params, memory, short))
    torch.testing.assert_close(d, g - (g @ r) / (r @ r) * r, rtol=1e-9, atol=1e-12)


def test_before_any_task_is_stored_it_is_the_identity() -> None:
    model, params = double_model()
    agem = AGEM(slots=6)
    memory = after_tasks(agem, model, params, 0)
    for seed in range(3):
        grads = elsewhere(params, seed)
        assert torch.equal(directed(agem, model, params, memory, grads), flat(grads))


def test_with_few_examples_stored_the_empty_slots_do_not_count() -> None:
    model, params = double_model()
    agem = AGEM(slots=9, replay=9)
    memory = after_tasks(agem, model, params, 1)
    r = reference_gradient(model, params, memory["x"][:3], memory["y"][:3])
    grads = dict(zip(params, (-2 * r).split([p.numel() for p in params.values()]), strict=True))
    grads = {k: g.view_as(params[k]) for k, g in grads.items()}
    assert float(directed(agem, model, params, memory, grads).norm()) < 1e-12 * float(r.norm())


def test_consolidating_leaves_the_memory_it_was_given_alone() -> None:
    model, params = double_model()
    agem = AGEM(slots=9)
    memory = after_tasks(agem, model, params, 1)
    before = {k: v.clone() for k, v in memory.items()}
    agem.consolidate(model, params, memory, batch_of(examples(11, 3), 0, 1))
    assert all(torch.equal(memory[k], before[k]) for k in before)


def test_every_example_of_a_task_is_equally_likely_to_be_stored() -> None:
    model, params = double_model()
    agem = AGEM(slots=9)
    n, draws, share = 11, 3000, 3
    empty = stack([after_tasks(agem, model, params, 0)] * draws)
    numbered = torch.arange(n).double()[:, None].expand(-1, 5), torch.zeros(n, dtype=torch.long)

    def stored_numbers(memory: Memory, key: Tensor) -> Tensor:
        return agem.consolidate(model, params, memory, batch_of(numbered, key))["x"][:share, 0]

    stored = vmap(stored_numbers)(empty, torch.arange(draws))
    assert all(len(set(row)) == share for row in stored.tolist())
    counts = np.bincount(stored.long().flatten().numpy(), minlength=n)
    p = share / n
    statistic = ((counts - draws * p) ** 2).sum() / (draws * p * (1 - p) * n / (n - 1))
    assert stats.chi2(n - 1).sf(statistic) > 1e-3


def test_the_engine_stores_an_equal_share_of_every_finished_task() -> None:
    challenge = blobs((70, 33, 50))
    end = train_to_the_end(cohort_of(challenge, AGEM(slots=11), [(0, 0.1), (1, 0.1)], epochs=1)).state
    assert not torch.equal(end.memory["x"][0], end.memory["x"][1])
    for run in (0, 1):
        memory = select(end.memory, run)
        assert memory["task"][:11].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [-1] * 2
        actual = []
        for x, y, task in zip(memory["x"][:9], memory["y"][:9], memory["task"][:9], strict=True):
            train = challenge.task(int(task), 0).train
            (where,) = (train.x == x).flatten(1).all(1).nonzero().flatten().tolist()
            assert int(train.y[where]) == int(y)
            actual.append((int(task), where))
        assert len(set(actual)) == 9


def test_a_task_smaller_than_its_share_is_stored_whole() -> None:
    end = train_to_the_end(cohort_of(blobs((60, 8)), AGEM(slots=40), epochs=1)).state
    assert end.memory["task"][0, :-1].tolist() == [0] * 20 + [1] * 8 + [-1] * 12


def test_its_approximation_is_the_mean_loss_of_the_stored_share() -> None:
    model, params = double_model()
    agem = AGEM(slots=9)
    memory = after_tasks(agem, model, params, 3)
    for task in range(3):
        rows = slice(3 * task, 3 * task + 3)
        expected = functional.cross_entropy(model.outputs(params, memory["x"][rows]), memory["y"][rows])
        torch.testing.assert_close(agem.approximation(model, memory, task)(params), expected)


@pytest.mark.parametrize("filling", ["share", "batch"])
def test_a_whole_run_is_that_of_a_plain_loop(filling: Filling) -> None:
    """The published rule: where g·r < 0, g − (g·r / r·r) r; at a task's end a share of it, or one batch, is stored."""
    cohort = cohort_of(blobs((70, 40, 50)), AGEM(slots=48, filling=filling), [(1, 0.1)])
    module = by_hand.network(cohort)
    stored: list[tuple[Tensor, Tensor]] = []
    projected = seen = 0
    for task in range(3):
        for x, y, key in by_hand.steps(cohort, task):
            g = by_hand.gradient(module, functional.cross_entropy(module(x), y))
            if stored:
                old_x, old_y = by_hand.stacked(by_hand.drawn(stored, 32, key))
                r = by_hand.gradient(module, functional.cross_entropy(module(old_x), old_y))
                if float(g @ r) < 0:
                    g = g - (g @ r) / (r @ r) * r
                    projected += 1
            by_hand.follow(module, g, 0.1)
        x, y, key = by_hand.consolidation(cohort, task)
        chosen = by_hand.chosen(key, "examples", len(y), 16 if filling == "share" else 32)
        new = list(zip(x[chosen], y[chosen], strict=True))
        if filling == "share":
            stored += new
        else:
            seen = by_hand.algorithm_r(stored, new, seen, 48, key)
    assert projected >= 3
    end = train_to_the_end(cohort).state
    by_hand.assert_same_network(module, end.params)
    x, y = by_hand.stacked(stored)
    assert torch.equal(end.memory["x"][0, :48], x) and torch.equal(end.memory["y"][0, :48], y)


def test_filled_by_batches_it_is_a_reservoir_of_one_batch_a_task() -> None:
    challenge = blobs((70, 60, 50, 90, 40))
    cohort = cohort_of(challenge, AGEM(slots=40, filling="batch"), [(0, 0.1), (1, 0.1)], epochs=1)
    end = train_to_the_end(cohort, "vectorised").state
    assert end.memory["count"].tolist() == [5 * 32] * 2
    assert not torch.equal(end.memory["x"][0], end.memory["x"][1])
    for run in (0, 1):
        memory = select(end.memory, run)
        assert set(memory["task"][:40].tolist()) == {0, 1, 2, 3, 4}
        actual = []
        for x, y, task in zip(memory["x"][:40], memory["y"][:40], memory["task"][:40], strict=True):
            train = challenge.task(int(task), 0).train
            (where,) = (train.x == x).flatten(1).all(1).nonzero().flatten().tolist()
            assert int(train.y[where]) == int(y)
            actual.append((int(task), where))
        assert len(set(actual)) == 40


def test_filled_by_batches_every_example_of_every_task_is_equally_likely_to_be_stored() -> None:
    """Tasks of 11 examples, of which 4 are offered: each stays with 6 / (4 tasks · 11)."""
    model, params = double_model()
    agem = AGEM(slots=6, filling="batch")
    n, tasks, draws = 11, 4, 3000

    def stored_numbers(memory: Memory, key: Tensor) -> Tensor:
        for task in range(tasks):
            part = (n * task + torch.arange(n)).double()[:, None].expand(-1, FEATURES)
            data = batch_of((part, torch.zeros(n, dtype=torch.long)), key + task, task)
            memory = agem.consolidate(model, params, memory, data)
        return memory["x"][:6, 0]

    stored = vmap(stored_numbers)(stack([after_tasks(agem, model, params, 0)] * draws), 4 * torch.arange(draws))
    assert all(len(set(row)) == 6 for row in stored.tolist())
    counts = np.bincount(stored.long().flatten().numpy(), minlength=tasks * n)
    # As for a draw of 6 out of 44: that no five of a task are stored together hardly changes the covariance.
    p = 6 / (tasks * n)
    statistic = ((counts - draws * p) ** 2).sum() / (draws * p * (1 - p) * tasks * n / (tasks * n - 1))
    assert stats.chi2(tasks * n - 1).sf(statistic) > 1e-3


def test_an_unknown_filling_is_refused() -> None:
    with pytest.raises(GlocalError, match="share"):
        AGEM(filling="shares")  # type: ignore[arg-type]


def test_fewer_slots_than_tasks_are_refused() -> None:
    with pytest.raises(GlocalError, match="slots=2"):
        train_to_the_end(cohort_of(blobs((20, 20, 20)), AGEM(slots=2)))
