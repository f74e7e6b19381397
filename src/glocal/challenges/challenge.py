"""Task T_t, its data D_t, and the challenge: an ordered sequence of tasks and its setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from glocal.errors import require
from glocal.rng import generator

Setting = Literal["task", "class", "domain"]
LossName = Literal["cross-entropy", "squared-error", "binary-cross-entropy"]
LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A user's loss: (outputs, targets) -> one loss per example."""
TransformFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A user's augmentation: (x, key) -> x, with random numbers from `glocal.rng`."""


class Data(NamedTuple):
    """Examples as two tensors.

    `x` is (n, *input_shape): uint8 images, which the model scales to [0, 1], or floats or int64 tokens, which it takes
    as they are.
    `y` is (n,) int64 class labels, or (n, columns) floats.
    """

    x: Tensor
    y: Tensor


class Normalise(NamedTuple):
    """Per-channel mean and standard deviation of pixels in [0, 1]: images become (x − mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Augment(NamedTuple):
    """Augmentation in training: pad by `padding` zeros and crop at random to the old size; mirror at random."""

    padding: int
    flip: bool


@dataclass(frozen=True)
class Task:
    """Training data, test data, the classes that occur in them, and validation data where there are any."""

    train: Data
    test: Data
    classes: tuple[int, ...]
    validation: Data | None = None

    @property
    def splits(self) -> dict[str, Data]:
        """The data by name: 'train', 'test' and, where there are any, 'validation'."""
        splits = {"train": self.train, "test": self.test}
        return splits if self.validation is None else {**splits, "validation": self.validation}


def fingerprint(tasks: Iterable[Task]) -> str:
    """Return the SHA-256 of every tensor's dtype, shape and bytes, in order."""
    digest = sha256()
    for task in tasks:
        for tensor in (tensor for data in task.splits.values() for tensor in data):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return "sha256:" + digest.hexdigest()


@dataclass(frozen=True)
class Challenge:
    """A sequence of tasks; data are loaded when `task` is first called.

    Attributes:
        setting: 'class' and 'task' challenges bring new classes in every task. Both accuracies, among all classes and
            among the task's classes, are measured in the same run; the setting says which one is reported. 'domain'
            challenges keep the classes and change the inputs.
        make_task: make_task(index, seed) returns a task; if `on_device`, make_task(index, seed, device) makes it there.
        seeded: whether the tasks depend on the run's seed (angles, permutations).
        fingerprint: identifies the data; it is part of a run's identity.
        options: the arguments that the challenge was made with; they are stored with every run.
        loss: a name, or a function (outputs, targets) -> one loss per example.
        epochs, batch_size: the defaults of training on one task.
        normalise, augment: transformations between the data of a task, which are as published, and the network;
            `augment`, in training only, may be a function (x, key) -> x.
        validation: the share of each task's training data that is held out as validation data; 'own' where the tasks
            bring their own; None: there are none.
        evaluate: the classes among which class-incremental accuracy is measured: 'all', or 'seen', those of the tasks
            trained so far and of the measured task, as with a head that grows.
        input_dtype: the dtype of the network's inputs: float32, also for uint8 images, or int64 for tokens.
    """

    name: str
    setting: Setting
    tasks: int
    outputs: int
    input_shape: tuple[int, ...]
    make_task: Callable[..., Task] = field(repr=False, compare=False)
    seeded: bool
    fingerprint: str
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: LossName | LossFunction = "cross-entropy"
    epochs: int = 5
    batch_size: int = 128
    normalise: Normalise | None = None
    augment: Augment | TransformFunction | None = None
    on_device: bool = False
    validation: float | Literal["own"] | None = None
    evaluate: Literal["all", "seen"] = "all"
    input_dtype: torch.dtype = torch.float32

    def task(self, index: int, seed: int, device: torch.device | None = None) -> Task:
        """Return task `index`, counted from 0, of the run with this seed; on `device` if the challenge supports it."""
        require(0 <= index < self.tasks, f"{self.name} has no task of index {index}; allowed: 0 to {self.tasks - 1}.")
        task = self.make_task(index, seed, device) if self.on_device and device else self.make_task(index, seed)
        if isinstance(self.validation, float) and task.validation is None:
            return hold_out(task, self.validation, f"task {index + 1} of {self.name}")
        return task

    def first(self, tasks: int) -> Challenge:
        """Return this challenge with only its first `tasks` tasks."""
        allowed = f"allowed: 1 to {self.tasks}"
        require(1 <= tasks <= self.tasks, f"{tasks} tasks of {self.name} were requested; {allowed}.")
        return replace(self, tasks=tasks)

    def among_seen_classes(self) -> Challenge:
        """Return this challenge with class-incremental accuracy measured among the classes seen so far."""
        growing = self.setting != "domain" and self.loss == "cross-entropy"
        allowed = "it is for tasks that bring new classes, with the loss cross-entropy"
        require(growing, f"evaluate='seen' was given for {self.name}, but {allowed}.")
        return replace(self, evaluate="seen")

    def with_validation(self, share: float) -> Challenge:
        """Return this challenge with a share of each task's training data held out as validation data."""
        message = f"{self.name} has validation data already ({self.validation}): leave validation={share} out."
        require(self.validation is None, message)
        require(0 < share < 1, f"validation = {share} was given; it is a share of the training data: 0.1, for example.")
        return replace(self, validation=share)


def hold_out(task: Task, share: float, name: str) -> Task:
    """Move a random share of a task's training data to its validation data; errors call the task by its name.

    The rows depend on the number of examples alone: the same for all seeds, and for tasks that show the same images.
    """
    (x, y), n = task.train, len(task.train.y)
    count = max(1, round(share * n))
    examples = f"holds out {count} of the {n} training examples of {name}"
    require(count < n, f"validation = {share} {examples}; at least one must be left.")
    held = torch.zeros(n, dtype=torch.bool)
    held[torch.randperm(n, generator=generator(0, "validation"))[:count]] = True
    held = held.to(y.device)
    return replace(task, train=Data(x[~held], y[~held]), validation=Data(x[held], y[held]))
