"""`take` and `put` agree with plain indexing, alone and under vmap over any axes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.replay_buffer import put, take

DTYPES = [torch.uint8, torch.float32, torch.long, torch.float64]


def table(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (1,), (8,), (3, 5), (2, 4, 4)]),
    n=st.integers(1, 9),
    rows=st.integers(0, 6),
    x_dim=st.sampled_from([None, 0, 1]),
    rows_dim=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 999),
)
def test_taken(
    dtype: torch.dtype, shape: tuple[int, ...], n: int, rows: int, x_dim: int | None, rows_dim: int | None, seed: int
) -> None:
    assume(rows > 0 or rows_dim != 1)  # torch's own indexing returns a wrong shape there, and runs are on dimension 0
    x = table((4, n, *shape), dtype, seed)
    where = torch.randint(0, n, (4, rows), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(take(x[0], where[0]), x[0][where[0]])
    if x_dim is None and rows_dim is None:
        return
    own_x, own_rows = (x if x_dim is not None else x[:1].expand_as(x)), (where if rows_dim is not None else where[:1])
    given_x = x[0] if x_dim is None else x.movedim(0, x_dim)
    given_rows = where[0] if rows_dim is None else where.movedim(0, rows_dim)
    actual = vmap(take, in_dims=(x_dim, rows_dim))(given_x, given_rows)
    expected = torch.stack([own_x[i][own_rows[i % len(own_rows)]] for i in range(4)])
    assert torch.equal(actual, expected)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (1,), (8,), (3, 5), (2, 4, 4)]),
    n=st.integers(2, 9),
    dims=st.tuples(st.sampled_from([0, 1]), st.sampled_from([None, 0]), st.sampled_from([None, 0])),
    seed=st.integers(0, 999),
)
def test_put(
    dtype: torch.dtype, shape: tuple[int, ...], n: int, dims: tuple[int, int | None, int | None], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = table((4, n, *shape), dtype, seed)
    where = torch.stack([torch.randperm(n, generator=draw)[: (n + 1) // 2] for _ in range(4)])
    values = table((4, (n + 1) // 2, *shape), dtype, seed + 1)
    expected = x.clone()
    for i in range(4):
        expected[i][where[i if dims[1] == 0 else 0]] = values[i if dims[2] == 0 else 0]
        expected[i, -1] = 0
    part = x.movedim(0, dims[0]).clone(memory_format=torch.contiguous_format)
    mapped = vmap(put, in_dims=dims)(part, where if dims[1] == 0 else where[0], values if dims[2] == 0 else values[0])
    assert torch.equal(mapped, expected)
    assert torch.equal(part.movedim(dims[0], 0), expected), "in place"
    alone = x[0].clone()
    assert torch.equal(put(alone, where[0], values[0]), expected[0])
    assert torch.equal(alone, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_tables_in_another_order_of_memory(dtype: torch.dtype) -> None:
    values, where = table((2, 2, 3, 4, 4), dtype, 0), torch.tensor([[0, 3], [2, 1]])
    x = torch.zeros(2, 5, 4, 4, 3, dtype=dtype).permute(0, 1, 4, 2, 3)  # channels last
    vmap(put)(x, where, values)
    for run in range(2):
        assert torch.equal(x[run][where[run]], values[run])
        assert torch.equal(take(x[run], where[run]), values[run])
    assert x.sum() == values.sum()
    assert torch.equal(vmap(take)(x, where), values)
    alone = torch.zeros(5, 4, 4, 3, dtype=dtype).permute(0, 3, 1, 2)
    assert torch.equal(put(alone, where[0], values[0])[where[0]], values[0])
    gaps = torch.zeros(2, 7, 3, 4, 4, dtype=dtype)[:, :5]
    assert torch.equal(vmap(put)(gaps, where, values).sum(), values.sum())
    assert torch.equal(gaps[1][where[1]], values[1])


def test_other_numbers_than_the_tables_are_refused() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        put(torch.zeros(3, 2), torch.tensor([0]), torch.ones(1, 2, dtype=torch.int32))


def test_what_is_not_kept_leaves_nothing_behind() -> None:
    x = torch.ones(5, 8, dtype=torch.uint8)
    put(x, torch.tensor([1, 4, 4]), torch.full((3, 8), 7, dtype=torch.uint8))
    assert x[:, 0].tolist() == [1, 7, 1, 1, 0]


def test_of_rows_that_are_not_there() -> None:
    with pytest.raises(IndexError):
        take(torch.zeros(3, 2), torch.tensor([3]))


def test_mapped_twice() -> None:
    x, where = table((2, 3, 5, 8), torch.uint8, 0), torch.randint(0, 5, (2, 3, 4))
    actual = vmap(vmap(take))(x, where)
    assert torch.equal(actual, torch.stack([torch.stack([x[i, j][where[i, j]] for j in range(3)]) for i in range(2)]))
