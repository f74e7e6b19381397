"""iCaRL: objective, exemplars and prediction against per-sample loops and a plain PyTorch implementation."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_problems import batch_of, blobs, cohort_of, elsewhere, gradient, linear_network, train_to_the_end
from torch import Tensor, nn
from torch.nn import functional

from glocal import losses
from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.algorithms.baselines import SGD
from glocal.algorithms.icarl import ICaRL, RandomICaRL
from glocal.challenges import Challenge, from_tasks
from glocal.engine.loop import Snapshot, train
from glocal.engine.state import State
from glocal.errors import GlocalError
from glocal.networks.mlp import MLP
from glocal.networks.model import Model
from glocal.rng import generator
from glocal.tree import Params, flatten, select, unflatten

KINDS = [ICaRL(slots=30), ICaRL(slots=30, features="raw"), RandomICaRL(slots=30)]
TASKS = ((0, 1), (4, 2), (3,))  # classes in no order; output 5 is never used
OUTPUTS, WIDTH = 6, 5


def kind(algorithm: Algorithm) -> str:
    return f"{algorithm.name}-{getattr(algorithm, 'features', '')}"


# One run's methods, in float64


def model_and_params(seed: int = 0, tasks: Sequence[Sequence[int]] = TASKS) -> tuple[Model, Params]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = MLP(WIDTH, OUTPUTS, (4,)).double()
    model = Model(
        module, losses.get("cross-entropy"), len(tasks), batch_size=8, classes=lambda task: tuple(tasks[task])
    )
    return model, {k: p.detach().clone() for k, p in module.named_parameters()}


def task_data(classes: Sequence[int], n: int = 20, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=draw)]
    x = torch.randn(n, WIDTH, dtype=torch.float64, generator=draw)
    return batch_of((x, y), seed)


def after(algorithm: ICaRL, finished: int, n: int = 20) -> tuple[Model, list[Params], list[Batch], Memory]:
    """The solutions θ_1, θ_2, ... of finished tasks, their data, and the memory after them."""
    model, params = model_and_params()
    data = [task_data(TASKS[t], n, seed=10 + t) for t in range(finished)]
    memory = algorithm.init(model, params, task_data(TASKS[0], 8))
    solutions = [elsewhere(params, seed=t) for t in range(finished)]
    for params, task in zip(solutions, data, strict=True):
        memory = algorithm.consolidate(model, params, memory, task)
    return model, solutions, data, memory


def network_outputs(params: Params, x: Tensor) -> tuple[list[float], list[float]]:
    """Features and outputs of one input, by hand."""
    hidden = (params["layers.0.weight"] @ x + params["layers.0.bias"]).relu()
    return hidden.tolist(), (params["layers.1.weight"] @ hidden + params["layers.1.bias"]).tolist()


def sigmoid(f: float) -> float:
    return 1 / (1 + math.exp(-f))


def sample_loss(
    params: Params, last: Params | None, x: Tensor, label: int, old: Sequence[int], new: Sequence[int]
) -> float:
    """Binary cross-entropy over the classes seen: targets of old ones by the last network, of new ones by the label."""
    _, f = network_outputs(params, x)
    targets = {c: float(label == c) for c in new}
    if last is not None:
        targets |= {c: sigmoid(network_outputs(last, x)[1][c]) for c in old}
    terms = [-q * math.log(sigmoid(f[c])) - (1 - q) * math.log(1 - sigmoid(f[c])) for c, q in targets.items()]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("finished", [0, 1, 2])
@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
def test_its_objective_is_a_loop_over_samples_and_classes_seen(algorithm: ICaRL, finished: int) -> None:
    model, solutions, data, memory = after(algorithm, finished)
    params = elsewhere(model_and_params()[1], seed=50)
    current = task_data(TASKS[finished], 9, seed=40)
    parts = [current, *[d._replace(x=d.x[:3], y=d.y[:3]) for d in data]]  # exemplars of old classes are among them
    batch = current._replace(x=torch.cat([p.x for p in parts]), y=torch.cat([p.y for p in parts]))
    old = [c for task in TASKS[:finished] for c in task]
    last = solutions[-1] if solutions else None
    terms = [sample_loss(params, last, x, int(y), old, TASKS[finished]) for x, y in zip(batch.x, batch.y, strict=True)]
    actual = algorithm.objective(model, params, memory, batch)
    assert float(actual) == pytest.approx(sum(terms) / len(terms), rel=1e-10)


def test_at_the_first_task_it_is_binary_cross_entropy_with_labels() -> None:
    algorithm = ICaRL(slots=10)
    model, _, _, memory = after(algorithm, 0)
    params, batch = elsewhere(model_and_params()[1]), task_data(TASKS[0], 7, seed=3)

    def value(p: Params) -> Tensor:
        labels = functional.one_hot(batch.y, OUTPUTS)[:, :2].double()
        return functional.binary_cross_entropy_with_logits(model.outputs(p, batch.x)[:, :2], labels)

    actual = gradient(lambda p: algorithm.objective(model, p, memory, batch), params)
    torch.testing.assert_close(actual, gradient(value, params), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
def test_it_predicts_the_class_whose_exemplars_are_nearest_on_average(algorithm: ICaRL) -> None:
    model, solutions, _, memory = after(algorithm, 2)
    theta = solutions[-1]

    def feature(x: Tensor) -> Tensor:
        f = torch.tensor(network_outputs(theta, x)[0], dtype=torch.float64)
        return f if algorithm.features == "raw" or not f.any() else f / f.norm()

    x, y = algorithm.exemplars(memory)  # type: ignore[misc]
    inputs = task_data(TASKS[0], 12, seed=77).x
    logits = algorithm.predict(model, theta, memory, inputs, 0)
    assert logits.shape == (12, OUTPUTS) and logits.isfinite().all()
    for c in range(OUTPUTS):
        if c in (3, 5):  # of a task to come, and of none
            assert (logits[:, c] < -1e20).all()
            continue
        mean = torch.stack([feature(x[i]) for i in range(len(y)) if int(y[i]) == c]).mean(0)
        mean = mean if algorithm.features == "raw" else mean / mean.norm()
        expected = torch.stack([-(feature(row) - mean).square().sum() for row in inputs])
        torch.testing.assert_close(logits[:, c], expected, rtol=1e-10, atol=1e-12)


def test_before_any_exemplar_the_network_itself_predicts() -> None:
    model, _, _, memory = after(ICaRL(slots=10), 0)
    params, x = model_and_params()[1], task_data(TASKS[0]).x
    assert torch.equal(ICaRL(slots=10).predict(model, params, memory, x, 0), model.outputs(params, x))
    assert ICaRL(slots=10).exemplars(memory) is None


@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
def test_its_approximation_is_a_loop_over_the_exemplars_of_the_task(algorithm: ICaRL) -> None:
    model, solutions, _, memory = after(algorithm, 2)
    x, y = algorithm.exemplars(memory)  # type: ignore[misc]
    seen = [c for task in TASKS[:2] for c in task]
    for task in (0, 1):
        rows = [i for i in range(len(y)) if int(y[i]) in TASKS[task]]
        for at in (solutions[-1], elsewhere(solutions[-1], seed=8)):
            terms = [sample_loss(at, solutions[-1], x[i], -1, seen, ()) for i in rows]
            actual = algorithm.approximation(model, memory, task)(at)
            assert float(actual) == pytest.approx(sum(terms) / len(terms), rel=1e-10)


def test_its_approximation_is_least_where_its_targets_were_taken() -> None:
    model, solutions, _, memory = after(ICaRL(slots=30), 2)
    for task in (0, 1):
        value = ICaRL(slots=30).approximation(model, memory, task)
        gradients = gradient(value, solutions[-1])
        assert max(float(g.abs().max()) for g in gradients.values()) < 1e-12
        assert all(value(elsewhere(solutions[-1], seed=s)) > value(solutions[-1]) for s in range(5))


# Exemplars


@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
def test_every_class_has_its_share_of_different_examples_of_its_own(algorithm: ICaRL) -> None:
    _, _, data, memory = after(algorithm, 2, n=40)
    x, y = algorithm.exemplars(memory)  # type: ignore[misc]
    assert sorted(y.tolist()) == sorted([0, 1, 2, 4] * (30 // 4))
    assert len({tuple(row.tolist()) for row in x}) == len(y)
    for row, label in zip(x, y, strict=True):
        (task,) = (t for t in (0, 1) if int(label) in TASKS[t])
        where = (data[task].x == row).all(1)
        assert data[task].y[where].tolist() == [int(label)]


@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
def test_old_classes_keep_their_first_ones(algorithm: ICaRL) -> None:
    memories = [after(algorithm, finished, n=60)[-1] for finished in (1, 2, 3)]
    for memory, share in zip(memories, (15, 7, 6), strict=True):
        for task in memory["exemplars"]:
            kept, first = memory["exemplars"][task], memories[int(task)]["exemplars"][task]
            assert kept["x"].shape[1] == share
            assert torch.equal(kept["x"], first["x"][:, :share]) and torch.equal(kept["y"], first["y"][:, :share])


def test_herding_follows_the_features_of_the_solution() -> None:
    """The best exemplar is the one nearest to its class's mean feature at θ_t."""
    for algorithm in KINDS[:2]:
        _, (theta,), (data,), memory = after(algorithm, 1, n=50)
        features = (data.x @ theta["layers.0.weight"].T + theta["layers.0.bias"]).relu()
        if algorithm.features == "normalised":
            features = functional.normalize(features)
        for c, kept in zip(TASKS[0], memory["exemplars"]["0"]["x"], strict=True):
            subset = features[data.y == c]
            nearest = (subset - subset.mean(0)).norm(dim=1).argmin()
            assert torch.equal(kept[0], data.x[data.y == c][nearest])


