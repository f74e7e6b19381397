"""Joint training: the expectation of its objective is the multi-task loss, for tasks of any size."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_problems import FEATURES, batch_of, blobs, cohort_of, double_model, elsewhere, examples, train_to_the_end
from torch import Tensor
from torch.nn import functional

from glocal.algorithms.algorithm import Memory
from glocal.algorithms.joint import Joint
from glocal.algorithms.sgd import SGD
from glocal.networks.model import Model
from glocal.tree import Params

SIZES = [2, 6, 3]
JOINT = Joint()


def remembering(model: Model, params: Params) -> tuple[Memory, list[tuple[Tensor, Tensor]]]:
    """Everything of finished tasks of unequal sizes."""
    tasks = [examples(n, 30 + n) for n in SIZES]
    memory = JOINT.init(model, params, batch_of(examples(2, 0), torch.zeros(4)))
    for number, data in enumerate(tasks):
        memory = JOINT.consolidate(model, params, memory, batch_of(data, torch.zeros(SIZES[number]), number))
    return memory, tasks


def true_loss(model: Model, params: Params, data: tuple[Tensor, Tensor]) -> float:
    return float(functional.cross_entropy(model.outputs(params, data[0]), data[1]))


def test_before_the_first_task_ends_it_is_the_tasks_own_loss() -> None:
    model, params = double_model()
    memory = JOINT.init(model, params, batch_of(examples(2, 0), torch.zeros(4)))
    data = examples(4, 1)
    actual = JOINT.objective(model, params, memory, batch_of(data, torch.rand(8)))
    assert float(actual) == pytest.approx(true_loss(model, params, data), rel=1e-12)


def test_the_expectation_of_its_objective_is_the_multi_task_loss() -> None:
    """Midpoints of 3 × 6 cells of the unit square: every task, and every example of a task, equally often."""
    model, params = double_model()
    memory, tasks = remembering(model, params)
    current = examples(1, 5)
    values = []
    for which, where in itertools.product(range(3), range(6)):
        random = torch.tensor([(which + 0.5) / 3, (where + 0.5) / 6])
        values.append(float(JOINT.objective(model, params, memory, batch_of(current, random, 3))))
    expected = sum(true_loss(model, params, data) for data in [*tasks, current]) / 4
    assert sum(values) / len(values) == pytest.approx(expected, rel=1e-12)


def test_a_short_batch_does_not_change_the_expectation() -> None:
    """A full batch draws two examples, so that all pairs of cells are tried; the stream's batch has one."""
    model, params = double_model()
    memory, tasks = remembering(model, params)
    current = examples(1, 5)
    cells = [((a + 0.5) / 3, (b + 0.5) / 6) for a, b in itertools.product(range(3), range(6))]
    values = [
        float(JOINT.objective(model, params, memory, batch_of(current, torch.tensor([p[0], q[0], p[1], q[1]]), 3)))
        for p, q in itertools.product(cells, cells)
    ]
    expected = sum(true_loss(model, params, data) for data in [*tasks, current]) / 4
    assert sum(values) / len(values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-24])
def test_extreme_uniforms_draw_examples_that_exist(extreme: float) -> None:
    model, params = double_model()
    memory, tasks = remembering(model, params)
    current = examples(2, 5)
    x, y = tasks[0] if extreme == 0 else tasks[-1]
    one = (x[:1], y[:1]) if extreme == 0 else (x[-1:], y[-1:])
    actual = JOINT.objective(model, params, memory, batch_of(current, torch.full((4,), extreme), 3))
    expected = (true_loss(model, params, current) + 3 * true_loss(model, params, one)) / 4
    assert float(actual) == pytest.approx(expected, rel=1e-12)


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
        loss[algorithm.name] = record.matrices["train_class_loss"][0, 2]
    assert float(loss["joint"].max()) < 0.1
    assert float(loss["sgd"].max()) > 0.2


def test_its_empty_memory_has_the_shape_of_an_example() -> None:
    model, params = double_model()
    memory = JOINT.init(model, params, batch_of(examples(2, 0), torch.zeros(4)))
    assert memory["x"].shape == (0, FEATURES)
    assert memory["y"].shape == (0,)
