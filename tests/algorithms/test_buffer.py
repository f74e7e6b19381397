"""The episodic memory against Vitter's reservoir algorithm in plain Python, and the uniformity of its draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from small_problems import CLASSES, batch_of, double_model, elsewhere, examples, uniforms
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from glocal.algorithms import buffer
from glocal.algorithms.algorithm import Batch, Memory
from glocal.tree import select, stack

QUICK = settings(deadline=None, max_examples=60, derandomize=True)


def stream_batch(first: int, count: int, task: int = 0) -> Batch:
    """Examples that carry their own number: x is the number, y is three times it."""
    numbers = torch.arange(first, first + count)
    return Batch(numbers[:, None].float(), 3 * numbers, torch.zeros(0), torch.tensor(task))


def algorithm_r(uniforms: list[float], slots: int) -> list[int]:
    """The numbers of the examples kept after a stream: fill, then replace slot ⌊u·(n+1)⌋ if there is such a slot."""
    kept: list[int] = []
    for n, u in enumerate(uniforms):
        if n < slots:
            kept.append(n)
        elif math.floor(u * (n + 1)) < slots:
            kept[math.floor(u * (n + 1))] = n
    return kept


def contents(memory: Memory) -> list[int]:
    filled = memory["task"][:-1] >= 0
    return [int(v) for v in memory["x"][:-1, 0][filled]]


UNIFORM = st.floats(0, 1, exclude_max=True, width=32)


@QUICK
@given(st.integers(1, 6), st.lists(st.lists(UNIFORM, min_size=1, max_size=9), min_size=1, max_size=5))
def test_reservoir_is_vitters_algorithm_r(slots: int, stream: list[list[float]]) -> None:
    memory = buffer.empty(slots, stream_batch(0, 1))
    seen, everything = 0, []
    for task, part in enumerate(stream):
        memory = buffer.reservoir(memory, stream_batch(seen, len(part), task), torch.tensor(part))
        seen += len(part)
        everything += [(u, task) for u in part]
        kept = algorithm_r([u for u, _ in everything], slots)
        assert contents(memory) == kept
        assert memory["y"][: len(kept)].tolist() == [3 * n for n in kept]
        assert memory["task"][: len(kept)].tolist() == [everything[n][1] for n in kept]
        assert int(memory["count"]) == seen


def test_of_two_examples_for_one_slot_the_later_stays() -> None:
    memory = buffer.reservoir(buffer.empty(2, stream_batch(0, 1)), stream_batch(0, 2), torch.zeros(2))
    memory = buffer.reservoir(memory, stream_batch(2, 3), torch.tensor([0.5, 0.4, 0.3]))  # slots 1, 1, 1
    assert contents(memory) == [0, 4]


def test_the_way_a_stream_is_cut_into_batches_does_not_matter() -> None:
    random = uniforms(40, seed=4)
    kept = []
    for size in (1, 7, 40):
        memory = buffer.empty(6, stream_batch(0, 1))
        for first in range(0, 40, size):
            part = random[first : first + size]
            memory = buffer.reservoir(memory, stream_batch(first, len(part)), part)
        kept.append(contents(memory))
    assert kept[0] == kept[1] == kept[2]


def test_every_element_of_a_stream_is_equally_likely_to_be_kept() -> None:
    slots, length, streams = 5, 20, 4000
    random = uniforms(streams, length, seed=1)
    empty = stack([buffer.empty(slots, stream_batch(0, 1))] * streams)
    memory = vmap(lambda m, u: buffer.reservoir(m, stream_batch(0, length), u))(empty, random)
    kept = memory["x"][:, :-1, 0].long().flatten()
    counts = np.bincount(kept.numpy(), minlength=length)
    # Indicators of a draw of k out of N have covariance p(1 − p) N/(N − 1) (I − 11ᵀ/N), p = k/N.
    p = slots / length
    statistic = ((counts - streams * p) ** 2).sum() / (streams * p * (1 - p) * length / (length - 1))
    assert stats.chi2(length - 1).sf(statistic) > 1e-3


def partly_filled(slots: int, filled: int) -> Memory:
    memory = buffer.empty(slots, stream_batch(0, 1))
    return buffer.reservoir(memory, stream_batch(1, filled), torch.zeros(filled)) if filled else memory


@QUICK
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 12), st.integers(0, 1000))
def test_draws_are_filled_slots_without_replacement(slots: int, filled: int, count: int, seed: int) -> None:
    filled = min(filled, slots)
    drawn = buffer.draw(partly_filled(slots, filled), count, uniforms(slots, seed=seed))
    assert drawn.weight.shape[0] == drawn.y.shape[0] == drawn.x.shape[0] == min(count, slots)
    real = drawn.weight == 1
    assert (drawn.weight[~real] == 0).all()
    numbers = drawn.x[real, 0].tolist()
    assert len(numbers) == len(set(numbers)) == min(count, filled)
    assert set(numbers) <= set(range(1, filled + 1))
    assert drawn.y[real].tolist() == [3 * n for n in numbers]


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-24])
def test_extreme_uniforms_draw_no_unfilled_slot(extreme: float) -> None:
    drawn = buffer.draw(partly_filled(6, 3), 3, torch.tensor([extreme] * 3 + [0.0] * 3))
    assert sorted(drawn.x[:, 0].tolist()) == [1, 2, 3]
    assert drawn.weight.tolist() == [1, 1, 1]


def test_every_pair_of_filled_slots_is_drawn_equally_often() -> None:
    slots, filled, draws = 7, 5, 6000
    memory = partly_filled(slots, filled)
    drawn = vmap(lambda u: buffer.draw(memory, 2, u))(uniforms(draws, slots, seed=2))
    low, high = drawn.x[..., 0].long().sort(1).values.T
    pairs = np.bincount((10 * low + high).numpy(), minlength=100)
    observed = [pairs[10 * a + b] for a in range(1, filled + 1) for b in range(a + 1, filled + 1)]
    assert sum(observed) == draws
    assert stats.chisquare(observed).pvalue > 1e-3


def test_mapped_over_runs_it_does_what_every_run_does_alone() -> None:
    runs, slots = 5, 4
    random, keys = uniforms(runs, 30, seed=3), uniforms(runs, slots, seed=5)

    def filled_and_drawn(memory: Memory, u: Tensor, key: Tensor) -> tuple[Memory, buffer.Replay]:
        for first in range(0, 30, 10):
            memory = buffer.reservoir(memory, stream_batch(first, 10), u[first : first + 10])
        return memory, buffer.draw(memory, 3, key)

    def empty() -> Memory:
        return buffer.empty(slots, stream_batch(0, 1))

    memories, draws = vmap(filled_and_drawn)(stack([empty()] * runs), random, keys)
    for run in range(runs):
        memory, drawn = filled_and_drawn(empty(), random[run], keys[run])
        together = select(memories, run)
        assert contents(together) == contents(memory) == algorithm_r(random[run].tolist(), slots)
        assert sorted(draws.x[run, :, 0].tolist()) == sorted(drawn.x[:, 0].tolist())
        assert torch.equal(draws.weight[run], drawn.weight)


def test_task_loss_is_the_mean_over_what_is_stored_of_the_task() -> None:
    model, params = double_model()
    memory = buffer.empty(8, batch_of(examples(1, 0), torch.zeros(0)))
    for task in range(3):
        data = examples(6, 10 + task)
        memory = buffer.reservoir(memory, batch_of(data, torch.zeros(0), task), uniforms(6, seed=task))
    for task in range(3):
        for at in (params, elsewhere(params)):
            stored = [i for i in range(8) if memory["task"][i] == task]
            terms = []
            for i in stored:
                logits = model.outputs(at, memory["x"][i : i + 1])
                assert logits.shape == (1, CLASSES)
                terms.append(float(functional.cross_entropy(logits, memory["y"][i : i + 1])))
            assert terms, "the stream left examples of every task"
            assert float(buffer.task_loss(model, memory, task)(at)) == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_the_spare_row_is_never_read() -> None:
    model, params = double_model()
    memory = buffer.empty(4, batch_of(examples(1, 0), torch.zeros(0)))
    memory = buffer.reservoir(memory, batch_of(examples(9, 1), torch.zeros(0)), uniforms(9, seed=1))
    keys = uniforms(4)
    before = buffer.task_loss(model, memory, 0)(params), *buffer.draw(memory, 4, keys)
    memory["x"][-1], memory["y"][-1], memory["task"][-1] = torch.nan, CLASSES - 1, 0
    after = buffer.task_loss(model, memory, 0)(params), *buffer.draw(memory, 4, keys)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
