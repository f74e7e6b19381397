"""GEM: the direction is the projection onto the constraints, and every task stores an equal share."""

from __future__ import annotations

import by_hand
import daqp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import (
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    flat,
    gradient,
    small_mlp,
    train_to_the_end,
)
from test_executors import SmallConv
from torch import Tensor
from torch.nn import functional

from glocal import losses
from glocal.algorithms.algorithm import Memory
from glocal.algorithms.baselines import SGD
from glocal.algorithms.gem import AGEM, GEM
from glocal.challenges import from_tasks
from glocal.engine.loop import Execution
from glocal.errors import GlocalError
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params, select

QUICK = settings(deadline=None, max_examples=20, derandomize=True)
TASKS, SHARE = 4, 3
PUBLISHED = {"margin": 0.5, "damping": 1e-3}


def remembering(gem: GEM, model: Model, params: Params, finished: int = TASKS, size: int = 11) -> Memory:
    memory = gem.init(model, params, batch_of(examples(4, 0)))
    for task in range(finished):
        data = batch_of(examples(size, 60 + task), task, task)
        memory = gem.consolidate(model, params, memory, data)
    return memory


def task_gradients(model: Model, params: Params, memory: Memory) -> Tensor:
    """M, one row a finished task, by plain autograd."""
    tasks = zip(memory["x"], memory["y"], strict=True)
    return torch.stack(
        [flat(gradient(lambda p: functional.cross_entropy(model.outputs(p, x), y), params)) for x, y in tasks]  # noqa: B023
    )


def noise(params: Params, seed: int, by: float = 1.0) -> Params:
    return elsewhere({k: torch.zeros_like(p) for k, p in params.items()}, seed, by)


def directed(gem: GEM, model: Model, grads: Params, params: Params, memory: Memory) -> Tensor:
    return flat(gem.direction(model, grads, params, memory, batch_of(examples(4, 9), 0, TASKS)))


def published_rule(g: np.ndarray, memory: np.ndarray, margin: float, damping: float) -> np.ndarray:
    """Follow g unless some memory's gradient forbids it; else add the dual's solution, found by daqp."""
    overlaps, tasks = memory @ g, len(memory)
    if (overlaps >= 0).all():
        return g
    lower, upper = np.full(tasks, margin), np.full(tasks, 1e30)
    hessian = memory @ memory.T + damping * np.eye(tasks)
    v, _, flag, _ = daqp.solve(hessian, overlaps, np.zeros((0, tasks)), upper, lower, primal_tol=1e-12, dual_tol=1e-14)
    assert flag == 1
    return g + memory.T @ v


@QUICK
@given(st.integers(0, 10_000), st.floats(0.1, 3), st.sampled_from([1e-6, 1.0, 1e4]))
def test_its_direction_is_the_closest_one_that_raises_no_finished_tasks_loss(
    seed: int, against: float, scale: float
) -> None:
    """The optimality conditions: d = g + Mᵀv, v ≥ 0, Md ≥ 0, v_o (Md)_o = 0."""
    model, params = double_model(TASKS)
    params = elsewhere(params, seed)
    gem = GEM(slots=TASKS * SHARE)
    memory = remembering(gem, model, params)
    m = task_gradients(model, params, memory)
    towards = dict(zip(params, m.mean(0).split([p.numel() for p in params.values()]), strict=True))
    random = noise(params, seed + 1, by=0.3)
    grads = {k: scale * (random[k] - against * towards[k].view_as(p)) for k, p in params.items()}
    g, d = flat(grads), directed(gem, model, grads, params, memory)
    size = float(g.norm())
    slack = (m @ d) / m.norm(dim=1)
    assert float(slack.min()) > -1e-9 * size
    v = torch.linalg.lstsq(m.T, (d - g).unsqueeze(1)).solution.squeeze(1)
    torch.testing.assert_close(g + m.T @ v, d, rtol=0, atol=1e-9 * size)
    assert float((v * m.norm(dim=1)).min()) > -1e-8 * size
    assert float((v * (m @ d)).abs().max()) < 1e-8 * size**2
    if bool((m @ g >= 0).all()):
        assert torch.equal(d, g)


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["projection", "published"])
def test_it_follows_the_published_rule(options: dict[str, float]) -> None:
    """With and without a violated constraint."""
    model, params = double_model(TASKS)
    gem = GEM(slots=TASKS * SHARE, **options)
    memory = remembering(gem, model, params)
    m = task_gradients(model, params, memory)
    violated = 0
    for seed in range(24):
        grads = noise(params, seed)
        if seed % 4 == 0:  # a step that helps all
            sizes = [p.numel() for p in params.values()]
            grads = {k: s.view_as(grads[k]) for k, s in zip(params, m.sum(0).split(sizes), strict=True)}
        g = flat(grads)
        violated += bool((m @ g < 0).any())
        expected = published_rule(g.numpy(), m.numpy(), gem.margin, gem.damping)
        np.testing.assert_allclose(directed(gem, model, grads, params, memory).numpy(), expected, atol=1e-8)
        if not bool((m @ g < 0).any()):
            assert torch.equal(directed(gem, model, grads, params, memory), g), "margin or not"
    assert 12 <= violated <= 20