def test_a_class_with_few_examples_repeats_them_in_turn_and_counts_them_once() -> None:
    algorithm = ICaRL(slots=16, features="raw")
    model, params = model_and_params(tasks=[(0, 1)])
    data = task_data((0, 1), 14, seed=4)
    data.y[:] = 0
    data.y[[2, 5, 11]] = 1
    memory = algorithm.consolidate(model, params, algorithm.init(model, params, data), data)
    x, y = memory["exemplars"]["0"]["x"][1], memory["exemplars"]["0"]["y"][1]
    assert y.tolist() == [1] * 8 and memory["counts"].tolist() == [8, 3, 0, 0, 0, 0]
    assert sorted(x[:3].tolist()) == sorted(data.x[[2, 5, 11]].tolist())
    assert torch.equal(x, x[[0, 1, 2, 0, 1, 2, 0, 1]])
    torch.testing.assert_close(memory["means"][1], model.features(params, data.x[[2, 5, 11]]).mean(0))
    once = torch.cat([memory["exemplars"]["0"]["x"][0], x[:3]])
    terms = [sample_loss(elsewhere(params), params, row, -1, (0, 1), ()) for row in once]
    actual = algorithm.approximation(model, memory, 0)(elsewhere(params))
    assert float(actual) == pytest.approx(sum(terms) / len(terms), rel=1e-10)


