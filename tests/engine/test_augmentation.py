"""Augmented training: every run has a stream of its own, and the whole is a plain loop over images cut by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.algorithms import AGEM, ALGORITHMS, ER, EWC, SGD, Algorithm, Batch, ICaRL, Memory, Step
from glocal.challenges import Challenge, from_tasks
from glocal.challenges.challenge import Augment, Normalise
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Sequential, Vectorised, copy_into_
from glocal.engine.loader import Loader
from glocal.engine.loop import Execution, Snapshot, train
from glocal.engine.state import State
from glocal.errors import GlocalError
from glocal.networks import Model, mlp
from glocal.rng import generator
from glocal.tree import Params, flatten, select, unflatten

RUNS = [(0, 0.1), (0, 0.3), (1, 0.1), (4, 0.2)]
BATCH, PADDING, SHAPE = 16, 2, (3, 4, 5)
STATISTICS = Normalise((0.5, 0.4, 0.3), (0.25, 0.2, 0.5))
WORD = (1 << 64) - 1


def network(shape: Sequence[int], outputs: int) -> nn.Module:
    return mlp(shape, outputs, (8,))


class Normed(nn.Module):
    """A convolution and BatchNorm."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def challenge(
    augment: Augment | None = Augment(PADDING, True),  # noqa: B008 - a named tuple
    normalise: Normalise | None = STATISTICS,
    setting: str = "domain",
) -> Challenge:
    """Random images of three classes, no pixel of which is black; class-incremental, two more with every task."""

    def data(n: int, task: int, seed: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1000 * seed + task)
        y = torch.arange(n) % 3 if setting == "domain" else 2 * task + torch.arange(n) % 2
        return torch.randint(1, 256, (n, *SHAPE), generator=draw, dtype=torch.uint8), y

    tasks = [(data(40, t, 0), data(9, t, 1)) for t in range(3)]
    made = from_tasks("pictures", tasks, setting=setting)  # type: ignore[arg-type]
    return replace(made, augment=augment, normalise=normalise)


def cohort(
    of: Challenge | None = None,
    algorithm: Algorithm | None = None,
    runs: Sequence[tuple[int, float]] = RUNS,
    make: type[nn.Module] | None = None,
) -> Cohort:
    members = tuple(Member(seed, lr, algorithm or SGD()) for seed, lr in runs)
    return Cohort(of or challenge(), make or network, members, epochs=2, batch_size=BATCH)


def finish(of: Cohort, execution: Execution = "auto") -> Snapshot:
    *_, last = train(of, execution=execution)
    return last


# What the network is given


@dataclass(frozen=True)
class Watches(Algorithm):
    """Remembers what the network was given in the last step, in two passes of the objective and in the direction."""

    name: ClassVar[str] = "watches-inputs"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {k: torch.zeros(example.x.shape) for k in ("first", "second", "last", "observed", "end")}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> tuple[Tensor, Memory]:
        second, last = model.prepare(batch.stored), model.prepare(batch.stored)
        return model.loss(params, batch.x, batch.y), {"first": batch.x, "second": second, "last": last}

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        """A gradient in which the direction's images can be recognised."""
        bright = model.prepare(batch.stored).sum()
        return {k: torch.zeros_like(g) + bright for k, g in grads.items()}

    def observe(self, memory: Memory, step: Step) -> Memory:
        return {**step.aux, "observed": step.batch.x, "end": memory["end"]}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {**memory, "end": model.prepare(data.stored[:BATCH])}


def given(of: Cohort, execution: Execution, task: int = 0, epoch: int = 0, steps: int = 2) -> list[Memory]:
    """Every step's inputs, all runs stacked, and last those of consolidation."""
    loader = Loader(of)
    loader.load_task(task)
    loader.load_epoch(epoch)
    state = of.initial_state(loader.example())
    seen = []
    if execution == "vectorised":
        mapped = Vectorised(of)
        for step in range(steps):
            mapped.step(state, mapped.hyper, loader.batch(step))
            seen.append({k: v.clone() for k, v in state.memory.items()})
        mapped.consolidate(state, loader)
    else:
        single = Sequential(of)
        batches = [list(loader.batches_of(run)) for run in range(len(of))]
        for step in range(steps):
            for run in range(len(of)):
                own = state.select(run)
                single.step(own, select(single.hyper, run), batches[run][step])
                copy_into_(own.as_tree(), select(state.as_tree(), run))
            seen.append({k: v.clone() for k, v in state.memory.items()})
        single.consolidate(state, loader)
    return [*seen, {"end": state.memory["end"], "params": torch.cat([p.flatten(1) for p in state.params.values()], 1)}]


