"""The published OGD procedure against a loop that reproduces the published code."""

from __future__ import annotations

import by_hand
import pytest
import torch
from small_problems import (
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    flat,
    gradient,
    linear_network,
    train_to_the_end,
)
from torch import Tensor
from torch.nn import functional

from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.ogd import OGDPublished
from glocal.challenges import from_tasks
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.tree import Params

SHARE = 4


def three_tasks() -> list[Batch]:
    return [batch_of(examples(11, 60 + t), t, t) for t in range(3)]


def drawn(task: Batch) -> list[int]:
    """The share of a task that is drawn."""
    return by_hand.chosen(task.key, "examples", len(task.y), SHARE)


def learn(model: Model, solutions: list[Params]) -> Memory:
    algorithm = OGDPublished(slots=3 * SHARE)
    memory = algorithm.init(model, solutions[0], batch_of(examples(2, 0)))
    for theta, task in zip(solutions, three_tasks(), strict=False):
        memory = algorithm.consolidate(model, theta, memory, task)
    return memory


def as_published(model: Model, solutions: list[Params], g: Tensor) -> Tensor:
    """Gradients written into one buffer and stored as views of it; the basis over its norm; g − B Bᵀ g."""
    basis: list[Tensor] = []
    for theta, task in zip(solutions, three_tasks(), strict=False):
        buffer = torch.empty_like(g)
        stored = []
        for i in drawn(task):
            value = lambda p, task=task, i=i: model.outputs(p, task.x[i][None])[0, task.y[i]]  # noqa: E731
            buffer.copy_(flat(gradient(value, theta)))
            stored.append(buffer.view(-1))
        basis += [row.clone() for row in stored]
    matrix = torch.stack(basis, 1)
    matrix = matrix / matrix.norm()
    return g - matrix @ (matrix.mT @ g)


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_it_does_what_the_published_loop_does(finished: int) -> None:
    model, params = double_model()
    solutions = [elsewhere(params, seed) for seed in range(finished)]
    memory = learn(model, solutions)
    grads = elsewhere(params, 9)
    actual = OGDPublished(slots=3 * SHARE).direction(model, grads, params, memory, three_tasks()[0])
    torch.testing.assert_close(flat(actual), as_published(model, solutions, flat(grads)), rtol=1e-10, atol=1e-12)


def test_it_is_no_projection() -> None:
    """What lies along the stored gradients becomes smaller and stays."""
    model, params = double_model()
    memory = learn(model, [elsewhere(params, seed) for seed in range(2)])
    v = flat({k: g[0] for k, g in memory["gradients"].items()})
    u = flat({k: g[1] for k, g in memory["gradients"].items()})
    algorithm = OGDPublished(slots=3 * SHARE)
    step = algorithm.direction(model, elsewhere(params, 9), params, memory, three_tasks()[0])
    cosines = [abs(float(flat(step) @ w / w.norm() / flat(step).norm())) for w in (v, u)]
    assert max(cosines) > 1e-2


def test_before_the_first_task_ends_it_is_sgd() -> None:
    model, params = double_model()
    algorithm = OGDPublished()
    memory = algorithm.init(model, params, batch_of(examples(2, 0)))
    grads = elsewhere(params)
    assert algorithm.direction(model, grads, params, memory, three_tasks()[0]) is grads


def test_gradients_of_zeros_do_no_harm() -> None:
    model, params = double_model()
    memory = learn(model, [params])
    memory["gradients"] = {k: torch.zeros_like(v) for k, v in memory["gradients"].items()}
    grads = elsewhere(params)
    actual = OGDPublished().direction(model, grads, params, memory, three_tasks()[0])
    torch.testing.assert_close(actual, grads, rtol=0, atol=0)


def test_its_approximation_is_the_quadratic_of_one_sample() -> None:
    model, params = double_model()
    solutions = [elsewhere(params, seed) for seed in range(3)]
    memory = learn(model, solutions)
    for number, (theta, task) in enumerate(zip(solutions, three_tasks(), strict=True)):
        last = drawn(task)[-1]
        x, y = task.x[last : last + 1], int(task.y[last])
        true_output = lambda p, x=x, y=y: model.outputs(p, x)[0, y]  # noqa: E731
        v = flat(gradient(true_output, theta))
        p = float(model.outputs(theta, x).softmax(-1)[0, y])
        at = elsewhere(params, 9)
        final_loss = functional.cross_entropy(model.outputs(theta, task.x), task.y)
        expected = final_loss + 0.5 * p * (1 - p) * (v @ (flat(at) - flat(theta))) ** 2
        torch.testing.assert_close(OGDPublished().approximation(model, memory, number)(at), expected)


def test_vectorised_and_run_by_run_agree() -> None:
    cohort = cohort_of(blobs((60, 50, 40)), OGDPublished(slots=12), [(s, lr) for s in (0, 1) for lr in (0.05, 0.2)])
    a, b = (train_to_the_end(cohort, how).state for how in ("vectorised", "sequential"))
    for k, value in a.params.items():
        torch.testing.assert_close(b.params[k], value, rtol=1e-5, atol=1e-6)
    assert a.memory["gradients"]["layers.0.weight"].shape == (4, 3, 16, 16)


def test_invalid_options_raise_errors() -> None:
    with pytest.raises(GlocalError, match="slots=2"):
        train_to_the_end(cohort_of(blobs((20, 20, 20)), OGDPublished(slots=2)))
    with pytest.raises(GlocalError, match="at least 1"):
        OGDPublished(slots=0)
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    challenge = from_tasks("regression", [((x, x[:, :1]), (x, x[:, :1]))], setting="domain", loss="squared-error")
    with pytest.raises(GlocalError, match="squared-error tasks have no classes"):
        train_to_the_end(cohort_of(challenge, OGDPublished(), network=linear_network))
