"""Tasks that show the images of one data set, each task with their pixels moved in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from glocal.challenges.challenge import Data, Task
from glocal.challenges.dataset import Dataset
from glocal.challenges.pixels import rearrange

CPU = torch.device("cpu")


def viewed(dataset: Dataset, moved: Callable[[int, int], Tensor | None]) -> Callable[..., Task]:
    """A challenge's `make_task`. `moved` gives a task's index map for a seed, or None where nothing moves.

    Pixels are moved on the device that asks for the task, where the data set is brought once.
    """
    held: dict[torch.device, Task] = {}

    def make_task(index: int, seed: int, device: torch.device = CPU) -> Task:
        if device != CPU and device not in held:
            held[device] = brought(dataset.load(), device)
        whole = dataset.load() if device == CPU else held[device]
        source = moved(index, seed)
        if source is None:
            return whole
        train, test = (Data(rearrange(part.x, source), part.y) for part in (whole.train, whole.test))
        return Task(train, test, whole.classes)

    return make_task


def brought(task: Task, device: torch.device) -> Task:
    train, test = (Data(part.x.to(device), part.y.to(device)) for part in (task.train, task.test))
    return Task(train, test, task.classes)
