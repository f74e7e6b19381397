r"""Synaptic intelligence, SI (§5.1): a diagonal quadratic at θ_{t−1} weighted by a path integral. Global.

    obj_t(θ) = L_t(θ) + c Σ_i Ω_i (θ_i − θ_{t−1,i})²,   Ω_i ← Ω_i + ω_i / ((θ_{t,i} − θ_{t−1,i})² + ξ) after every task,

where ω_i accumulates the decrease of the loss due to θ_i over all steps: ω_i ← ω_i − ∂L_t/∂θ_i · Δθ_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Bounds, Locality, Memory, Step
from glocal.algorithms.ewc import first_order_weighted_square, weighted_square
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params

Importance = Literal["path", "published"]


@dataclass(frozen=True)
class SI(Algorithm):
    r"""Minimise L_t plus one diagonal quadratic for all finished tasks, of which each task is assigned an equal share:

        \hat L_o(θ) = (1/(t−1)) c Σ_i Ω_i (θ_i − θ_{t−1,i})².

    Its centre is the last solution, not θ_o, and Ω depends on the path, not on the solution: global. With
    importance='published', used for the paper's results, every entry of the total gradient is clipped to [−1, 1], and
    ω_i ← ω_i + lr g_i² with the clipped g.

    Δθ_i is the step that the optimiser took, with its momentum, scaling, weight decay and the scheduled rate, so that
    Σ_i ω_i is the first-order decrease of the loss under every optimiser. importance='published' takes −g_i Δθ_i with
    the clipped g, which is lr g_i² for plain SGD.
    """

    name: ClassVar[str] = "si"
    family: ClassVar[str] = "quadratic"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "the last solution, Ω, and ω of the current task"
    memory_size: ClassVar[str] = "3 P"
    at_least: ClassVar[Bounds] = {"penalty": 0}

    penalty: float = 1.0
    """c, the weight of the quadratic penalty."""
    damping: float = 1.0
    """ξ, which bounds Ω for parameters that barely changed."""
    importance: Importance = "path"
    """Definition of ω: path (path integral of L_t) or published (with clipped gradients)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.damping > 0, f"si.damping = {self.damping} was given; it must be above 0.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {
            "anchor": {k: p.clone() for k, p in params.items()},
            "importance": {k: torch.zeros_like(p) for k, p in params.items()},
            "path": {k: torch.zeros_like(p) for k, p in params.items()},
            "finished": torch.zeros((), dtype=torch.long, device=example.y.device),
        }

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        quadratic = first_order_weighted_square(memory["importance"], params, memory["anchor"])
        return model.loss(params, batch.x, batch.y) + self.penalty * quadratic

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return {k: g.clamp(-1, 1) for k, g in grads.items()} if self.importance == "published" else grads

    def observe(self, memory: Memory, step: Step) -> Memory:
        for k, update in step.update.items():
            gradient = step.direction[k]
            if self.importance != "published":  # the gradient of L_t without the penalty
                delta = step.params[k] - update - memory["anchor"][k]
                gradient = step.grads[k] - 2 * self.penalty * memory["importance"][k] * delta
            memory["path"][k].sub_(gradient * update)
        return memory

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        squared = {k: (p - memory["anchor"][k]).square() for k, p in params.items()}
        new = {k: memory["path"][k] / (squared[k] + self.damping) for k in params}
        return {
            "anchor": params,
            "importance": {k: memory["importance"][k] + new[k] for k in new},
            "path": {k: torch.zeros_like(p) for k, p in params.items()},
            "finished": memory["finished"] + 1,
        }

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        importance, anchor = memory["importance"], memory["anchor"]
        return lambda params: self.penalty * weighted_square(importance, params, anchor) / memory["finished"]
