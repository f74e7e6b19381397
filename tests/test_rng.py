"""Random numbers as a function of a key: SplitMix64 with whole numbers, and what statistics expect of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.func import vmap

from glocal.rng import below, choose, fold_in, generator, split, uniform

QUICK = settings(deadline=None, max_examples=50, derandomize=True)
KEYS = st.integers(-(2**63), 2**63 - 1)
WORD = (1 << 64) - 1


def splitmix64(state: int) -> Iterator[int]:
    """The generator as its authors wrote it, on Python's integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        yield z ^ (z >> 31)


def unsigned(z: Tensor) -> list[int]:
    return [int(word) & WORD for word in z.flatten()]


def test_the_published_numbers_of_seed_1234567() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert unsigned(split(torch.tensor(1234567), torch.arange(4))) == published


@QUICK
@given(KEYS, st.sampled_from([1, 2, 9, 33, 1000, 2**31 - 1]))
def test_every_key_gives_the_generators_sequence(key: int, bound: int) -> None:
    words = split(torch.tensor(key), torch.arange(20))
    sequence = [word for word, _ in zip(splitmix64(key & WORD), range(20), strict=False)]
    assert unsigned(words) == sequence
    assert [int(split(torch.tensor(key), i)) & WORD for i in range(20)] == sequence
    assert below(bound, words).tolist() == [(word >> 32) * bound >> 32 for word in sequence]


def test_late_numbers_are_counted_like_early_ones() -> None:
    key, late = torch.tensor(-5), (1 << 20) + 3
    assert int(split(key, late)) == int(split(key, torch.tensor([late])))


