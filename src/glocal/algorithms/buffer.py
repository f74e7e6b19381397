r"""An episodic memory: examples of finished tasks, the same for every algorithm that replays them.

Moving whole examples in and out of a memory, for one run or, mapped, for all runs of a cohort at once.

Mapped, torch's own indexing moves the elements of an example one by one. Here the runs' rows are seen as rows of one
long table, and an example moves as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from glocal.algorithms.algorithm import Batch, Memory
from glocal.networks.model import Model


class Replay(NamedTuple):
    """Examples drawn from a buffer. A buffer that holds fewer than were asked for fills up with weight 0."""

    x: Tensor
    y: Tensor
    weight: Tensor
    slot: Tensor


def empty(slots: int, example: Batch) -> Memory:
    """No example in `slots` slots; one row more, never read, takes the writes that reservoir sampling rejects."""
    rows = slots + 1
    device = example.y.device
    return {
        "x": torch.zeros(rows, *example.x.shape[1:], dtype=example.x.dtype, device=device),
        "y": torch.zeros(rows, *example.y.shape[1:], dtype=example.y.dtype, device=device),
        "task": torch.full((rows,), -1, dtype=torch.long, device=device),
        "seen": torch.zeros((), dtype=torch.long, device=device),
    }


def reservoir(memory: Memory, batch: Batch, random: Tensor) -> Memory:
    """Vitter's algorithm R: the n-th example ever seen (n from 0) takes slot n, then slot ⌊u(n+1)⌋ or none."""
    return write(memory, batch, reservoir_slots(memory, random), memory["seen"] + batch.y.shape[0])


def reservoir_slots(memory: Memory, random: Tensor) -> Tensor:
    """Where algorithm R puts the next examples, one uniform number each: their slots, or the spare row."""
    slots, count = memory["task"].shape[0] - 1, random.shape[0]
    order = torch.arange(count, device=random.device)
    n = memory["seen"] + order
    slot = torch.where(n < slots, n, (random.double() * (n + 1)).long().clamp(max=slots))
    # Who of the batch a slot ends up with. Those without one stay out of each other's way: on a GPU they would queue.
    place = torch.where(slot < slots, slot, slots + order)
    last = order.new_zeros(slots + count).scatter_reduce(0, place, order, "amax")
    return torch.where(last.gather(0, place) == order, slot, slots)


def write(memory: Memory, batch: Batch, slot: Tensor, seen: Tensor) -> Memory:
    """Put the batch's examples into their slots, in place; no slot but the spare one may be named twice."""
    return {
        "x": put(memory["x"], slot, batch.x),
        "y": put(memory["y"], slot, batch.y),
        "task": memory["task"].index_put_((slot,), batch.task.expand_as(slot)),
        "seen": seen,
    }


def draw(memory: Memory, count: int, random: Tensor, ordered: bool = False) -> Replay:
    """Uniformly and without replacement, `count` of the filled slots or all of them; one uniform number a slot.

    They come in any order, or in that of their numbers.
    """
    filled = memory["task"][:-1] >= 0
    key = torch.where(filled, random, random + 1)
    chosen = key.topk(min(count, key.shape[-1]), largest=False, sorted=ordered).indices
    return Replay(take(memory["x"], chosen), take(memory["y"], chosen), filled[chosen].to(random.dtype), chosen)


def sample_replay(model: Model, batch: Batch, memory: Memory, count: int, random: Tensor) -> Replay:
    """Examples to go through the network beside, or instead of, the stream's batch.

    Batch statistics see every row, whatever its weight: there the stream's examples stand in for missing ones.
    """
    # Augmentation gives the i-th of a batch the i-th random numbers: which is the i-th must not depend on the device.
    drawn = draw(memory, count, random, ordered=model.transform.augmentation is not None)
    if not model.has_batchnorm:
        return drawn
    repeated = torch.arange(drawn.weight.shape[0], device=batch.y.device) % batch.y.shape[0]
    stored = (drawn.weight > 0).view(-1, *[1] * (batch.x.dim() - 1))
    return drawn._replace(x=torch.where(stored, drawn.x, take(batch.x, repeated)))


def task_loss(model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    r"""Eq. replay-approx: \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ), S_o the stored examples of task o."""
    stored = (memory["task"][:-1] == task).float()
    return lambda params: model.loss(params, memory["x"][:-1], memory["y"][:-1], stored)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], of numbers that nobody differentiates. Mapped, nobody checks that the rows are there: the next ones are
    another run's."""
    return _Take.apply(x, rows)


def put(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """x[rows] = values, in place. The last row takes whatever is not kept, several at once: it is left empty, for which
    of them came last is chance."""
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
            return take(x, rows.movedim(_number(dims[1]), 0)), 0
        return take(*_one_table(info.batch_size, x, dims[0], rows, dims[1])), 0


class _Put(Function):
    @staticmethod
    def forward(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        if x.is_contiguous() and values.dtype == x.dtype:
            _words(x).index_copy_(0, rows, _words(values.contiguous()))
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
        table, rows = _one_table(runs, x, _number(dims[0]), rows, dims[1])
        _Put.apply(table, rows.flatten(), values.flatten(0, 1))
        own = x.movedim(_number(dims[0]), 0)
        if own.stride(0) != own.shape[1] * own.stride(1):  # then the table is a copy
            own.copy_(table.unflatten(0, (runs, -1)))
        return x, dims[0]


def _one_table(runs: int, x: Tensor, dim: int, rows: Tensor, rows_dim: int | None) -> tuple[Tensor, Tensor]:
    """All runs' rows below each other, and where their own rows are found there, one line of numbers a run."""
    own = rows.unsqueeze(0) if rows_dim is None else rows.movedim(rows_dim, 0)
    x = x.movedim(dim, 0)
    first = torch.arange(runs, device=rows.device) * x.shape[1]
    return x.flatten(0, 1), own + first.view(-1, *[1] * (own.dim() - 1))


def _number(dim: int | None) -> int:
    assert dim is not None
    return dim


def _words(x: Tensor) -> Tensor:
    """A row as 64-bit words, where it can be seen so: an image of bytes is copied in an eighth of the steps."""
    flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    whole = flat.shape[1] * flat.element_size() % 8 == 0 and flat.is_contiguous()
    return flat.view(torch.int64) if whole and x.device.type == "cpu" else flat
