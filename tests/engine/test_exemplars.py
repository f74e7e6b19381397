"""Stored examples that join a task's training set: every epoch is one shuffled pass over both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal import rng
from glocal.algorithms import Algorithm, Batch, Memory, Step
from glocal.challenges import Challenge, from_tasks
from glocal.challenges.challenge import Data, Task
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loader import Loader
from glocal.engine.loop import Execution, Snapshot, train
from glocal.engine.state import State
from glocal.errors import GlocalError
from glocal.networks import Model, mlp
from glocal.rng import generator
from glocal.tree import Params, flatten, select, unflatten

RUNS = [(0, 0.1), (0, 0.3), (1, 0.1), (4, 0.2)]
BATCH = 16
KEPT = 5  # of every finished task


@dataclass(frozen=True)
class KeepsSome(Algorithm):
    """Trains on the task's data joined with a few drawn examples of every finished task."""

    name: ClassVar[str] = "keeps-some"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"x": example.stored[:0], "y": example.y[:0]}

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        return (memory["x"], memory["y"]) if len(memory["y"]) else None

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        chosen = rng.choose(data.key, len(data.y), KEPT)
        return {"x": torch.cat([memory["x"], data.stored[chosen]]), "y": torch.cat([memory["y"], data.y[chosen]])}


@dataclass(frozen=True)
class KeepsAndObserves(KeepsSome):
    """The same, summing the bytes of the examples it sees."""

    name: ClassVar[str] = "keeps-and-observes"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {**super().init(model, params, example), "brightness": torch.zeros(())}

    def observe(self, memory: Memory, step: Step) -> Memory:
        return {**memory, "brightness": memory["brightness"] + step.batch.stored.float().sum()}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {**super().consolidate(model, params, memory, data), "brightness": memory["brightness"]}


@dataclass(frozen=True)
class KeepsPrepared(KeepsSome):
    """Keeps inputs as the network takes them, which would be mixed with the challenge's bytes."""

    name: ClassVar[str] = "keeps-prepared"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"x": example.x[:0], "y": example.y[:0]}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {"x": torch.cat([memory["x"], data.x[:KEPT]]), "y": torch.cat([memory["y"], data.y[:KEPT]])}


def network(shape: Sequence[int], outputs: int) -> nn.Module:
    return mlp(shape, outputs, (8,))


def challenge(dtype: torch.dtype = torch.uint8, seeded: bool = False, sizes: Sequence[int] = (40, 37, 40)) -> Challenge:
    """Random images of three classes. Every example is another one, so that it can be recognised."""

    def data(n: int, *key: int) -> Data:
        draw = torch.Generator().manual_seed(sum(1000**i * k for i, k in enumerate(key)))
        x = torch.randint(256, (n, 1, 3, 3), generator=draw, dtype=torch.uint8)
        return Data(x if dtype == torch.uint8 else x.to(dtype) / 255 - 0.5, torch.arange(n) % 3)

    made = from_tasks("pictures", [(data(n, t), data(9, t, 1)) for t, n in enumerate(sizes)], setting="domain")
    if not seeded:
        return made
    task = lambda t, seed: Task(data(sizes[t], t, 7, seed), data(9, t, 1), (0, 1, 2))  # noqa: E731
    return replace(made, seeded=True, make_task=task)


def cohort(
    of: Challenge, algorithm: Algorithm | None = None, runs: Sequence[tuple[int, float]] = RUNS, epochs: int = 2
) -> Cohort:
    members = tuple(Member(seed, lr, algorithm or KeepsSome()) for seed, lr in runs)
    return Cohort(of, network, members, epochs, BATCH)


def finish(of: Cohort, execution: Execution = "auto") -> Snapshot:
    *_, last = train(of, execution=execution)
    return last


def stored(count: int, like: Tensor, runs: int = len(RUNS)) -> Memory:
    """A memory with other examples for every run."""
    draw = torch.Generator().manual_seed(99)
    x = torch.randint(256, (runs, count, *like.shape[1:]), generator=draw, dtype=torch.uint8)
    y = torch.randint(3, (runs, count), generator=draw)
    return {"x": x if like.dtype == torch.uint8 else x.to(like.dtype) / 255 - 0.5, "y": y}


