"""What the runs of a cohort are fed: the task's data on the device, and each run's own order and random numbers.

Streams are keyed, not consumed: the order of an epoch depends on (seed, task, epoch) alone. So a run's batches do not
depend on its cohort, its learning rate, its device or on where training was interrupted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.algorithms.buffer import take
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.errors import require
from glocal.inputs import evenly_spaced_indices
from glocal.rng import generator


class Loader:
    """Batches for all runs of a cohort, from the current task and epoch."""

    x: Tensor = None  # type: ignore[assignment]
    inputs: Tensor = None  # type: ignore[assignment]
    y: Tensor = None  # type: ignore[assignment]
    task: Tensor = None  # type: ignore[assignment]
    rows: Tensor = None  # type: ignore[assignment]
    random: Tensor = None  # type: ignore[assignment]
    keys: Tensor = None  # type: ignore[assignment]
    progress: Tensor = None  # type: ignore[assignment]
    replayed: tuple[Tensor, Tensor] | None = None

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.device = cohort.device
        self.seeds = sorted({m.seed for m in cohort.members})
        self._seed_numbers = [self.seeds.index(m.seed) for m in cohort.members]
        self._seed_of_run = torch.tensor(self._seed_numbers, device=self.device)
        group_of_run = [g for g, runs in enumerate(cohort.groups) for _ in range(runs.start, runs.stop)]
        self._group_of_run = torch.tensor(group_of_run, device=self.device)
        self.uniforms = cohort.algorithm.uniforms(cohort.model(vectorised=False))
        self.end = torch.ones((), device=self.device)
        self.transform = cohort.transform
        self._unkeyed = torch.zeros(len(cohort), dtype=torch.long, device=self.device)
        # Who does not observe the steps cannot keep their examples: transformed once a task, they serve all its
        # steps, unless they are to be augmented in every one of them.
        self._raw = type(cohort.algorithm).observe is not Algorithm.observe or self.transform.augmentation is not None

    def load_task(self, task: int, memory: Memory | None = None) -> None:
        """Bring the task's training data to the device: once for all runs that share them.

        What a run replays from its memory joins them, behind the task's own examples.
        """
        challenge, groups = self.cohort.challenge, self.cohort.groups
        seeds = [self.cohort.members[runs.start].seed for runs in groups]
        parts = [challenge.task(task, seed, self.device).train for seed in seeds]
        self.examples = parts[0].y.shape[0]
        same = all(p.y.shape[0] == self.examples for p in parts)
        require(same, f"task {task} of {challenge.name} must have equally many examples for every seed.")
        self.replayed = None if memory is None else self._replayed(memory)
        self.joint = self.examples + (0 if self.replayed is None else self.replayed[1].shape[1])
        self.steps = -(-self.joint // self.cohort.batch_size)
        self._place("x", torch.cat([p.x for p in parts]))
        self.transform.check(self.x, challenge.name)
        if self._raw:
            self.inputs = self.x
        else:
            self._place("inputs", self.transform.normalize(self.x))
        self._place("y", torch.cat([p.y for p in parts]))
        self._place("task", torch.tensor(task))
        self._place("rows", torch.zeros(len(self.cohort), self.joint, dtype=torch.long))
        self._place("random", torch.zeros(len(self.seeds), self.steps, self.uniforms))
        self._place("keys", torch.zeros(len(self.seeds), self.steps + 1, dtype=torch.long))
        self._place("progress", torch.linspace(0, 1, self.steps) if self.steps > 1 else torch.ones(1))

    def _replayed(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """Every run's stored examples, as they go through the network beside the task's: (runs, m, ...)."""
        own = [m.algorithm.exemplars(tree.select(memory, run)) for run, m in enumerate(self.cohort.members)]
        parts = [part for part in own if part is not None]
        if not parts or not parts[0][1].shape[0]:
            return None
        x, y = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        return x if self._raw else self.transform.normalize(x), y

    def tensors(self) -> list[Tensor]:
        """All that a batch is made from, for a captured graph to look at."""
        held = [self.inputs, self.y, self.rows, self.random, self.keys, self.task, self.progress]
        return held if self.replayed is None else [*held, *self.replayed]

    def _place(self, name: str, tensor: Tensor) -> None:
        """Bring a tensor to the device, where the last one was if it fits: a captured graph looks there again."""
        held: Tensor | None = getattr(self, name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            held.copy_(tensor)
        else:
            setattr(self, name, tensor.to(self.device))

    def load_epoch(self, epoch: int) -> None:
        """Draw the epoch's order and random numbers, in place, so that a captured graph finds them where they were."""
        task = int(self.task)
        key = (task, epoch)
        orders = torch.stack([torch.randperm(self.joint, generator=generator(s, "order", *key)) for s in self.seeds])
        self.rows.copy_(orders.to(self.device)[self._seed_of_run])
        if self.replayed is None:
            self.rows += self.examples * self._group_of_run.unsqueeze(1)
        if self.uniforms:
            shape = (self.steps, self.uniforms)
            draws = [torch.rand(shape, generator=generator(s, "buffer", *key)) for s in self.seeds]
            self.random.copy_(torch.stack(draws))
        if self.transform.augmentation is not None:
            draw = lambda s: torch.randint(2**63 - 1, (self.steps + 1,), generator=generator(s, "augmentation", *key))  # noqa: E731
            self.keys.copy_(torch.stack([draw(s) for s in self.seeds]))

    def size(self, step: int) -> int:
        """Examples in the step's batch: the last one of an epoch may be short."""
        return min(self.cohort.batch_size, self.joint - step * self.cohort.batch_size)

    def batch(self, step: int) -> Batch:
        """The step's batch of every run, stacked."""
        begin = step * self.cohort.batch_size
        rows = self.rows[:, begin : begin + self.size(step)]
        random = self.random[:, step].index_select(0, self._seed_of_run)
        return self._gather(rows, random, self.progress[step], self.keys_at(step))

    def batch_at(self, step: Tensor, size: int) -> Batch:
        """The same with the step's number on the device, for a captured graph."""
        where = step * self.cohort.batch_size + torch.arange(size, device=self.device)
        random = self.random.index_select(1, step.view(1)).squeeze(1).index_select(0, self._seed_of_run)
        progress = self.progress.index_select(0, step.view(1))[0]
        return self._gather(self.rows.index_select(1, where), random, progress, self.keys_at(step))

    def batches_of(self, run: int) -> Iterator[Batch]:
        """The epoch's batches of one run."""
        batches = self.rows[run].split(self.cohort.batch_size)
        draws = self.random[self._seed_numbers[run]].unbind(0)
        keys = self.keys[self._seed_numbers[run], : self.steps].unbind(0)
        for rows, random, progress, key in zip(batches, draws, self.progress.unbind(0), keys, strict=True):
            if self.replayed is None:
                x, y = self.inputs.index_select(0, rows), self.y.index_select(0, rows)
            else:
                x, y = self._joined(rows.unsqueeze(0), slice(run, run + 1))
                x, y = x[0], y[0]
            yield Batch(x, y, random, self.task, progress, key)

    def whole(self, group: int) -> Batch:
        """All training data that the runs of a group share."""
        part = slice(group * self.examples, (group + 1) * self.examples)
        return Batch(self.x[part], self.y[part], self.random, self.task, self.end)

    def draws(self) -> dict[str, Tensor]:
        """Every run's random numbers for consolidation: a uniform one per example, and its key."""
        draw = lambda seed: torch.rand(self.examples, generator=generator(seed, "consolidate", int(self.task)))  # noqa: E731
        random = torch.stack([draw(m.seed) for m in self.cohort.members]).to(self.device)
        return {"random": random, "key": self.keys_at(self.steps)}

    def shortened(self, examples: int) -> Loader:
        """The same loader over the first few examples of every group's data."""
        short = copy.copy(self)
        short.examples = min(examples, self.examples)
        groups = range(len(self.cohort.groups))
        kept = torch.cat([torch.arange(short.examples) + g * self.examples for g in groups]).to(self.device)
        short.x, short.y = self.x[kept], self.y[kept]
        return short

    def first_step(self) -> Loader:
        """The same loader, at its end after one step."""
        short = copy.copy(self)
        short.steps = 1
        return short

    def example(self) -> Batch:
        """A full batch of the first examples: its shapes are a step's shapes."""
        size = min(self.cohort.batch_size, self.examples)
        return Batch(self.x[:size], self.y[:size], self.random.new_zeros(self.uniforms), self.task)

    def keys_at(self, step: int | Tensor) -> Tensor:
        """The random keys of a step's augmentation, one per run; in consolidation, after the epoch's last."""
        if self.transform.augmentation is None:
            return self._unkeyed
        keys = self.keys[:, step] if isinstance(step, int) else self.keys.index_select(1, step.view(1)).squeeze(1)
        return keys.index_select(0, self._seed_of_run)

    def _gather(self, rows: Tensor, random: Tensor, progress: Tensor, keys: Tensor) -> Batch:
        if self.replayed is None:
            flat = rows.reshape(-1)
            x = self.inputs.index_select(0, flat).unflatten(0, rows.shape)
            y = self.y.index_select(0, flat).unflatten(0, rows.shape)
        else:
            x, y = self._joined(rows, slice(None))
        return Batch(x, y, random, self.task, progress, keys)

    def _joined(self, rows: Tensor, runs: slice) -> tuple[Tensor, Tensor]:
        """Examples of some runs, (runs, n) of them: rows beyond the task's own are the run's replayed ones."""
        assert self.replayed is not None
        stored = rows >= self.examples
        task_rows = rows.clamp(max=self.examples - 1) + self.examples * self._group_of_run[runs].unsqueeze(1)
        memory_rows = (rows - self.examples).clamp(min=0)

        def choose(task: Tensor, memory: Tensor) -> Tensor:
            which = stored.view(*stored.shape, *[1] * (task.dim() - 1))
            return torch.where(which, vmap(take)(memory[runs], memory_rows), task[task_rows])

        x, y = self.replayed
        return choose(self.inputs, x), choose(self.y, y)


def evenly_spaced(data: Data, count: int) -> Data:
    """At most `count` examples, at equal distances through the data."""
    if data.y.shape[0] <= count:
        return data
    chosen = evenly_spaced_indices(data.y.shape[0], count)
    return Data(data.x[chosen], data.y[chosen])
