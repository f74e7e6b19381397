"""Products of many matrices on a CPU, whose threads take whole matrices: five on two threads take as long as six."""

from __future__ import annotations

import torch
from torch import Tensor

IDLE = 0.1
"""The part of the time that threads may wait for the last ones."""
WORK = 1 << 24
"""Multiplications of a matrix from which it is worth cutting into parts."""


def lopsided(x: Tensor, y: Tensor) -> bool:
    """Whether threads would be idle for long, and the matrices left over can be cut into equal parts for all."""
    threads, (matrices, rows, inner) = torch.get_num_threads(), x.shape
    last = matrices % threads
    idle = (threads - last) / (matrices + threads - last)
    return last > 0 and idle > IDLE and rows % threads == 0 and rows * inner * y.shape[2] >= WORK


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """x_b y_b for every b: whole matrices as far as they give every thread equally many, then each by its rows."""
    if not lopsided(x, y):
        return torch.bmm(x, y)
    threads = torch.get_num_threads()
    whole = len(x) - len(x) % threads
    out = x.new_empty(*x.shape[:2], y.shape[2])
    if whole:
        torch.bmm(x[:whole], y[:whole], out=out[:whole])
    for left, right, result in zip(x[whole:], y[whole:], out[whole:], strict=True):
        rows = (threads, left.shape[0] // threads)
        torch.bmm(left.unflatten(0, rows), right.expand(threads, -1, -1), out=result.unflatten(0, rows))
    return out
