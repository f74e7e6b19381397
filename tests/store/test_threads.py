"""Sweeps in several threads store what they store one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.rng import generator, global_generator
from glocal.store.run import Runs


class Noisy(nn.Module):
    """Draws from torch's global generator in training, by a function that no key replaces."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(784 if i == 0 else 8, 8) for i in range(30))
        self.last = nn.Linear(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.flatten(1)).relu() + 0.1
        return self.last(x * (1 + 0.1 * torch.empty(8).exponential_()) if self.training else x)


def noisy(shape: Any, outputs: int) -> nn.Module:
    return Noisy(outputs)


def sweep(store: Path, seed: int) -> Runs:
    quick: Any = {"tasks": 2, "batch_size": 1000, "network": noisy, "store": store, "train_eval": 10}
    return glocal.sweep("rotated-digits", ["er"], [0.1], range(seed, seed + 3), execution="sequential", **quick)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    return [sweep(tmp_path_factory.mktemp("alone"), seed) for seed in (0, 3)]


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "two stores"])
def test_threads_store_the_results_of_one_thread(tmp_path: Path, alone: list[Runs], shared: bool) -> None:
    stores = [tmp_path / ("both" if shared else str(i)) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(sweep, stores, (0, 3)))
    for one, other in zip([*alone[0], *alone[1]], [*together[0], *together[1]], strict=True):
        assert one.config == other.config
        for name, array in one.arrays.items():
            if name != "memory_bytes":
                np.testing.assert_array_equal(array, other.arrays[name], name)


def test_networks_are_initialised_from_their_seed_in_every_thread() -> None:
    def make(seed: int) -> torch.Tensor:
        with global_generator(generator(seed)):
            return torch.cat([nn.Linear(50, 50).weight.detach() for _ in range(40)])

    state = torch.get_rng_state()
    expected = [make(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert all(map(torch.equal, threads.map(make, range(8)), expected))
    assert torch.equal(torch.get_rng_state(), state)
