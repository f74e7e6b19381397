r"""The dual of a projection onto half-spaces: a quadratic programme with one variable a constraint,

    min_{z ≥ 0} ½ zᵀQz + qᵀz   ⇔   w = Qz + q,   z ≥ 0,   w ≥ 0,   zᵀw = 0,

followed from a problem whose solution is plain to the one that is asked for (parametric principal pivoting; Cottle,
Pang & Stone 1992, §4.5): with q + λ1 in place of q and λ large it is z = 0, and while λ falls to 0 it moves along
straight lines. Where two of them meet, one w_k has come down to 0 and z_k begins to grow, or the other way round: one
pivot of the tableau. So the solution is exact after finitely many pivots, each a few operations on a small matrix that
look at no number: they can be mapped and captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIVOTS = 3
"""Pivots a variable. Gradients need about one and seldom two; a path not ended by then is left with w ≥ −λ, λ small."""
RIDGE = 1e-12
"""Added to the diagonal, scaled to 1: dependent gradients keep pivots that rounding cannot turn negative."""


def multipliers(gram: Tensor, overlaps: Tensor, margin: float | Tensor, damping: float | Tensor) -> Tensor:
    """argmin_{v ≥ margin} ½ vᵀ(G + damping I)v + oᵀv, for G = MMᵀ and o = Mg: g + Mᵀv is the projected g."""
    quadratic = gram + damping * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return margin + least(quadratic, overlaps + margin * quadratic.sum(-1))


def least(quadratic: Tensor, linear: Tensor) -> Tensor:
    """argmin_{z ≥ 0} ½ zᵀQz + qᵀz, for Q positive semi-definite; float64 is advised."""
    n = linear.shape[-1]
    size = quadratic.diagonal()
    scale = torch.where(size > 0, size, 1).rsqrt()
    unit = quadratic * scale * scale.unsqueeze(-1) + RIDGE * torch.eye(n, dtype=size.dtype, device=size.device)
    table = torch.cat([unit, (linear * scale).unsqueeze(-1), torch.ones_like(unit[:, :1])], -1)
    grown = torch.zeros_like(size, dtype=torch.bool)
    places = torch.arange(n + 2, device=size.device)
    for _ in range(PIVOTS * n):
        height, k = _next_meeting(table)
        pivot = (places == k) & (height > 0)
        table, grown = _exchange(table, pivot, k), grown ^ pivot[:n]
    height, _ = _next_meeting(table)
    constant, slope = table[:, n], table[:, n + 1]
    return torch.where(grown, (constant + height.clamp(min=0) * slope).clamp(min=0), 0) * scale


def _next_meeting(table: Tensor) -> tuple[Tensor, Tensor]:
    """The largest λ at which some basic variable, constant + λ slope, comes down to 0 as λ falls, and which it is."""
    constant, slope = table[:, -2], table[:, -1]
    lowest, k = torch.where(slope > 0, constant / slope, torch.inf).min(-1)
    return -lowest, k


def _exchange(table: Tensor, pivot: Tensor, k: Tensor) -> Tensor:
    """Solve row k for its non-basic variable and put that into the other rows; nothing, where no pivot is marked."""
    n = table.shape[0]
    row, column = table.index_select(0, k.view(1)), table.index_select(1, k.view(1))
    value = row.index_select(1, k.view(1))
    crossed = pivot | pivot[:n].unsqueeze(-1)
    row, column = torch.where(pivot, -1, row), torch.where(pivot[:n].unsqueeze(-1), 1, column)
    return torch.where(crossed, 0, table) - torch.where(pivot.any(), column, 0) * (row / value)
