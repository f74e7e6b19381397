r"""Task T_t, its data D_t, and the challenge: an ordered sequence of tasks and its setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from glocal.errors import GlocalError

Setting = Literal["task", "class", "domain"]
LossName = Literal["cross-entropy", "squared-error"]


class Data(NamedTuple):
    """Examples as two tensors.

    `x` is (n, *input_shape): uint8 images, which the model scales to [0, 1], or floats, which it takes as they are.
    `y` is (n,) int64 class labels, or (n, outputs) floats for squared error.
    """

    x: Tensor
    y: Tensor


class Normalise(NamedTuple):
    """Per channel, what is taken from pixels in [0, 1], and what they are divided by then."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Augment(NamedTuple):
    """How images vary in training: `padding` zeros on every side and a random crop of the old size; a random mirror."""

    padding: int
    flip: bool


@dataclass(frozen=True)
class Task:
    """One task: what it is learnt from, what it is tested on, and the classes that occur in it."""

    train: Data
    test: Data
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Challenge:
    """A sequence of tasks. Nothing is loaded or rotated before `task` asks for it.

    setting: 'class' and 'task' challenges bring new classes with every task; both accuracies (over all classes, and
        among the task's own) are measured from the same run, and the setting names the one that is reported.
        'domain' challenges keep the classes and change the inputs.
    seeded: whether the tasks themselves depend on the run's seed (angles, permutations).
    fingerprint: identifies the data behind the tasks; results computed on other data are other results.
    options: the resolved arguments the challenge was made with, recorded with every run.
    epochs, batch_size: how each task is trained unless a run says otherwise.
    make_task: the task of this number for this seed; with `on_device`, on the device given as a third argument.
    normalise, augment: what becomes of images on their way into the network, always and in training. The data of a
        task hold them as they were published.
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
    loss: LossName = "cross-entropy"
    epochs: int = 5
    batch_size: int = 128
    normalise: Normalise | None = None
    augment: Augment | None = None
    on_device: bool = False

    def task(self, index: int, seed: int, device: torch.device | None = None) -> Task:
        """Task number `index`, counted from 0, as the run with this seed meets it; on a device, if that is where the
        challenge can make it."""
        if not 0 <= index < self.tasks:
            raise GlocalError(f"{self.name} has tasks 0 to {self.tasks - 1}; task {index} was asked for.")
        return self.make_task(index, seed, device) if self.on_device and device else self.make_task(index, seed)

    def first(self, tasks: int) -> Challenge:
        """The same challenge, ended after its first `tasks` tasks."""
        if not 1 <= tasks <= self.tasks:
            raise GlocalError(
                f"{self.name} has {self.tasks} tasks; {tasks} were asked for (allowed: 1 to {self.tasks})."
            )
        return replace(self, tasks=tasks)
