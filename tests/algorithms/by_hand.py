"""Train the first run of a cohort with a plain loop, given the engine's data order and random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from glocal.engine.cohort import Cohort, seeded_network
from glocal.rng import generator


def network(cohort: Cohort) -> nn.Module:
    """Return the run's network at θ_0."""
    return seeded_network(cohort.make_network, cohort.challenge, cohort.members[0].seed).train()


def steps(cohort: Cohort, task: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the batches of all epochs of a task, with their uniform random numbers."""
    seed, uniforms = cohort.members[0].seed, cohort.algorithm.uniforms(cohort.model(vectorised=False))
    x, y = cohort.challenge.task(task, seed).train
    for epoch in range(cohort.epochs):
        order = torch.randperm(len(y), generator=generator(seed, "order", task, epoch)).split(cohort.batch_size)
        random = torch.rand(len(order), uniforms, generator=generator(seed, "buffer", task, epoch))
        for rows, numbers in zip(order, random, strict=True):
            yield x[rows], y[rows], numbers


def consolidation(cohort: Cohort, task: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a task's data with one uniform random number per example."""
    seed = cohort.members[0].seed
    x, y = cohort.challenge.task(task, seed).train
    return x, y, torch.rand(len(y), generator=generator(seed, "consolidate", task))


def gradient(module: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def follow(module: nn.Module, direction: Tensor, lr: float) -> None:
    """Apply θ ← θ − lr · direction."""
    with torch.no_grad():
        sizes = [p.numel() for p in module.parameters()]
        for p, part in zip(module.parameters(), direction.split(sizes), strict=True):
            p.sub_(lr * part.view_as(p))


def algorithm_r(kept: list, new: Sequence, seen: int, slots: int, random: Tensor) -> int:
    """Add items to a reservoir one by one and return the updated count."""
    for item, u in zip(new, random.tolist(), strict=True):
        if len(kept) < slots:
            kept.append(item)
        elif int(u * (seen + 1)) < slots:
            kept[int(u * (seen + 1))] = item
        seen += 1
    return seen


def drawn(kept: list, count: int, random: Tensor) -> list:
    """Return the filled slots with the smallest random numbers."""
    return [kept[i] for i in random[: len(kept)].argsort()[:count].tolist()]


def stacked(items: list) -> list[Tensor]:
    return [torch.stack(tensors) for tensors in zip(*items, strict=True)]


def assert_same_network(module: nn.Module, params: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Assert that the first run's parameters equal the module's."""
    for name, p in module.named_parameters():
        torch.testing.assert_close(params[name][0], p.detach(), rtol=tolerance, atol=tolerance)