def test_a_runs_images_do_not_depend_on_its_cohort_nor_on_how_it_is_executed() -> None:
    together = given(cohort(algorithm=Watches()), "vectorised")
    one_by_one = given(cohort(algorithm=Watches()), "sequential")
    for a, b in zip(together, one_by_one, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"params"}:
            assert torch.equal(a[name], b[name])
        if "params" in a:
            torch.testing.assert_close(a["params"], b["params"], rtol=1e-4, atol=1e-4)
    for run in (1, 3):
        alone = given(cohort(algorithm=Watches(), runs=[RUNS[run]]), "vectorised")
        for a, b in zip(alone, together, strict=True):
            assert all(torch.equal(a[name][0], b[name][run]) for name in a.keys() - {"params"})


def test_images_differ_between_passes_steps_epochs_tasks_and_seeds_and_not_between_rates() -> None:
    still = cohort(replace(challenge(), make_task=lambda task, seed: challenge().task(0, 0)), Watches())
    # The offsets are told from the images' black margins, whatever images stand in the batch.
    black = -torch.tensor(STATISTICS.mean) / torch.tensor(STATISTICS.std)

    def margins(x: Tensor) -> Tensor:
        return (x == black.view(3, 1, 1)).all(1)

    seen: list[tuple[str, Tensor]] = []
    for task, epoch in [(0, 0), (0, 1), (1, 0)]:
        steps = given(still, "vectorised", task, epoch)
        for number, step in enumerate(steps[:-1]):
            for name in ("first", "second", "last"):
                assert torch.equal(margins(step[name][0]), margins(step[name][1])), "one seed, two rates"
                for run in (0, 2, 3):
                    seen.append((f"{task} {epoch} {number} {name} {run}", margins(step[name][run])))
        seen += [(f"{task} {epoch} end {run}", margins(steps[-1]["end"][run])) for run in (0, 2, 3)]
    for i, (a, x) in enumerate(seen):
        for b, y in seen[:i]:
            assert not torch.equal(x, y), (a, b)


def test_a_direction_has_images_of_its_own() -> None:
    of = cohort(algorithm=Watches())
    step, end = given(of, "vectorised", steps=1)
    start = torch.cat([p.flatten(1) for p in of.initial()[0].values()], 1)
    lrs = torch.tensor([lr for _, lr in RUNS])
    brightness = (start - end["params"]).mean(1) / lrs  # what `direction` made of its images
    for name in ("first", "second", "last"):
        sums = step[name].flatten(1).sum(1)
        assert ((brightness - sums).abs() > 1e-2).all()
    assert abs(brightness[0] - brightness[1]) < 1e-2, "one seed, two rates"


# Training by hand


def purpose(name: str) -> int:
    """What a purpose adds to a key."""
    return int.from_bytes(sha256(name.encode()).digest()[:8], "big")


def words(key: int) -> Iterator[int]:
    """SplitMix64 on Python's integers."""
    while True:
        key = (key + 0x9E3779B97F4A7C15) & WORD
        z = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        yield z ^ (z >> 31)


def seen_by_hand(x: Tensor, key: int, of: str = "augmentation") -> Tensor:
    """The step's first batch for this purpose: cut, mirrored, scaled and normalised."""
    draws = words(next(words(key + purpose(of))))
    made = []
    for image in x.numpy():
        top, left, coin = (((next(draws) >> 32) * bound) >> 32 for bound in (2 * PADDING + 1, 2 * PADDING + 1, 2))
        margin = (PADDING, PADDING)
        cut = np.pad(image, ((0, 0), margin, margin))[:, top : top + SHAPE[1], left : left + SHAPE[2]]
        made.append(cut[:, :, ::-1] if coin else cut)
    pixels = np.stack(made).astype(np.float64) / 255
    mean, std = (np.array(part).reshape(3, 1, 1) for part in STATISTICS)
    return torch.tensor((pixels - mean) / std, dtype=torch.float32)


