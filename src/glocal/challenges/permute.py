"""Permuted pixels: every task shows the same images with their pixels in another fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.challenges.dataset import Dataset
from glocal.challenges.pixels import rearrange
from glocal.errors import GlocalError
from glocal.randomness import generator


def permutation(seed: int, task: int, pixels: int) -> Tensor:
    """The order of the pixels in this task of the run with this seed, whatever the other tasks are."""
    return torch.randperm(pixels, generator=generator(seed, "challenge", "permutation", task))


def permuted(name: str, dataset: Dataset, tasks: int, *, identity_first: bool = True) -> Challenge:
    """A permutation per task, the same for train and test; the first task shows the images as they are, unless
    `identity_first` is false."""
    if not isinstance(identity_first, bool):
        raise GlocalError(f"identity_first is {identity_first!r}; allowed: True (task 0 is not permuted) or False.")

    def make_task(index: int, seed: int) -> Task:
        whole = dataset.load()
        if index == 0 and identity_first:
            return whole
        order = permutation(seed, index, whole.train.x.shape[-2] * whole.train.x.shape[-1])
        train, test = (Data(rearrange(part.x, order), part.y) for part in (whole.train, whole.test))
        return Task(train, test, whole.classes)

    return Challenge(
        name=name,
        setting="domain",
        tasks=tasks,
        outputs=dataset.classes,
        input_shape=dataset.input_shape,
        make_task=make_task,
        seeded=True,
        fingerprint=dataset.fingerprint,
        options={"identity_first": identity_first},
    )
