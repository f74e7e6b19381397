"""Worker of `benchmarks.step`: the algorithms as hand-written training loops in plain PyTorch.

Data are float32 tensors in memory, the network is an `nn.Sequential`, the optimizer `torch.optim.SGD`. The process
never imports glocal, which changes settings of MKL.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from benchmarks import setting
from benchmarks.setting import BATCH_SIZE, TaskData
from benchmarks.worker import ms_per_step, serve

GEMM_SECONDS = 0.03


class Sgd:
    """Plain SGD, and the base class of the others."""

    def __init__(self) -> None:
        self.network = setting.make_mlp()
        self.parameters = list(self.network.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=setting.LR)

    def epoch(self, x: Tensor, y: Tensor) -> int:
        for indices in torch.randperm(len(y)).split(BATCH_SIZE):
            self.step(x.index_select(0, indices), y.index_select(0, indices))
        return setting.steps_per_epoch(len(y))

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.network(x), y)

    def consolidate(self, x: Tensor, y: Tensor) -> None:
        """Update the memory after a task."""


class Er(Sgd):
    """Experience replay from a reservoir, with one forward pass over the mini-batch and the replay batch."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.empty(setting.ER_SLOTS, setting.WIDTHS[0])
        self.y = torch.empty(setting.ER_SLOTS, dtype=torch.long)
        self.num_seen = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        if self.num_seen:
            indices = torch.randperm(min(self.num_seen, setting.ER_SLOTS))[:BATCH_SIZE]
            replay_x, replay_y = self.x.index_select(0, indices), self.y.index_select(0, indices)
            super().step(torch.cat([x, replay_x]), torch.cat([y, replay_y]))
        else:
            super().step(x, y)
        self.store(x, y)

    def store(self, x: Tensor, y: Tensor) -> None:
        n = torch.arange(self.num_seen, self.num_seen + len(y))
        slots = torch.where(n < setting.ER_SLOTS, n, (torch.rand(len(y), dtype=torch.double) * (n + 1)).long())
        indices = (slots < setting.ER_SLOTS).nonzero().squeeze(1)
        self.x[slots[indices]] = x[indices]
        self.y[slots[indices]] = y[indices]
        self.num_seen += len(y)


class Ewc(Sgd):
    """Elastic weight consolidation: a diagonal quadratic penalty around the previous solution."""

    def __init__(self) -> None:
        super().__init__()
        self.fisher: list[Tensor] = []
        self.solution: list[Tensor] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        for p, f, s in zip(self.parameters, self.fisher, self.solution, strict=False):
            loss = loss + setting.EWC_PENALTY * (f * (p - s).square()).sum()
        return loss

    def consolidate(self, x: Tensor, y: Tensor) -> None:
        params = {k: p.detach().clone() for k, p in self.network.named_parameters()}

        def sample_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(functional_call(self.network, params, (x,)), y)

        per_sample_grads = vmap(grad(sample_loss), in_dims=(None, 0, 0))
        fisher = {k: torch.zeros_like(p) for k, p in params.items()}
        for x_chunk, y_chunk in zip(x.split(100), y.split(100), strict=True):
            for k, g in per_sample_grads(params, x_chunk, y_chunk).items():
                fisher[k] += g.square().sum(0) / len(y)
        self.fisher, self.solution = list(fisher.values()), list(params.values())


class Agem(Sgd):
    """A-GEM: remove the gradient's component that opposes the gradient on stored examples."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.empty(0, setting.WIDTHS[0])
        self.y = torch.empty(0, dtype=torch.long)
        self.sizes = [p.numel() for p in self.parameters]

    def step(self, x: Tensor, y: Tensor) -> None:
        if not len(self.y):
            return super().step(x, y)
        indices = torch.randperm(len(self.y))[:BATCH_SIZE]
        reference = self.gradient(self.x.index_select(0, indices), self.y.index_select(0, indices))
        gradient = self.gradient(x, y)
        overlap = gradient @ reference
        if overlap < 0:
            gradient -= overlap / (reference @ reference) * reference
        for p, part in zip(self.parameters, gradient.split(self.sizes), strict=True):
            p.grad = part.view_as(p)
        self.optimizer.step()

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(self.loss(x, y), self.parameters)])

    def consolidate(self, x: Tensor, y: Tensor) -> None:
        indices = torch.randperm(len(y))[: setting.AGEM_SLOTS_PER_TASK]
        self.x, self.y = torch.cat([self.x, x[indices]]), torch.cat([self.y, y[indices]])


ALGORITHMS: dict[str, type[Sgd]] = {"sgd": Sgd, "er": Er, "ewc": Ewc, "agem": Agem}


def measure(algorithm: type[Sgd], tasks: list[TaskData]) -> float:
    """Learn the first task for an epoch, then time epochs of the second; return milliseconds per step."""
    torch.manual_seed(setting.SEEDS[0])
    learner = algorithm()
    learner.epoch(*tasks[0])
    learner.consolidate(*tasks[0])
    return ms_per_step(partial(learner.epoch, *tasks[1]), setting.MIN_SECONDS)


def gemm_gflops() -> float:
    """Return the highest rate of the forward and the weight-gradient product of the widest layer, in GFLOP/s.

    Each is measured for one network and batched over all runs of a cohort.
    """
    rates = []
    inputs, outputs = setting.WIDTHS[:2]
    for batch_shape in ((), (setting.NUM_RUNS,)):
        x = torch.randn(*batch_shape, BATCH_SIZE, inputs)
        weight = torch.randn(*batch_shape, outputs, inputs)
        output_grad = torch.randn(*batch_shape, outputs, BATCH_SIZE)  # transposed
        work = 2 * (batch_shape or (1,))[0] * BATCH_SIZE * inputs * outputs
        rates += [work / _seconds_per_matmul(x, weight.mT), work / _seconds_per_matmul(output_grad, x)]
    return max(rates) / 1e9


def _seconds_per_matmul(a: Tensor, b: Tensor) -> float:
    out = a @ b
    product: Callable[[], Tensor] = partial(torch.matmul, a, b, out=out)
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < GEMM_SECONDS:
        product()
        calls += 1
    return elapsed / calls


def main() -> None:
    torch.set_num_threads(setting.THREADS)
    tasks = setting.read_tasks(Path(sys.argv[1]))
    measurements = {name: partial(measure, algorithm, tasks) for name, algorithm in ALGORITHMS.items()}
    serve({"torch": torch.__version__}, {**measurements, "gemm": gemm_gflops})


if __name__ == "__main__":
    main()
