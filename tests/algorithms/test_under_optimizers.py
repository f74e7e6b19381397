"""What algorithms that project, freeze or integrate promise under optimisers other than plain SGD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from old_tasks import largest_change, logits_over_time
from small_problems import blobs, cohort_of, linear_network
from torch import Tensor
from torch.nn import functional

from glocal import rng
from glocal.algorithms import AGEM, GEM, OGD, PNN, SI, Algorithm, Batch, Memory, PackNet, Step
from glocal.algorithms.replay_buffer import sample_replay
from glocal.curvature.jacobian import jvp_and_vjp
from glocal.engine.cohort import Cohort
from glocal.engine.loader import Loader
from glocal.engine.loop import Execution, train
from glocal.engine.state import State
from glocal.networks.model import Model
from glocal.optimizers import SGD, Adam, AdamW, Optimizer
from glocal.tree import Params, inner, select

MOMENTUM = SGD(momentum=0.9)


def with_optimizer(cohort: Cohort, optimizer: Optimizer) -> Cohort:
    return cohort.only([replace(member, optimizer=optimizer) for member in cohort.members])


# GEM and A-GEM


class Recording(NamedTuple):
    """One step: the gradients of the old losses, the direction and the update."""

    old: list[Params]
    direction: Params
    update: Params


recorded: list[Recording] = []
old_gradients: list[Params] = []


class Recorded:
    """Records every step."""

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        old_gradients[:] = self.old_gradients(model, params, memory, batch)  # type: ignore[attr-defined]
        return super().direction(model, grads, params, memory, batch)  # type: ignore[misc]

    def observe(self, memory: Memory, step: Step) -> Memory:
        recorded.append(Recording(list(old_gradients), step.direction, step.update))
        return super().observe(memory, step)  # type: ignore[misc]


@dataclass(frozen=True)
class RecordedGEM(Recorded, GEM):
    def old_gradients(self, model: Model, params: Params, memory: Memory, batch: Batch) -> list[Params]:
        stored = zip(memory["x"], memory["y"], strict=True)
        return [model.grad(params, x, y) for x, y in stored]


@dataclass(frozen=True)
class RecordedAGEM(Recorded, AGEM):
    def old_gradients(self, model: Model, params: Params, memory: Memory, batch: Batch) -> list[Params]:
        key = rng.fold_in(batch.key, "replay")
        replay = sample_replay(model, batch, memory, model.batch_size, key)
        return [model.grad(params, replay.x, replay.y, replay.weight)] if int(batch.task) else []


@pytest.mark.parametrize("optimizer", [SGD(), MOMENTUM, Adam()], ids=lambda o: o.name)
@pytest.mark.parametrize("algorithm", [RecordedGEM(slots=60), RecordedAGEM(slots=60)], ids=lambda a: a.name)
def test_directions_raise_no_old_loss_but_only_plain_steps_follow_them(
    algorithm: Algorithm, optimizer: Optimizer
) -> None:
    recorded.clear()
    cohort = cohort_of(blobs((96, 96, 96)), algorithm, [(0, 0.02 if optimizer.name == "adam" else 0.1)], epochs=4)
    for _ in train(with_optimizer(cohort, optimizer), execution="sequential"):
        pass

    def cosines(part: Literal["direction", "update"]) -> Tensor:
        pairs: list[tuple[Params, Params]] = [(old, getattr(entry, part)) for entry in recorded for old in entry.old]
        return torch.stack([inner(a, b) / (inner(a, a) * inner(b, b)).sqrt() for a, b in pairs])

    assert cosines("direction").min() > -1e-4, "every direction fulfils the constraints"
    highest = float(cosines("update").max())  # an update is a descent: −direction for plain SGD
    assert highest < 1e-4 if optimizer == SGD() else highest > 0.05, "only plain SGD steps along it"


# OGD

LINEAR_STEPS: list[Optimizer] = [
    MOMENTUM,
    SGD(momentum=0.9, nesterov=True, clip=0.5),
    SGD(momentum=0.5, schedule="cosine", warmup=1.0),
]
OTHER_STEPS: list[Optimizer] = [Adam(), AdamW(), SGD(weight_decay=0.1), SGD(momentum=0.95, state="kept")]
SLOW_STEPS = [LINEAR_STEPS[0], LINEAR_STEPS[2], *OTHER_STEPS[1:]]


@pytest.mark.parametrize(
    "optimizer",
    [LINEAR_STEPS[1], OTHER_STEPS[0], *(pytest.param(o, marks=pytest.mark.slow) for o in SLOW_STEPS)],
    ids=lambda o: f"{o.name} {o.state}",
)
def test_ogd_stays_orthogonal_where_steps_are_linear_in_the_directions(optimizer: Optimizer) -> None:
    """θ_2 − θ_1 against the gradients stored at θ_1, which have length 1."""
    cohort = with_optimizer(cohort_of(blobs((90, 90)), OGD(slots=40), [(0, 0.01)], epochs=4), optimizer)
    _, first, last = [
        (select(s.state.params, 0), select(s.state.memory, 0))
        for s in map(clone_state, train(cohort, execution="sequential"))
    ]
    module = cohort.model(vectorised=False).module
    moved = {k: last[0][k] - p for k, p in first[0].items()}
    along = jvp_and_vjp(module, first[1]["span"]["rows"], moved)[0].abs().max() / inner(moved, moved).sqrt()
    assert along < 1e-5 if optimizer in LINEAR_STEPS else along > 1e-3


def clone_state(snapshot: Any) -> Any:
    own = {k: p.clone() for k, p in snapshot.state.params.items()}
    return replace(snapshot, state=replace(snapshot.state, params=own))


# SI


PATHS: list[Optimizer] = [
    Adam(schedule="cosine"),
    AdamW(warmup=10.0, weight_decay=1.0),
    SGD(momentum=0.9, weight_decay=0.1, clip=0.5, schedule="step", step_epochs=20.0),
]


@pytest.mark.parametrize("execution", ["sequential", pytest.param("vectorised", marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", PATHS, ids=lambda o: o.name)
def test_sis_path_integral_is_the_decrease_of_the_loss(optimizer: Optimizer, execution: Execution) -> None:
    """Full batches and small steps: Σ ω is L_1(θ_0) − L_1(θ_1) up to second order, with the rates of the schedule."""
    challenge = blobs((64,))
    x, y = challenge.task(0, 0).train
    cohort = with_optimizer(cohort_of(challenge, SI(), [(0, 3e-3)], linear_network, 60, 64), optimizer)
    paths: list[float] = []
    losses: list[float] = []

    def watch(task: int, epoch: int, state: State, loader: Loader) -> None:
        paths.append(sum(float(p.sum()) for p in state.memory["path"].values()))

    for snapshot in train(cohort, execution=execution, watch=watch):
        theta = select(snapshot.state.params, 0)
        logits = x.flatten(1) @ theta["layers.0.weight"].T + theta["layers.0.bias"]
        losses.append(float(functional.cross_entropy(logits, y)))
    assert losses[0] - losses[1] > 0.05
    assert paths[-1] == pytest.approx(losses[0] - losses[1], rel=0.02)


# Frozen parameters


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (PackNet(), MOMENTUM),
        (PackNet(), AdamW(weight_decay=0.0, clip=1.0)),
        (PNN(), Adam(weight_decay=0.1, state="kept")),
        (PNN(), SGD(momentum=0.9, weight_decay=0.1, state="kept")),
    ],
    ids=lambda part: part.name,
)
def test_frozen_weights_stay(algorithm: Algorithm, optimizer: Optimizer) -> None:
    cohort = cohort_of(blobs((96, 96, 96)), algorithm, [(0, 0.01), (1, 0.003)], epochs=3)
    assert largest_change(logits_over_time(with_optimizer(cohort, optimizer), "vectorised")) == 0


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=0.1), SGD(momentum=0.9, state="kept"), Adam(state="kept")])
def test_what_is_refused_would_move_packnets_weights(optimizer: Optimizer) -> None:
    cohort = cohort_of(blobs((96, 96, 96)), PackNet(), [(0, 0.01)], epochs=3)
    assert largest_change(logits_over_time(with_optimizer(cohort, optimizer), "vectorised")) > 1e-3
