"""Objectives that contain gradients, and random numbers that algorithms draw from torch's global generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import glocal
from glocal import challenges
from glocal.algorithms import SGD
from glocal.engine.cohort import seeded_network

WEIGHT, LR = 0.5, 0.1


@dataclass(frozen=True)
class ModelGrad(SGD):
    """Penalises the squared norm of the gradient."""

    name = "model-grad"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        gradient = model.grad(params, batch.x, batch.y)
        return model.loss(params, batch.x, batch.y) + WEIGHT * sum(g.square().sum() for g in gradient.values())


@dataclass(frozen=True)
class FuncGrad(SGD):
    """The same by `torch.func`."""

    name = "func-grad"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        gradient = torch.func.grad(model.loss)(dict(params), batch.x, batch.y)
        return model.loss(params, batch.x, batch.y) + WEIGHT * sum(g.square().sum() for g in gradient.values())


@dataclass(frozen=True)
class Draws(SGD):
    """Draws in `init` and before every epoch."""

    name = "draws"

    def init(self, model: Any, params: Any, example: Any) -> Any:
        return {"mask": {k: (torch.rand_like(p) < 0.5).to(p.dtype) for k, p in params.items()}}

    def before_epoch(self, model: Any, params: Any, memory: Any, epoch: int, epochs: int) -> Any:
        return {k: p + 0.05 * torch.randn_like(p) for k, p in params.items()}, memory

    def direction(self, model: Any, grads: Any, params: Any, memory: Any, batch: Any) -> Any:
        return {k: g * memory["mask"][k] for k, g in grads.items()}


def small_challenge() -> glocal.Challenge:
    draw = np.random.default_rng(0)
    tasks: Any = [((draw.normal(size=(20, 4)), draw.integers(3, size=20)),) * 2 for _ in range(2)]
    return challenges.from_tasks("small", tasks, setting="domain")


def linear(shape: Any, outputs: int) -> nn.Module:
    return nn.Linear(shape[0], outputs)


def distances(algorithm: Any, seeds: list[int], seed: int) -> list[float]:
    """Train a step per task, and return the run's distances from θ_0."""
    options: dict[str, Any] = {"network": linear, "epochs": 1, "batch_size": 20}
    runs = glocal.sweep(small_challenge(), [algorithm], [LR], seeds, **options)
    return [float(x) for x in next(run for run in runs if run.seed == seed).arrays["distance_from_init"]]


@pytest.mark.parametrize("algorithm", [ModelGrad(), FuncGrad()])
@pytest.mark.parametrize("seeds", [[2], [1, 2]])
def test_gradients_in_an_objective_are_differentiated(algorithm: Any, seeds: list[int]) -> None:
    """A step's length is lr ‖∇(L + w ‖∇L‖²)‖, here by plain PyTorch."""
    challenge = small_challenge()
    network, data = seeded_network(linear, challenge, 2), challenge.task(0, 2).train
    params = list(network.parameters())
    loss = functional.cross_entropy(network(data.x), data.y)
    gradient = torch.autograd.grad(loss, params, create_graph=True)
    penalised = loss + WEIGHT * sum(g.square().sum() for g in gradient)
    step = torch.cat([g.flatten() for g in torch.autograd.grad(penalised, params)]).norm()
    assert distances(algorithm, seeds, 2)[0] == pytest.approx(LR * float(step), rel=1e-5)


def test_what_an_algorithm_draws_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = distances(Draws(), [2], 2)
    torch.manual_seed(7)
    assert distances(Draws(), [1, 2], 2) == pytest.approx(first, rel=1e-6)
    assert distances(Draws(), [1], 1) != pytest.approx(first, rel=1e-3)
