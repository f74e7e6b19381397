r"""Plain SGD (§2) and stable SGD (appendix; Mirzadeh et al. 2020): \hat L_o(θ) = 0 for finished tasks. Global.

Stable SGD uses dropout and small batches to find flat minima, and a learning rate that decays from task to task to stay
close to them. The authors' plastic regime is `sgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from glocal import rng
from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.errors import require
from glocal.networks.layer_calls import DropoutNetwork
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params


@dataclass(frozen=True)
class SGD(Algorithm):
    r"""Minimise L_t. \hat L_o(θ) = 0 does not depend on θ_o: global."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class StableSGD(Algorithm):
    r"""Minimise L_t with dropout before every linear layer except the first, at the learning rate lr · decay^t.

    The batch size is an option of the run. On 20 rotations of MNIST the authors use batches of 10, lr 0.1, decay 0.4 to
    0.8 and hidden layers of 256. \hat L_o(θ) = 0 does not depend on θ_o: global.
    """

    name: ClassVar[str] = "stable-sgd"

    dropout: float = 0.5
    """Dropout probability during training."""
    decay: float = 0.8
    """Factor applied to the learning rate at every new task."""

    def __post_init__(self) -> None:
        require(0 <= self.dropout < 1, f"stable-sgd needs a dropout of at least 0, below 1; {self.dropout} was given.")
        require(self.decay >= 0, f"stable-sgd needs a decay of at least 0; {self.decay} was given.")

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: DropoutNetwork(make(shape, outputs), shape)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        assert isinstance(model.module, DropoutNetwork)
        random = rng.uniform(rng.fold_in(batch.key, "dropout"), batch.y.shape[0] * sum(model.module.widths))
        outputs = model.outputs(params, batch.x, random, self.dropout)
        return model.criterion.per_sample(outputs, batch.y).mean()

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return {k: g * self.decay**batch.task for k, g in grads.items()}
