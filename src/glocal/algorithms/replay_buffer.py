"""Episodic memory: a buffer of stored examples, shared by the replay algorithms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from glocal import rng
from glocal.algorithms.algorithm import Approximation, Batch, Memory
from glocal.networks.model import Model


class Replay(NamedTuple):
    """Examples drawn from a buffer; `slot` is the buffer row of each. The weight is 1, or 0 where the row is empty."""

    x: Tensor
    y: Tensor
    weight: Tensor
    slot: Tensor


def empty(slots: int, example: Batch) -> Memory:
    """Return an empty buffer. It has one row more than slots, which receives rejected writes and is never read.

    Empty rows pass through the network with weight 0. They hold an example, for zeros may be no valid input, and their
    loss not finite.
    """
    rows = slots + 1
    device = example.y.device
    return {
        "x": example.stored[:1].repeat(rows, *[1] * (example.stored.dim() - 1)),
        "y": example.y[:1].repeat(rows, *[1] * (example.y.dim() - 1)),
        "task": torch.full((rows,), -1, dtype=torch.long, device=device),
        "count": torch.zeros((), dtype=torch.long, device=device),
    }


def reservoir(memory: Memory, batch: Batch, **extra: Tensor) -> Memory:
    """Add a batch; once the buffer is full, example n (from 0) takes slot j ~ U{0, …, n} if j < slots (Vitter's R)."""
    slots, count = memory["task"].shape[0] - 1, batch.y.shape[0]
    order = torch.arange(count, device=batch.y.device)
    n = memory["count"] + order
    words = rng.words(rng.fold_in(batch.key, "reservoir"), count)
    slot = torch.where(n < slots, n, rng.below(n + 1, words).clamp(max=slots))
    # Of examples with the same slot the last wins. Rejected ones get distinct places: atomics on one would serialise.
    place = torch.where(slot < slots, slot, slots + order)
    last = order.new_zeros(slots + count).scatter_reduce(0, place, order, "amax")
    return write(memory, batch, torch.where(last.gather(0, place) == order, slot, slots), **extra)


def write(memory: Memory, batch: Batch, slot: Tensor, **extra: Tensor) -> Memory:
    """Write a batch, and values that are stored with it, to slots in place; only the spare row may occur twice."""
    return {
        **{k: put(memory[k], slot, values) for k, values in {"x": batch.stored, "y": batch.y, **extra}.items()},
        "task": memory["task"].index_put_((slot,), batch.task.expand_as(slot)),
        "count": memory["count"] + batch.y.shape[0],
    }


def draw(memory: Memory, count: int, key: Tensor, ordered: bool = False) -> Replay:
    """Draw `count` filled slots (or all) without replacement.

    With `ordered`, they are in random order; otherwise their order is unspecified.
    """
    filled = memory["task"][:-1] >= 0
    rank = torch.where(filled, rng.words(key, filled.shape[0]), torch.iinfo(torch.long).min)
    slot = rank.topk(min(count, filled.shape[0]), sorted=ordered).indices
    return Replay(take(memory["x"], slot), take(memory["y"], slot), filled[slot].float(), slot)


def sample_replay(model: Model, batch: Batch, memory: Memory, count: int, key: Tensor) -> Replay:
    """Draw a replay batch for a forward pass, augmented anew.

    BatchNorm's statistics include rows of weight 0, so with BatchNorm such rows are copied from the current batch.
    """
    # Augmentation uses random numbers by position, so the order must not depend on the device.
    replay = draw(memory, count, key, ordered=model.transform.augmentation is not None)
    if model.has_batchnorm:
        substitutes = torch.arange(replay.weight.shape[0], device=batch.y.device) % batch.y.shape[0]
        stored = (replay.weight > 0).view(-1, *[1] * (batch.x.dim() - 1))
        replay = replay._replace(x=torch.where(stored, replay.x, take(batch.stored, substitutes)))
    return replay._replace(x=model.prepare(replay.x))


def task_loss(model: Model, memory: Memory, task: int) -> Approximation:
    r"""Return \hat L_o of Eq. replay-approx, (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ) over the stored examples S_o."""
    stored = (memory["task"][:-1] == task).float()
    return lambda params: model.loss(params, memory["x"][:-1], memory["y"][:-1], stored)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows], rows copied as a whole: under `vmap`, indexing copies their elements one by one."""
    return embedding(rows, x.reshape(x.shape[0], -1)).reshape(*rows.shape, *x.shape[1:])


def put(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Set x[rows] = values in place. The last row receives rejected writes in no fixed order, and is then zeroed."""
    x.index_put_((rows,), values)
    x[-1].zero_()
    return x