def test_no_class_has_more_places_than_its_task_has_examples() -> None:
    model, params = model_and_params(tasks=[(0, 1)])
    data = task_data((0, 1), 6, seed=4)
    memory = ICaRL(slots=500).consolidate(model, params, ICaRL().init(model, params, data), data)
    assert memory["exemplars"]["0"]["y"].shape == (2, 6)


def test_a_class_without_training_examples_is_never_replayed_nor_predicted() -> None:
    model, params = model_and_params(tasks=[(0, 1)])
    data = task_data((1,), 14, seed=4)
    algorithm = ICaRL(slots=8)
    memory = algorithm.consolidate(model, params, algorithm.init(model, params, data), data)
    x, y = algorithm.exemplars(memory)  # type: ignore[misc]
    for row, label in zip(x, y, strict=True):
        assert data.y[(data.x == row).all(1)].tolist() == [int(label)]
    assert (algorithm.predict(model, params, memory, data.x, 0).argmax(1) == 1).all()


def test_a_class_that_returns_is_labelled_again_and_has_one_mean() -> None:
    tasks = [(0, 1), (1, 2)]
    model, params = model_and_params(tasks=tasks)
    algorithm = ICaRL(slots=12, features="raw")
    first, second = task_data((0, 1), 30, seed=4), task_data((1, 2), 30, seed=5)
    memory = algorithm.consolidate(model, params, algorithm.init(model, params, first), first)
    there = elsewhere(params)
    terms = [sample_loss(there, params, x, int(y), (0,), (1, 2)) for x, y in zip(second.x, second.y, strict=True)]
    assert float(algorithm.objective(model, there, memory, second)) == pytest.approx(sum(terms) / 30, rel=1e-10)
    memory = algorithm.consolidate(model, there, memory, second)
    x, y = algorithm.exemplars(memory)  # type: ignore[misc]
    assert torch.bincount(y).tolist() == [3, 6, 3]
    torch.testing.assert_close(memory["means"][1], model.features(there, x[y == 1]).mean(0))