def test_with_one_finished_task_it_is_a_gem() -> None:
    model, params = double_model(1)
    gem, agem = GEM(slots=6), AGEM(slots=6, replay=6)
    stored = remembering(gem, model, params, finished=1)
    example = batch_of(examples(4, 0))
    data = batch_of(examples(11, 60), 0, 0)
    averaged = agem.consolidate(model, params, agem.init(model, params, example), data)
    for seed in range(10):
        grads = noise(params, seed)
        expected = flat(agem.direction(model, grads, params, averaged, batch_of(examples(4, 9), 0, 1)))
        torch.testing.assert_close(directed(gem, model, grads, params, stored), expected, rtol=1e-9, atol=1e-12)


def test_before_any_task_is_stored_it_is_the_identity() -> None:
    model, params = double_model(TASKS)
    gem = GEM(slots=TASKS * SHARE, **PUBLISHED)
    grads = noise(params, 1)
    assert torch.equal(directed(gem, model, grads, params, remembering(gem, model, params, finished=0)), flat(grads))


def test_in_single_precision_it_raises_no_finished_tasks_loss_either() -> None:
    model, params = double_model(TASKS)
    gem = GEM(slots=TASKS * SHARE)
    memory = remembering(gem, model, params)
    single, memory["x"] = {k: p.float() for k, p in params.items()}, memory["x"].float()
    m = task_gradients(model, single, memory)
    for seed in range(20):
        grads = noise(single, seed)
        d = directed(gem, model, grads, single, memory)
        assert d.dtype == torch.float32
        assert float(((m @ d) / m.norm(dim=1)).min()) > -1e-6 * float(flat(grads).norm())


