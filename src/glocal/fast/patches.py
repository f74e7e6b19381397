r"""A convolution's patches as the rows of a matrix, for many groups at once, and the transpose of that.

    rows[g, (n, i, j), (a, b, c)] = x[n, g · C + c, i s + a − p, j s + b − p]      (0 outside of the image)

with stride s and padding p. Images and rows have their channels last in memory. On a GPU one kernel moves each number
once; elsewhere plain tensor operations do the same.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from glocal.fast.triton import available


class Patches(NamedTuple):
    """How many, and where they are."""

    images: int
    groups: int
    channels: int
    height: int
    width: int
    k: int
    stride: int
    padding: int

    @property
    def size(self) -> tuple[int, int]:
        """The output's height and width."""
        reach = 2 * self.padding - self.k
        return (self.height + reach) // self.stride + 1, (self.width + reach) // self.stride + 1


def gather(x: Tensor, of: Patches) -> Tensor:
    """The rows of x (n, groups · C, h, w), shape (groups, n · h' · w', k · k · C)."""
    pixels = x.permute(0, 2, 3, 1).contiguous()
    if available(x):
        from glocal.fast import patches_triton

        return patches_triton.gather(pixels, of)
    p, s, (h, w) = of.padding, of.stride, of.size
    padded = functional.pad(pixels, [0, 0, p, p, p, p]).unflatten(-1, (of.groups, of.channels))
    image, row, column, group, one = padded.stride()
    windows = padded.as_strided(
        (of.groups, of.images, h, w, of.k, of.k, of.channels), (group, image, row * s, column * s, row, column, one)
    )
    return windows.reshape(of.groups, of.images * h * w, -1)


def scatter(rows: Tensor, of: Patches) -> Tensor:
    """What rows give back to the images they were gathered from, summed: (n, groups · C, h, w)."""
    if available(rows):
        from glocal.fast import patches_triton

        return patches_triton.scatter(rows, of).permute(0, 3, 1, 2)
    p, s, (h, w) = of.padding, of.stride, of.size
    parts = rows.view(of.groups, of.images, h, w, of.k, of.k, of.channels).permute(4, 5, 1, 2, 3, 0, 6)
    padded = rows.new_zeros(of.images, of.height + 2 * p, of.width + 2 * p, of.groups, of.channels)
    for a in range(of.k):
        for b in range(of.k):
            padded[:, a : a + s * h : s, b : b + s * w : s] += parts[a, b]
    return padded[:, p : p + of.height, p : p + of.width].flatten(3).permute(0, 3, 1, 2)
