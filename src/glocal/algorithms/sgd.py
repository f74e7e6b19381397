r"""Plain SGD: \hat L_o(θ) = 0 for every finished task o (§2 and the appendix on stable SGD).

Stable SGD (appendix; Mirzadeh et al. 2020): plain SGD in a regime that finds flat minima and moves little.

Dropout and small batches flatten the minima that are found; a learning rate that begins large and decays from task to
task shortens the way between them. The authors' plastic regime is `sgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.errors import require
from glocal.networks.dropout import DropoutNetwork
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params


@dataclass(frozen=True)
class SGD(Algorithm):
    r"""Follows L_t alone. Its approximation of the past, 0, does not depend on θ_o: global."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class StableSGD(Algorithm):
    r"""Follows L_t alone, with dropout before every linear layer but a first one, at the learning rate lr · decay^t.

    Batches are the run's: on 20 rotations of MNIST the authors take batches of 10, an lr of 0.1, decays of 0.4 to 0.8
    and hidden layers of 256. \hat L_o(θ) = 0 does not depend on θ_o: global.
    """

    name: ClassVar[str] = "stable-sgd"

    dropout: float = 0.5
    """Share of a layer's inputs that is dropped at every step; at test none is."""
    decay: float = 0.8
    """What the learning rate is multiplied by with every new task."""

    def __post_init__(self) -> None:
        require(0 <= self.dropout < 1, f"stable-sgd needs a dropout of at least 0, below 1; {self.dropout} was given.")
        require(self.decay >= 0, f"stable-sgd needs a decay of at least 0; {self.decay} was given.")

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: DropoutNetwork(make(shape, outputs), shape)

    def uniforms(self, model: Model) -> int:
        assert isinstance(model.module, DropoutNetwork)
        return model.batch_size * sum(model.module.widths)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        outputs = model.outputs(params, batch.x, batch.random, self.dropout)
        return model.criterion.per_sample(outputs, batch.y).mean()

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return {k: g * self.decay**batch.task for k, g in grads.items()}
