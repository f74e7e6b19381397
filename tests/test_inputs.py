"""A user's examples: every accepted form gives the same tensors, and errors name the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from glocal.errors import GlocalError
from glocal.inputs import as_inputs, as_labels, as_targets, check_finite, evenly_spaced_indices, read_examples

X, Y = torch.arange(10.0).unsqueeze(1), torch.arange(10)
TEN = TensorDataset(X, Y)
SPREAD, FIRST = [0, 3, 6, 9], [0, 1, 2, 3]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(TEN)


class PythonLabels(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([float(i)]), i


def reversed_batch(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*examples[::-1], strict=True)
    return torch.stack(x), torch.stack(y)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ((X, Y), SPREAD),
        ((X.numpy(), Y.numpy()), SPREAD),
        ((X.tolist(), Y.tolist()), SPREAD),
        (TEN, SPREAD),
        (PythonLabels(), SPREAD),
        (DataLoader(TEN, batch_size=3), SPREAD),
        (DataLoader(TEN, batch_size=3, shuffle=True, drop_last=True), SPREAD),
        (DataLoader(TEN, batch_size=3, sampler=SubsetRandomSampler([4, 5])), {4, 5}),
        (DataLoader(TEN, batch_size=3, sampler=WeightedRandomSampler([0.0] * 9 + [1.0], 10)), [9, 9, 9, 9]),
        (DataLoader(TEN, batch_size=2, collate_fn=reversed_batch), [1, 0, 3, 2]),
        (Stream(), FIRST),
        (DataLoader(Stream(), batch_size=3), FIRST),
        ([(X[:3], Y[:3]), (X[3:], Y[3:])], FIRST),
        (((X[i : i + 2].numpy(), Y[i : i + 2].numpy()) for i in range(0, 10, 2)), FIRST),
    ],
)
def test_examples_are_evenly_spaced_or_the_first_of_a_stream(source: Any, expected: Any) -> None:
    x, y = read_examples(source, max_examples=4)
    assert x.flatten().tolist() == y.tolist()
    assert (set(y.tolist()) if isinstance(expected, set) else y.tolist()) == expected


def test_all_examples_are_read_by_default() -> None:
    sources: list[Any] = [(X, Y), TEN, DataLoader(TEN, batch_size=3, shuffle=True), Stream(), DataLoader(Stream())]
    for source in sources:
        assert read_examples(source)[1].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), r"x of task 3 has shape \(4, 2\) and y \(3,\)"),
        ((torch.zeros(4, 2), torch.tensor(1)), r"y \(\)"),
        ((torch.zeros(0, 2), torch.zeros(0)), "task 3 has no examples"),
        ([(torch.zeros(4, 2), torch.zeros(3)), (torch.zeros(3, 2), torch.zeros(4))], "the same length"),
        ([(torch.zeros(2, 2), torch.zeros(2)), (torch.zeros(2, 3), torch.zeros(2))], "batches of task 3 differ"),
        ([(object(), object())], "x of task 3 cannot be converted"),
        ([{"image": X, "label": Y}], r"batch 0 of task 3 is a dict of length 2 \('image', 'label'\)"),
        ([(X, X, Y)], r"batch 0 of task 3 is a tuple of length 3 \(Tensor, Tensor, Tensor\)"),
        (DataLoader([object(), object()], batch_size=1), "item 0 of task 3 is a object"),  # type: ignore[arg-type]
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "task 3 has no examples"),
        ([], "task 3 has no examples"),
        (None, "task 3 is a NoneType; give a pair"),
        (X, "task 3 is a Tensor; give a pair"),
        ({"x": X}, r"task 3 is a dict of length 1 \('x'\); give a pair"),
    ],
)
def test_wrong_sources_are_refused(source: Any, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        read_examples(source, "task 3", 4)


def test_fewer_than_one_example_is_refused() -> None:
    with pytest.raises(GlocalError, match="examples is 0; allowed: 1 or more"):
        read_examples((X, Y), max_examples=0)


def test_tensors_share_memory_and_carry_no_gradient() -> None:
    x = X.clone().requires_grad_()
    read, _ = read_examples((x, Y))
    assert read.data_ptr() == x.data_ptr() and not read.requires_grad
    array = X.numpy()
    assert read_examples((array, Y))[0].data_ptr() == array.ctypes.data


@pytest.mark.parametrize(("n", "count"), [(10, 4), (7, 7), (3, 9), (1, 1), (1000, 13), (0, 4)])
def test_evenly_spaced_indices(n: int, count: int) -> None:
    k = min(n, count)
    exact = [i * (n - 1) / (k - 1) if k > 1 else 0 for i in range(k)]
    indices = evenly_spaced_indices(n, count).tolist()
    assert len(indices) == k == len(set(indices))
    assert all(abs(index - position) <= 0.5 for index, position in zip(indices, exact, strict=True))


def test_nonfinite_values_are_counted() -> None:
    x = torch.zeros(5, 2, 3)
    check_finite(x, "x")
    x[2, 0, 1], x[4, 1, 1] = np.inf, np.nan
    with pytest.raises(GlocalError, match="x contains NaN or infinity in 2 of 5 examples, the first at index 2"):
        check_finite(x, "x")


def test_values_beyond_float32_are_not_finite() -> None:
    with pytest.raises(GlocalError, match="x contains NaN or infinity in 1 of 2 examples, the first at index 1"):
        as_inputs(torch.tensor([[0.0], [1e300]], dtype=torch.float64), "x")


def test_dtypes_of_inputs_labels_and_targets() -> None:
    assert as_inputs(X.double(), "x").dtype == torch.float32
    assert as_inputs(X.byte().view(10, 1, 1, -1), "x").dtype == torch.uint8
    assert as_labels(Y.float(), "y").dtype == torch.int64
    assert as_targets(Y, "y").shape == (10, 1) and as_targets(Y, "y").dtype == torch.float32