def scaled(x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x


@pytest.mark.parametrize("seeded", [False, True], ids=["one task for all seeds", "a task for every seed"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["uint8", "float"])
@pytest.mark.parametrize("algorithm", [KeepsSome(), KeepsAndObserves()], ids=lambda a: a.name)
def test_an_epoch_is_the_runs_own_permutation_of_both(algorithm: Algorithm, dtype: torch.dtype, seeded: bool) -> None:
    of = challenge(dtype, seeded)
    loader = Loader(cohort(of, algorithm))
    memory = stored(7, of.task(1, 0).train.x)
    loader.load_task(1, memory)
    assert loader.steps == 3 and [loader.size(i) for i in range(3)] == [16, 16, 12]  # 37 + 7 examples
    for epoch in (0, 1):
        loader.load_epoch(epoch)
        for run, (seed, _) in enumerate(RUNS):
            own = of.task(1, seed).train
            x, y = torch.cat([own.x, memory["x"][run]]), torch.cat([own.y, memory["y"][run]])
            order = torch.randperm(44, generator=generator(seed, "order", 1, epoch))
            for step, (rows, single) in enumerate(zip(order.split(BATCH), loader.batches_of(run), strict=True)):
                mapped, captured = loader.batch(step), loader.batch_at(torch.tensor(step), len(rows))
                for batch_x, batch_y in [
                    (single.x, single.y),
                    (mapped.x[run], mapped.y[run]),
                    (captured.x[run], captured.y[run]),
                ]:
                    assert batch_x.dtype == x.dtype
                    assert torch.equal(batch_x, x[rows]) and torch.equal(batch_y, y[rows])


def test_exemplars_of_another_type_are_refused() -> None:
    with pytest.raises(GlocalError, match=r"keeps-prepared .* store batch\.stored"):
        finish(cohort(challenge(), KeepsPrepared()))
    assert finish(cohort(challenge(torch.float32), KeepsPrepared())).finished == 3


def test_progress_and_random_keys_follow_the_joined_length() -> None:
    of = challenge()
    loader = Loader(cohort(of))
    loader.load_task(1, stored(30, of.task(1, 0).train.x))  # 67 examples: 5 steps
    loader.load_epoch(0)
    assert torch.equal(torch.stack([b.progress for b in loader.batches_of(1)]), torch.linspace(0, 1, 5))
    expected = torch.randint(2**63 - 1, (6,), generator=generator(4, "step", 1, 0))
    assert torch.equal(torch.stack([b.key for b in loader.batches_of(3)]), expected[:5])
    assert torch.equal(torch.stack([loader.batch(i).key[3] for i in range(5)]), expected[:5])
    assert torch.equal(loader.tensors["keys"][3, -1], expected[5])


def test_with_nothing_stored_it_is_the_task_alone() -> None:
    of = challenge()
    loaders = [Loader(cohort(of)) for _ in range(3)]
    loaders[0].load_task(0)
    loaders[1].load_task(0, stored(0, of.task(0, 0).train.x))
    loaders[2].load_task(1, stored(6, of.task(0, 0).train.x))
    loaders[2].load_task(0, stored(0, of.task(0, 0).train.x))  # what was replayed before is gone
    for loader in loaders:
        loader.load_epoch(0)
        assert loader.steps == 3 and len(loader.tensors) == len(loaders[0].tensors)
        assert torch.equal(loader.batch(2).x, loaders[0].batch(2).x) and loader.batch(2).y.shape == (4, 8)


def test_consolidation_sees_the_task_alone() -> None:
    of = challenge()
    loader = Loader(cohort(of))
    loader.load_task(1, stored(7, of.task(1, 0).train.x))
    assert torch.equal(loader.whole(0).x, of.task(1, 0).train.x)


def test_whoever_replays_has_hyperparameters_of_its_own() -> None:
    @dataclass(frozen=True)
    class Shades(KeepsSome):
        shade: float = 1.0

        def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
            return memory["x"] * self.shade, memory["y"]

    of = challenge(torch.float32)
    members = tuple(Member(0, 0.1, Shades(shade=shade)) for shade in (1.0, 3.0))
    loader = Loader(Cohort(of, network, members, 1, BATCH))
    memory = stored(4, of.task(1, 0).train.x, runs=2)
    loader.load_task(1, memory)
    shades = loader.tensors["exemplars_x"]
    assert torch.equal(shades[0], memory["x"][0]) and torch.equal(shades[1], 3 * memory["x"][1])


def by_hand(of: Challenge, seed: int, lr: float, start: Params, epochs: int = 2) -> Params:
    """The whole run as a plain loop over tensors that were joined beforehand."""
    net = network(of.input_shape, of.outputs)
    net.load_state_dict(start)
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    x, y = of.task(0, seed).train.x[:0], of.task(0, seed).train.y[:0]
    for task in range(of.tasks):
        own = of.task(task, seed).train
        joint_x, joint_y = torch.cat([own.x, x]), torch.cat([own.y, y])
        for epoch in range(epochs):
            order = torch.randperm(len(joint_y), generator=generator(seed, "order", task, epoch))
            for rows in order.split(BATCH):
                optimiser.zero_grad()
                functional.cross_entropy(net(scaled(joint_x[rows])), joint_y[rows]).backward()
                optimiser.step()
        steps = -(-len(joint_y) // BATCH)
        keys = torch.randint(2**63 - 1, (steps + 1,), generator=generator(seed, "step", task, epochs - 1))
        chosen = rng.choose(keys[-1], len(own.y), KEPT)
        x, y = torch.cat([x, own.x[chosen]]), torch.cat([y, own.y[chosen]])
    return {k: v.clone() for k, v in net.state_dict().items()}


@pytest.mark.parametrize("seeded", [False, True], ids=["one task for all seeds", "a task for every seed"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["uint8", "float"])
def test_training_is_a_plain_loop_over_the_joined_examples(dtype: torch.dtype, seeded: bool) -> None:
    of = challenge(dtype, seeded)
    start = cohort(of).initial()[0]
    for execution in ("vectorised", "sequential"):
        end = finish(cohort(of), execution).state
        for run, (seed, lr) in enumerate(RUNS):
            expected = by_hand(of, seed, lr, select(start, run))
            torch.testing.assert_close(select(end.params, run), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", [KeepsSome(), KeepsAndObserves()], ids=lambda a: a.name)
def test_a_run_is_the_same_alone_among_others_and_run_by_run(algorithm: Algorithm) -> None:
    of = challenge(seeded=True)
    together = finish(cohort(of, algorithm), "vectorised").state
    one_by_one = finish(cohort(of, algorithm), "sequential").state
    for key, value in flatten(together.as_tree()).items():
        torch.testing.assert_close(value, flatten(one_by_one.as_tree())[key], rtol=1e-5, atol=1e-7)
    for run in (1, 3):
        alone = finish(cohort(of, algorithm, [RUNS[run]])).state
        torch.testing.assert_close(select(alone.params, 0), select(together.params, run), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
@pytest.mark.parametrize("finished", [1, 2])
def test_resumed_at_a_task_boundary_it_goes_on_with_the_same_bits(finished: int, execution: Execution) -> None:
    of = cohort(challenge(seeded=True))
    whole = finish(of, execution)
    snapshots = train(of, execution=execution)
    at = [next(snapshots) for _ in range(finished + 1)][-1]
    written = {k: v.clone() for k, v in sorted(flatten(at.state.as_tree()).items())}
    del snapshots
    resumed = Snapshot(at.finished, State.from_tree(unflatten(written), at.state.clock), at.record)
    *_, last = train(of, resumed, execution)
    for key, value in flatten(whole.state.as_tree()).items():
        assert torch.equal(value, flatten(last.state.as_tree())[key]), key
    assert torch.equal(last.record.arrays["epoch_loss"], whole.record.arrays["epoch_loss"])
