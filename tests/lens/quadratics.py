"""What the tests of forgetting and curvature share: subjects whose losses are known quadratics, and a small network.

The quadratics are linear regressions, L(θ) = ½ mean ‖W x − y‖², so that H = I ⊗ XᵀX / n for any θ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.training_trace import Checkpoint, TrainingTrace
from glocal.losses import get
from glocal.networks.mlp import MLP
from glocal.tree import from_vector, to_vector

FEATURES, OUTPUTS, EXAMPLES = 4, 2, 12


class Quadratics(NamedTuple):
    """A trace, and beside it all that numpy needs to know of it."""

    trace: TrainingTrace
    data: list[tuple[np.ndarray, np.ndarray]]
    thetas: list[np.ndarray]  # θ_0 … θ_N, each (P,)

    def loss(self, o: int, theta: np.ndarray) -> float:
        x, y = self.data[o]
        return float(((x @ theta.reshape(y.shape[1], -1).T - y) ** 2).sum() / 2 / len(x))

    def hessian(self, o: int) -> np.ndarray:
        x, y = self.data[o]
        return np.kron(np.eye(y.shape[1]), x.T @ x / len(x))

    def gradient(self, o: int, theta: np.ndarray) -> np.ndarray:
        x, y = self.data[o]
        return ((x @ theta.reshape(y.shape[1], -1).T - y).T @ x / len(x)).reshape(-1)

    def solution(self, o: int) -> np.ndarray:
        return self.thetas[o + 1]

    def update(self, t: int) -> np.ndarray:
        return self.thetas[t + 1] - self.thetas[t]


def of_data(data: list[tuple[np.ndarray, np.ndarray]], thetas: Sequence[np.ndarray]) -> Quadratics:
    features, outputs = data[0][0].shape[1], data[0][1].shape[1]
    module = nn.Linear(features, outputs, bias=False).double()
    states = [{"weight": torch.from_numpy(theta.reshape(outputs, features))} for theta in thetas]
    tasks = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]
    return Quadratics(trace_checkpoints(module, "squared-error", tasks, states), data, list(thetas))


def anywhere(seed: int, tasks: int = 4, spans: int = FEATURES, step: float = 1.0) -> Quadratics:
    """Tasks with inputs in random subspaces of `spans` dimensions, and solutions that have nothing to do with them."""
    draw = np.random.default_rng(seed)
    data, thetas = [], [draw.normal(size=FEATURES * OUTPUTS)]
    for _ in range(tasks):
        x = draw.normal(size=(EXAMPLES, spans)) @ draw.normal(size=(spans, FEATURES))
        data.append((x, draw.normal(size=(EXAMPLES, OUTPUTS))))
        thetas.append(thetas[-1] + step * draw.normal(size=FEATURES * OUTPUTS))
    return of_data(data, thetas)


def apart(seed: int, tasks: int = 3, strays: float = 0.0) -> Quadratics:
    """Every task has two input dimensions of its own, and every solution is its minimum, reached without touching those
    of others: nothing is forgotten. With `strays` the last update moves in the first task's dimensions too."""
    draw = np.random.default_rng(seed)
    size = 2 * tasks + 1
    axes, _ = np.linalg.qr(draw.normal(size=(size, size)))
    data, thetas = [], [draw.normal(size=size * OUTPUTS)]
    for t in range(tasks):
        own = axes[2 * t : 2 * t + 2]
        x, y = draw.normal(size=(EXAMPLES, 2)) @ own, draw.normal(size=(EXAMPLES, OUTPUTS))
        before = thetas[-1].reshape(OUTPUTS, size)
        optimum = np.linalg.lstsq(x, y, rcond=None)[0].T
        free = 0.3 * np.outer(draw.normal(size=OUTPUTS), axes[-1])  # where no task looks
        thetas.append((before - before @ own.T @ own + optimum + free).reshape(-1))
        data.append((x, y))
    thetas[-1] = thetas[-1] + strays * np.outer(draw.normal(size=OUTPUTS), axes[0]).reshape(-1)
    return of_data(data, thetas)


def network(
    seed: int = 0, tasks: int = 3, step: float = 0.3, loss: str = "cross-entropy", dtype: torch.dtype = torch.float64
) -> TrainingTrace:
    """A tanh network, random tasks and a random walk."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(MLP(5, 4, ()), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    start = {k: p.detach().clone() for k, p in module.named_parameters()}
    walk = [to_vector(start)]
    for _ in range(tasks):
        walk.append(walk[-1] + step * torch.randn(walk[0].shape, dtype=torch.float64, generator=draw).to(dtype))
    data = []
    for _ in range(tasks):
        x = torch.randn(15, 5, dtype=torch.float64, generator=draw).to(dtype)
        y = torch.randint(3, (15,), generator=draw)
        data.append((x, y if loss == "cross-entropy" else torch.eye(3, dtype=dtype)[y]))
    return trace_checkpoints(module, get(loss), data, [from_vector(theta, start) for theta in walk])


def at(trace: TrainingTrace, theta: Tensor) -> Checkpoint:
    point = trace.checkpoints[0]
    return Checkpoint(from_vector(theta, point.params), point.buffers)


def theta_of(trace: TrainingTrace, task: int) -> Tensor:
    return to_vector(trace.checkpoints[task + 1].params)


def dense_hessian(trace: TrainingTrace, task: int) -> Tensor:
    """H_o at θ_o, by plain autograd."""
    return torch.autograd.functional.hessian(lambda theta: trace.value(task, at(trace, theta)), theta_of(trace, task))


def diverged(trace: TrainingTrace, point: int) -> TrainingTrace:
    """The same with parameters beyond numbers at one point."""
    points = list(trace.checkpoints)
    params = {k: torch.full_like(p, torch.nan) for k, p in points[point].params.items()}
    points[point] = Checkpoint(params, points[point].buffers)
    return TrainingTrace(trace.module, trace.loss, trace.tasks, points)
