"""A user's random augmentation: applied once to every training batch, keyed by the run, and never when evaluating."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import glocal
from glocal import rng
from glocal.algorithms import ER, GEM, SGD, Algorithm
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, Snapshot, train
from glocal.errors import GlocalError
from glocal.networks import mlp
from glocal.sweeps import resolve

EXECUTIONS = pytest.mark.parametrize("execution", ["sequential", "vectorised"])


def identity(x: Tensor, key: Tensor) -> Tensor:
    return x


def noise(x: Tensor, key: Tensor) -> Tensor:
    return x + rng.uniform(key, x.numel()).view(x.shape) - 0.5


def erase(x: Tensor, key: Tensor) -> Tensor:
    return torch.zeros_like(x)


def torch_noise(x: Tensor, key: Tensor) -> Tensor:
    return x + torch.rand_like(x) - 0.5


def shorter(x: Tensor, key: Tensor) -> Tensor:
    return x[:, :1]


def in_place(x: Tensor, key: Tensor) -> Tensor:
    return x.add_(1)


def numpy_noise(x: Tensor, key: Tensor) -> Tensor:
    return x * (1 if np.random.rand() < 0.5 else 2)


def without_key(x: Tensor) -> Tensor:
    return x


def part(n: int, first: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    y = first + np.arange(n) % 2
    x = np.eye(4)[y] + np.random.default_rng(n).uniform(0, 0.5, (n, 4))
    return (100 * x[:, None, None]).astype(dtype) if dtype == np.uint8 else x.astype(dtype), y


def challenge(transform: Any = None, dtype: Any = np.float32) -> Challenge:
    tasks = [(part(24, first, dtype), part(10, first, dtype)) for first in (0, 2)]
    return from_tasks("small", tasks, transform=transform)


def trained(made: Challenge, algorithm: Algorithm, execution: Execution) -> Snapshot:
    members = tuple(Member(seed, 0.2, algorithm) for seed in (1, 2))
    *_, last = train(Cohort(made, mlp, members, epochs=2, batch_size=8), execution=execution)
    return last


@EXECUTIONS
@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=10), pytest.param(GEM(slots=8), marks=pytest.mark.slow)])
def test_the_identity_changes_nothing_and_noise_does(algorithm: Algorithm, execution: Execution) -> None:
    plain, same, noisy = (trained(challenge(t), algorithm, execution) for t in (None, identity, noise))
    for key, params in plain.state.params.items():
        torch.testing.assert_close(same.state.params[key], params, rtol=1e-5, atol=1e-7)
    assert any((noisy.state.params[key] - params).abs().max() > 1e-3 for key, params in plain.state.params.items())


@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=10), pytest.param(GEM(slots=8), marks=pytest.mark.slow)])
def test_both_executors_draw_the_same_numbers(algorithm: Algorithm) -> None:
    one, other = (trained(challenge(noise), algorithm, execution) for execution in ("sequential", "vectorised"))
    for key, params in one.state.params.items():
        torch.testing.assert_close(other.state.params[key], params, rtol=1e-3, atol=1e-5)


def test_a_step_is_that_of_torch_on_the_transformed_batch() -> None:
    """One epoch of one step; what the network saw is what the transform returned."""
    seen: list[Tensor] = []

    def recorded(x: Tensor, key: Tensor) -> Tensor:
        seen.append(noise(x, key))
        return seen[-1]

    made = challenge(recorded).first(1)
    cohort = Cohort(made, mlp, (Member(1, 0.2, SGD()),), epochs=1, batch_size=24)
    start, _ = cohort.initial()
    *_, last = train(cohort, execution="sequential")
    *_, batch = (x for x in seen if len(x) == 24)  # checks see the first ones
    module = cohort.network(1)
    y = made.task(0, 0).train.y[torch.randperm(24, generator=rng.generator(1, "order", 0, 0))]
    torch.nn.functional.cross_entropy(module(batch), y).backward()
    for key, p in module.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(last.state.params[key][0], start[key][0] - 0.2 * p.grad, rtol=1e-4, atol=1e-6)


def test_every_step_and_every_run_has_its_own_key() -> None:
    keys: list[int] = []

    def recorded(x: Tensor, key: Tensor) -> Tensor:
        keys.append(int(key))
        return x

    steps: list[int] = []
    for _ in range(2):
        keys.clear()
        trained(challenge(recorded), SGD(), "sequential")
        checked = [key for key in keys if key != 0]  # 0 is the key of the transform's check
        repeated = checked[:2], checked[2:4], checked[4:6]
        assert repeated[0] == repeated[1] == repeated[2], "two steps, repeated to check the algorithm"
        steps += checked[6:]
    assert len(steps) == 2 * 2 * 2 * 2 * 3, "repetitions, runs, tasks, epochs, steps"
    assert steps[: len(steps) // 2] == steps[len(steps) // 2 :], "the same when trained again"
    assert len(set(steps)) == len(steps) // 2


@EXECUTIONS
def test_bytes_are_scaled_first_and_evaluation_sees_the_data(execution: Execution) -> None:
    made = challenge(erase, np.uint8)
    last = trained(made, SGD(), execution)
    cohort = Cohort(made, mlp, (Member(1, 0.2, SGD()),), epochs=1, batch_size=8)
    start, _ = cohort.initial()
    first = next(iter(start))  # the weights of the first layer see zeros only
    torch.testing.assert_close(last.state.params[first][0], start[first][0])
    module = cohort.network(1)
    module.load_state_dict({k: p[0] for k, p in last.state.params.items()})
    x, y = made.task(0, 0).test
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(module(x.float() / 255), y)
    assert float(last.record.arrays["test_class_loss"][0, -1, 0]) == pytest.approx(float(expected), rel=1e-4)


def test_torchs_own_random_numbers_are_drawn_run_by_run(tmp_path: Path) -> None:
    """`vmap` cannot draw them for several runs; a run is the same alone and beside another."""
    both = glocal.sweep(challenge(torch_noise), ["sgd"], [0.1], [1, 2], epochs=1, store=tmp_path / "both")
    (alone,) = glocal.sweep(challenge(torch_noise), ["sgd"], [0.1], [2], epochs=1, store=tmp_path / "alone")
    assert both[1].info["notes"], "a note says why"
    np.testing.assert_allclose(both[1].arrays["epoch_loss"], alone.arrays["epoch_loss"], rtol=1e-5)


def test_a_transform_is_part_of_a_runs_name() -> None:
    configs = [resolve.challenge(challenge(t)).config for t in (None, identity, noise)]
    assert "augment" not in configs[0]
    assert configs[1]["augment"] == {"name": "identity", "source": resolve.source_hash(identity)}
    assert configs[1]["augment"] != configs[2]["augment"]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (shorter, r"'shorter' must return \(2, 4\) and torch.float32 like its input, not \(2, 1\)"),
        (in_place, "'in_place' changes its inputs in place"),
        (numpy_noise, "the transform 'numpy_noise' draws from Python's random or numpy's"),
        (without_key, r"'without_key' does not accept x of shape \(2, 4\) and torch.float32, and a key"),
    ],
)
def test_transforms_are_checked(transform: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(GlocalError, match=message):
        glocal.sweep(challenge(transform), ["sgd"], [0.1], [1], epochs=1, store=tmp_path)


def test_only_functions_are_transforms() -> None:
    with pytest.raises(GlocalError, match="transform is 'flip'; give a function"):
        challenge("flip")


class Items(Dataset[tuple[Tensor, int]]):
    """Ten items; `augmented` ones differ whenever they are read."""

    def __init__(self, augmented: bool) -> None:
        self.augmented, self.reads = augmented, 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.full((3,), float(index)) + (torch.rand(3) if self.augmented else 0), index % 2


@pytest.mark.parametrize("loader", [False, True])
def test_a_data_set_whose_items_change_gets_a_warning(loader: bool) -> None:
    def task(train: Dataset[Any], test: Dataset[Any]) -> list[Any]:
        parts = (DataLoader(part, batch_size=4, shuffle=True) if loader else part for part in (train, test))
        return [tuple(parts)]

    with pytest.warns(UserWarning, match=r"the items of task 1 \(train\) differ when they are read again.*transform"):
        from_tasks("random", task(Items(True), Items(False)), setting="domain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_tasks("fixed", task(Items(False), Items(False)), setting="domain")
