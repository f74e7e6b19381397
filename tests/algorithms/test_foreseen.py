"""A first layer that knows how its inputs lie to the stored ones moves as one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from small_problems import (
    CLASSES,
    FEATURES,
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    gradient,
    small_mlp,
    train_to_the_end,
    uniforms,
)
from torch import Tensor, nn
from torch.nn import functional

from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.foreseen import first_layer
from glocal.algorithms.ogd import OGD, OGDGTL, OGDAve, Orthogonal
from glocal.challenges.challenge import Challenge, Data, Task
from glocal.curvature.jacobian import jacobian
from glocal.curvature.output_jacobians import every_output
from glocal.engine.cohort import Cohort
from glocal.engine.executors import Vectorised
from glocal.engine.loader import Feed
from glocal.engine.loop import Execution, train
from glocal.engine.memory_budget import bytes_per_run, initial_state
from glocal.engine.state import State
from glocal.lens.trajectory import record
from glocal.networks.mlp import mlp
from glocal.networks.model import Model
from glocal.tree import Params

VARIANTS = (OGD, OGDGTL, OGDAve)
RUNS = [(seed, lr) for seed in (0, 1) for lr in (0.05, 0.1)]


def double_mlp(shape: Sequence[int], outputs: int) -> nn.Module:
    return small_mlp(shape, outputs).double()


def doubled(of_seed: Mapping[int, Challenge], seeded: bool) -> Challenge:
    """Challenges in float64, one for every seed."""

    def task(number: int, seed: int) -> Task:
        made = of_seed[seed if seeded else 0].task(number, seed)
        return replace(
            made, train=Data(made.train.x.double(), made.train.y), test=Data(made.test.x.double(), made.test.y)
        )

    return replace(of_seed[0], seeded=seeded, make_task=task)


def wide_cohort(algorithm: Orthogonal) -> Cohort:
    """Inputs of many numbers in small batches: here it pays."""
    challenge = doubled({0: blobs((60, 60, 60), shape=(1, 8, 8))}, seeded=False)
    return cohort_of(challenge, algorithm, RUNS, double_mlp, batch_size=8)


@contextmanager
def nothing_foreseen() -> Iterator[None]:
    with patch.object(Orthogonal, "foresee", lambda *args: None):
        yield


@contextmanager
def noted_widths() -> Iterator[list[int]]:
    """How many numbers the inputs of every task's steps have."""
    widths: list[int] = []
    load = Feed.load_task

    def noted(self: Feed, task: int, memory: Memory | None = None) -> None:
        load(self, task, memory)
        if memory is not None:
            widths.append(self.inputs[0].numel())

    with patch.object(Feed, "load_task", noted):
        yield widths