def by_hand(of: Challenge, seed: int, lr: float, start: Params, replays: int = 0) -> Params:
    """The whole run as a plain loop; with `replays`, on a buffer that is large enough for all examples (ER)."""
    net = network(of.input_shape, of.outputs)
    net.load_state_dict(start)
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    x, y = of.task(0, seed).train.x[:0], of.task(0, seed).train.y[:0]
    for task in range(of.tasks):
        own = of.task(task, seed).train
        for epoch in range(2):
            order = torch.randperm(len(own.y), generator=generator(seed, "order", task, epoch))
            steps = -(-len(own.y) // BATCH)
            keys = torch.randint(2**63 - 1, (steps + 1,), generator=generator(seed, "step", task, epoch))
            for step, rows in enumerate(order.split(BATCH)):
                batch_y = own.y[rows]
                seen = seen_by_hand(own.x[rows], int(keys[step]))
                if replays and len(y):
                    ranks = words(int(keys[step]) + purpose("replay"))
                    signed = torch.tensor([next(ranks) - 2**63 for _ in y]) ^ -(2**63)  # as int64
                    drawn = signed.topk(min(BATCH, len(y))).indices
                    replayed = seen_by_hand(x[drawn], int(keys[step]), "objective")
                    seen, batch_y = torch.cat([seen, replayed]), torch.cat([batch_y, y[drawn]])
                optimiser.zero_grad()
                functional.cross_entropy(net(seen), batch_y).backward()
                optimiser.step()
                x, y = torch.cat([x, own.x[rows]]), torch.cat([y, own.y[rows]])
    return {k: v.clone() for k, v in net.state_dict().items()}


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
def test_training_is_a_plain_loop_over_images_cut_by_hand(execution: Execution) -> None:
    of = challenge()
    start = cohort(of).initial()[0]
    end = finish(cohort(of), execution).state
    for run, (seed, lr) in enumerate(RUNS):
        expected = by_hand(of, seed, lr, select(start, run))
        torch.testing.assert_close(select(end.params, run), expected, rtol=1e-4, atol=1e-5)


def test_evaluation_sees_images_as_they_are() -> None:
    of = challenge()
    end = finish(cohort(of), "vectorised")
    for run in range(len(RUNS)):
        net = network(of.input_shape, of.outputs)
        net.load_state_dict(select(end.state.params, run))
        mean, std = (torch.tensor(part).view(3, 1, 1) for part in STATISTICS)
        for task in range(3):
            for split, data in (("train", of.task(task, 0).train), ("test", of.task(task, 0).test)):
                loss = functional.cross_entropy(net((data.x / 255 - mean) / std), data.y)
                assert float(end.record.arrays[f"{split}_class_loss"][run, 3, task]) == pytest.approx(
                    float(loss.detach()), rel=1e-4
                )


def test_a_buffers_images_are_raw_and_augmented_when_they_are_drawn() -> None:
    of = challenge()
    algorithm = ER(slots=300)
    start = cohort(of, algorithm).initial()[0]
    end = finish(cohort(of, algorithm), "vectorised").state
    assert end.memory["x"].dtype == torch.uint8
    stored = end.memory["x"][0][: 3 * 80].flatten(1)
    originals = {tuple(image) for t in range(3) for image in of.task(t, 0).train.x.flatten(1).tolist()}
    assert {tuple(image) for image in stored.tolist()} == originals
    for run, (seed, lr) in enumerate(RUNS):
        expected = by_hand(of, seed, lr, select(start, run), replays=300)
        torch.testing.assert_close(select(end.params, run), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=20), ICaRL(slots=12)], ids=lambda a: a.name)
def test_resumed_at_a_task_boundary_it_goes_on_with_the_same_bits(algorithm: Algorithm, execution: Execution) -> None:
    of = cohort(challenge(setting="class" if algorithm.name == "icarl" else "domain"), algorithm)
    whole = finish(of, execution)
    snapshots = train(of, execution=execution)
    at = [next(snapshots) for _ in range(2)][-1]
    written = {k: v.clone() for k, v in sorted(flatten(at.state.as_tree()).items())}
    del snapshots
    *_, last = train(
        of, Snapshot(at.finished, State.from_tree(unflatten(written), at.state.clock), at.record), execution
    )
    for key, value in flatten(whole.state.as_tree()).items():
        assert torch.equal(value, flatten(last.state.as_tree())[key]), key


