"""Joint training: the expectation of its objective is the multi-task loss, for tasks of any size."""

from __future__ import annotations

import by_hand
import pytest
import torch
from small_problems import FEATURES, batch_of, blobs, cohort_of, double_model, elsewhere, examples, train_to_the_end
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from glocal.algorithms.algorithm import Memory
from glocal.algorithms.baselines import SGD, Joint
from glocal.networks.model import Model
from glocal.tree import Params

SIZES = [2, 6, 3]
JOINT = Joint()


def remembering(model: Model, params: Params) -> tuple[Memory, list[tuple[Tensor, Tensor]]]:
    """Everything of finished tasks of unequal sizes."""
    tasks = [examples(n, 30 + n) for n in SIZES]
    memory = JOINT.init(model, params, batch_of(examples(2, 0)))
    for number, data in enumerate(tasks):
        memory = JOINT.consolidate(model, params, memory, batch_of(data, 0, number))
    return memory, tasks


def true_loss(model: Model, params: Params, data: tuple[Tensor, Tensor]) -> float:
    return float(functional.cross_entropy(model.outputs(params, data[0]), data[1]))


def test_before_the_first_task_ends_it_is_the_tasks_own_loss() -> None:
    model, params = double_model()
    memory = JOINT.init(model, params, batch_of(examples(2, 0)))
    data = examples(4, 1)
    actual = JOINT.objective(model, params, memory, batch_of(data))
    assert float(actual) == pytest.approx(true_loss(model, params, data), rel=1e-12)


@pytest.mark.parametrize("current", [4, 1], ids=["full batch", "short last batch"])
def test_it_draws_a_batch_of_finished_tasks_with_equal_probability(current: int) -> None:
    model, params = double_model()
    memory, tasks = remembering(model, params)
    for key in range(20):
        batch = batch_of(examples(current, 5), key, 3)
        words = by_hand.words(key, "replay", 8)
        drawn = []
        for which, where in zip(words[:4], words[4:], strict=True):
            x, y = tasks[(which >> 32) * 3 >> 32]
            row = (where >> 32) * len(y) >> 32
            drawn.append((x[row], y[row]))
        past = true_loss(model, params, tuple(by_hand.stacked(drawn)))  # type: ignore[arg-type]
        expected = (true_loss(model, params, (batch.x, batch.y)) + 3 * past) / 4
        assert float(JOINT.objective(model, params, memory, batch)) == pytest.approx(expected, rel=1e-12)


def test_the_expectation_of_its_objective_is_the_multi_task_loss() -> None:
    model, params = double_model()
    memory, tasks = remembering(model, params)
    current = examples(1, 5)
    keys = torch.arange(4000)
    values = vmap(lambda key: JOINT.objective(model, params, memory, batch_of(current, key, 3)))(keys)
    expected = sum(true_loss(model, params, data) for data in [*tasks, current]) / 4
    assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / len(keys) ** 0.5


def test_its_approximation_is_the_true_loss() -> None:
    model, params = double_model()
    memory, tasks = remembering(model, params)
    for at in (params, elsewhere(params)):
        for number, data in enumerate(tasks):
            actual = JOINT.approximation(model, memory, number)(at)
            assert float(actual) == pytest.approx(true_loss(model, at, data), rel=1e-12)


def test_the_engine_remembers_all_data_of_tasks_of_unequal_sizes() -> None:
    challenge = blobs((70, 33, 50))
    memory = train_to_the_end(cohort_of(challenge, JOINT, [(0, 0.1), (1, 0.1)], epochs=1)).state.memory
    for run in (0, 1):
        for part in ("x", "y"):
            everything = torch.cat([getattr(challenge.task(t, 0).train, part) for t in range(3)])
            assert torch.equal(memory[part][run], everything)
        assert memory["ends"][run].tolist() == [0, 70, 103, 153]


def test_it_learns_all_tasks_and_plain_sgd_does_not() -> None:
    challenge = blobs((120, 120))
    loss = {}
    for algorithm in (SGD(), JOINT):
        record = train_to_the_end(cohort_of(challenge, algorithm, [(0, 0.3)], epochs=15)).record
        loss[algorithm.name] = record.arrays["train_class_loss"][0, 2]
    assert float(loss["joint"].max()) < 0.1
    assert float(loss["sgd"].max()) > 0.2


def test_its_empty_memory_has_the_shape_of_an_example() -> None:
    model, params = double_model()
    memory = JOINT.init(model, params, batch_of(examples(2, 0)))
    assert memory["x"].shape == (0, FEATURES)
    assert memory["y"].shape == (0,)
