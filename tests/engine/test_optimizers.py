"""Optimisers and schedules against torch.optim, through the engine and step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from glocal import optimizers, tree
from glocal.algorithms.baselines import SGD
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, Snapshot, train
from glocal.errors import GlocalError
from glocal.networks.mlp import mlp
from glocal.optimizers import (
    Adam,
    AdamW,
    Optimizer,
    add_weight_decay,
    apply_update,
    clip_gradients,
    step_scalars,
)
from glocal.rng import generator
from glocal.tree import Params

EPOCHS, BATCH, EXAMPLES = 5, 16, 320  # two tasks of 100 steps
STEPS = EXAMPLES // BATCH


class Double(nn.Module):
    """A network in float64, so that rounding does not grow to 1e-6 over 200 steps."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.base = mlp(shape, outputs, (8,)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.double())


def two_tasks(examples: int = EXAMPLES) -> Challenge:
    draw = torch.Generator().manual_seed(0)
    tasks = []
    for _ in range(2):
        x, y = torch.randn(examples, 6, generator=draw), torch.randint(3, (examples,), generator=draw)
        tasks.append(((x, y), (x[:20], y[:20])))
    return from_tasks("noise", tasks, setting="domain")


CHALLENGE = two_tasks()


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """An optimiser of a user, written for one run; one of its scalars is 0, and has the name of one of SGD's."""

    name: ClassVar[str] = "rmsprop"

    decay: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0

    def init(self, params: Params, hyper: Params) -> tree.Tree:
        return {k: {name: torch.zeros_like(p) for name, p in params.items()} for k in ("square", "velocity")}

    def update(self, grads: Params, state: tree.Tree, params: Params, hyper: Params) -> tuple[Params, tree.Tree]:
        grads = add_weight_decay(clip_gradients(grads, hyper), params, hyper)
        old, decay = state["square"], hyper["decay"]
        square = {k: decay * old[k] + (1 - decay) * g * g for k, g in grads.items()}
        steps = {k: g / (square[k].sqrt() + hyper["eps"]) for k, g in grads.items()}
        velocity = {k: hyper["momentum"] * state["velocity"][k] + step for k, step in steps.items()}
        return velocity, {"square": old | square, "velocity": state["velocity"] | velocity}


@dataclass(frozen=True)
class Anchored(Optimizer):
    """d = g + pull · (θ − θ_start), θ_start where the task began: a state that is not 0 after a reset."""

    name: ClassVar[str] = "anchored"

    pull: float = 0.1

    def init(self, params: Params, hyper: Params) -> tree.Tree:
        return {"start": params}

    def update(self, grads: Params, state: tree.Tree, params: Params, hyper: Params) -> tuple[Params, tree.Tree]:
        return {k: g + hyper["pull"] * (params[k] - state["start"][k]) for k, g in grads.items()}, state


def torch_optimizer(own: Optimizer, params: Any, lr: float) -> torch.optim.Optimizer:
    if isinstance(own, optimizers.SGD):
        return torch.optim.SGD(params, lr, own.momentum, weight_decay=own.weight_decay, nesterov=own.nesterov)
    if isinstance(own, RMSprop):
        return torch.optim.RMSprop(params, lr, own.decay, own.eps, own.weight_decay, own.momentum)
    assert isinstance(own, Adam)
    kind = torch.optim.AdamW if isinstance(own, AdamW) else torch.optim.Adam
    return kind(params, lr, (own.beta1, own.beta2), own.eps, own.weight_decay)


def torch_schedule(own: Optimizer, optimizer: torch.optim.Optimizer, tasks: int) -> lr_scheduler.LRScheduler:
    """The schedule of so many tasks, stepped after every batch."""
    warm = round(own.warmup * STEPS)
    following: lr_scheduler.LRScheduler = lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    if own.schedule == "step":
        following = lr_scheduler.StepLR(optimizer, round(own.step_epochs * STEPS), own.gamma)
    elif own.schedule == "cosine":
        following = lr_scheduler.CosineAnnealingLR(optimizer, tasks * EPOCHS * STEPS - warm)
    if not warm:
        return following
    rising = lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm - 1)
    return lr_scheduler.SequentialLR(optimizer, [rising, following], [warm])


