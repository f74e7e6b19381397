r"""Episodic memory: a buffer of stored examples, shared by the replay algorithms.

Under `vmap`, torch's indexing copies the elements of an example one by one. `take` and `put` view the buffers of all
runs as one table instead and copy whole rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from glocal import rng
from glocal.algorithms.algorithm import Approximation, Batch, Memory
from glocal.networks.model import Model


class Replay(NamedTuple):
    """Examples drawn from a buffer; rows that the buffer could not fill have weight 0."""

    x: Tensor
    y: Tensor
    weight: Tensor
    slot: Tensor


def empty(slots: int, example: Batch) -> Memory:
    """Return an empty buffer. It has one row more than slots, which receives rejected writes and is never read."""
    rows = slots + 1
    device = example.y.device
    return {
        "x": torch.zeros(rows, *example.x.shape[1:], dtype=example.x.dtype, device=device),
        "y": torch.zeros(rows, *example.y.shape[1:], dtype=example.y.dtype, device=device),
        "task": torch.full((rows,), -1, dtype=torch.long, device=device),
        "count": torch.zeros((), dtype=torch.long, device=device),
    }


def reservoir(memory: Memory, batch: Batch) -> Memory:
    """Add a batch by Vitter's algorithm R: example n (from 0) goes to slot n, later to a random one of n + 1 slots."""
    return write(memory, batch, reservoir_slots(memory, batch), memory["count"] + batch.y.shape[0])


def reservoir_slots(memory: Memory, batch: Batch) -> Tensor:
    """Return the slots of a batch's examples in a reservoir; those that are not stored get the spare row."""
    slots, count = memory["task"].shape[0] - 1, batch.y.shape[0]
    order = torch.arange(count, device=batch.y.device)
    n = memory["count"] + order
    words = rng.words(rng.fold_in(batch.key, "reservoir"), count)
    slot = torch.where(n < slots, n, rng.below(n + 1, words).clamp(max=slots))
    # Of examples with the same slot the last wins. Rejected ones get distinct places: atomics on one would serialise.
    place = torch.where(slot < slots, slot, slots + order)
    last = order.new_zeros(slots + count).scatter_reduce(0, place, order, "amax")
    return torch.where(last.gather(0, place) == order, slot, slots)


def write(memory: Memory, batch: Batch, slot: Tensor, count: Tensor) -> Memory:
    """Write a batch to its slots in place and set the count; only the spare row may occur more than once."""
    return {
        "x": put(memory["x"], slot, batch.x),
        "y": put(memory["y"], slot, batch.y),
        "task": memory["task"].index_put_((slot,), batch.task.expand_as(slot)),
        "count": count,
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
    """Draw a replay batch for a forward pass.

    BatchNorm's statistics include rows of weight 0, so with BatchNorm such rows are copied from the current batch.
    """
    # Augmentation uses random numbers by position, so the order must not depend on the device.
    replay = draw(memory, count, key, ordered=model.transform.augmentation is not None)
    if not model.has_batchnorm:
        return replay
    substitutes = torch.arange(replay.weight.shape[0], device=batch.y.device) % batch.y.shape[0]
    stored = (replay.weight > 0).view(-1, *[1] * (batch.x.dim() - 1))
    return replay._replace(x=torch.where(stored, replay.x, take(batch.x, substitutes)))


def task_loss(model: Model, memory: Memory, task: int) -> Approximation:
    r"""Return \hat L_o of Eq. replay-approx, (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ) over the stored examples S_o."""
    stored = (memory["task"][:-1] == task).float()
    return lambda params: model.loss(params, memory["x"][:-1], memory["y"][:-1], stored)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows], not differentiable. Under `vmap` an index beyond the end reads the next run's data, unchecked."""
    return _Take.apply(x, rows)


def put(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Set x[rows] = values in place. The last row receives rejected writes in no fixed order, and is then zeroed."""
    _Put.apply(x, rows, values)
    x[-1].zero_()
    return x


class _Take(Function):
    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, int | None], x: Tensor, rows: Tensor) -> tuple[Tensor, int]:
        if dims[0] is None:
            return take(x, rows.movedim(_known(dims[1]), 0)), 0
        return take(*_one_table(info.batch_size, x, dims[0], rows, dims[1])), 0


class _Put(Function):
    @staticmethod
    def forward(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        if x.is_contiguous() and values.dtype == x.dtype:
            _as_words(x).index_copy_(0, rows, _as_words(values.contiguous()))
        else:
            x.index_copy_(0, rows, values)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, rows: Tensor, values: Tensor
    ) -> tuple[Tensor, int | None]:
        runs = info.batch_size
        values = values.expand(runs, *values.shape) if dims[2] is None else values.movedim(dims[2], 0)
        table, rows = _one_table(runs, x, _known(dims[0]), rows, dims[1])
        _Put.apply(table, rows.flatten(), values.flatten(0, 1))
        by_run = x.movedim(_known(dims[0]), 0)
        if by_run.stride(0) != by_run.shape[1] * by_run.stride(1):  # the table is a copy, not a view
            by_run.copy_(table.unflatten(0, (runs, -1)))
        return x, dims[0]


def _one_table(runs: int, x: Tensor, dim: int, rows: Tensor, rows_dim: int | None) -> tuple[Tensor, Tensor]:
    """Concatenate the rows of all runs, and return each run's row indices in that table."""
    rows = rows.unsqueeze(0) if rows_dim is None else rows.movedim(rows_dim, 0)
    x = x.movedim(dim, 0)
    first = torch.arange(runs, device=rows.device) * x.shape[1]
    return x.flatten(0, 1), rows + first.view(-1, *[1] * (rows.dim() - 1))


def _known(dim: int | None) -> int:
    assert dim is not None
    return dim


def _as_words(x: Tensor) -> Tensor:
    """View the rows as 64-bit words where possible, to copy byte images with an eighth of the operations."""
    flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    divisible = flat.shape[1] * flat.element_size() % 8 == 0 and flat.is_contiguous()
    return flat.view(torch.int64) if divisible and x.device.type == "cpu" else flat
