r"""Rotated images: every task shows the same images, rotated by another angle.

Rotation is about the image's centre c, counter-clockwise, by nearest neighbour: output pixel (x, y) shows the input
pixel that contains the point R(−angle) (x + 1/2 − c_x, y + 1/2 − c_y) + c, or 0 if that point lies outside. Rounding
decides which pixel contains a point on a border, so the arithmetic is Pillow's: matrix entries rounded to 15 digits,
then 16.16 fixed point with one rounding per coefficient. The results equal `Image.rotate(angle, Resampling.NEAREST)` on
every pixel, for sides up to 16,000 pixels (above which Pillow does not use fixed point).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from glocal.challenges.challenge import Challenge
from glocal.challenges.datasets import Dataset
from glocal.challenges.permuted import OUTSIDE, rearrange, rearranged_tasks
from glocal.errors import GlocalError, require
from glocal.rng import generator

Angles = Sequence[float] | Mapping[int, Sequence[float]]


def rotated(name: str, dataset: Dataset, tasks: int, *, angles: Angles | None = None) -> Challenge:
    """Rotate the images by one angle per task, the same for train and test; the first task is rotated too.

    angles: degrees, as one list for every seed or as {seed: list}; by default they are drawn for every seed.
    """
    fixed = None if angles is None else _parse_angles(angles, tasks)

    def angle(index: int, seed: int) -> float:
        if fixed is None:
            return random_angle(seed, index)
        if isinstance(fixed, list):
            return fixed[index]
        if seed not in fixed:
            seeds = ", ".join(map(str, sorted(fixed)))
            raise GlocalError(f"{name} has no angles for seed {seed}; they are given for the seeds {seeds}.")
        return fixed[seed][index]

    def index_map(index: int, seed: int) -> Tensor:
        height, width = dataset.input_shape[-2:]
        return rotation_map(height, width, angle(index, seed))

    options: dict[str, Any] = {}
    if isinstance(fixed, list):
        options["angles"] = fixed
    elif fixed is not None:
        options["angles"] = {str(seed): fixed[seed] for seed in sorted(fixed)}
    return Challenge(
        name=name,
        setting="domain",
        tasks=tasks,
        outputs=dataset.classes,
        input_shape=dataset.input_shape,
        make_task=rearranged_tasks(dataset, index_map),
        on_device=True,
        seeded=not isinstance(fixed, list),
        fingerprint=dataset.fingerprint,
        options=options,
    )


def random_angle(seed: int, task: int) -> float:
    """Draw an angle from [0, 180) degrees; it depends on the seed and the task's number, not on the number of tasks."""
    stream = generator(seed, "challenge", "angle", task)
    return 180.0 * float(torch.rand((), dtype=torch.float64, generator=stream))


def _parse_angles(angles: Any, tasks: int) -> list[float] | dict[int, list[float]]:
    if not isinstance(angles, Mapping):
        return _angle_list(angles, "", tasks)
    by_seed: dict[int, list[float]] = {}
    for key, degrees in angles.items():
        try:
            seed = int(key)  # JSON and TOML have seeds as strings
        except (TypeError, ValueError):
            raise GlocalError(
                f"angles are given for {key!r}, which is not a seed; give them as {{seed: [degrees, ...]}}."
            ) from None
        by_seed[seed] = _angle_list(degrees, f" for seed {seed}", tasks)
    require(bool(by_seed), "angles are given for no seed; give them as {seed: [degrees, ...]}, or leave them out.")
    return by_seed


def _angle_list(angles: Any, suffix: str, tasks: int) -> list[float]:
    """Return at least `tasks` finite angles as floats."""
    is_list = isinstance(angles, Sequence) and not isinstance(angles, str | bytes)
    require(
        is_list and all(isinstance(a, int | float) and not isinstance(a, bool) and math.isfinite(a) for a in angles),
        f"the angles{suffix} are {angles!r}; give a list of degrees, such as [0, 45, 90].",
    )
    require(len(angles) >= tasks, f"{len(angles)} angles are given{suffix} for {tasks} tasks; give one angle per task.")
    return [float(angle) for angle in angles]


def rotate(images: Tensor, angle: float) -> Tensor:
    """Rotate images (..., h, w) of any dtype counter-clockwise by `angle` degrees; new pixels are 0."""
    require(images.ndim >= 2, f"images have the shape {tuple(images.shape)}; give (..., height, width).")
    height, width = images.shape[-2:]
    return rearrange(images, rotation_map(height, width, float(angle)))


@lru_cache(maxsize=256)
def rotation_map(height: int, width: int, angle: float) -> Tensor:
    """Return the index map of a rotation (see `rearrange`). It is cached: treat it as read-only."""
    require(math.isfinite(angle), f"the angle {angle} is not finite; give degrees, such as 45.")
    angle = angle % 360.0
    pixels = torch.arange(height * width).reshape(height, width)
    # Multiples of 90 are exact transpositions, except quarter turns of a rectangle, which are sampled below.
    if angle in (0.0, 180.0) or (angle in (90.0, 270.0) and height == width):
        return torch.rot90(pixels, int(angle) // 90).flatten()
    radians = -math.radians(angle)
    cos, sin, minus_sin = round(math.cos(radians), 15), round(math.sin(radians), 15), round(-math.sin(radians), 15)
    centre_x, centre_y = width / 2, height / 2
    # The order of these sums is Pillow's too, because it changes the rounding.
    shift_x = cos * -centre_x + sin * -centre_y + centre_x
    shift_y = minus_sin * -centre_x + cos * -centre_y + centre_y
    rows, columns = torch.arange(height).unsqueeze(1), torch.arange(width)
    x = (_fixed_point(shift_x + cos * 0.5 + sin * 0.5) + columns * _fixed_point(cos) + rows * _fixed_point(sin)) >> 16
    y = (
        _fixed_point(shift_y + minus_sin * 0.5 + cos * 0.5)
        + columns * _fixed_point(minus_sin)
        + rows * _fixed_point(cos)
    ) >> 16
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(inside, y * width + x, OUTSIDE).flatten()


def _fixed_point(value: float) -> int:
    """Convert to 16.16 fixed point, rounding half up."""
    return math.floor(value * 65536.0 + 0.5)