def settings_of(algorithm: Algorithm) -> str:
    return "domain" if "domain" in algorithm.settings else "class"


OPTIONS: dict[str, dict[str, int]] = {name: {"slots": 60} for name in ("er", "agem", "gem", "icarl", "icarl-random")}


@pytest.mark.parametrize("make", [None, Normed], ids=["mlp", "batchnorm"])
@pytest.mark.parametrize("name", ["er", "agem", "gem", "der", "joint", "ewc", "ogd-gtl", "icarl"])
def test_algorithms_agree_mapped_and_run_by_run(name: str, make: type[nn.Module] | None) -> None:
    algorithm = ALGORITHMS[name](**OPTIONS.get(name, {}))
    of = cohort(challenge(setting=settings_of(algorithm)), algorithm, RUNS[1:3], make)
    together, one_by_one = (finish(of, how).state for how in ("vectorised", "sequential"))
    for key, value in flatten({"params": together.params, "buffers": together.buffers}).items():
        expected = flatten({"params": one_by_one.params, "buffers": one_by_one.buffers})[key]
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)


# Without augmentation


def beforehand(of: Challenge, normalise: Normalise | None) -> Challenge:
    """The same tasks with images that are floats already."""
    mean, std = (0.0, 1.0) if normalise is None else (torch.tensor(part).view(3, 1, 1) for part in normalise)
    splits = [(of.task(t, 0).train, of.task(t, 0).test) for t in range(of.tasks)]
    return from_tasks("floats", [tuple(((d.x / 255 - mean) / std, d.y) for d in both) for both in splits], "domain")


@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=20)], ids=lambda a: a.name)
def test_normalised_images_are_those_normalised_beforehand(algorithm: Algorithm) -> None:
    of = challenge(augment=None)
    ends = [finish(cohort(made, algorithm), "vectorised") for made in (of, beforehand(of, STATISTICS))]
    for key, value in ends[0].state.params.items():
        torch.testing.assert_close(value, ends[1].state.params[key], rtol=1e-5, atol=1e-6)


def test_the_fisher_matrix_is_that_of_normalised_images() -> None:
    of = challenge(augment=None)
    ends = [finish(cohort(made, EWC())) for made in (of, beforehand(of, STATISTICS))]
    for key, value in ends[0].state.memory["fisher"].items():
        torch.testing.assert_close(value, ends[1].state.memory["fisher"][key], rtol=1e-4, atol=1e-7)


def test_with_batch_statistics_agem_replays_images_on_the_streams_scale() -> None:
    """The stream is prepared beforehand, the memory is raw: both must reach the network alike."""
    of = challenge(augment=None, normalise=None)
    ends = [
        finish(cohort(made, AGEM(slots=30), make=Normed), "vectorised").state for made in (of, beforehand(of, None))
    ]
    for key, value in flatten({"params": ends[0].params, "buffers": ends[0].buffers}).items():
        torch.testing.assert_close(value, flatten({"params": ends[1].params, "buffers": ends[1].buffers})[key])


def test_floats_that_ask_for_augmentation_are_refused() -> None:
    of = challenge()
    asked = replace(beforehand(of, None), augment=Augment(1, False))
    with pytest.raises(GlocalError, match=r"uint8 images.*floats has inputs of type torch.float32"):
        finish(cohort(asked))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", ["sgd", "er", "agem", "gem", "icarl"])
def test_captured_on_a_gpu_the_images_are_those_of_the_cpu(name: str) -> None:
    algorithm = ALGORITHMS[name](**OPTIONS.get(name, {}))
    of = cohort(challenge(setting=settings_of(algorithm)), algorithm)
    ends = {device: finish(replace(of, device=torch.device(device))) for device in ("cpu", "cuda")}
    assert ends["cuda"].record.notes == []
    for key, expected in ends["cpu"].state.params.items():
        torch.testing.assert_close(ends["cuda"].state.params[key].cpu(), expected, rtol=1e-3, atol=1e-4)
