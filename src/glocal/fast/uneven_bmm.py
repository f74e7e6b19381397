"""Products of many matrices on a CPU, whose threads take whole matrices: five on two threads take as long as six."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IDLE = 0.1
"""The part of the time that threads may wait for the last ones."""
WORK = 1 << 23
"""Multiplications of a matrix from which it is worth cutting into parts."""


def lopsided(x: Tensor, y: Tensor) -> bool:
    """Whether threads would be idle for long, and the matrices left over can be cut into equal parts for all."""
    threads, (matrices, rows, inner) = torch.get_num_threads(), x.shape
    last = matrices % threads
    idle = (threads - last) / (matrices + threads - last)
    return last > 0 and idle > IDLE and rows % threads == 0 and rows * inner * y.shape[2] >= WORK


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """x_b y_b for every b."""
    return _in_parts(torch.bmm, [x], y, None) if lopsided(x, y) else torch.bmm(x, y)


def baddbmm(a: Tensor, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """a_b + x_b y_b for every b."""
    return _in_parts(torch.baddbmm, [a, x], y, out) if lopsided(x, y) else torch.baddbmm(a, x, y, out=out)


def _in_parts(product: Callable[..., Any], rows: list[Tensor], y: Tensor, out: Tensor | None) -> Tensor:
    """Whole matrices as far as they give every thread equally many, then each of the others by its rows."""
    threads, left = torch.get_num_threads(), rows[-1]
    whole = len(left) - len(left) % threads
    out = left.new_empty(*left.shape[:2], y.shape[2]) if out is None else out
    if whole:
        product(*(t[:whole] for t in rows), y[:whole], out=out[:whole])
    for b in range(whole, len(left)):
        parts = [t[b].unflatten(0, (threads, -1)) for t in (*rows, out)]
        product(*parts[:-1], y[b].expand(threads, -1, -1), out=parts[-1])
    return out