# Training


def split_blobs(
    sizes: Sequence[int] = (60, 60, 60), dtype: torch.dtype = torch.float32, seed: int = 0, noise: float = 0.5
) -> Challenge:
    """Every task brings two classes, each around a centre of its own."""
    draw = torch.Generator().manual_seed(seed)

    def part(n: int, task: int, centres: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.arange(n) % 2
        x = centres[y] + noise * torch.randn(n, 1, 4, 4, generator=draw)
        return (x * 40 + 128).clamp(0, 255).to(torch.uint8) if dtype == torch.uint8 else x, y + 2 * task

    tasks = []
    for task, n in enumerate(sizes):
        centres = torch.randn(2, 1, 4, 4, generator=draw)
        tasks.append((part(n, task, centres), part(60, task, centres)))
    return from_tasks("split-blobs", tasks, setting="class")


class SmallConv(nn.Module):
    """Convolution, BatchNorm, two linear layers: for images of 4 × 4."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(shape[0], 3, 3, bias=False), nn.BatchNorm2d(3)
        self.hidden, self.head = nn.Linear(12, 9), nn.Linear(9, outputs)

    def embed(self, x: Tensor) -> Tensor:
        return self.hidden(self.norm(self.conv(x)).relu().flatten(1)).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def plain_pytorch(
    challenge: Challenge, seed: int, lr: float, start: Params, slots: int, epochs: int, normalised: bool
) -> tuple[nn.Module, Tensor]:
    """iCaRL with two classes a task as its authors would write it: modules, an optimiser, lists of exemplars."""
    net = SmallConv(challenge.input_shape, challenge.outputs)
    net.load_state_dict(start)
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    last: nn.Module | None = None
    exemplars: dict[int, Tensor] = {}
    embed = lambda x: functional.normalize(net.embed(x)) if normalised else net.embed(x)  # noqa: E731
    for task in range(challenge.tasks):
        subset = challenge.task(task, seed).train
        x = torch.cat([subset.x, *exemplars.values()])
        y = torch.cat([subset.y, *[torch.full((len(kept),), c) for c, kept in exemplars.items()]])
        before, now = 2 * task, 2 * task + 2
        net.train()
        for epoch in range(epochs):
            for rows in torch.randperm(len(y), generator=generator(seed, "order", task, epoch)).split(32):
                targets = functional.one_hot(y[rows], challenge.outputs)[:, :now].float()
                if last is not None:
                    with torch.no_grad():
                        targets[:, :before] = last(x[rows])[:, :before].sigmoid()
                optimiser.zero_grad()
                functional.binary_cross_entropy_with_logits(net(x[rows])[:, :now], targets).backward()
                optimiser.step()
        net.eval()
        last = copy.deepcopy(net)
        with torch.no_grad():
            exemplars = {c: kept[: slots // now] for c, kept in exemplars.items()}
            for c in (before, before + 1):
                images = subset.x[subset.y == c]
                features = embed(images).double()
                chosen: list[int] = []
                total, left = torch.zeros_like(features[0]), list(range(len(images)))
                while len(chosen) < slots // now:
                    away = [float((features.mean(0) - (total + features[i]) / (len(chosen) + 1)).norm()) for i in left]
                    chosen.append(left.pop(away.index(min(away))))
                    total += features[chosen[-1]]
                exemplars[c] = images[chosen]
    with torch.no_grad():
        means = torch.stack([embed(kept).mean(0) for kept in exemplars.values()])
        means = functional.normalize(means) if normalised else means
        distances = [(embed(challenge.task(t, seed).test.x)[:, None] - means).square().sum(-1) for t in range(3)]
    return net, -torch.cat(distances)


SURE = 0
"""A seed with which no example is as near to one class as to another, where rounding would decide."""


@pytest.mark.parametrize("algorithm", KINDS[:2], ids=kind)
def test_a_whole_run_is_that_of_plain_pytorch(algorithm: ICaRL) -> None:
    """BatchNorm tells apart who ran in which mode, and with which statistics."""
    challenge = split_blobs()
    of = cohort_of(challenge, algorithm, [(SURE, 0.1)], SmallConv, epochs=3)
    initial = of.initial()
    start = {**select(initial[0], 0), **select(initial[1], 0)}
    net, logits = plain_pytorch(challenge, SURE, 0.1, start, 30, 3, algorithm.features == "normalised")
    end = train_to_the_end(of)
    torch.testing.assert_close(
        {**select(end.state.params, 0), **select(end.state.buffers, 0)}, dict(net.state_dict()), rtol=1e-3, atol=1e-5
    )
    for task in range(3):
        y = challenge.task(task, SURE).test.y
        subset = logits[60 * task : 60 * task + 60]
        accuracy = float((subset.argmax(1) == y).double().mean())
        assert float(end.record.arrays["test_class_accuracy"][0, 3, task]) == pytest.approx(accuracy, abs=1e-9)
        loss = float(functional.cross_entropy(subset, y))
        assert float(end.record.arrays["test_class_loss"][0, 3, task]) == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["uint8", "float"])
def test_it_remembers_classes_that_plain_sgd_confuses(algorithm: ICaRL, dtype: torch.dtype) -> None:
    challenge = split_blobs(dtype=dtype)
    rate = 0.2 if dtype == torch.float32 else 1.0
    accuracy = {}
    for trained in (SGD(), algorithm):
        record = train_to_the_end(cohort_of(challenge, trained, [(0, rate), (1, rate)], epochs=15)).record
        accuracy[trained.name] = record.arrays["test_class_accuracy"][:, 3, :2].mean()
        assert record.arrays["test_class_loss"].isfinite().all()
    assert accuracy["sgd"] < 0.6
    assert accuracy[algorithm.name] > accuracy["sgd"] + 0.25


def test_among_the_tasks_own_classes_it_is_measured_too() -> None:
    record = train_to_the_end(cohort_of(split_blobs(), ICaRL(slots=30), epochs=10)).record
    of_task = record.arrays["test_task_accuracy"][0, 3]
    assert (of_task >= record.arrays["test_class_accuracy"][0, 3]).all() and (of_task > 0.8).all()


@pytest.mark.parametrize("network", [SmallConv, linear_network], ids=["batchnorm", "linear"])
@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
def test_vectorised_and_run_by_run_agree(algorithm: Algorithm, network: Any) -> None:
    runs = [(0, 0.05), (0, 0.2), (1, 0.1)]
    of = cohort_of(split_blobs(), algorithm, runs, network)
    mapped, single = train_to_the_end(of, "vectorised"), train_to_the_end(of, "sequential")
    leaves = flatten(single.state.as_tree())
    for key, value in flatten(mapped.state.as_tree()).items():
        torch.testing.assert_close(value, leaves[key], rtol=1e-5, atol=1e-5)
    accuracies = [s.record.arrays["test_class_accuracy"] for s in (mapped, single)]
    assert torch.equal(*accuracies)
    assert all(not torch.equal(p[0], p[1]) for p in mapped.state.params.values()), "other runs end elsewhere"


@pytest.mark.parametrize("algorithm", KINDS, ids=kind)
def test_resumed_from_what_was_written_down_it_goes_on_with_the_same_bits(algorithm: Algorithm) -> None:
    of = cohort_of(split_blobs(), algorithm, [(0, 0.1), (1, 0.2)])
    complete = train_to_the_end(of)
    snapshots = train(of)
    at = [next(snapshots) for _ in range(3)][-1]
    written = {k: v.clone() for k, v in sorted(flatten(at.state.as_tree()).items(), reverse=True)}
    del snapshots
    *_, last = train(of, Snapshot(2, State.from_tree(unflatten(written), at.state.clock), at.record))
    resumed = flatten(last.state.as_tree())
    for key, value in flatten(complete.state.as_tree()).items():
        assert torch.equal(value, resumed[key]), key


def test_exemplars_depend_on_the_solution_by_herding_and_not_by_chance() -> None:
    """Two runs with one seed and other learning rates: what is remembered of the first task."""
    for algorithm, same in ((ICaRL(slots=12), False), (RandomICaRL(slots=12), True)):
        of = cohort_of(split_blobs(noise=1.0), algorithm, [(3, 0.01), (3, 0.5)], epochs=5)
        x = train_to_the_end(of).state.memory["exemplars"]["0"]["x"]
        assert torch.equal(x[0], x[1]) is same


def test_the_memory_is_as_large_as_it_says() -> None:
    algorithm = ICaRL(slots=24)
    end = train_to_the_end(cohort_of(split_blobs(), algorithm))
    memory = select(end.state.memory, 0)
    assert sum(k["y"].numel() for k in memory["exemplars"].values()) == 24
    assert sum(p.numel() for p in memory["network"].values()) == sum(p[0].numel() for p in end.state.params.values())
    assert memory["means"].shape == (6, 12)


# What it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots = 0 was given; it must be at least 1"),
        ({"features": "normalized"}, "features 'normalized'. Did you mean 'normalised'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        ICaRL(**options)
    with pytest.raises(GlocalError, match=message):
        RandomICaRL(**options)


def test_it_needs_a_slot_for_every_class() -> None:
    with pytest.raises(GlocalError, match="slots=5 cannot store an exemplar of each of 6 classes"):
        train_to_the_end(cohort_of(split_blobs(), ICaRL(slots=5)))
    assert train_to_the_end(cohort_of(split_blobs(), ICaRL(slots=6))).finished == 3


def test_it_refuses_numbers_for_targets() -> None:
    x = torch.randn(20, 3)
    numbers = from_tasks("numbers", [((x, x), (x, x))], setting="domain", loss="squared-error")
    with pytest.raises(GlocalError, match="requires a classification challenge"):
        train_to_the_end(cohort_of(numbers, ICaRL()))


def test_it_refuses_a_network_without_a_linear_layer() -> None:
    network = lambda shape, outputs: nn.Sequential(nn.Conv2d(1, outputs, 4), nn.Flatten())  # noqa: E731
    with pytest.raises(GlocalError, match=r"last nn\.Linear layer"):
        train_to_the_end(cohort_of(split_blobs(), ICaRL(), network=network))


def test_tasks_that_share_their_classes_do_not_break_it() -> None:
    record = train_to_the_end(cohort_of(blobs((60, 60)), ICaRL(slots=16), epochs=8)).record
    assert float(record.arrays["test_class_accuracy"][0, 2].min()) > 0.5
