r"""The contractions of a convolution in single precision, by the units of a GPU that multiply half precision.

A number is the sum of two of 11 significant bits, x = u (h + l), with a power of two u, and

    x y = u u' (h h' + h l' + l h')    up to l l', 2⁻²² of it.

u is common to an image, or to a channel of all images or of the weight: what is not finite, or far larger, in one of
them leaves the others as they are. A number is off by 2⁻²² of itself at most, or by 2⁻³⁹ of the largest with the same
u, where that is more.

Such units make these three products sooner than one in single precision, but cut digits off where they add up: they add
up few products at a time, and the rest is added as usual.

Images have their channels last and a rim of zeros. What a position sees of one row of the image then lies side by side
in memory, q counting taps and channels alike, and a convolution is a product with the weight as a matrix:

    y[p, f] = Σ_a Σ_q x[p at tap (a, 0), and q further] w[a, q, f]

The slope in x is the same with mirrored taps. With stride s it is made of s² such products, each for the positions that
the same taps reach.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.fast.triton import available
from glocal.precision import conv_uses_tf32

WORTH = 1 << 33
"""Products from which on it is faster than the library on an H200: below, the time goes into launching kernels."""
SHARED = 200_000
"""Bytes of a processor's own memory that the programs ask for: a Hopper has them."""


class Reach(NamedTuple):
    """The positions residue + s i of one axis, how many they are, the taps that reach them, in the order of what these
    read, and where the first of them reads for i = 0."""

    residue: int
    many: int
    taps: range
    first: int

    @classmethod
    def of(cls, residue: int, k: int, stride: int, padding: int, side: int) -> Reach:
        """A position p of the side reads at (p + padding − a) / stride for the taps a of which that is whole."""
        taps = range((residue + padding) % stride, k, stride)[::-1]
        first = (residue + padding - taps[0]) // stride if taps else 0
        return cls(residue, max(0, -(-(side - residue) // stride)), taps, first)

    def mirrored(self, k: int) -> slice:
        """The taps among k in reverse order."""
        return slice(k - 1 - self.taps[0], None, -self.taps.step)

    def beyond(self, read: int) -> int:
        """Zeros that are read at either end of so many numbers."""
        if not self.taps or not self.many:
            return 0
        last = self.first + self.many - 1 + len(self.taps) - 1
        return max(0, -self.first, last - (read - 1))


def suits(x: Tensor, products: int) -> bool:
    """Whether so many products of single numbers are to be made so: not where torch may use tf32, which is faster."""
    single = products >= WORTH and available(x) and x.dtype == torch.float32
    return single and _roomy(x.device) and not conv_uses_tf32()


@cache
def _roomy(device: torch.device) -> bool:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= SHARED


def output(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """y: (n, width, h', w') of x (n, channels, h, w) and w (width, channels, k, k)."""
    from glocal.fast.fp32_from_fp16_triton import halved, matrix, multiply

    if x.shape[1] != w.shape[1]:
        raise ValueError(f"images of {x.shape[1]} channels were given to a weight for {w.shape[1]}.")
    k = w.shape[-1]
    height, width = ((side + 2 * padding - k) // stride + 1 for side in x.shape[2:])
    y = x.new_empty(x.shape[0], height, width, w.shape[0])
    multiply(halved(_pixels(x), padding, "image"), matrix(w.permute(2, 3, 1, 0)), y, stride, (0, 0))
    return y.permute(0, 3, 1, 2)


def input(y: Tensor, w: Tensor, stride: int, padding: int, size: tuple[int, int]) -> Tensor:
    """The slope in x, (n, channels, *size)."""
    from glocal.fast.fp32_from_fp16_triton import Halves, halved, matrix, multiply

    axes = [[Reach.of(r, w.shape[-1], stride, padding, side) for r in range(stride)] for side in size]
    rim = max(reach.beyond(read) for axis, read in zip(axes, y.shape[2:], strict=True) for reach in axis)
    slopes = halved(_pixels(y), rim, "image")
    mirrored = matrix(w.permute(2, 3, 0, 1).flip(0, 1))
    x = y.new_empty(y.shape[0], *size, w.shape[1])
    for down in axes[0]:
        for across in axes[1]:
            some = x[:, down.residue :: stride, across.residue :: stride]
            if down.taps and across.taps and some.numel():
                taps = mirrored.parts[:, down.mirrored(w.shape[-1])][:, :, across.mirrored(w.shape[-1])].contiguous()
                multiply(slopes, Halves(taps, mirrored.largest), some, 1, (down.first + rim, across.first + rim))
            else:
                some.zero_()
    return x.permute(0, 3, 1, 2)


def weight(x: Tensor, y: Tensor, stride: int, padding: int, k: int) -> Tensor:
    """The slope in w, (width, channels, k, k)."""
    from glocal.fast.fp32_from_fp16_triton import correlate, halved

    found = correlate(halved(_pixels(y), 0, "channel"), halved(_pixels(x), padding, "channel"), stride, k)
    return found[: y.shape[1], :, :, : x.shape[1]].permute(0, 3, 1, 2).contiguous()


def _pixels(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)
