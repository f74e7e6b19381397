"""Permuted pixels: every task shows the same images with their pixels in another fixed order.

A task is described by an index map, which rotated challenges share: pixel p of a task's images is pixel `index_map[p]`
of the original ones, counted row by row. All images are rearranged by one gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.challenges.datasets import Dataset
from glocal.errors import require
from glocal.rng import generator

IndexMap: TypeAlias = Callable[[int, int], Tensor | None]
"""From the index of a task and the seed to the task's index map, or None for the original images."""
OUTSIDE = -1
"""The entry of an index map for a pixel that lies outside the original image; it becomes 0."""


def permuted(name: str, dataset: Dataset, tasks: int, *, identity_first: bool = True) -> Challenge:
    """Permute the pixels, in one order per task, seed and challenge, the same for train and test.

    identity_first: whether the first task shows the original images.
    """
    require(isinstance(identity_first, bool), f"identity_first is {identity_first!r}; allowed: True or False.")
    height, width = dataset.input_shape[-2:]

    def index_map(index: int, seed: int) -> Tensor | None:
        if index == 0 and identity_first:
            return None
        return torch.randperm(height * width, generator=generator(seed, "challenge", "permutation", index))

    return rearranged(name, dataset, tasks, index_map, seeded=True, options={"identity_first": identity_first})


def rearranged(
    name: str, dataset: Dataset, tasks: int, index_map: IndexMap, *, seeded: bool, options: Mapping[str, Any]
) -> Challenge:
    """Return the challenge whose tasks rearrange the pixels of a data set.

    Pixels are rearranged on the device that asks for the task, to which the data set is copied once.
    """

    @cache
    def original(device: torch.device | None) -> Task:
        task = dataset.load()
        train, test = (Data(data.x.to(device), data.y.to(device)) for data in (task.train, task.test))
        return Task(train, test, task.classes)

    def make_task(index: int, seed: int, device: torch.device | None = None) -> Task:
        task, indices = original(device), index_map(index, seed)
        if indices is None:
            return task
        train, test = (Data(rearrange(data.x, indices), data.y) for data in (task.train, task.test))
        return Task(train, test, task.classes)

    return dataset.challenge(name, "domain", tasks, make_task, on_device=True, seeded=seeded, options=options)


def rearrange(images: Tensor, index_map: Tensor) -> Tensor:
    """Replace pixel p of every image (..., h, w) by its pixel `index_map[p]`, or by 0 where that is `OUTSIDE`."""
    index_map = index_map.to(images.device)
    flat = images.reshape(-1, index_map.numel())
    output = flat.gather(1, index_map.clamp(min=0).expand(flat.shape[0], -1))
    outside = index_map == OUTSIDE
    if bool(outside.any()):
        output.masked_fill_(outside, 0)
    return output.reshape(images.shape)