@pytest.mark.parametrize("execution", ["vectorised", "run-by-run"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_where_it_would_go(variant: type[Orthogonal], execution: Execution) -> None:
    cohort = wide_cohort(variant(slots=36))
    stored = 12 if variant is not OGD else 3  # a task, inputs
    with noted_widths() as widths:
        foreseen = train_to_the_end(cohort, execution).state.params
    assert widths == [64, 64 + stored, 64 + 2 * stored]
    with nothing_foreseen(), noted_widths() as narrow:
        plain = train_to_the_end(cohort, execution).state.params
    assert narrow == [64, 64, 64]
    for name, values in plain.items():
        assert foreseen[name].shape == values.shape
        torch.testing.assert_close(foreseen[name], values, rtol=1e-6, atol=1e-7)


def shuffled(challenge: Challenge, seed: int) -> Challenge:
    def task(number: int, _: int) -> Task:
        made = challenge.task(number, 0)
        order = torch.randperm(len(made.train.y), generator=torch.Generator().manual_seed(seed))
        return replace(made, train=Data(made.train.x[order], made.train.y[order]))

    return replace(challenge, make_task=task)


@pytest.mark.parametrize("runs", [RUNS, RUNS[::-1]])
def test_so_it_does_where_every_seed_has_data_of_its_own(runs: Sequence[tuple[int, float]]) -> None:
    """And labels of its own; whatever the order of the runs."""
    of_seed = {seed: shuffled(blobs((60, 60), shape=(1, 8, 8), seed=seed), seed) for seed in (0, 1)}
    cohort = cohort_of(doubled(of_seed, seeded=True), OGDGTL(slots=20), runs, double_mlp, epochs=1, batch_size=8)
    assert len(cohort.groups) == 2
    with noted_widths() as widths:
        foreseen = train_to_the_end(cohort).state.params
    assert len(set(widths)) == 2
    with nothing_foreseen():
        plain = train_to_the_end(cohort).state.params
    for name, values in plain.items():
        torch.testing.assert_close(foreseen[name], values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_is_the_projection_by_the_whole_gradient(variant: type[Orthogonal], bias: bool) -> None:
    """In float64 to the last digits, from the network's gradient with and without what is foreseen."""
    model, params = double_model(hidden=(7, 4))
    if not bias:
        module = nn.Sequential(nn.Linear(FEATURES, 7, bias=False), nn.Tanh(), nn.Linear(7, CLASSES)).double()
        model = Model(module, model.criterion, model.tasks, batch_size=4)
        params = {k: p.detach().clone() for k, p in module.named_parameters()}
    algorithm = variant(slots=9 * (CLASSES if variant is OGD else 1))
    old, new = examples(3, 1), examples(4, 2)
    empty = algorithm.init(model, params, batch_of((old[0][:2], old[1][:2]), torch.zeros(0)))
    memory = algorithm.consolidate(model, params, empty, batch_of(old, uniforms(3)))
    theta = elsewhere(params)
    with patch("glocal.algorithms.foreseen.pays", lambda *args: True):
        inputs = algorithm.foresee(model, memory, new[0], epochs=1)
    assert inputs is not None and inputs.shape == (4, FEATURES + 3)
    wide = algorithm.widened(model, theta, memory)

    def step(params: Params, x: Tensor) -> Params:
        slopes = gradient(lambda p: model.loss(p, x, new[1]), params)
        return algorithm.direction(model, slopes, params, memory, batch_of((x, new[1]), torch.zeros(0)))

    assert torch.equal(model.outputs(wide, inputs), model.outputs(theta, new[0]))
    expected, taken = step(theta, new[0]), algorithm.folded(model, step(wide, inputs), memory)
    for name, values in expected.items():
        torch.testing.assert_close(taken[name], values, rtol=1e-10, atol=1e-12)


def test_outputs_stay_what_they_are_while_something_is_owed() -> None:
    """With C ≠ 0 the wide network is the folded one."""
    model, params = double_model()
    memory = OGD(slots=27).init(model, params, batch_of(examples(2, 0), torch.zeros(0)))
    memory = OGD(slots=27).consolidate(model, params, memory, batch_of(examples(3, 1), uniforms(3)))
    with patch("glocal.algorithms.foreseen.pays", lambda *args: True):
        inputs = OGD(slots=27).foresee(model, memory, examples(6, 2)[0], 1)
    assert inputs is not None
    wide = elsewhere(OGD(slots=27).widened(model, params, memory))
    folded = OGD(slots=27).folded(model, wide, memory)
    torch.testing.assert_close(model.outputs(folded, examples(6, 2)[0]), model.outputs(wide, inputs))


def test_who_watches_sees_parameters_as_they_are() -> None:
    cohort, shapes = wide_cohort(OGDGTL(slots=36)), []

    def watch(task: int, epoch: int, state: State, feed: Feed) -> None:
        shapes.append({k: p.shape for k, p in state.params.items()})

    for _ in train(cohort, watch=watch):
        pass
    own = {k: torch.Size([len(cohort), *p.shape]) for k, p in double_mlp((1, 8, 8), 4).named_parameters()}
    assert shapes == [own] * 6


@pytest.mark.parametrize("runs", [RUNS, RUNS[:1]], ids=["cohort", "alone"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_recorded_as_it_is(variant: type[Orthogonal], runs: Sequence[tuple[int, float]]) -> None:
    """θ, and not what its steps are made with."""
    challenge = doubled({0: blobs((60, 60), shape=(1, 8, 8))}, seeded=False)
    cohort = cohort_of(challenge, variant(slots=36), runs, double_mlp, epochs=2, batch_size=8)
    with noted_widths() as widths:
        foreseen = record(cohort, steps=1)
    assert widths[1] > 64
    with nothing_foreseen():
        plain = record(cohort, steps=1)
    for found, expected in zip(foreseen, plain, strict=True):
        assert [m[:2] for m in found.moments] == [m[:2] for m in expected.moments]
        assert [m.step for m in expected.moments if m.finished == 1] == list(range(16, 33))
        for a, b in zip(found.moments, expected.moments, strict=True):
            torch.testing.assert_close(a.point.params, b.point.params, rtol=1e-6, atol=1e-7)


def test_ways_of_ones_own_are_left_alone() -> None:
    """They may look at θ and its gradient, or store what depends on it."""

    @dataclass(frozen=True)
    class Looking(OGDGTL):
        def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
            assert grads["layers.0.weight"].shape[1] == 64
            return super().direction(model, grads, params, memory, batch)

    @dataclass(frozen=True)
    class Decaying(OGDGTL):
        def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
            return super().objective(model, params, memory, batch) + sum(p.square().sum() for p in params.values())

    @dataclass(frozen=True)
    class Hardest(OGDGTL):
        def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
            return super().consolidate(model, params, memory, data._replace(random=model.losses(params, *data[:2])))

    for algorithm in (Looking(slots=36), Decaying(slots=36), Hardest(slots=36), OGDGTL(slots=36, passes=2)):
        with noted_widths() as widths:
            train_to_the_end(wide_cohort(algorithm))
        assert widths == [64, 64, 64]


def test_bf16_and_inputs_of_another_type_are_left_alone() -> None:
    cohort = cohort_of(blobs((60, 60), shape=(1, 8, 8)), OGDGTL(slots=20), RUNS, small_mlp, batch_size=8)
    for other, width in (
        (cohort, 74),
        (replace(cohort, precision="bf16"), 64),
        (replace(cohort, make_network=Cast), 64),
    ):
        with noted_widths() as widths:
            train_to_the_end(other)
        assert widths == [64, width]


def test_parameters_stay_where_they_are_from_epoch_to_epoch() -> None:
    """A captured graph looks there again; and they are narrow again whatever happens."""
    cohort, places = wide_cohort(OGDGTL(slots=36)), set()
    step = Vectorised.step

    def noted(self: Vectorised, state: State, batch: Batch) -> Tensor:
        weight = state.params["layers.0.weight"]
        places.add((weight.data_ptr(), weight.shape[-1]))
        return step(self, state, batch)

    with patch.object(Vectorised, "step", noted):
        train_to_the_end(cohort, "vectorised")
    assert len({place for place in places if place[1] > 64}) == 2  # two tasks, two epochs each
    feed = Feed(cohort)
    feed.load_task(0)
    executor, state = Vectorised(cohort), initial_state(cohort, feed)
    with torch.no_grad():
        executor.consolidate(state, feed)
    feed.load_task(1, state.memory)
    feed.load_epoch(0)
    assert feed.foreseen

    def interrupted(steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.epoch(state, feed, 0, interrupted)
    assert state.params["layers.0.weight"].shape[-1] == 64


def test_where_it_takes_longer_it_is_left_alone() -> None:
    with noted_widths() as widths:
        train_to_the_end(cohort_of(blobs((40, 40)), OGDGTL(slots=8), RUNS, batch_size=40))
    assert widths == [16, 16]


# Which networks have such a layer.


class Around(nn.Module):
    """The inputs go past the first layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(x + self.enter(x).tanh())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.other(x).tanh()


class Scaled(nn.Module):
    """What enters is not the input itself, but depends on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x / (1 + x.square().sum(1, keepdim=True)))


class Before(nn.Module):
    """Something is done to the inputs before they enter."""

    def __init__(self, what: Callable[[Before, Tensor], Tensor]) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(FEATURES, CLASSES)
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.what(self, x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (x.sum(1, keepdim=True) > 0)


class Cast(nn.Module):
    """Computes in float64 whatever it is given."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.base = small_mlp(shape, outputs).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.double())


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 2, 3), nn.Linear(2 * (FEATURES - 2), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.unsqueeze(1)).tanh().flatten(1))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: mlp((FEATURES,), CLASSES, (4,)), "layers.0"),
        (lambda: mlp((FEATURES,), CLASSES, (FEATURES, FEATURES)), "layers.0"),
        (lambda: mlp((FEATURES,), CLASSES, ()), "layers.0"),
        (Dropped, "body.1"),
        (Around, None),
        (Twice, None),
        (Scaled, None),
        (Convolutional, None),
        (Gated, None),
        (lambda: Before(lambda own, x: x), "layer"),
        (lambda: Before(lambda own, x: x * own.scale), None),
        (lambda: Before(lambda own, x: x + own.shift), None),
        (lambda: Before(lambda own, x: x.relu()), None),
        (lambda: Before(lambda own, x: x.clamp(0, 1)), None),
        (lambda: Before(lambda own, x: functional.dropout(x, 0.2, own.training)), None),
        (lambda: Before(lambda own, x: x + torch.randn_like(x) if own.training else x), None),
    ],
)
def test_a_first_layer_is_one_that_all_of_the_input_goes_through(
    make: Callable[[], nn.Module], name: str | None
) -> None:
    module = make().eval()
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    rows = jacobian(module, params, buffers, torch.randn(2, FEATURES), every_output)
    assert first_layer(module, rows) == name


def test_what_is_foreseen_is_planned_for() -> None:
    cohort = wide_cohort(OGDGTL(slots=36))
    with nothing_foreseen():
        less = bytes_per_run(cohort)
    of_a_seed = 60 * (64 + 36) * 8
    assert bytes_per_run(cohort) - less == of_a_seed / 2
