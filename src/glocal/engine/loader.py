"""The data loader of a cohort: the task's data on the device, and every run's own order and random keys.

Random streams are keyed, not consumed: the order of an epoch depends on (seed, task, epoch) alone. A run's batches
therefore do not depend on its cohort, its learning rate, its device, or on where training was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.replay_buffer import take
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.step import Hyper
from glocal.errors import require
from glocal.inputs import evenly_spaced_indices
from glocal.rng import generator
from glocal.tree import Params


class Loader:
    """Batches for all runs of a cohort, from the current task and epoch.

    `tensors` holds all that batches are made of. A tensor of the next task or epoch is copied into the last one where
    shapes agree, so that a captured CUDA graph finds it at the same address:

        x, y                      training data, (groups · examples, ...); runs of a group share theirs
        exemplars_x, exemplars_y  stored examples that join them, (runs, m, ...), where the algorithm has any
        rows                      the order of the epoch, (runs, examples + m)
        keys                      random keys of every step and of consolidation, (runs, steps + 1)
        task, progress            the task's number, and the progress through the epoch at every step
        lr                        the learning rate at every step, (runs, steps), where it is scheduled
    """

    def __init__(self, cohort: Cohort) -> None:
        self.cohort, self.device = cohort, cohort.device
        self.examples = self.steps = 0
        self.tensors: Params = {}
        self.x = self.y = self.task = torch.empty(0)  # those of `tensors`
        self._seeds = sorted({m.seed for m in cohort.members})
        self._seed_of_run = torch.tensor([self._seeds.index(m.seed) for m in cohort.members], device=self.device)
        group_of_run = [g for g, runs in enumerate(cohort.groups) for _ in range(runs.start, runs.stop)]
        self._group_of_run = torch.tensor(group_of_run, device=self.device)
        self._end = torch.ones((), device=self.device)

    def load_task(self, task: int, memory: Memory | None = None) -> None:
        """Bring a task's training data to the device, with the exemplars of every run's memory behind them."""
        challenge = self.cohort.challenge
        seeds = [self.cohort.members[runs.start].seed for runs in self.cohort.groups]
        parts = [challenge.task(task, seed, self.device).train for seed in seeds]
        self.examples = parts[0].y.shape[0]
        same = all(p.y.shape[0] == self.examples for p in parts)
        require(same, f"task {task + 1} of {challenge.name} must have equally many examples for every seed.")
        exemplars = {} if memory is None else self._exemplars(memory, parts[0].x.dtype)
        joint = self.examples + (exemplars["exemplars_y"].shape[1] if exemplars else 0)
        self.steps = -(-joint // self.cohort.batch_size)
        new = {
            "x": torch.cat([p.x for p in parts]),
            "y": torch.cat([p.y for p in parts]),
            **exemplars,
            "rows": torch.zeros(len(self.cohort), joint, dtype=torch.long),
            "keys": torch.zeros(len(self.cohort), self.steps + 1, dtype=torch.long),
            "task": torch.tensor(task),
            "progress": torch.linspace(0, 1, self.steps) if self.steps > 1 else torch.ones(1),
        }
        if any(m.optimizer.scheduled for m in self.cohort.members):
            new["lr"] = torch.zeros(len(self.cohort), self.steps)
        self.tensors = {name: self._place(tensor, self.tensors.get(name)) for name, tensor in new.items()}
        self.x, self.y, self.task = (self.tensors[name] for name in ("x", "y", "task"))
        self.cohort.transform.check(self.x, challenge.name)

    def load_epoch(self, epoch: int) -> None:
        """Draw the order and the random keys of an epoch, and compute its learning rates, in place."""
        task, rows, keys = int(self.task), self.tensors["rows"], self.tensors["keys"]
        orders = [torch.randperm(rows.shape[1], generator=generator(s, "order", task, epoch)) for s in self._seeds]
        rows.copy_(torch.stack(orders).to(self.device)[self._seed_of_run])
        streams = [generator(s, "step", task, epoch) for s in self._seeds]
        drawn = torch.stack([torch.randint(2**63 - 1, keys.shape[1:], generator=stream) for stream in streams])
        keys.copy_(drawn.to(self.device)[self._seed_of_run])
        if "lr" in self.tensors:
            times = task, self.cohort.planned_tasks, epoch, self.cohort.epochs, self.steps
            rates = [m.lr * m.optimizer.lr_factors(*times) for m in self.cohort.members]
            self.tensors["lr"].copy_(torch.stack(rates))

    def size(self, step: int) -> int:
        """Return the batch size of a step: the last batch of an epoch may be short."""
        return min(self.cohort.batch_size, self.tensors["rows"].shape[1] - step * self.cohort.batch_size)

    def batch(self, step: int) -> Batch:
        """Return the step's batch of every run, stacked."""
        begin = step * self.cohort.batch_size
        rows = self.tensors["rows"][:, begin : begin + self.size(step)]
        keys, progress = self.tensors["keys"][:, step], self.tensors["progress"][step]
        return Batch(*self._examples(rows, slice(None)), self.task, keys, progress)

    def batch_at(self, step: Tensor, size: int, runs: slice = slice(None)) -> Batch:
        """Return the same for some of the runs, with the step as a tensor on the device, for CUDA graphs."""
        positions = step * self.cohort.batch_size + torch.arange(size, device=self.device)
        keys = self.tensors["keys"][runs].index_select(1, step.view(1)).squeeze(1)
        progress = self.tensors["progress"].index_select(0, step.view(1)).squeeze(0)
        rows = self.tensors["rows"][runs].index_select(1, positions)
        return Batch(*self._examples(rows, runs), self.task, keys, progress)

    def batches_of(self, run: int) -> Iterator[Batch]:
        """Yield the epoch's batches of one run."""
        keys, progress = self.tensors["keys"][run], self.tensors["progress"]
        batches = self.tensors["rows"][run].split(self.cohort.batch_size)[: self.steps]
        for step, rows in enumerate(batches):
            x, y = self._examples(rows.unsqueeze(0), slice(run, run + 1))
            yield Batch(x[0], y[0], self.task, keys[step], progress[step])

    def with_scheduled_lr(self, hyper: Hyper, step: int | Tensor, run: int | None = None) -> Hyper:
        """Return the hyperparameters of all runs or of one, with the learning rate of a step of this epoch."""
        if "lr" not in self.tensors:
            return hyper
        rates = self.tensors["lr"] if run is None else self.tensors["lr"][run]
        lr = rates[..., step] if isinstance(step, int) else rates.index_select(-1, step.view(1)).squeeze(-1)
        return {**hyper, "lr": lr}

    def whole(self, group: int, limit: int | None = None) -> Batch:
        """Return all training data that a group shares, or the first `limit`; the runs' keys come last in `keys`."""
        first = group * self.examples
        part = slice(first, first + min(self.examples, limit or self.examples))
        return Batch(self.x[part], self.y[part], self.task, self.task.new_zeros(()), self._end)

    def example(self) -> Batch:
        """Return a full batch of the first examples: its shapes are those of a step."""
        size = min(self.cohort.batch_size, self.examples)
        return Batch(self.x[:size], self.y[:size], self.task, self.task.new_zeros(()))

    def _exemplars(self, memory: Memory, dtype: torch.dtype) -> Params:
        """Return every run's stored examples that join the training set of this type; {} if there are none."""
        stored = [m.algorithm.exemplars(tree.select(memory, run)) for run, m in enumerate(self.cohort.members)]
        parts = [part for part in stored if part is not None]
        pairs = all(isinstance(part, tuple) and len(part) == 2 for part in parts)
        require(pairs, f"{self.cohort.algorithm.name}.exemplars must return (x, y) or None.")
        if not parts or not parts[0][1].shape[0]:
            return {}
        x, y = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        types = f"{x.dtype}, but inputs of {self.cohort.challenge.name} have {dtype}"
        require(x.dtype == dtype, f"the exemplars of {self.cohort.algorithm.name} have {types}: store batch.stored.")
        return {"exemplars_x": x, "exemplars_y": y}

    def _place(self, tensor: Tensor, buffer: Tensor | None) -> Tensor:
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            return tensor.to(self.device)
        return buffer.copy_(tensor)

    def _examples(self, rows: Tensor, runs: slice) -> tuple[Tensor, Tensor]:
        """Return examples of some runs, (runs, n, ...); rows beyond the task's own are the run's exemplars."""
        first = self.examples * self._group_of_run[runs].unsqueeze(1)
        if "exemplars_y" not in self.tensors:
            flat = (rows + first).reshape(-1)
            return (
                self.x.index_select(0, flat).unflatten(0, rows.shape),
                self.y.index_select(0, flat).unflatten(0, rows.shape),
            )
        stored = rows >= self.examples
        task_rows = rows.clamp(max=self.examples - 1) + first
        memory_rows = (rows - self.examples).clamp(min=0)

        def choose(task: Tensor, exemplars: Tensor) -> Tensor:
            mask = stored.view(*stored.shape, *[1] * (task.dim() - 1))
            return torch.where(mask, vmap(take)(exemplars[runs], memory_rows), task[task_rows])

        return choose(self.x, self.tensors["exemplars_x"]), choose(self.y, self.tensors["exemplars_y"])


def evenly_spaced(data: Data, count: int) -> Data:
    """Return at most `count` examples, evenly spaced through the data."""
    if data.y.shape[0] <= count:
        return data
    indices = evenly_spaced_indices(data.y.shape[0], count)
    return Data(data.x[indices], data.y[indices])
