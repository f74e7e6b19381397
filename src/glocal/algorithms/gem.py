r"""Gradient episodic memory (§5.1, Eq. GEM-obj): one constraint for every finished task.

The dual of a projection onto half-spaces: a quadratic programme with one variable a constraint,

    min_{z ≥ 0} ½ zᵀQz + qᵀz   ⇔   w = Qz + q,   z ≥ 0,   w ≥ 0,   zᵀw = 0,

followed from a problem whose solution is plain to the one that is asked for (parametric principal pivoting; Cottle,
Pang & Stone 1992, §4.5): with q + λ1 in place of q and λ large it is z = 0, and while λ falls to 0 it moves along
straight lines. Where two of them meet, one w_k has come down to 0 and z_k begins to grow, or the other way round: one
pivot of the tableau. So the solution is exact after finitely many pivots, each a few operations on a small matrix that
look at no number: they can be mapped and captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.buffer import take
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class GEM(Algorithm):
    r"""Minimises L_t without raising, to first order, any \hat L_o, o < t:

        d = argmin ‖d − g‖²  s.t.  d·m_o ≥ 0,   m_o = ∇\hat L_o(θ) on all that is stored of task o,

    found as d = g + Mᵀv, v = argmin_{v ≥ margin} ½ vᵀ(MMᵀ + damping I)v + (Mg)ᵀv, where some m_o·g < 0, else d = g.
    With margin = damping = 0, the default, that is the projection above, whatever the gradients' lengths.
    Lopez-Paz & Ranzato (2017) favour backward transfer by a margin: their numbers, and Mammoth's on rotated digits, go
    with `margin=0.5, damping=0.001`.

    \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ). It is linearised at the current θ, not at θ_o: global.
    """

    name: ClassVar[str] = "gem"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples, an equal share of them for every task"
    memory_size: ClassVar[str] = "slots examples"

    slots: int = 500
    """Examples the memory holds after the last task."""
    margin: float = 0.0
    """How much of every task's gradient is added at least, once one of them is violated."""
    damping: float = 0.0
    """Added to the diagonal of MMᵀ: constraints of gradients much shorter than its root are let go."""

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"gem needs slots of at least 1; {self.slots} was given.")
        require(self.margin >= 0, f"gem needs a margin of at least 0; {self.margin} was given.")
        require(self.damping >= 0, f"gem needs a damping of at least 0; {self.damping} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        enough = self.slots >= model.tasks
        require(enough, f"gem with slots={self.slots} cannot hold one example of each of {model.tasks} tasks.")
        share = self.slots // model.tasks
        return {
            "x": example.x.new_zeros(0, share, *example.x.shape[1:]),
            "y": example.y.new_zeros(0, share, *example.y.shape[1:]),
            "weight": example.random.new_zeros(0, share),  # 0 where a task has fewer examples than its share
        }

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        if memory["y"].shape[0] == 0:
            return grads
        past = self._gradients(model, params, memory)
        products = _products(past, grads)
        gram, overlaps = products[:-1, :-1], products[:-1, -1]
        v = multipliers(gram, overlaps, self.margin, self.damping)
        v = torch.where((overlaps < 0).any(), v, 0)
        return {k: g + _combination(v.to(g.dtype), past[k]) for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        share = self.slots // model.tasks
        chosen = data.random.topk(min(share, data.y.shape[0])).indices
        place = torch.arange(share, device=data.y.device)
        rows = chosen[place % chosen.shape[0]]
        new = {"x": take(data.x, rows), "y": take(data.y, rows), "weight": (place < chosen.shape[0]).to(data.random)}
        return {k: torch.cat([memory[k], part.unsqueeze(0)]) for k, part in new.items()}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda params: model.loss(params, memory["x"][task], memory["y"][task], memory["weight"][task])

    @staticmethod
    def _gradients(model: Model, params: Params, memory: Memory) -> Params:
        """∇\\hat L_o(θ) of every finished task, stacked."""
        # Prepared together, so that mapped or not the same examples come out.
        x = model.prepare(memory["x"].flatten(0, 1)).unflatten(0, memory["y"].shape[:2])
        stored = x, memory["y"], memory["weight"]
        if model.vectorised and not model.buffers:
            return vmap(model.grad, in_dims=(None, 0, 0, 0))(params, *stored)
        # Buffers pass from task to task, and what runs run by run need not be a network that can be mapped.
        each = [model.grad(params, x, y, weight) for x, y, weight in zip(*stored, strict=True)]
        return {k: torch.stack([grads[k] for grads in each]) for k in params}


def _products(past: Params, grads: Params) -> Tensor:
    """The inner products of all m_o and, last, g: in float64, for they square the condition number."""
    parts = []
    for k, g in grads.items():
        # Products of a layer's rows side by side: one long one is slow on a GPU.
        rows = g.shape[0] if g.dim() > 1 else 1
        both = torch.cat([past[k], g.unsqueeze(0)]).double().reshape(-1, rows, g.numel() // rows).transpose(0, 1)
        parts.append(both @ both.mT)
    return torch.cat(parts).sum(0)


def _combination(v: Tensor, rows: Tensor) -> Tensor:
    """Σ_o v_o m_o, task by task: in this order it is the same number alone and in a cohort."""
    combined = v[0] * rows[0]
    for o in range(1, rows.shape[0]):
        combined = combined + v[o] * rows[o]
    return combined


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
