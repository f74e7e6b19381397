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
from glocal.challenges.permuted import OUTSIDE, rearranged
from glocal.errors import GlocalError, require
from glocal.rng import generator

Angles = Sequence[float] | Mapping[int, Sequence[float]]


def rotated(name: str, dataset: Dataset, tasks: int, *, angles: Angles | None = None) -> Challenge:
    """Rotate the images by one angle per task, the same for train and test; the first task is rotated too.

    angles: degrees, as one list for every seed or as {seed: list}; by default they are drawn for every seed.
    """
    fixed = _parse_angles(angles, tasks)
    height, width = dataset.input_shape[-2:]

    def index_map(index: int, seed: int) -> Tensor:
        if isinstance(fixed, dict) and str(seed) not in fixed:
            seeds = ", ".join(fixed)
            raise GlocalError(f"{name} has no angles for seed {seed}; they are given for the seeds {seeds}.")
        degrees = fixed[str(seed)] if isinstance(fixed, dict) else fixed
        return rotation_map(height, width, random_angle(seed, index) if degrees is None else degrees[index])

    options = {} if fixed is None else {"angles": fixed}
    return rearranged(name, dataset, tasks, index_map, seeded=not isinstance(fixed, list), options=options)


def random_angle(seed: int, task: int) -> float:
    """Draw an angle from [0, 180) degrees; it depends on the seed and the task's number, not on the number of tasks."""
    stream = generator(seed, "challenge", "angle", task)
    return 180.0 * float(torch.rand((), dtype=torch.float64, generator=stream))


def _parse_angles(angles: Any, tasks: int) -> list[float] | dict[str, list[float]] | None:
    """Return the angles as floats, by seed as text, as JSON and TOML have it."""
    if angles is None:
        return None
    if not isinstance(angles, Mapping):
        return _angle_list(angles, "", tasks)
    seeds = {str(seed): degrees for seed, degrees in angles.items()}
    allowed = "give them as {seed: [degrees, ...]}, or leave them out"
    valid = bool(seeds) and all(map(str.isdecimal, seeds))
    require(valid, f"angles are given for the seeds {list(angles)}; {allowed}.")
    return {seed: _angle_list(seeds[seed], f" for seed {seed}", tasks) for seed in sorted(seeds, key=int)}


def _angle_list(angles: Any, suffix: str, tasks: int) -> list[float]:
    """Return at least `tasks` finite angles as floats."""
    is_list = isinstance(angles, Sequence) and not isinstance(angles, str | bytes)
    require(
        is_list and all(isinstance(a, int | float) and not isinstance(a, bool) and math.isfinite(a) for a in angles),
        f"the angles{suffix} are {angles!r}; give a list of degrees, such as [0, 45, 90].",
    )
    require(len(angles) >= tasks, f"{len(angles)} angles are given{suffix} for {tasks} tasks; give one angle per task.")
    return [float(angle) for angle in angles]


@lru_cache(maxsize=256)
def rotation_map(height: int, width: int, angle: float) -> Tensor:
    """Return the index map of a rotation (see `rearrange`). It is cached: treat it as read-only."""
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
    in_image = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(in_image, y * width + x, OUTSIDE).flatten()


def _fixed_point(value: float) -> int:
    """Convert to 16.16 fixed point, rounding half up."""
    return math.floor(value * 65536.0 + 0.5)
