"""The hand-written loop: what one writes in an afternoon with plain PyTorch, without a framework and without waste.

Data are float32 tensors in memory, the network an `nn.Sequential`, the optimiser `torch.optim.SGD`. It runs in a
process of its own, where no other library has touched PyTorch's or MKL's settings.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from benchmarks import setting
from benchmarks.floor import gemm_gflops
from benchmarks.tensors import Task, read, steps_per_epoch
from benchmarks.worker import per_step, serve


class Sgd:
    """Plain SGD, and the skeleton of the others."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for a, b in pairwise(setting.WIDTHS):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.network = nn.Sequential(*layers[:-1])
        self.parameters = list(self.network.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=setting.LEARNING_RATE)

    def epoch(self, x: Tensor, y: Tensor) -> int:
        for rows in torch.randperm(len(y)).split(setting.BATCH):
            self.step(x.index_select(0, rows), y.index_select(0, rows))
        return steps_per_epoch(len(y))

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.network(x), y)

    def finish(self, x: Tensor, y: Tensor) -> None:
        """After a task."""


class Er(Sgd):
    """Experience replay from a reservoir of all examples seen; one forward pass over stream and replay."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.empty(setting.RESERVOIR, setting.WIDTHS[0])
        self.y = torch.empty(setting.RESERVOIR, dtype=torch.long)
        self.seen = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        if self.seen:
            rows = torch.randperm(min(self.seen, setting.RESERVOIR))[: setting.BATCH]
            both = torch.cat([x, self.x.index_select(0, rows)]), torch.cat([y, self.y.index_select(0, rows)])
            super().step(*both)
        else:
            super().step(x, y)
        self.store(x, y)

    def store(self, x: Tensor, y: Tensor) -> None:
        n = torch.arange(self.seen, self.seen + len(y))
        slots = torch.where(n < setting.RESERVOIR, n, (torch.rand(len(y), dtype=torch.double) * (n + 1)).long())
        kept = (slots < setting.RESERVOIR).nonzero().squeeze(1)
        self.x[slots[kept]] = x[kept]
        self.y[slots[kept]] = y[kept]
        self.seen += len(y)


class Ewc(Sgd):
    """Elastic weight consolidation: a diagonal quadratic around the last solution."""

    def __init__(self) -> None:
        super().__init__()
        self.fisher: list[Tensor] = []
        self.anchor: list[Tensor] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        for p, f, a in zip(self.parameters, self.fisher, self.anchor, strict=False):
            loss = loss + setting.EWC_PENALTY * (f * (p - a).square()).sum()
        return loss

    def finish(self, x: Tensor, y: Tensor) -> None:
        params = {k: p.detach().clone() for k, p in self.network.named_parameters()}

        def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(functional_call(self.network, params, (x,)), y)

        each = vmap(grad(one), in_dims=(None, 0, 0))
        fisher = {k: torch.zeros_like(p) for k, p in params.items()}
        for a, b in zip(x.split(100), y.split(100), strict=True):
            for k, g in each(params, a, b).items():
                fisher[k] += g.square().sum(0) / len(y)
        self.fisher, self.anchor = list(fisher.values()), list(params.values())


class Agem(Sgd):
    """A-GEM: the gradient, without its component against the gradient on stored examples."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.empty(0, setting.WIDTHS[0])
        self.y = torch.empty(0, dtype=torch.long)
        self.sizes = [p.numel() for p in self.parameters]

    def step(self, x: Tensor, y: Tensor) -> None:
        if not len(self.y):
            return super().step(x, y)
        rows = torch.randperm(len(self.y))[: setting.BATCH]
        reference = self.gradient(self.x.index_select(0, rows), self.y.index_select(0, rows))
        gradient = self.gradient(x, y)
        overlap = gradient @ reference
        if overlap < 0:
            gradient -= overlap / (reference @ reference) * reference
        for p, part in zip(self.parameters, gradient.split(self.sizes), strict=True):
            p.grad = part.view_as(p)
        self.optimizer.step()

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(self.loss(x, y), self.parameters)])

    def finish(self, x: Tensor, y: Tensor) -> None:
        rows = torch.randperm(len(y))[: setting.STORED_PER_TASK]
        self.x, self.y = torch.cat([self.x, x[rows]]), torch.cat([self.y, y[rows]])


LEARNERS: dict[str, type[Sgd]] = {"sgd": Sgd, "er": Er, "ewc": Ewc, "agem": Agem}


def measure(learner: type[Sgd], tasks: list[Task]) -> float:
    """Learn the first task for an epoch, then time epochs of the second."""
    torch.manual_seed(setting.SEEDS[0])
    made = learner()
    made.epoch(*tasks[0])
    made.finish(*tasks[0])
    return per_step(partial(made.epoch, *tasks[1]), setting.SECONDS)


def main() -> None:
    torch.set_num_threads(setting.THREADS)
    tasks = read(Path(sys.argv[1]))
    contenders = {name: partial(measure, learner, tasks) for name, learner in LEARNERS.items()}
    serve({"torch": torch.__version__}, {**contenders, "gemm": gemm_gflops})


if __name__ == "__main__":
    main()
