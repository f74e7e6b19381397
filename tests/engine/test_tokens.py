"""Integer tokens reach the network as they are, are stored as they are, and are checked against the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import glocal
from glocal.algorithms import ER, SGD, Algorithm, StableSGD
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, train
from glocal.errors import GlocalError

VOCABULARY = 12


class BagOfTokens(nn.Module):
    def __init__(self, outputs: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 6)
        self.hidden = nn.Linear(6, 8)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(x).mean(1))))


def bag_of_tokens(shape: Sequence[int], outputs: int) -> nn.Module:
    return BagOfTokens(outputs, VOCABULARY)


def small_vocabulary(shape: Sequence[int], outputs: int) -> nn.Module:
    return BagOfTokens(outputs, VOCABULARY - 1)


def part(n: int, dtype: Any = np.int64) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences of small tokens, class 0, and of large ones, class 1."""
    random, y = np.random.default_rng(n), np.arange(n) % 2
    return (random.integers(0, VOCABULARY // 2, (n, 5)) + VOCABULARY // 2 * y[:, None]).astype(dtype), y


def tokens(dtype: Any = np.int64) -> Challenge:
    return from_tasks("tokens", [(part(40, dtype), part(21)), (part(32, dtype), part(22))], setting="domain")


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_integers_of_any_width_are_the_same_challenge(dtype: Any) -> None:
    challenge = tokens(dtype)
    assert challenge.input_dtype == challenge.task(0, 0).train.x.dtype == torch.int64
    np.testing.assert_array_equal(challenge.task(0, 0).train.x.numpy(), part(40)[0])
    assert challenge.fingerprint == tokens().fingerprint


def test_bytes_stay_images() -> None:
    x, y = part(20, np.uint8)
    x = x[:, None, None]
    challenge = from_tasks("bytes", [((x, y), (x, y))], setting="domain")
    assert challenge.input_dtype == torch.float32 and challenge.task(0, 0).train.x.dtype == torch.uint8


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=9), StableSGD()])
def test_training_learns_and_buffers_hold_tokens(algorithm: Algorithm, execution: Execution) -> None:
    members = tuple(Member(seed, 0.5, algorithm) for seed in (1, 2))
    *_, last = train(Cohort(tokens(), bag_of_tokens, members, epochs=8, batch_size=8), execution=execution)
    assert last.record.arrays["test_class_accuracy"][:, -1].min() > 0.9
    if isinstance(algorithm, ER):
        stored = last.state.memory["x"][:, :-1]
        assert stored.dtype == torch.int64 and stored.unique().numel() == VOCABULARY


def test_networks_are_checked_with_all_tokens(tmp_path: Path) -> None:
    with pytest.raises(GlocalError, match="'mlp' takes images or floats"):
        glocal.sweep(tokens(), ["sgd"], [0.1], [1], store=tmp_path)
    with pytest.raises(GlocalError, match=r"'small_vocabulary' does not accept .* index out of range"):
        glocal.sweep(tokens(), ["sgd"], [0.1], [1], network=small_vocabulary, store=tmp_path)