def test_duplicate_tasks_and_zero_gradients_are_handled() -> None:
    model, params = double_model(TASKS, loss="squared-error")
    gem = GEM(slots=TASKS * SHARE)
    x, _ = examples(TASKS * SHARE, 4)
    targets = torch.randn(TASKS * SHARE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, y = x.view(TASKS, SHARE, -1), targets.view(TASKS, SHARE, -1)
    x[1], y[1] = x[0], y[0]
    y[2] = model.outputs(params, x[2])  # fitted: no gradient
    memory = {"x": x, "y": y, "weight": torch.ones(TASKS, SHARE)}
    m = torch.stack([flat(gradient(gem.approximation(model, memory, o), params)) for o in range(TASKS)])
    assert float(m[2].norm()) == 0
    for seed in range(20):
        grads = noise(params, seed)
        d = directed(gem, model, grads, params, memory)
        assert float((m @ d).min()) > -1e-9
        unit = (m[[0, 3]] / m[[0, 3]].norm(dim=1, keepdim=True)).numpy()
        n = len(d)
        expected = daqp.solve(np.eye(n), -flat(grads).numpy(), unit, np.full(2, 1e30), np.zeros(2))[0]
        np.testing.assert_allclose(d.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["projection", "published"])
def test_a_whole_run_is_that_of_a_plain_loop(options: dict[str, float]) -> None:
    cohort = cohort_of(blobs((70, 33, 50)), GEM(slots=30, **options), [(1, 0.1)])
    module = by_hand.network(cohort)
    stored: list[tuple[Tensor, Tensor]] = []
    projected = 0
    for task in range(3):
        for x, y, _ in by_hand.steps(cohort, task):
            g = by_hand.gradient(module, functional.cross_entropy(module(x), y))
            if stored:
                past = [by_hand.gradient(module, functional.cross_entropy(module(a), b)) for a, b in stored]
                m = torch.stack(past).double().numpy()
                d = torch.tensor(published_rule(g.double().numpy(), m, **{"margin": 0.0, "damping": 0.0, **options}))
                projected += not torch.equal(d, g.double())
                g = d.float()
            by_hand.follow(module, g, 0.1)
        x, y, key = by_hand.consolidation(cohort, task)
        chosen = by_hand.chosen(key, "examples", len(y), 10)
        stored.append((x[chosen], y[chosen]))
    assert projected >= 3
    by_hand.assert_same_network(module, train_to_the_end(cohort).state.params, 1e-4)


@pytest.mark.parametrize("network", [small_mlp, SmallConv], ids=["mlp", "batchnorm"])
def test_vectorised_and_run_by_run_agree(network: MakeNetwork) -> None:
    runs = [(0, 0.2), (1, 0.1)]
    cohort = cohort_of(blobs((40, 33, 40)), GEM(slots=31), runs, network, epochs=1)
    mapped, single = train_to_the_end(cohort, "vectorised").state, train_to_the_end(cohort, "sequential").state
    tolerance = 1e-5 if network is small_mlp else 1e-4  # convolutions are rounded differently when mapped
    torch.testing.assert_close(mapped.params, single.params, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mapped.buffers, single.buffers, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mapped.memory, single.memory, rtol=0, atol=0)


def test_runs_with_other_margins_train_together() -> None:
    challenge = blobs((70, 33, 50))
    cohort = cohort_of(challenge, GEM(slots=31), [(0, 0.1)], epochs=1)
    options = [GEM(slots=31), GEM(slots=31, **PUBLISHED)]
    members = [type(cohort.members[0])(0, 0.1, gem) for gem in options]
    together = train_to_the_end(cohort.only(members), "vectorised").state.params
    for run, gem in enumerate(options):
        alone = train_to_the_end(cohort_of(challenge, gem, [(0, 0.1)], epochs=1)).state.params
        torch.testing.assert_close(select(together, run), select(alone, 0), rtol=1e-5, atol=1e-6)
    first, second = together["layers.0.weight"][:2]
    assert float((first - second).abs().max()) > 1e-3


@pytest.mark.parametrize("first", ["stream", "memory"])
def test_batchnorm_sees_every_finished_task_after_the_streams_batch(first: str) -> None:
    """The published code passes the memory first: the parameters are the same, the running statistics are not."""
    cohort = cohort_of(blobs((64, 32)), GEM(slots=20), [(0, 0.1)], SmallConv, epochs=1)
    module = by_hand.network(cohort)
    for task in range(2):
        for x, y, _ in by_hand.steps(cohort, task):
            batches = {"stream": (x, y)}
            if task == 1:
                old_x, old_y, key = by_hand.consolidation(cohort, 0)
                chosen = by_hand.chosen(key, "examples", len(old_y), 10)
                batches["memory"] = old_x[chosen], old_y[chosen]
            gradients = {}
            for name in sorted(batches, key=lambda name: name != first):
                inputs, labels = batches[name]
                gradients[name] = by_hand.gradient(module, functional.cross_entropy(module(inputs), labels))
            g = gradients["stream"]
            if task == 1:
                m = gradients["memory"]
                g = g - min(0.0, float(g @ m)) / float(m @ m) * m
            by_hand.follow(module, g, 0.1)
    end = train_to_the_end(cohort).state
    by_hand.assert_same_network(module, end.params, 1e-4)
    ours = select(end.buffers, 0)
    close = [torch.allclose(ours[k], b, rtol=1e-4, atol=1e-5) for k, b in module.named_buffers() if "running" in k]
    assert all(close) if first == "stream" else not any(close)


def test_the_engine_stores_an_equal_share_of_every_finished_task() -> None:
    challenge = blobs((70, 33, 50))
    end = train_to_the_end(cohort_of(challenge, GEM(slots=11), [(0, 0.1), (1, 0.1)], epochs=1)).state
    assert not torch.equal(end.memory["x"][0], end.memory["x"][1])
    for run in (0, 1):
        memory = select(end.memory, run)
        assert memory["y"].shape == (3, 3)
        for task in range(3):
            train = challenge.task(task, 0).train
            actual = set()
            for x, y in zip(memory["x"][task], memory["y"][task], strict=True):
                (where,) = (train.x == x).flatten(1).all(1).nonzero().flatten().tolist()
                assert int(train.y[where]) == int(y)
                actual.add(where)
            assert len(actual) == 3


def test_a_task_smaller_than_its_share_counts_each_of_its_examples_once() -> None:
    model, params = double_model(2)
    gem = GEM(slots=40)
    memory = remembering(gem, model, params, finished=2, size=8)
    for task in range(2):
        x, y = examples(8, 60 + task)
        expected = functional.cross_entropy(model.outputs(params, x), y)
        torch.testing.assert_close(gem.approximation(model, memory, task)(params), expected)
    complete = train_to_the_end(cohort_of(blobs((60, 8)), GEM(slots=40), epochs=1)).state.memory
    assert complete["weight"][0].sum(1).tolist() == [20, 8]


def test_its_approximation_is_the_mean_loss_of_the_stored_share() -> None:
    model, params = double_model(TASKS)
    gem = GEM(slots=TASKS * SHARE)
    memory = remembering(gem, model, params)
    for task in range(TASKS):
        expected = functional.cross_entropy(model.outputs(params, memory["x"][task]), memory["y"][task])
        torch.testing.assert_close(gem.approximation(model, memory, task)(params), expected)


def test_uint8_images_stay_bytes_and_targets_may_be_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 1, 4, 4), generator=draw, dtype=torch.uint8)
    y = torch.randn(40, 2, generator=draw)
    tasks = [((x[i::2], y[i::2]), (x[i::2], y[i::2])) for i in (0, 1)]
    challenge = from_tasks("bytes", tasks, setting="domain", loss="squared-error")
    end = train_to_the_end(cohort_of(challenge, GEM(slots=10), [(0, 0.05), (1, 0.05)]), "vectorised")
    assert end.state.memory["x"].dtype == torch.uint8
    assert end.state.diverged.tolist() == [-1, -1]
    model = Model(by_hand.network(cohort_of(challenge, GEM())), losses.get("squared-error"), 2, 32)
    run, params = select(end.state.memory, 1), select(end.state.params, 1)
    outputs = model.module(run["x"][0] / 255)
    assert outputs.shape == (5, 2)
    value = GEM(slots=10).approximation(model, run, 0)(params)
    expected = 0.5 * (torch.func.functional_call(model.module, params, (run["x"][0] / 255,)) - run["y"][0]) ** 2
    torch.testing.assert_close(value, expected.sum(1).mean())


