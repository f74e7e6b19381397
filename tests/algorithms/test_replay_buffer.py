"""The episodic memory against Vitter's reservoir algorithm in plain Python, and the uniformity of its draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from small_problems import CLASSES, batch_of, double_model, elsewhere, examples
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

import glocal
from glocal import losses
from glocal.algorithms import DER, replay_buffer
from glocal.algorithms.algorithm import Batch, Memory
from glocal.challenges import from_tasks
from glocal.networks.model import Model
from glocal.tree import select, stack

QUICK = settings(deadline=None, max_examples=60, derandomize=True)


def stream_batch(first: int, count: int, task: int = 0, key: int | Tensor = 0) -> Batch:
    """Examples that carry their own number: x is the number, y is three times it."""
    numbers = torch.arange(first, first + count)
    return Batch(numbers[:, None].float(), 3 * numbers, torch.tensor(task), torch.as_tensor(key))


def contents(memory: Memory) -> list[int]:
    filled = memory["task"][:-1] >= 0
    return [int(v) for v in memory["x"][:-1, 0][filled]]


@QUICK
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**63 - 1)), min_size=1, max_size=5))
def test_reservoir_is_vitters_algorithm_r(slots: int, stream: list[tuple[int, int]]) -> None:
    memory = replay_buffer.empty(slots, stream_batch(0, 1))
    kept: list[tuple[int, int]] = []
    seen = 0
    for task, (size, key) in enumerate(stream):
        memory = replay_buffer.reservoir(memory, stream_batch(seen, size, task, key))
        seen = by_hand.algorithm_r(kept, [(seen + i, task) for i in range(size)], seen, slots, key)
        assert contents(memory) == [n for n, _ in kept]
        assert memory["y"][: len(kept)].tolist() == [3 * n for n, _ in kept]
        assert memory["task"][: len(kept)].tolist() == [task for _, task in kept]
        assert int(memory["count"]) == seen


def test_every_element_of_a_stream_is_equally_likely_to_be_kept() -> None:
    slots, length, streams = 5, 20, 4000
    empty = stack([replay_buffer.empty(slots, stream_batch(0, 1))] * streams)
    memory = vmap(lambda m, key: replay_buffer.reservoir(m, stream_batch(0, length, key=key)))(
        empty, torch.arange(streams)
    )
    kept = memory["x"][:, :-1, 0].long().flatten()
    counts = np.bincount(kept.numpy(), minlength=length)
    # Indicators of a draw of k out of N have covariance p(1 − p) N/(N − 1) (I − 11ᵀ/N), p = k/N.
    p = slots / length
    statistic = ((counts - streams * p) ** 2).sum() / (streams * p * (1 - p) * length / (length - 1))
    assert stats.chi2(length - 1).sf(statistic) > 1e-3


def partly_filled(slots: int, filled: int) -> Memory:
    memory = replay_buffer.empty(slots, stream_batch(0, 1))
    return replay_buffer.reservoir(memory, stream_batch(1, filled)) if filled else memory


@QUICK
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 12), st.integers(0, 1000))
def test_draws_are_filled_slots_without_replacement(slots: int, filled: int, count: int, seed: int) -> None:
    filled = min(filled, slots)
    drawn = replay_buffer.draw(partly_filled(slots, filled), count, torch.tensor(seed))
    assert drawn.weight.shape[0] == drawn.y.shape[0] == drawn.x.shape[0] == min(count, slots)
    real = drawn.weight == 1
    assert (drawn.weight[~real] == 0).all()
    numbers = drawn.x[real, 0].tolist()
    assert len(numbers) == len(set(numbers)) == min(count, filled)
    assert set(numbers) <= set(range(1, filled + 1))
    assert drawn.y[real].tolist() == [3 * n for n in numbers]


def test_every_pair_of_filled_slots_is_drawn_equally_often() -> None:
    slots, filled, draws = 7, 5, 6000
    memory = partly_filled(slots, filled)
    drawn = vmap(lambda key: replay_buffer.draw(memory, 2, key))(torch.arange(draws))
    low, high = drawn.x[..., 0].long().sort(1).values.T
    pairs = np.bincount((10 * low + high).numpy(), minlength=100)
    observed = [pairs[10 * a + b] for a in range(1, filled + 1) for b in range(a + 1, filled + 1)]
    assert sum(observed) == draws
    assert stats.chisquare(observed).pvalue > 1e-3


def test_mapped_over_runs_it_does_what_every_run_does_alone() -> None:
    runs, slots = 5, 4
    keys = torch.arange(runs)

    def filled_and_drawn(memory: Memory, key: Tensor) -> tuple[Memory, replay_buffer.Replay]:
        for first in range(0, 30, 10):
            memory = replay_buffer.reservoir(memory, stream_batch(first, 10, key=key + first))
        return memory, replay_buffer.draw(memory, 3, key)

    def empty() -> Memory:
        return replay_buffer.empty(slots, stream_batch(0, 1))

    memories, draws = vmap(filled_and_drawn)(stack([empty()] * runs), keys)
    for run in range(runs):
        memory, drawn = filled_and_drawn(empty(), keys[run])
        together = select(memories, run)
        assert contents(together) == contents(memory)
        assert sorted(draws.x[run, :, 0].tolist()) == sorted(drawn.x[:, 0].tolist())
        assert torch.equal(draws.weight[run], drawn.weight)


def test_task_loss_is_the_mean_over_what_is_stored_of_the_task() -> None:
    model, params = double_model()
    memory = replay_buffer.empty(8, batch_of(examples(1, 0)))
    for task in range(3):
        data = examples(6, 10 + task)
        memory = replay_buffer.reservoir(memory, batch_of(data, task, task))
    for task in range(3):
        for at in (params, elsewhere(params)):
            stored = [i for i in range(8) if memory["task"][i] == task]
            terms = []
            for i in stored:
                logits = model.outputs(at, memory["x"][i : i + 1])
                assert logits.shape == (1, CLASSES)
                terms.append(float(functional.cross_entropy(logits, memory["y"][i : i + 1])))
            assert terms, "the stream left examples of every task"
            assert float(replay_buffer.task_loss(model, memory, task)(at)) == pytest.approx(
                sum(terms) / len(terms), rel=1e-12
            )


def test_the_spare_row_is_never_read() -> None:
    model, params = double_model()
    memory = replay_buffer.empty(4, batch_of(examples(1, 0)))
    memory = replay_buffer.reservoir(memory, batch_of(examples(9, 1)))
    key = torch.tensor(4)
    before = replay_buffer.task_loss(model, memory, 0)(params), *replay_buffer.draw(memory, 4, key)
    memory["x"][-1], memory["y"][-1], memory["task"][-1] = torch.nan, CLASSES - 1, 0
    after = replay_buffer.task_loss(model, memory, 0)(params), *replay_buffer.draw(memory, 4, key)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class UnitLength(nn.Module):
    """Not defined for an input of zeros."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x / x.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("name", ["er", "agem", "der", "derpp"])
