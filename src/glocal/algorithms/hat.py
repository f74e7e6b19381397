r"""Hard attention to the task, HAT (§5.1; Serra et al. 2018): every task learns a gate for each hidden unit. Global.

    a_l^t = σ(s e_l^t),   a_l^{<t} = max(a_l^1, …, a_l^{t−1}),

where e_l^t is the task's embedding for layer l (layers whose outputs are added share one), and s rises linearly from
1/s_max to s_max in every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Batch, Bounds, Memory
from glocal.algorithms.partition import Partition, current, frozen_batchnorm
from glocal.networks.hat import GatedNetwork
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params, inner, total

MAX_EMBEDDING = 6.0
"""Bound of |e|, within which σ has a useful gradient."""
MAX_GATE_INPUT = 50.0
"""Bound of |s e| in the gradient compensation, whose cosh(s e) would overflow."""


@dataclass(frozen=True)
class HAT(Partition):
    r"""Minimise L_t + c Σ a_l (1 − a_l^{<t}) / Σ (1 − a_l^{<t}), the gated loss plus a penalty on newly used units.

    The gradient of the weight from unit j to unit i is masked by the use of both units in finished tasks:

        [1 − min(a_{l,i}^{<t}, a_{l−1,j}^{<t})] ∂L_t/∂W_{l,ij}.

    All tasks use the network's inputs and outputs, so the head's weights are masked by its inputs and its bias is
    trained in the first task only. BatchNorm's scale and shift are masked by 1 − a^{<t}; its statistics are those of
    the first task. With gates of exactly 0 and 1, \hat L_o(θ) = L_o(θ_o) holds during training; a large s_max comes
    close to that. The modified gradient uses the current θ, not θ_o: global. Adam's scaling would undo masks between 0
    and 1 and is refused, as are weight decay and momentum kept from the task before.
    """

    name: ClassVar[str] = "hat"
    scales_gradients: ClassVar[bool] = True
    freezes_weights: ClassVar[bool] = True
    memory_contents: ClassVar[str] = (
        "the largest gate of every hidden unit over finished tasks; embeddings as parameters"
    )
    memory_size: ClassVar[str] = "(T + 1) U for U hidden units"
    at_least: ClassVar[Bounds] = {"scale": 1, "sparsity": 0}

    scale: float = 400.0
    """s_max, the steepness of the gates at test time and at the end of every epoch."""
    sparsity: float = 0.75
    """c, the weight of the penalty on used units."""

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: GatedNetwork(make(shape, outputs), shape, tasks)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        used = {k: e.new_zeros(e.shape[1]) for k, e in _embeddings(model, params).items()}
        return {**super().init(model, params, example), "used": used}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        return {**params, **{k: _clamp(e) for k, e in _embeddings(model, params).items()}}, memory

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        gates = _gates(model, params, current(model, memory), self._steepness(batch.progress))
        with frozen_batchnorm(model, current(model, memory)) as network:
            outputs = network.outputs(params, batch.x, *gates.values())
        loss = model.criterion.per_sample(outputs, batch.y).mean()
        unused = {k: 1 - memory["used"][k] for k in gates}
        capacity = total(unused.values())
        return loss + self.sparsity * (inner(gates, unused) / capacity.clamp(min=torch.finfo(capacity.dtype).eps))

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        free = _gated_network(model).free(list(memory["used"].values()), begun=current(model, memory) > 0)
        s = self._steepness(batch.progress)
        direction = {k: g * free[k] for k, g in grads.items() if k in free}
        for k, e in _embeddings(model, params).items():
            gradient = grads[k] * _compensation(_clamp(e), s, self.scale)
            outwards = (e.abs() > MAX_EMBEDDING) & (gradient * e < 0)  # would move e further beyond its bounds
            direction[k] = torch.where(outwards, 0, gradient)
        return {k: direction[k] for k in grads}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        memory = super().consolidate(model, params, memory, data)
        gates = _gates(model, params, memory["loss_at_solution"].shape[0] - 1, self.scale)
        return {**memory, "used": {k: torch.maximum(a, gates[k]) for k, a in memory["used"].items()}}

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return model.outputs(params, x, *_gates(model, params, task, self.scale).values())

    def _steepness(self, progress: Tensor) -> Tensor:
        """Return s, which is linear in the progress through the epoch."""
        return 1 / self.scale + (self.scale - 1 / self.scale) * progress


def _embeddings(model: Model, params: Params) -> Params:
    """Return the embeddings of every group of hidden units, (tasks, units) each."""
    names = [f"embeddings.{group}" for group in range(len(_gated_network(model).group_sizes))]
    return {k: params[k] for k in names}


def _gates(model: Model, params: Params, task: int, s: Tensor | float) -> Params:
    """Return a = σ(s e) of one task. Embeddings are clamped to their bounds; the gradient passes straight through."""
    embeddings = {k: e[task] for k, e in _embeddings(model, params).items()}
    return {k: _sigmoid_pair(s * (e + (_clamp(e) - e).detach()))[0] for k, e in embeddings.items()}


def _compensation(e: Tensor, s: Tensor, scale: Tensor | float) -> Tensor:
    """Return s_max (cosh(s e) + 1) / (s (cosh(e) + 1)), which turns the gate's derivative s σ'(s e) into s_max σ'(e).

    It is computed with 1 / (cosh(z) + 1) = 2 σ(z) σ(−z).
    """
    plain, scaled = _sigmoid_pair(e), _sigmoid_pair((s * e).clamp(-MAX_GATE_INPUT, MAX_GATE_INPUT))
    return scale / s * (plain[0] * plain[1]) / (scaled[0] * scaled[1])


def _sigmoid_pair(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return σ(z) and σ(−z).

    A softmax is used because `sigmoid` rounds differently at different positions of a tensor. The larger value is
    computed as 1 minus the smaller, so the derivative σ(z) σ(−z) stays accurate where the larger is close to 1.
    """
    positive, negative = torch.stack([z, torch.zeros_like(z)], -1).softmax(-1).unbind(-1)
    return torch.where(z > 0, 1 - negative, positive), torch.where(z > 0, negative, 1 - positive)


def _clamp(e: Tensor) -> Tensor:
    return e.clamp(-MAX_EMBEDDING, MAX_EMBEDDING)


def _gated_network(model: Model) -> GatedNetwork:
    assert isinstance(model.module, GatedNetwork)
    return model.module