def test_mapped_over_keys_it_is_the_same() -> None:
    keys = torch.tensor([3, -(2**63), 2**63 - 1, 4])
    draw: Callable[[Tensor], Tensor] = lambda key: below(9, split(split(key, 7), torch.arange(50)))  # noqa: E731
    assert torch.equal(vmap(draw)(keys), torch.stack([draw(key) for key in keys]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_on_a_gpu_it_is_the_same() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=generator(0, "test"))
    assert torch.equal(split(keys.cuda(), torch.arange(1000).cuda()).cpu(), split(keys, torch.arange(1000)))
    assert torch.equal(below(9, split(keys.cuda(), 5)).cpu(), below(9, split(keys, 5)))


def test_uniform_numbers_are_the_upper_24_bits() -> None:
    expected = [(word >> 40) / 2**24 for word, _ in zip(splitmix64(12), range(1000), strict=False)]
    actual = uniform(torch.tensor(12), 1000)
    assert actual.dtype == torch.float32 and actual.double().tolist() == expected
    state = -0x9E3779B97F4A7C15  # whose first word is 0; the largest word is below 1, too
    assert float(uniform(torch.tensor(_signed(state)), 1)) == 0
    assert float(torch.tensor((WORD >> 40) / 2**24)) < 1


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


PURPOSES = ["dropout", "examples", "labels", "reservoir", "replay", "second replay", "augmentation", "direction"]


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("first", [0, 2**40])
def test_uniform_numbers_are_uniform_and_independent_of_neighbouring_keys(purpose: str, first: int) -> None:
    keys = fold_in(first + torch.arange(200), purpose)
    u = vmap(lambda key: uniform(key, 500))(keys).double()
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    z = (u - 0.5) * math.sqrt(12)
    for a, b in [(z[1:], z[:-1]), (z[:, 1:], z[:, :-1])]:
        assert abs(float((a * b).mean())) < 4.5 / math.sqrt(a.numel())


def test_purposes_are_independent() -> None:
    keys = torch.randint(2**63 - 1, (100,), generator=generator(0, "purposes"))
    u = torch.stack([vmap(lambda key: uniform(key, 500))(fold_in(keys, purpose)) for purpose in PURPOSES])
    correlations = torch.corrcoef(u.flatten(1).double()) - torch.eye(len(PURPOSES))
    assert float(correlations.abs().max()) < 4.5 / math.sqrt(100 * 500)


def test_sequences_of_purposes_do_not_overlap() -> None:
    """Offsets in SplitMix64's sequence, in steps of the golden ratio, are further apart than any draw is long."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    offsets = [int(fold_in(torch.tensor(0), purpose)) * inverse & WORD for purpose in PURPOSES] + [0]
    assert min((a - b) & WORD for a in offsets for b in offsets if a != b) > 1 << 40


def test_chosen_numbers_are_distinct_and_every_ordered_pair_is_equally_likely() -> None:
    n, draws = 6, 9000
    chosen = vmap(lambda key: choose(key, n, 2))(torch.arange(draws))
    assert bool((chosen[:, 0] != chosen[:, 1]).all())
    counts = (n * chosen[:, 0] + chosen[:, 1]).bincount(minlength=n * n)
    assert stats.chisquare(counts[counts > 0].numpy()).pvalue > 1e-3 and int((counts > 0).sum()) == n * (n - 1)
    assert sorted(choose(torch.tensor(3), 5, 9).tolist()) == [0, 1, 2, 3, 4]


def test_mapped_over_keys_uniform_numbers_and_choices_are_the_same() -> None:
    keys = torch.tensor([3, -(2**63), 2**63 - 1, 4])
    for draw in (lambda key: uniform(key, 70), lambda key: choose(key, 70, 9)):
        assert torch.equal(vmap(draw)(keys), torch.stack([draw(key) for key in keys]))


def uniforms(keys: Tensor, calls: int, elements: int) -> Tensor:
    """As augmentation draws them, in [0, 1): (keys, calls, elements)."""
    words = split(split(keys.unsqueeze(1), torch.arange(calls)).unsqueeze(2), torch.arange(elements))
    return (below(2**31 - 1, words).double() + 0.5) / (2**31 - 1)


RANDOM_KEYS = torch.randint(2**63 - 1, (100,), generator=generator(0, "keys"))


@pytest.mark.parametrize("keys", [torch.arange(100), RANDOM_KEYS], ids=["neighbouring keys", "random keys"])
def test_moments_and_correlations_are_those_of_independent_uniforms(keys: Tensor) -> None:
    u = uniforms(keys, 20, 100)
    n = u.numel()
    assert abs(float(u.mean()) - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
    assert abs(float(u.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    z = (u - 1 / 2) * math.sqrt(12)
    for axis in range(3):
        for lag in (1, 2, 3):
            products = z.narrow(axis, lag, z.shape[axis] - lag) * z.narrow(axis, 0, z.shape[axis] - lag)
            assert abs(float(products.mean())) < 4.5 / math.sqrt(products.numel()), (axis, lag)


def chi_square(counts: Tensor) -> float:
    """How many standard deviations Pearson's statistic is away from its mean, the cells' number less one."""
    expected = counts.sum() / counts.numel()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (counts.numel() - 1)) / math.sqrt(2 * (counts.numel() - 1))


@pytest.mark.parametrize("bound", [2, 9, 64])
def test_the_numbers_below_a_bound_are_equally_frequent_alone_and_in_pairs(bound: int) -> None:
    words = split(split(torch.arange(400).unsqueeze(1), 0), torch.arange(500))
    draws = below(bound, words)
    assert abs(chi_square(draws.flatten().bincount(minlength=bound))) < 4.5
    for a, b in [(draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])]:  # in a row, and under neighbouring keys
        pairs = (a * bound + b).flatten().bincount(minlength=bound**2)
        assert abs(chi_square(pairs)) < 4.5


def test_a_changed_bit_of_the_key_changes_half_of_all_bits() -> None:
    keys = torch.arange(200)
    for bit in range(0, 63, 7):
        changed = split(keys, 0) ^ split(keys ^ (1 << bit), 0)
        flipped = sum(word.bit_count() for word in unsigned(changed)) / (64 * len(keys))
        assert abs(flipped - 1 / 2) < 4.5 * 1 / 2 / math.sqrt(64 * len(keys)), bit


STREAMS = st.tuples(
    st.integers(0, 99), st.lists(st.integers(0, 99) | st.text("a1:", max_size=3), max_size=3).map(tuple)
)


def first_numbers(seed: int, *names: str | int) -> list[int]:
    return torch.randint(0, 2**31, (4,), generator=generator(seed, *names)).tolist()


@settings(deadline=None)
@given(STREAMS, STREAMS)
def test_streams_are_equal_if_and_only_if_their_keys_are(a: tuple, b: tuple) -> None:
    def kinds(key: tuple) -> tuple:
        return key[0], *((type(name), name) for name in key[1])

    assert (first_numbers(a[0], *a[1]) == first_numbers(b[0], *b[1])) == (kinds(a) == kinds(b))


def test_keys_are_not_concatenated() -> None:
    streams = [
        first_numbers(1, "a", "b"),
        first_numbers(1, "ab"),
        first_numbers(1, "b", "a"),
        first_numbers(1, "a", 2),
        first_numbers(1, "a", "2"),
        first_numbers(12, "a"),
    ]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_streams_ignore_global_state_and_other_streams() -> None:
    torch.manual_seed(0)
    before = first_numbers(7, "order")
    torch.manual_seed(1)
    first_numbers(7, "init")
    assert first_numbers(7, "order") == before


def test_the_global_stream_is_not_used() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first_numbers(3, "anything")
    assert torch.equal(torch.rand(2), expected)


def test_negative_and_large_seeds_are_distinct() -> None:
    assert len({tuple(first_numbers(seed)) for seed in (-1, 1, 2**63, 2**64 + 1)}) == 4
