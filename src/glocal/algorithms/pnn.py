r"""Progressive neural networks (§5.1; Rusu et al. 2016): a column of its own for every task, Θ^t."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.partition import Partition, current
from glocal.networks.model import MakeNetwork, Model
from glocal.networks.progressive import ProgressiveNetwork
from glocal.tree import Params


@dataclass(frozen=True)
class PNN(Partition):
    r"""Trains the column of task t and the connections that lead into it from all earlier columns, on L_t alone.

    The earlier columns are constants: ∂\tilde L_t/∂θ_i = 0 for θ_i ∉ Θ^t, also where ∂L_t/∂θ_i is not. So
    \hat L_o(θ) = L_o(θ_o) is exact along training, and forgetting is 0. The modified derivative uses the current state
    of the network: global.
    """

    name: ClassVar[str] = "pnn"
    remembers: ClassVar[str] = "the columns of finished tasks and their lateral connections, as parameters"
    grows: ClassVar[str] = "T P + T (T − 1)/2 Q, Q the weights between two columns"

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: ProgressiveNetwork(make, shape, outputs, tasks)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        outputs = model.outputs(params, batch.x, current(model, memory))
        return model.criterion.per_sample(outputs, batch.y).mean()

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return model.outputs(params, x, task)
