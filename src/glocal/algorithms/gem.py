r"""Gradient episodic memory (§5.1, Eq. GEM-obj): GEM has a constraint per finished task, A-GEM one for all. Global.

The dual of GEM's projection is a quadratic programme with one variable per constraint,

    min_{z ≥ 0} ½ zᵀQz + qᵀz   ⇔   w = Qz + q,   z ≥ 0,   w ≥ 0,   zᵀw = 0.

It is solved by parametric principal pivoting (Cottle, Pang & Stone 1992, §4.5): replace q by q + λ1. For large λ the
solution is z = 0, and it is piecewise linear in λ as λ falls to 0. At every breakpoint one w_k or z_k reaches 0, and
one pivot of the tableau exchanges the two. The method is exact after finitely many pivots and has no data-dependent
control flow, so it can be vectorised with `vmap` and captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from glocal import rng
from glocal.algorithms import replay_buffer
from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Bounds, Locality, Memory
from glocal.algorithms.replay_buffer import take
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params, inner


@dataclass(frozen=True)
class GEM(Algorithm):
    r"""Minimise L_t without increasing, to first order, any \hat L_o, o < t:

        d = argmin ‖d − g‖²  s.t.  d·m_o ≥ 0,   m_o = ∇\hat L_o(θ) on all stored examples of task o.

    If some m_o·g < 0, d = g + Mᵀv with v = argmin_{v ≥ margin} ½ vᵀ(MMᵀ + damping I)v + (Mg)ᵀv; otherwise d = g. With
    margin = damping = 0, the default, this is the projection above. Lopez-Paz & Ranzato (2017), and Mammoth on
    Rotated-MNIST, use `margin=0.5, damping=0.001`.

    \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ) is linearised at the current θ, not at θ_o: global.
    The constraint holds for d, which is the step of plain SGD. Momentum, weight decay and Adam step elsewhere.

    With BatchNorm, the stored examples of every task pass after the stream's batch, in training mode, and update the
    running statistics. The published code passes them before it. Gradients in training mode do not use running
    statistics, so parameters are the same in both orders; only evaluation differs. Ours is also A-GEM's published
    order.
    """

    name: ClassVar[str] = "gem"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples, equally many per task"
    memory_size: ClassVar[str] = "slots examples"
    at_least: ClassVar[Bounds] = {"slots": 1, "margin": 0, "damping": 0}

    slots: int = 500
    """Number of stored examples after the last task."""
    margin: float = 0.0
    """Lower bound of all v_o in steps that violate a constraint; larger values favour backward transfer."""
    damping: float = 0.0
    """Value added to the diagonal of MMᵀ; it weakens the constraints of tasks with ‖m_o‖ ≪ √damping."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        enough = self.slots >= model.tasks
        require(enough, f"gem with slots={self.slots} cannot store an example of each of {model.tasks} tasks.")
        share = self.slots // model.tasks
        return {
            "x": example.stored.new_zeros(0, share, *example.stored.shape[1:]),
            "y": example.y.new_zeros(0, share, *example.y.shape[1:]),
            "weight": torch.zeros(0, share, device=example.y.device),  # 0 where a task has fewer examples
        }

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        if memory["y"].shape[0] == 0:
            return grads
        model.statistics = "every pass"  # after the stream's batch, task by task: see the class
        past = self._gradients(model, params, memory)
        products = _products(past, grads)
        gram, overlaps = products[:-1, :-1], products[:-1, -1]
        v = multipliers(gram, overlaps, self.margin, self.damping)
        v = torch.where((overlaps < 0).any(), v, 0)
        return {k: g + _combination(v.to(g.dtype), past[k]) for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        share = self.slots // model.tasks
        indices = rng.choose(rng.fold_in(data.key, "examples"), data.y.shape[0], share)
        position = torch.arange(share, device=data.y.device)
        rows = indices[position % indices.shape[0]]
        weight = (position < indices.shape[0]).to(memory["weight"])
        new = {"x": take(data.stored, rows), "y": take(data.y, rows), "weight": weight}
        return {k: torch.cat([memory[k], part.unsqueeze(0)]) for k, part in new.items()}

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        return lambda params: model.loss(params, memory["x"][task], memory["y"][task], memory["weight"][task])

    @staticmethod
    def _gradients(model: Model, params: Params, memory: Memory) -> Params:
        """Return ∇\\hat L_o(θ) of all finished tasks, stacked."""
        # One call for all tasks: augmentation then gives the same examples with and without vmap.
        x = model.prepare(memory["x"].flatten(0, 1)).unflatten(0, memory["y"].shape[:2])
        stored = x, memory["y"], memory["weight"]
        if model.vectorised and not model.buffers and not model.draws:  # `vmap` would draw once for all tasks
            return vmap(model.grad, in_dims=(None, 0, 0, 0))(params, *stored)
        # Buffers are updated task by task, and sequential runs may use networks that vmap does not support.
        by_task = [model.grad(params, x, y, weight) for x, y, weight in zip(*stored, strict=True)]
        return {k: torch.stack([grads[k] for grads in by_task]) for k in params}


Filling = Literal["share", "batch"]


@dataclass(frozen=True)
class AGEM(Algorithm):
    r"""Averaged GEM: minimise L_t without increasing, to first order, the mean loss on the stored examples:

        g ← g − min(0, g·r) / (r·r) r,   r = ∇\hat L(θ) on a batch drawn from the memory.

    \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ) is linearised at the current θ, not at θ_o: global.
    The paper's results use `filling='batch'`. The constraint holds for the direction, which is the step of plain SGD.
    Momentum, weight decay and Adam step elsewhere.
    """

    name: ClassVar[str] = "agem"
    family: ClassVar[str] = "constraint"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples, equally many per task (filling=batch: a reservoir)"
    memory_size: ClassVar[str] = "slots examples"
    at_least: ClassVar[Bounds] = {"slots": 1, "replay": 0}

    slots: int = 500
    """Number of stored examples after the last task."""
    replay: int = 0
    """Number of stored examples per step for the reference gradient; 0: the batch size."""
    filling: Filling = "share"
    """Examples stored per task: share (slots / tasks) or batch (one batch, by reservoir sampling, as published)."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        if self.filling == "share":
            enough = self.slots >= model.tasks
            require(enough, f"agem with slots={self.slots} cannot store an example of each of {model.tasks} tasks.")
        return replay_buffer.empty(self.slots, example)

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        model.statistics = "every pass"  # after the stream's batch, as published
        key = rng.fold_in(batch.key, "replay")
        replay = replay_buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, key)
        reference = model.grad(params, replay.x, replay.y, replay.weight)
        overlap, square = inner(grads, reference), inner(reference, reference)
        # During the first task nothing is stored: the reference and the coefficient are 0.
        coefficient = overlap.clamp(max=0) / square.clamp(min=torch.finfo(square.dtype).tiny)
        return {k: g - coefficient * reference[k] for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        memory = {k: v.clone() for k, v in memory.items()}
        count = model.batch_size if self.filling == "batch" else self.slots // model.tasks
        rows = rng.choose(rng.fold_in(data.key, "examples"), data.y.shape[0], count)
        examples = data._replace(x=data.stored[rows], y=data.y[rows], raw=None)
        if self.filling == "batch":
            return replay_buffer.reservoir(memory, examples)
        slot = memory["count"] + torch.arange(rows.shape[0], device=rows.device)
        return replay_buffer.write(memory, examples, slot)

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        return replay_buffer.task_loss(model, memory, task)


def _products(past: Params, grads: Params) -> Tensor:
    """Return the Gram matrix of all m_o and, last, g, in float64, because it squares the condition number."""
    parts = []
    for k, g in grads.items():
        # One batched product over a layer's rows: a single long one is slow on a GPU.
        rows = g.shape[0] if g.dim() > 1 else 1
        both = torch.cat([past[k], g.unsqueeze(0)]).double().reshape(-1, rows, g.numel() // rows).transpose(0, 1)
        parts.append(both @ both.mT)
    return torch.cat(parts).sum(0)


def _combination(v: Tensor, rows: Tensor) -> Tensor:
    """Return Σ_o v_o m_o, added task by task so that it is bit-equal alone and in a cohort."""
    combined = v[0] * rows[0]
    for o in range(1, rows.shape[0]):
        combined = combined + v[o] * rows[o]
    return combined


PIVOTS_PER_VARIABLE = 3
"""Maximal number of pivots per variable; about one is needed. At the limit w ≥ −λ for the small λ reached."""
RIDGE = 1e-12
"""Value added to the unit diagonal, so that pivots of linearly dependent gradients stay positive despite rounding."""


def multipliers(gram: Tensor, overlaps: Tensor, margin: float | Tensor, damping: float | Tensor) -> Tensor:
    """Return argmin_{v ≥ margin} ½ vᵀ(G + damping I)v + oᵀv for G = MMᵀ and o = Mg; the projected g is g + Mᵀv."""
    quadratic = gram + damping * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return margin + solve_nonnegative(quadratic, overlaps + margin * quadratic.sum(-1))


def solve_nonnegative(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Return argmin_{z ≥ 0} ½ zᵀQz + qᵀz for positive semi-definite Q; use float64."""
    n = linear.shape[-1]
    diagonal = quadratic.diagonal()
    scale = torch.where(diagonal > 0, diagonal, 1).rsqrt()
    ridge = RIDGE * torch.eye(n, dtype=diagonal.dtype, device=diagonal.device)
    unit = quadratic * scale * scale.unsqueeze(-1) + ridge
    tableau = torch.cat([unit, (linear * scale).unsqueeze(-1), torch.ones_like(unit[:, :1])], -1)
    basic = torch.zeros_like(diagonal, dtype=torch.bool)  # whether z_k, not w_k, is basic
    columns = torch.arange(n + 2, device=diagonal.device)
    for _ in range(PIVOTS_PER_VARIABLE * n):
        breakpoint, k = _next_breakpoint(tableau)
        pivot = (columns == k) & (breakpoint > 0)
        tableau, basic = _exchange(tableau, pivot, k), basic ^ pivot[:n]
    breakpoint, _ = _next_breakpoint(tableau)
    constant, rate = tableau[:, n], tableau[:, n + 1]
    return torch.where(basic, (constant + breakpoint.clamp(min=0) * rate).clamp(min=0), 0) * scale


def _next_breakpoint(tableau: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest λ at which a basic variable, constant + λ rate, reaches 0, and the index of that variable."""
    constant, rate = tableau[:, -2], tableau[:, -1]
    lowest, k = torch.where(rate > 0, constant / rate, torch.inf).min(-1)
    return -lowest, k


def _exchange(tableau: Tensor, pivot: Tensor, k: Tensor) -> Tensor:
    """Exchange the basic and the non-basic variable of row k; return the tableau unchanged if `pivot` is all False."""
    n = tableau.shape[0]
    row, column = tableau.index_select(0, k.view(1)), tableau.index_select(1, k.view(1))
    value = row.index_select(1, k.view(1))
    crossed = pivot | pivot[:n].unsqueeze(-1)
    row, column = torch.where(pivot, -1, row), torch.where(pivot[:n].unsqueeze(-1), 1, column)
    return torch.where(crossed, 0, tableau) - torch.where(pivot.any(), column, 0) * (row / value)
