"""Permuted pixels: every task shows the same images with their pixels in another fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from glocal.challenges.challenge import Challenge
from glocal.challenges.dataset import Dataset
from glocal.challenges.pixel_permutation import viewed
from glocal.errors import GlocalError
from glocal.rng import generator


def permutation(seed: int, task: int, pixels: int) -> Tensor:
    """The order of the pixels in this task of the run with this seed, whatever the other tasks are."""
    return torch.randperm(pixels, generator=generator(seed, "challenge", "permutation", task))


def permuted(name: str, dataset: Dataset, tasks: int, *, identity_first: bool = True) -> Challenge:
    """A permutation per task, the same for train and test; the first task shows the images as they are, unless
    `identity_first` is false."""
    if not isinstance(identity_first, bool):
        raise GlocalError(f"identity_first is {identity_first!r}; allowed: True (task 0 is not permuted) or False.")

    def ordered(index: int, seed: int) -> Tensor | None:
        height, width = dataset.input_shape[-2:]
        return None if index == 0 and identity_first else permutation(seed, index, height * width)

    return Challenge(
        name=name,
        setting="domain",
        tasks=tasks,
        outputs=dataset.classes,
        input_shape=dataset.input_shape,
        make_task=viewed(dataset, ordered),
        on_device=True,
        seeded=True,
        fingerprint=dataset.fingerprint,
        options={"identity_first": identity_first},
    )