@cache
def plain_loop(member: Member) -> Params:
    """θ after both tasks: an ordinary training loop with the same batches."""
    own, network = member.optimizer, Double(CHALLENGE.input_shape, CHALLENGE.outputs)
    network.load_state_dict(tree.select(Cohort(CHALLENGE, Double, (member,), EPOCHS, BATCH).initial()[0], 0))
    for task in range(2):
        if task == 0 or own.state == "reset":
            state = torch_optimizer(own, network.parameters(), member.lr)
        if task == 0 or own.span == "task":
            for group in state.param_groups:
                group["lr"] = group["initial_lr"] = member.lr
            schedule = torch_schedule(own, state, 2 if own.span == "sequence" else 1)
        else:
            schedule.optimizer = state
        x, y = CHALLENGE.task(task, member.seed).train
        for epoch in range(EPOCHS):
            order = torch.randperm(len(y), generator=generator(member.seed, "order", task, epoch))
            for rows in order.split(BATCH):
                state.zero_grad()
                functional.cross_entropy(network(x[rows]), y[rows]).backward()
                if own.clip:
                    nn.utils.clip_grad_norm_(network.parameters(), own.clip)
                state.step()
                schedule.step()
    return {k: p.detach() for k, p in network.named_parameters()}


CASES: dict[str, list[Optimizer]] = {
    "sgd": [
        optimizers.SGD(momentum=0.9, weight_decay=0.01, clip=0.5),
        optimizers.SGD(schedule="step", gamma=0.2, step_epochs=2.0, warmup=1.0),
        optimizers.SGD(momentum=0.5, schedule="cosine"),
        optimizers.SGD(weight_decay=0.1),
        optimizers.SGD(clip=0.05),
        optimizers.SGD(clip=100.0),
        optimizers.SGD(schedule="step", step_epochs=0.3),
        optimizers.SGD(),
    ],
    "nesterov": [
        optimizers.SGD(momentum=0.9, nesterov=True, state="kept", schedule="cosine", span="sequence", warmup=2.0),
        optimizers.SGD(momentum=0.3, nesterov=True, state="kept", schedule="step", span="sequence", step_epochs=3.0),
        optimizers.SGD(momentum=0.9, nesterov=True, state="kept", weight_decay=0.1),
    ],
    "adam": [
        Adam(weight_decay=0.1, warmup=0.5),
        Adam(beta1=0.5, beta2=0.9, clip=0.1),
        Adam(eps=1e-3, schedule="step", gamma=0.5),
        Adam(),
    ],
    "adam kept": [Adam(state="kept"), Adam(beta1=0.0, weight_decay=0.01, state="kept")],
    "adamw": [
        AdamW(weight_decay=0.5, beta2=0.99, clip=0.2),
        AdamW(schedule="cosine", warmup=0.35),
        AdamW(schedule="cosine", weight_decay=0.1),
        AdamW(weight_decay=0.0),
    ],
    "own": [
        RMSprop(decay=0.9, weight_decay=0.1, clip=0.2),
        RMSprop(schedule="cosine", momentum=0.5),
        RMSprop(eps=1e-3, warmup=0.5),
    ],
    "own kept": [RMSprop(state="kept"), RMSprop(decay=0.5, state="kept")],
}


