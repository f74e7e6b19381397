r"""Experience replay, ER (§5.1, global), and dark experience replay, DER and DER++ (Buzzega et al. 2020, local)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from glocal import rng
from glocal.algorithms import replay_buffer
from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Bounds, Locality, Memory, Step
from glocal.algorithms.replay_buffer import take
from glocal.networks.model import Model
from glocal.tree import Params


@dataclass(frozen=True)
class ER(Algorithm):
    r"""Minimise the mean loss over the current batch and a batch drawn from a reservoir of all past examples:

        \hat L_o(θ) = (1/|S_o|) Σ_{(x,y) ∈ S_o} ℓ(x, y, θ)   (Eq. replay-approx).

    S_o is chosen at random and does not depend on θ_o: global.
    """

    name: ClassVar[str] = "er"
    family: ClassVar[str] = "replay"
    locality: ClassVar[Locality] = "global"
    memory_contents: ClassVar[str] = "examples of all tasks, by reservoir sampling"
    memory_size: ClassVar[str] = "slots examples"
    at_least: ClassVar[Bounds] = {"slots": 1, "replay": 0}

    slots: int = 500
    """Number of stored examples."""
    replay: int = 0
    """Number of stored examples drawn per step; 0: the batch size."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return replay_buffer.empty(self.slots, example)

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Any:
        replay = self._draw(model, memory, batch, "replay")
        weight = torch.cat([replay.weight.new_ones(batch.y.shape[0]), replay.weight])
        return model.loss(params, torch.cat([batch.x, replay.x]), torch.cat([batch.y, replay.y]), weight)

    def observe(self, memory: Memory, step: Step) -> Memory:
        return replay_buffer.reservoir(memory, step.batch)

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        return replay_buffer.task_loss(model, memory, task)

    def _draw(self, model: Model, memory: Memory, batch: Batch, purpose: str) -> replay_buffer.Replay:
        key = rng.fold_in(batch.key, purpose)
        return replay_buffer.sample_replay(model, batch, memory, self.replay or model.batch_size, key)


@dataclass(frozen=True)
class DER(ER):
    r"""Minimise L_t plus the squared distance to the stored logits on a batch drawn from a reservoir:

        \hat L_o(θ) = (1/|S_o|) Σ_{(x,z) ∈ S_o} (α/K) ‖f_θ(x) − z‖²,   f_θ(x) and z vectors of K logits.

    z is the output for x in the step that stored x, before its update. These are outputs of networks on the path to
    θ_o: local.
    """

    name: ClassVar[str] = "der"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "examples of all tasks and their logits when stored, by reservoir sampling"
    memory_size: ClassVar[str] = "slots (examples + K)"
    at_least: ClassVar[Bounds] = {**ER.at_least, "alpha": 0}

    alpha: float = 0.5
    """α, the weight of the distance to stored logits; Mammoth on Rotated-MNIST: 0.5 for 500 slots, 1 for 200."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        logits = model.eval_mode().outputs(params, example.x[:1])
        return super().init(model, params, example) | {"logits": logits.new_zeros(self.slots + 1, *logits.shape[1:])}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> tuple[Tensor, Memory]:
        model.statistics = "every pass"  # of the stream and of both replays, as published
        outputs = model.outputs(params, batch.x)
        stream = model.criterion.per_sample(outputs, batch.y).mean()
        return stream + self._past_loss(model, params, memory, batch), {"logits": outputs}

    def observe(self, memory: Memory, step: Step) -> Memory:
        return replay_buffer.reservoir(memory, step.batch, logits=step.aux["logits"])

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        stored = (memory["task"][:-1] == task).to(memory["logits"].dtype)

        def value(params: Mapping[str, Tensor]) -> Tensor:
            outputs = model.outputs(params, memory["x"][:-1])
            return self.alpha * _weighted_mean((outputs - memory["logits"][:-1]).square().mean(-1), stored)

        return value

    def _past_loss(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        replay = self._draw(model, memory, batch, "replay")
        difference = _replay_outputs(model, params, replay) - take(memory["logits"], replay.slot)
        return self.alpha * _weighted_mean(difference.square().mean(-1), replay.weight)


@dataclass(frozen=True)
class DERpp(DER):
    r"""Minimise the objective of DER plus the loss on the labels of a second, independent replay batch:

        \hat L_o(θ) = (1/|S_o|) Σ_{(x,y,z) ∈ S_o} (α/K) ‖f_θ(x) − z‖² + β ℓ(x, y, θ).

    Local, because of the logits.
    """

    name: ClassVar[str] = "derpp"
    at_least: ClassVar[Bounds] = {**DER.at_least, "beta": 0}

    beta: float = 1.0
    """β, the weight of the loss on stored labels; Mammoth on Rotated-MNIST: 1 for 500 slots, 0.5 for 200."""

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        logits, labels = super().approximation(model, memory, task), replay_buffer.task_loss(model, memory, task)
        return lambda params: logits(params) + self.beta * labels(params)

    def _past_loss(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        logits = super()._past_loss(model, params, memory, batch)
        replay = self._draw(model, memory, batch, "second replay")
        losses = model.criterion.per_sample(_replay_outputs(model, params, replay), replay.y)
        return logits + self.beta * _weighted_mean(losses, replay.weight)


def _replay_outputs(model: Model, params: Params, replay: replay_buffer.Replay) -> Tensor:
    """Return f_θ on replayed examples from a separate forward pass; an empty replay does not update the buffers."""
    separate = model.bind(model.buffers)
    outputs = separate.outputs(params, replay.x)
    stored = replay.weight.sum() > 0
    model.buffers = {k: torch.where(stored, separate.buffers[k], b) for k, b in model.buffers.items()}
    return outputs


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return Σ w v / Σ w, or 0 if all weights are 0."""
    return (weight * values).sum() / weight.sum().clamp(min=1)
