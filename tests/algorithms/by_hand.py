"""Train the first run of a cohort with a plain loop, given the engine's data order and random keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn

from glocal.engine.cohort import Cohort, seeded_network
from glocal.rng import generator


def network(cohort: Cohort) -> nn.Module:
    """Return the run's network at θ_0."""
    return seeded_network(cohort.make_network, cohort.challenge, cohort.members[0].seed).train()


def steps(cohort: Cohort, task: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the batches of all epochs of a task, with their random keys."""
    seed = cohort.members[0].seed
    x, y = cohort.challenge.task(task, seed).train
    for epoch in range(cohort.epochs):
        order = torch.randperm(len(y), generator=generator(seed, "order", task, epoch)).split(cohort.batch_size)
        for rows, key in zip(order, _keys(cohort, task, epoch)[:-1], strict=True):
            yield x[rows], y[rows], key


def consolidation(cohort: Cohort, task: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a task's data with its random key."""
    x, y = cohort.challenge.task(task, cohort.members[0].seed).train
    return x, y, _keys(cohort, task, cohort.epochs - 1)[-1]


def _keys(cohort: Cohort, task: int, epoch: int) -> Tensor:
    """Return the keys of all steps of an epoch, and one more for consolidation."""
    seed = cohort.members[0].seed
    steps = -(-len(cohort.challenge.task(task, seed).train.y) // cohort.batch_size)
    return torch.randint(2**63 - 1, (steps + 1,), generator=generator(seed, "step", task, epoch))


def words(key: int | Tensor, purpose: str, n: int) -> list[int]:
    """Return n words of SplitMix64, with Python's integers."""
    state, result = int(key) + int.from_bytes(sha256(purpose.encode()).digest()[:8], "big"), []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        result.append(z ^ (z >> 31))
    return result


def uniforms(key: int | Tensor, purpose: str, n: int) -> Tensor:
    """Return n uniform numbers: the upper 24 bits of every word."""
    return torch.tensor([(word >> 40) / 2**24 for word in words(key, purpose, n)])


def chosen(key: int | Tensor, purpose: str, n: int, count: int) -> list[int]:
    """Return the positions of the largest of n words, read as signed integers."""
    ranks = [word if word < 2**63 else word - 2**64 for word in words(key, purpose, n)]
    return sorted(range(n), key=lambda i: -ranks[i])[:count]


def gradient(module: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def follow(module: nn.Module, direction: Tensor, lr: float) -> None:
    """Apply θ ← θ − lr · direction."""
    with torch.no_grad():
        sizes = [p.numel() for p in module.parameters()]
        for p, part in zip(module.parameters(), direction.split(sizes), strict=True):
            p.sub_(lr * part.view_as(p))


def algorithm_r(kept: list, new: Sequence, seen: int, slots: int, key: int | Tensor) -> int:
    """Add items to a reservoir one by one and return the updated count."""
    for item, word in zip(new, words(key, "reservoir", len(new)), strict=True):
        slot = (word >> 32) * (seen + 1) >> 32
        if len(kept) < slots:
            kept.append(item)
        elif slot < slots:
            kept[slot] = item
        seen += 1
    return seen


def drawn(kept: list, count: int, key: int | Tensor, purpose: str = "replay") -> list:
    """Return the filled slots that are drawn."""
    return [kept[i] for i in chosen(key, purpose, len(kept), count)]


def stacked(items: list) -> list[Tensor]:
    return [torch.stack(tensors) for tensors in zip(*items, strict=True)]


def assert_same_network(module: nn.Module, params: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Assert that the first run's parameters equal the module's."""
    for name, p in module.named_parameters():
        torch.testing.assert_close(params[name][0], p.detach(), rtol=tolerance, atol=tolerance)