@pytest.mark.parametrize("execution", [pytest.param("sequential", marks=pytest.mark.slow), "vectorised"])
@pytest.mark.parametrize("case", CASES)
def test_training_agrees_with_torch(case: str, execution: Execution) -> None:
    rates = {"sgd": 0.05, "adam": 0.005, "adamw": 0.005, "rmsprop": 0.005}
    members = [Member(seed, rates[own.name] / (1 + seed), SGD(), own) for seed, own in enumerate(CASES[case])]
    members = members[:2] if execution == "sequential" else members
    *_, last = train(Cohort(CHALLENGE, Double, tuple(members), EPOCHS, BATCH), execution=execution)
    for run, member in enumerate(members):
        torch.testing.assert_close(tree.select(last.state.params, run), plain_loop(member), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
def test_a_state_that_begins_at_the_parameters_begins_there_in_every_task(execution: Execution) -> None:
    members = tuple(Member(seed, 0.05, SGD(), Anchored(pull)) for seed, pull in enumerate((0.5, 2.0)))
    *_, last = train(Cohort(CHALLENGE, Double, members, EPOCHS, BATCH), execution=execution)
    for run, member in enumerate(members):
        network = Double(CHALLENGE.input_shape, CHALLENGE.outputs)
        network.load_state_dict(tree.select(Cohort(CHALLENGE, Double, (member,), EPOCHS, BATCH).initial()[0], 0))
        for task in range(2):
            starts = [p.detach().clone() for p in network.parameters()]
            x, y = CHALLENGE.task(task, member.seed).train
            for epoch in range(EPOCHS):
                order = torch.randperm(len(y), generator=generator(member.seed, "order", task, epoch))
                for rows in order.split(BATCH):
                    loss = functional.cross_entropy(network(x[rows]), y[rows])
                    grads = torch.autograd.grad(loss, list(network.parameters()))
                    for p, g, start in zip(network.parameters(), grads, starts, strict=True):
                        assert isinstance(member.optimizer, Anchored)
                        p.data -= member.lr * (g + member.optimizer.pull * (p.data - start))
        expected = {k: p.detach() for k, p in network.named_parameters()}
        torch.testing.assert_close(tree.select(last.state.params, run), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("own", [optimizers.SGD(momentum=0.9, weight_decay=0.1), Adam(), AdamW(clip=0.5)])
def test_a_parameter_without_a_gradient_is_left_alone_and_its_steps_are_not_counted(own: Optimizer) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 3), "b": (3,), "scalar": ()}
    theirs = {k: nn.Parameter(torch.randn(shape, generator=draw).double()) for k, shape in shapes.items()}
    params = {k: p.detach().clone()[None] for k, p in theirs.items()}
    hyper = {k: torch.tensor(v) for k, v in step_scalars([own]).items()}
    reference, state = torch_optimizer(own, theirs.values(), 0.01), own.init(params, hyper)
    for step in range(200):
        present = shapes if step % 7 > 3 else ["a"]
        grads = {k: torch.randn(shapes[k], generator=draw).double() for k in present}
        for k, p in theirs.items():
            p.grad = grads[k].clone() if k in grads else None
        if own.clip:
            nn.utils.clip_grad_norm_(theirs.values(), own.clip)
        reference.step()
        descent, state = own.update({k: g[None] for k, g in grads.items()}, state, params, hyper)
        apply_update(params, descent, torch.tensor([0.01]))
    for k, p in theirs.items():
        torch.testing.assert_close(params[k][0], p.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "own",
    [Adam(clip=0.3), AdamW(schedule="cosine"), optimizers.SGD(momentum=0.9, clip=0.1), RMSprop(clip=0.3, momentum=0.5)],
)
def test_a_run_does_not_depend_on_its_cohort(own: Optimizer) -> None:
    """Bit by bit, together with runs of other scalars, and with runs that use options it does not use."""
    others = [replace(own, weight_decay=0.2), replace(own, clip=0.0, warmup=1.0)]
    members = [Member(seed, 0.01, SGD(), o) for seed, o in enumerate([own, *others])]

    def final(chosen: list[Member], execution: Execution) -> Snapshot:
        *_, last = train(Cohort(CHALLENGE, mlp, tuple(chosen), 2, 4 * BATCH), execution=execution)
        return last

    together = final(members, "vectorised").state.params
    for run, member in enumerate(members):
        alone = final([member], "sequential").state.params
        assert all(torch.equal(p[run], alone[k][0]) for k, p in together.items()), member.optimizer


def test_the_rate_of_a_schedule_falls_to_zero_and_rises_from_it() -> None:
    own = optimizers.SGD(schedule="cosine", warmup=1.0, span="sequence")
    factors = torch.cat([own.lr_factors(task, 3, epoch, 2, 10) for task in range(3) for epoch in range(2)])
    torch.testing.assert_close(factors[:10], torch.arange(1, 11, dtype=torch.float64) / 10)
    assert factors[10] == 1 and factors[10:].diff().max() < 0 and factors[-1] < 0.01
    assert math.isclose(float(factors[35]), 0.5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (optimizers.SGD, {"momentum": -0.1}, "sgd.momentum = -0.1 was given; it must be at least 0"),
        (Adam, {"beta2": 1.0}, "adam.beta2 = 1.0 was given; it must be at least 0 and below 1"),
        (Adam, {"beta1": 1 - 1e-9}, "below 1 in float32"),
        (optimizers.SGD, {"nesterov": True}, "nesterov=true has no effect without momentum"),
        (AdamW, {"eps": 0.0}, "adamw.eps = 0.0 was given; it must be above 0"),
        (Adam, {"schedule": "cosin"}, "unknown adam.schedule 'cosin'. Did you mean 'cosine'"),
        (Adam, {"gamma": 0.5}, "gamma and step_epochs are options of schedule=step"),
        (optimizers.SGD, {"span": "sequence"}, "span=sequence has no effect on a constant rate"),
    ],
)
def test_bad_options_are_refused(kind: type[Optimizer], options: dict[str, Any], message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        kind(**options)


def test_plain_sgd_has_neither_state_nor_scalars() -> None:
    plain = optimizers.SGD()
    grads = {"w": torch.ones(2)}
    assert step_scalars([plain, plain]) == {} and plain.init(grads, {}) == {}
    descent, state = plain.update(grads, {}, grads, {})
    assert descent is grads and state == {}
