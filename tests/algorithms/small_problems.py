"""Tiny models, batches and challenges shared by the algorithm tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from glocal import losses
from glocal.algorithms.algorithm import Algorithm, Batch
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, MakeNetwork, Member
from glocal.engine.loop import Execution, Snapshot, train
from glocal.networks.mlp import MLP, mlp
from glocal.networks.model import Model
from glocal.tree import Params

FEATURES, CLASSES = 5, 3


def small_mlp(shape: Sequence[int], outputs: int) -> nn.Module:
    return mlp(shape, outputs, (16, 12))


def linear_network(shape: Sequence[int], outputs: int) -> nn.Module:
    return mlp(shape, outputs, ())


def double_model(
    tasks: int = 3, loss: str = "cross-entropy", hidden: Sequence[int] = (4,), seed: int = 0
) -> tuple[Model, Params]:
    """Return a tiny MLP in float64 as a `Model`, and its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = MLP(FEATURES, CLASSES, hidden).double()
    return Model(module, losses.get(loss), tasks, batch_size=4), {
        k: p.detach().clone() for k, p in module.named_parameters()
    }


def elsewhere(params: Params, seed: int = 1, by: float = 0.5) -> Params:
    """Return randomly perturbed parameters."""
    draw = torch.Generator().manual_seed(seed)
    return {k: p + by * torch.randn(p.shape, dtype=p.dtype, generator=draw) for k, p in params.items()}


def examples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, FEATURES, dtype=torch.float64, generator=draw), torch.randint(CLASSES, (n,), generator=draw)


def batch_of(data: tuple[Tensor, Tensor], key: int | Tensor = 0, task: int = 0) -> Batch:
    return Batch(*data, torch.tensor(task), torch.as_tensor(key))


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def gradient(value: Callable[[Params], Tensor], params: Params) -> Params:
    """Return ∇ value(params) by autograd."""
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    return dict(zip(leaves, torch.autograd.grad(value(leaves), list(leaves.values())), strict=True))


def flat(params: Params) -> Tensor:
    return torch.cat([p.flatten() for p in params.values()])


def blobs(
    sizes: Sequence[int] = (150, 150), shape: Sequence[int] = (1, 4, 4), classes: int = 4, test: int = 40, seed: int = 0
) -> Challenge:
    """Return noisy classes around centres that move from task to task."""
    draw = torch.Generator().manual_seed(seed)

    def part(n: int, centres: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.arange(n) % classes
        return centres[y] + 0.4 * torch.randn(n, *shape, generator=draw), y

    tasks = []
    for n in sizes:
        centres = torch.randn(classes, *shape, generator=draw)
        tasks.append((part(n, centres), part(test, centres)))
    return from_tasks("blobs", tasks, setting="domain")


def cohort_of(
    challenge: Challenge,
    algorithm: Algorithm,
    runs: Sequence[tuple[int, float]] = ((0, 0.1),),
    network: MakeNetwork = small_mlp,
    epochs: int = 2,
    batch_size: int = 32,
) -> Cohort:
    """Return a cohort of one algorithm with the given (seed, learning rate) pairs."""
    members = tuple(Member(seed, lr, algorithm) for seed, lr in runs)
    return Cohort(challenge, network, members, epochs, batch_size)


def train_to_the_end(cohort: Cohort, execution: Execution = "auto") -> Snapshot:
    *_, last = train(cohort, execution=execution)
    return last


# Linear regression with orthogonal inputs: every loss is a diagonal quadratic, whose optimum is known.


def orthogonal_task(scales: list[float], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return eight inputs with orthogonal, centred columns, and two noisy linear targets."""
    signs = np.array([[(-1) ** bin(row & column).count("1") for column in (1, 2, 4)] for row in range(8)], dtype=float)
    random = np.random.default_rng(seed)
    x = signs * np.array(scales)
    return x, x @ random.normal(size=(3, 2)) + random.normal(size=2) + 0.3 * random.normal(size=(8, 2))


REGRESSIONS = [
    orthogonal_task([1.2, 0.8, 1.0], 0),
    orthogonal_task([0.7, 1.5, 0.9], 1),
    orthogonal_task([1.0, 0.9, 1.4], 2),
]


def normal_equations(task: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return A, b with ∇L(θ) = Aθ − b for the mean of ½‖f − y‖² over a task, the bias last."""
    x, y = task
    design = np.hstack([x, np.ones((len(x), 1))])
    return design.T @ design / len(x), design.T @ y / len(x)


def learnt(algorithm: Algorithm, tasks: list[tuple[np.ndarray, np.ndarray]], epochs: int = 160) -> np.ndarray:
    """Return the linear network after full-batch training on all tasks, weights above bias."""
    challenge = from_tasks("regressions", [(task, task) for task in tasks], setting="domain", loss="squared-error")
    cohort = cohort_of(challenge, algorithm, [(0, 0.2)], network=linear_network, epochs=epochs, batch_size=8)
    params = train_to_the_end(cohort).state.params
    return torch.cat([params["layers.0.weight"][0].T, params["layers.0.bias"]]).numpy()


# Linear regression whose losses are any quadratics, solved in double precision.

RegressionTask = tuple[np.ndarray, np.ndarray]


class Double(nn.Module):
    """A network that converts its inputs to float64."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.double())


def double_linear(shape: Sequence[int], outputs: int) -> nn.Module:
    return Double(linear_network(shape, outputs))


def correlated_task(seed: int, features: int = 3, outputs: int = 2, spans: int | None = None) -> RegressionTask:
    """Return sixteen inputs in a random subspace of `spans` dimensions, and noisy linear targets."""
    random = np.random.default_rng(seed)
    directions = np.eye(features) + 0.25 * random.normal(size=(features, features))
    if spans is not None:
        directions = np.linalg.qr(directions)[0][:spans]
    x = (random.normal(size=(16, len(directions))) @ directions).astype(np.float32)
    noise = 0.3 * random.normal(size=(16, outputs)) if spans is None else 0
    return x, (x @ random.normal(size=(features, outputs)) + noise).astype(np.float32)


def regression_snapshots(
    algorithm: Algorithm, tasks: Sequence[RegressionTask], epochs: int, lr: float = 0.3
) -> tuple[list[Params], Snapshot]:
    """Return θ after every task of full-batch training, and the final snapshot."""
    challenge = from_tasks("regressions", [(task, task) for task in tasks], setting="domain", loss="squared-error")
    cohort = cohort_of(challenge, algorithm, [(0, lr)], network=double_linear, epochs=epochs, batch_size=16)
    solutions = []
    for snapshot in train(cohort):
        solutions.append({k: p[0].clone() for k, p in snapshot.state.params.items()})
    return solutions[1:], snapshot


def regression_matrix(params: Params) -> np.ndarray:
    """Return the weights above the bias, in the order of `normal_equations`."""
    return torch.cat([params["base.layers.0.weight"].T, params["base.layers.0.bias"][None]]).numpy()


def regression_loss(task: RegressionTask, theta: np.ndarray) -> float:
    """Return L(θ), the mean of ½‖f − y‖²."""
    x, y = (part.astype(np.float64) for part in task)
    design = np.hstack([x, np.ones((len(x), 1))])
    return float(((design @ theta - y) ** 2).sum() / 2 / len(x))
