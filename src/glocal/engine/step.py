"""One step of one run, as pure functions. Everything the engine does is these, mapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.algorithms.algorithm import Algorithm, Batch, Memory, Step
from glocal.networks.model import Model
from glocal.tree import Params

DIRECTION = 1 << 20  # what a step's second pass gives to the network is counted from here, and not from 0 again
Hyper = dict[str, Tensor]  # lr and the algorithm's scalar hyperparameters: one number a run


def scalars(algorithm: Algorithm) -> dict[str, float]:
    """The algorithm's scalar hyperparameters: its float fields."""
    fields = dataclasses.fields(algorithm)
    return {f.name: getattr(algorithm, f.name) for f in fields if f.type in ("float", float)}


@dataclass(frozen=True)
class Program:
    """The algorithm's methods with a run's own hyperparameters and buffers put in place."""

    algorithm: Algorithm
    model: Model

    @property
    def projects(self) -> bool:
        return type(self.algorithm).direction is not Algorithm.direction

    @property
    def observes(self) -> bool:
        return type(self.algorithm).observe is not Algorithm.observe

    @property
    def consolidates(self) -> bool:
        return type(self.algorithm).consolidate is not Algorithm.consolidate

    @property
    def disturbs(self) -> bool:
        return type(self.algorithm).buffers_after is not Algorithm.buffers_after

    def gradients(self, params: Params, found: Sequence[Tensor | None]) -> Params:
        """Gradients by name. Parameters outside the objective have none: only those who look at gradients see zeros."""
        named = zip(params.items(), found, strict=True)
        if self.projects or self.algorithm.watches:
            return {k: torch.zeros_like(p) if g is None else g for (k, p), g in named}
        return {k: g for (k, _), g in named if g is not None}

    @property
    def prepares(self) -> bool:
        return type(self.algorithm).before_epoch is not Algorithm.before_epoch

    def before_epoch(
        self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        return self._with(hyper).before_epoch(self.model.bind(buffers), params, memory, epoch, epochs)

    def objective(
        self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, batch: Batch
    ) -> tuple[Tensor, Params, Memory]:
        model = self.model.bind(buffers, key=batch.key)
        value, notes = self._with(hyper).objective_and_notes(model, params, memory, batch)
        return value, model.buffers, notes

    def direction(
        self, grads: Params, params: Params, buffers: Params, memory: Memory, hyper: Hyper, batch: Batch
    ) -> tuple[Params, Params]:
        model = self.model.bind(buffers, key=batch.key, first=DIRECTION)
        return self._with(hyper).direction(model, grads, params, memory, batch), model.buffers

    def observe(self, memory: Memory, hyper: Hyper, step: Step) -> Memory:
        return self._with(hyper).observe(memory, step)

    def consolidate(
        self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, data: Batch
    ) -> tuple[Memory, Params]:
        algorithm, model = self._with(hyper), self.model.bind(buffers, key=data.key)
        memory = algorithm.consolidate(model, params, memory, data)
        if not buffers or not self.disturbs:
            return memory, buffers
        return memory, algorithm.buffers_after(self.model.bind(buffers, key=data.key, first=DIRECTION), params, data)

    def predict(self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, x: Tensor, task: int) -> Tensor:
        return self._with(hyper).predict(self.model.bind(buffers, training=False), params, memory, x, task)

    def _with(self, hyper: Mapping[str, Tensor]) -> Algorithm:
        """The algorithm with this run's hyperparameters in its float fields, tensors now."""
        own = {k: v for k, v in hyper.items() if k != "lr"}
        if not own:
            return self.algorithm
        bound = object.__new__(type(self.algorithm))
        bound.__dict__.update(self.algorithm.__dict__ | own)
        return bound