def test_empty_rows_are_no_inputs_of_the_network(name: str, tmp_path: Path) -> None:
    """The first epoch of one step has nothing to replay, and is plain SGD's."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = [((x, torch.arange(24) % 2),) * 2] * 2
    made = from_tasks("small", data, setting="domain")
    options: Any = {"network": lambda shape, outputs: UnitLength(outputs), "batch_size": 24, "epochs": 1}
    run, plain = glocal.sweep(made, [name, "sgd"], [0.1], [1], store=tmp_path, **options)
    assert run.diverged is None and np.isfinite(run.arrays["epoch_loss"]).all()
    assert run.arrays["epoch_loss"][0, 0] == pytest.approx(plain.arrays["epoch_loss"][0, 0])


def test_the_stored_loss_of_a_task_leaves_empty_rows_out() -> None:
    module = UnitLength(3)
    model = Model(module, losses.get("cross-entropy"))
    params = {k: p.detach() for k, p in module.named_parameters()}
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3
    batch = Batch(x, y, torch.tensor(1), torch.tensor(0))
    memory = replay_buffer.reservoir(replay_buffer.empty(9, batch), batch)
    value = replay_buffer.task_loss(model, memory, 1)(params)
    torch.testing.assert_close(value, functional.cross_entropy(module(x), y))
    der = DER(slots=9, alpha=2.0)
    memory = replay_buffer.reservoir(der.init(model, params, batch), batch, logits=torch.ones(5, 3))
    distance = (module(x) - 1).square().mean()
    torch.testing.assert_close(der.approximation(model, memory, 1)(params), 2 * distance)


def test_empty_rows_hold_an_example() -> None:
    """Also its target: a relative error is not defined for a target of 0."""
    module = UnitLength(1)
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.full((5, 1), 3.0)
    batch = Batch(x, y, torch.tensor(1), torch.tensor(0))
    memory = replay_buffer.empty(9, batch)
    replay = replay_buffer.sample_replay(Model(module, losses.get("squared-error")), batch, memory, 7, torch.tensor(0))
    assert not replay.weight.any() and (replay.y == 3).all() and replay.x.equal(x[:1].expand(7, -1))
