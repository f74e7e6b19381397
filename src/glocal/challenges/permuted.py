"""Permuted pixels: every task shows the same images with their pixels in another fixed order.

A task is described by an index map, which rotated challenges share: pixel p of a task's images is pixel `index_map[p]`
of the original ones, counted row by row. All images are rearranged by one gather.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.challenges.datasets import Dataset
from glocal.errors import require
from glocal.rng import generator

OUTSIDE = -1
"""The entry of an index map for a pixel that lies outside the original image; it becomes 0."""
CPU = torch.device("cpu")


def permuted(name: str, dataset: Dataset, tasks: int, *, identity_first: bool = True) -> Challenge:
    """Permute the pixels, in one order per task, seed and challenge, the same for train and test.

    identity_first: whether task 0 shows the original images.
    """
    require(
        isinstance(identity_first, bool),
        f"identity_first is {identity_first!r}; allowed: True (task 0 is not permuted) or False.",
    )

    def index_map(index: int, seed: int) -> Tensor | None:
        height, width = dataset.input_shape[-2:]
        return None if index == 0 and identity_first else random_permutation(seed, index, height * width)

    return Challenge(
        name=name,
        setting="domain",
        tasks=tasks,
        outputs=dataset.classes,
        input_shape=dataset.input_shape,
        make_task=rearranged_tasks(dataset, index_map),
        on_device=True,
        seeded=True,
        fingerprint=dataset.fingerprint,
        options={"identity_first": identity_first},
    )


def random_permutation(seed: int, task: int, pixels: int) -> Tensor:
    """Draw the order of the pixels; it depends on the seed and the task's number, not on the number of tasks."""
    return torch.randperm(pixels, generator=generator(seed, "challenge", "permutation", task))


def rearranged_tasks(dataset: Dataset, index_map: Callable[[int, int], Tensor | None]) -> Callable[..., Task]:
    """Return a challenge's `make_task` that rearranges the pixels of a data set.

    `index_map(index, seed)` is the index map of a task, or None for the original images. Pixels are rearranged on the
    device that asks for the task, to which the data set is copied once.
    """
    copies: dict[torch.device, Task] = {}

    def original(device: torch.device) -> Task:
        if device == CPU:
            return dataset.load()
        if device not in copies:
            task = dataset.load()
            train, test = (Data(data.x.to(device), data.y.to(device)) for data in (task.train, task.test))
            copies[device] = Task(train, test, task.classes)
        return copies[device]

    def make_task(index: int, seed: int, device: torch.device = CPU) -> Task:
        task, indices = original(device), index_map(index, seed)
        if indices is None:
            return task
        train, test = (Data(rearrange(data.x, indices), data.y) for data in (task.train, task.test))
        return Task(train, test, task.classes)

    return make_task


def rearrange(images: Tensor, index_map: Tensor) -> Tensor:
    """Replace pixel p of every image (..., h, w) by its pixel `index_map[p]`, or by 0 where that is `OUTSIDE`."""
    height, width = images.shape[-2:]
    require(
        index_map.shape == (height * width,),
        f"the index map has shape {tuple(index_map.shape)}; images of {height}x{width} need ({height * width},).",
    )
    index_map = index_map.to(images.device)
    flat = images.reshape(-1, height * width)
    output = flat.gather(1, index_map.clamp(min=0).expand(flat.shape[0], -1))
    outside = index_map == OUTSIDE
    if bool(outside.any()):
        output.masked_fill_(outside, 0)
    return output.reshape(images.shape)
