r"""One solution, several memories: what an algorithm would have kept of the same steps with other random numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Memory, Step
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params


@dataclass(frozen=True)
class Redrawn(Algorithm):
    """Trains as `algorithm` does with the first of its memories; the others look on, each with draws of its own.

    Nothing is consolidated: the memories are as they are before the task ends. An empty one is left out.
    """

    name: ClassVar[str] = "redrawn"

    algorithm: Algorithm
    draws: int

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return self.algorithm.network(make, tasks)

    def uniforms(self, model: Model) -> int:
        return self.draws * self.algorithm.uniforms(model)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return _kept([self.algorithm.init(model, params, self._share(example, d)) for d in range(self.draws)])

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        made = [self.algorithm.before_epoch(model, params, m, epoch, epochs) for m in self.memories(memory)]
        return made[0][0], _kept([m for _, m in made])

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        return self.algorithm.exemplars(self.memories(memory)[0])

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Any:
        return self.algorithm.objective(model, params, self.memories(memory)[0], self._share(batch, 0))

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return self.algorithm.direction(model, grads, params, self.memories(memory)[0], self._share(batch, 0))

    def observe(self, memory: Memory, step: Step) -> Memory:
        steps = [replace(step, batch=self._share(step.batch, d)) for d in range(self.draws)]
        return _kept([self.algorithm.observe(m, s) for m, s in zip(self.memories(memory), steps, strict=True)])

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return self.algorithm.predict(model, params, self.memories(memory)[0], x, task)

    def memories(self, memory: Memory) -> list[Memory]:
        return [memory.get(str(d), {}) for d in range(self.draws)]

    def _share(self, batch: Batch, draw: int) -> Batch:
        """The batch with the random numbers of one memory."""
        each = batch.random.shape[0] // self.draws
        return batch._replace(random=batch.random[draw * each : (draw + 1) * each])


def _kept(memories: list[Memory]) -> Memory:
    return {str(d): memory for d, memory in enumerate(memories) if memory}
