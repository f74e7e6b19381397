r"""Rotation about the image's centre, counter-clockwise, by nearest neighbour.

Output pixel (x, y) shows the input pixel that holds the point R(-angle) (x + 1/2 - c_x, y + 1/2 - c_y) + c, or 0 where
that point lies outside. Which pixel holds a point on the border between two is a matter of arithmetic, so the
arithmetic is Pillow's: matrix entries rounded to 15 digits, then 16.16 fixed point with one rounding per coefficient.
Results equal `Image.rotate(angle, Resampling.NEAREST)` exactly, on every pixel, for sides up to 16,000 pixels (beyond
them Pillow leaves fixed point). The map of an angle is worked out once, and a batch is then rotated by one gather.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from glocal.challenges.pixels import OUTSIDE, rearrange
from glocal.errors import GlocalError


def _fix(value: float) -> int:
    """A number in 16.16 fixed point, rounded half up."""
    return math.floor(value * 65536.0 + 0.5)


@lru_cache(maxsize=256)
def rotation_map(height: int, width: int, angle: float) -> Tensor:
    """For each output pixel, row by row, the input pixel shown, or `OUTSIDE`. It is cached: treat it as read-only."""
    if not math.isfinite(angle):
        raise GlocalError(f"the angle {angle} is not a number of degrees; give a finite one, such as 45.")
    angle = angle % 360.0
    pixels = torch.arange(height * width).reshape(height, width)
    # Multiples of 90 are exact transpositions; a quarter turn of a rectangle is not one and is sampled below.
    if angle in (0.0, 180.0) or (angle in (90.0, 270.0) and height == width):
        return torch.rot90(pixels, int(angle) // 90).flatten()
    radians = -math.radians(angle)
    cos, sin, minus_sin = round(math.cos(radians), 15), round(math.sin(radians), 15), round(-math.sin(radians), 15)
    centre_x, centre_y = width / 2, height / 2
    # The order of these sums is Pillow's too: floating-point addition does not commute with rounding.
    shift_x = cos * -centre_x + sin * -centre_y + centre_x
    shift_y = minus_sin * -centre_x + cos * -centre_y + centre_y
    rows, columns = torch.arange(height).unsqueeze(1), torch.arange(width)
    x = (_fix(shift_x + cos * 0.5 + sin * 0.5) + columns * _fix(cos) + rows * _fix(sin)) >> 16
    y = (_fix(shift_y + minus_sin * 0.5 + cos * 0.5) + columns * _fix(minus_sin) + rows * _fix(cos)) >> 16
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(inside, y * width + x, OUTSIDE).flatten()


def rotate(images: Tensor, angle: float) -> Tensor:
    """Images (..., h, w) of any dtype and on any device, turned counter-clockwise by `angle` degrees, filled with 0."""
    if images.ndim < 2:
        raise GlocalError(
            f"images need at least the axes (height, width); a tensor of shape {tuple(images.shape)} came."
        )
    height, width = images.shape[-2:]
    return rearrange(images, rotation_map(height, width, float(angle)))