def test_a_diverged_run_raises_nothing_and_leaves_the_others_alone() -> None:
    challenge = blobs((64, 64))
    sane, mad = [(0, 0.05), (1, 0.1)], (2, 1e30)
    without = train_to_the_end(cohort_of(challenge, GEM(slots=20), sane, epochs=1), "vectorised")
    executions: list[Execution] = ["vectorised", "sequential"]
    for execution in executions:
        among = train_to_the_end(cohort_of(challenge, GEM(slots=20), [*sane, mad], epochs=1), execution)
        assert among.state.diverged[2] >= 0
        for name, values in without.state.params.items():
            assert torch.equal(among.state.params[name][:2], values)


def test_a_projection_slows_forgetting_down() -> None:
    challenge = blobs((160, 160))
    loss = {}
    for algorithm in (SGD(), GEM(slots=100)):
        record = train_to_the_end(cohort_of(challenge, algorithm, [(1, 0.2)], epochs=6)).record
        loss[algorithm.name] = record.arrays["test_class_loss"][0]
    assert loss["sgd"][2, 0] > 3 * loss["sgd"][1, 0]
    assert loss["gem"][2, 0] < loss["sgd"][2, 0] / 2


def test_fewer_slots_than_tasks_are_refused() -> None:
    with pytest.raises(GlocalError, match="slots=2"):
        train_to_the_end(cohort_of(blobs((20, 20, 20)), GEM(slots=2)))


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"margin": -1.0}, {"damping": -1e-3}])
def test_what_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(GlocalError, match=next(iter(wrong))):
        GEM(**wrong)
