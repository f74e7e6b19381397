"""Rotated images: every task shows the same images turned by another angle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glocal.challenges.challenge import Challenge
from glocal.challenges.dataset import Dataset
from glocal.challenges.pixel_permutation import viewed
from glocal.challenges.rotate import rotation_map
from glocal.errors import GlocalError
from glocal.rng import generator

Angles = Sequence[float] | Mapping[int, Sequence[float]]


def random_angle(seed: int, task: int) -> float:
    """Uniform in [0, 180) degrees; it depends on the seed and the task's number, not on how many tasks there are."""
    stream = generator(seed, "challenge", "angle", task)
    return 180.0 * float(torch.rand((), dtype=torch.float64, generator=stream))


def _listed(angles: Any, whose: str, tasks: int) -> list[float]:
    """A list of at least `tasks` finite angles, as floats."""
    numeric = isinstance(angles, Sequence) and not isinstance(angles, str | bytes)
    if not numeric or not all(
        isinstance(a, int | float) and not isinstance(a, bool) and math.isfinite(a) for a in angles
    ):
        raise GlocalError(f"the angles{whose} are {angles!r}; give a list of degrees, such as [0, 45, 90].")
    if len(angles) < tasks:
        raise GlocalError(f"{len(angles)} angles are given{whose} for {tasks} tasks; give one angle per task.")
    return [float(angle) for angle in angles]


def _resolve(angles: Any, tasks: int) -> list[float] | dict[int, list[float]]:
    if not isinstance(angles, Mapping):
        return _listed(angles, "", tasks)
    resolved: dict[int, list[float]] = {}
    for key, listed in angles.items():
        try:
            seed = int(key)  # in JSON and TOML the seeds are strings
        except (TypeError, ValueError):
            raise GlocalError(
                f"angles are given for {key!r}, which is not a seed; give them as {{seed: [degrees, ...]}}."
            ) from None
        resolved[seed] = _listed(listed, f" for seed {seed}", tasks)
    if not resolved:
        raise GlocalError(
            "angles are given for no seed at all; give them as {seed: [degrees, ...]}, or leave them out."
        )
    return resolved


def rotated(name: str, dataset: Dataset, tasks: int, *, angles: Angles | None = None) -> Challenge:
    """An angle per task, the same for train and test; the first task is rotated too.

    The angles are drawn per seed unless given: one list for every seed, or a list for each.
    """
    given = None if angles is None else _resolve(angles, tasks)

    def angle(index: int, seed: int) -> float:
        if given is None:
            return random_angle(seed, index)
        if isinstance(given, list):
            return given[index]
        if seed not in given:
            seeds = ", ".join(map(str, sorted(given)))
            raise GlocalError(f"{name} has no angles for seed {seed}; they are given for the seeds {seeds}.")
        return given[seed][index]

    def turned(index: int, seed: int) -> Tensor:
        height, width = dataset.input_shape[-2:]
        return rotation_map(height, width, angle(index, seed))

    options: dict[str, Any] = {}
    if isinstance(given, list):
        options["angles"] = given
    elif given is not None:
        options["angles"] = {str(seed): given[seed] for seed in sorted(given)}
    return Challenge(
        name=name,
        setting="domain",
        tasks=tasks,
        outputs=dataset.classes,
        input_shape=dataset.input_shape,
        make_task=viewed(dataset, turned),
        on_device=True,
        seeded=not isinstance(given, list),
        fingerprint=dataset.fingerprint,
        options=options,
    )
