r"""Dark experience replay, DER and DER++ (Buzzega et al. 2020): replay with the logits of past networks. Local."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal import rng
from glocal.algorithms import buffer
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory, Step
from glocal.algorithms.buffer import put, take
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class DER(Algorithm):
    r"""Minimise L_t plus the squared distance to the stored logits on a batch drawn from a reservoir:

        \hat L_o(θ) = (1/|S_o|) Σ_{(x,z) ∈ S_o} (α/K) ‖f_θ(x) − z‖²,   f_θ(x) and z vectors of K logits.

    z is the output for x in the step that stored x, before its update. These are outputs of networks on the path to
    θ_o: local.
    """

    name: ClassVar[str] = "der"
    family: ClassVar[str] = "replay"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "examples of all tasks and their logits when stored, by reservoir sampling"
    memory_size: ClassVar[str] = "slots (examples + K)"

    slots: int = 500
    """Number of stored examples."""
    replay: int = 0
    """Number of stored examples drawn per step; 0: the batch size."""
    alpha: float = 0.5
    """α, the weight of the distance to stored logits; Mammoth on Rotated-MNIST: 0.5 for 500 slots, 1 for 200."""

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"{self.name} needs slots of at least 1; {self.slots} was given.")
        require(self.replay >= 0, f"{self.name} needs a replay of at least 0; {self.replay} was given.")
        require(self.alpha >= 0, f"{self.name} needs an alpha of at least 0; {self.alpha} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        logits = model.eval_mode().outputs(params, example.x[:1])
        return buffer.empty(self.slots, example) | {"logits": logits.new_zeros(self.slots + 1, *logits.shape[1:])}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> tuple[Tensor, Memory]:
        outputs = model.outputs(params, batch.x)
        stream = model.criterion.per_sample(outputs, batch.y).mean()
        return stream + self._past(model, params, memory, batch), {"logits": outputs}

    def observe(self, memory: Memory, step: Step) -> Memory:
        slot = buffer.reservoir_slots(memory, step.batch)
        written = buffer.write(memory, step.batch, slot, memory["count"] + step.batch.y.shape[0])
        return written | {"logits": put(memory["logits"], slot, step.aux["logits"])}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        stored = (memory["task"][:-1] == task).to(memory["logits"].dtype)

        def value(params: Mapping[str, Tensor]) -> Tensor:
            outputs = model.outputs(params, memory["x"][:-1])
            return self.alpha * _weighted_mean((outputs - memory["logits"][:-1]).square().mean(-1), stored)

        return value

    def _past(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        replay = self._draw(model, memory, batch, "replay")
        difference = _replay_outputs(model, params, replay) - take(memory["logits"], replay.slot)
        return self.alpha * _weighted_mean(difference.square().mean(-1), replay.weight)

    def _draw(self, model: Model, memory: Memory, batch: Batch, purpose: str) -> buffer.Replay:
        key = rng.fold_in(batch.key, purpose)
        return buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, key)


@dataclass(frozen=True)
class DERpp(DER):
    r"""Minimise the objective of DER plus the loss on the labels of a second, independent replay batch:

        \hat L_o(θ) = (1/|S_o|) Σ_{(x,y,z) ∈ S_o} (α/K) ‖f_θ(x) − z‖² + β ℓ(x, y, θ).

    Local, because of the logits.
    """

    name: ClassVar[str] = "derpp"

    beta: float = 1.0
    """β, the weight of the loss on stored labels; Mammoth on Rotated-MNIST: 1 for 500 slots, 0.5 for 200."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.beta >= 0, f"derpp needs a beta of at least 0; {self.beta} was given.")

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        logits, labels = super().approximation(model, memory, task), buffer.task_loss(model, memory, task)
        return lambda params: logits(params) + self.beta * labels(params)

    def _past(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        logits = super()._past(model, params, memory, batch)
        replay = self._draw(model, memory, batch, "second replay")
        losses = model.criterion.per_sample(_replay_outputs(model, params, replay), replay.y)
        return logits + self.beta * _weighted_mean(losses, replay.weight)


def _replay_outputs(model: Model, params: Params, replay: buffer.Replay) -> Tensor:
    """Return f_θ on replayed examples from a separate forward pass; an empty replay does not update the buffers."""
    separate = model.bind(model.buffers)
    outputs = separate.outputs(params, replay.x)
    stored = replay.weight.sum() > 0
    model.buffers = {k: torch.where(stored, separate.buffers[k], b) for k, b in model.buffers.items()}
    return outputs


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return Σ w v / Σ w, or 0 if all weights are 0."""
    return (weight * values).sum() / weight.sum().clamp(min=1)
