"""Moving whole examples in and out of a memory, for one run or, mapped, for all runs of a cohort at once.

Mapped, torch's own indexing moves the elements of an example one by one. Here the runs' rows are seen as rows of one
long table, and an example moves as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


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
