r"""Hard attention to the task (§5.1; Serra et al. 2018): a task owns hidden units, by gates that it learns.

    a_l^t = σ(s e_l^t),   a_l^{<t} = max(a_l^1, …, a_l^{t−1}),

with e_l^t the task's embedding in layer l (one for all layers whose units are added up), and s rising through every
epoch from 1/s_max to s_max.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.partition import Partition, current, frozen_batchnorm
from glocal.errors import require
from glocal.networks.hat import GatedNetwork
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params, inner, total

WIDEST = 6.0
"""Embeddings stay within ±6, where σ has a slope."""
STEEPEST = 50.0
"""s e is taken within ±50 where the compensation needs its cosh."""


@dataclass(frozen=True)
class HAT(Partition):
    r"""Minimises L_t + c Σ a_l (1 − a_l^{<t}) / Σ (1 − a_l^{<t}): the loss through the task's gates, and a price for
    units that no finished task uses. A weight from unit j to unit i follows

        [1 − min(a_{l,i}^{<t}, a_{l−1,j}^{<t})] ∂L_t/∂W_{l,ij}:

    Θ^t is what no finished task uses at both ends, and the gates decide how sharply. Inputs and outputs are used by
    every task, so the shared head is guarded by its inputs, and its bias is trained in the first task alone.
    A unit's scale and shift in BatchNorm follow 1 − a^{<t}, and its statistics are those of the first task. With gates
    of 0 and 1, \hat L_o(θ) = L_o(θ_o) is exact along training; s_max makes them nearly so. The modified derivative uses
    the current state of the network: global.
    """

    name: ClassVar[str] = "hat"
    memory_contents: ClassVar[str] = "how much finished tasks use every hidden unit; their embeddings, as parameters"
    memory_size: ClassVar[str] = "(T + 1) U, U the hidden units"

    scale: float = 400.0
    """s_max, how hard the gates are at test and at the end of every epoch."""
    sparsity: float = 0.75
    """c, the price of a unit."""

    def __post_init__(self) -> None:
        require(self.scale >= 1, f"hat needs a scale of at least 1; {self.scale} was given.")
        require(self.sparsity >= 0, f"hat needs a sparsity of at least 0; {self.sparsity} was given.")

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: GatedNetwork(make(shape, outputs), shape, tasks)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        used = {k: e.new_zeros(e.shape[1]) for k, e in _embeddings(model, params).items()}
        return {**super().init(model, params, example), "used": used}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        return {**params, **{k: _within(e) for k, e in _embeddings(model, params).items()}}, memory

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        gates = _gates(model, params, current(model, memory), self._steepness(batch.progress))
        with frozen_batchnorm(model, current(model, memory)) as network:
            outputs = network.outputs(params, batch.x, *gates.values())
        return model.criterion.per_sample(outputs, batch.y).mean() + self.sparsity * _price(gates, memory["used"])

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        free = _gated(model).free(list(memory["used"].values()), begun=current(model, memory) > 0)
        s = self._steepness(batch.progress)
        compensated = {
            k: _inwards(grads[k] * _compensation(_within(e), s, self.scale), e)
            for k, e in _embeddings(model, params).items()
        }
        return {k: compensated[k] if k in compensated else g * free[k] for k, g in grads.items()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        memory = super().consolidate(model, params, memory, data)
        gates = _gates(model, params, memory["loss_at_solution"].shape[0] - 1, self.scale)
        return {**memory, "used": {k: torch.maximum(a, gates[k]) for k, a in memory["used"].items()}}

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return model.outputs(params, x, *_gates(model, params, task, self.scale).values())

    def _steepness(self, progress: Tensor) -> Tensor:
        """s, linear in the progress through the epoch."""
        return 1 / self.scale + (self.scale - 1 / self.scale) * progress


def _embeddings(model: Model, params: Params) -> Params:
    """e of every group of hidden units, (tasks, units)."""
    names = [f"embeddings.{number}" for number in range(len(_gated(model).group_sizes))]
    return {k: params[k] for k in names}


def _gates(model: Model, params: Params, task: int, s: Tensor | float) -> Params:
    """a = σ(s e) of one task. Beyond their bounds embeddings count as on them, with the slope they have there."""
    embeddings = {k: e[task] for k, e in _embeddings(model, params).items()}
    return {k: _logistic(s * (e + (_within(e) - e).detach()))[0] for k, e in embeddings.items()}


def _price(gates: Params, used: Params) -> Tensor:
    """Σ a (1 − a^{<t}) / Σ (1 − a^{<t}) over all hidden units."""
    free = {k: 1 - used[k] for k in gates}
    left = total(free.values())
    return inner(gates, free) / left.clamp(min=torch.finfo(left.dtype).eps)


def _compensation(e: Tensor, s: Tensor, scale: Tensor | float) -> Tensor:
    """s_max (cosh(s e) + 1) / (s (cosh(e) + 1)): the slope of the gate, s σ'(s e), becomes s_max σ'(e).

    1 / (cosh(z) + 1) = 2 σ(z) σ(−z).
    """
    gentle, steep = _logistic(e), _logistic((s * e).clamp(-STEEPEST, STEEPEST))
    return scale / s * (gentle[0] * gentle[1]) / (steep[0] * steep[1])


def _logistic(z: Tensor) -> tuple[Tensor, Tensor]:
    """σ(z) and σ(−z), as a softmax of two: `sigmoid` rounds by the place an element has among all runs' elements.

    The larger is taken as 1 minus the smaller, so that their common slope σ(z) σ(−z) keeps all its digits where the
    larger is nearly 1: the compensation makes much of what is left of it.
    """
    up, down = torch.stack([z, torch.zeros_like(z)], -1).softmax(-1).unbind(-1)
    return torch.where(z > 0, 1 - down, up), torch.where(z > 0, down, 1 - up)


def _within(e: Tensor) -> Tensor:
    return e.clamp(-WIDEST, WIDEST)


def _inwards(direction: Tensor, e: Tensor) -> Tensor:
    """No step away from the bounds where they are passed."""
    return torch.where((e.abs() > WIDEST) & (direction * e < 0), 0, direction)


def _gated(model: Model) -> GatedNetwork:
    assert isinstance(model.module, GatedNetwork)
    return model.module
