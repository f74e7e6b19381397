"""Random streams are keyed by their purpose and by nothing else."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glocal.rng import generator

keys = st.tuples(st.integers(0, 99), st.lists(st.integers(0, 99) | st.text("a1:", max_size=3), max_size=3).map(tuple))


def draw(seed: int, *names: str | int) -> list[int]:
    return torch.randint(0, 2**31, (4,), generator=generator(seed, *names)).tolist()


@settings(deadline=None)
@given(keys, keys)
def test_streams_are_equal_exactly_when_their_keys_are(a: tuple, b: tuple) -> None:
    def kinds(key: tuple) -> tuple:
        return key[0], *((type(name), name) for name in key[1])

    assert (draw(a[0], *a[1]) == draw(b[0], *b[1])) == (kinds(a) == kinds(b))


def test_a_key_is_more_than_its_parts_run_together() -> None:
    streams = [draw(1, "a", "b"), draw(1, "ab"), draw(1, "b", "a"), draw(1, "a", 2), draw(1, "a", "2"), draw(12, "a")]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_neither_global_state_nor_other_streams_matter() -> None:
    torch.manual_seed(0)
    before = draw(7, "order")
    torch.manual_seed(1)
    draw(7, "init")
    assert draw(7, "order") == before


def test_the_global_stream_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    draw(3, "anything")
    assert torch.equal(torch.rand(2), expected)


def test_negative_and_huge_seeds_are_seeds() -> None:
    assert len({tuple(draw(seed)) for seed in (-1, 1, 2**63, 2**64 + 1)}) == 4
