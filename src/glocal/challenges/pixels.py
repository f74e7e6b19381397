"""Moving pixels: every image of a batch rearranged by one index map, in one gather."""

from __future__ import annotations

from torch import Tensor

from glocal.errors import GlocalError

OUTSIDE = -1
"""The entry of an index map for a pixel that comes from outside the image; it is filled with 0."""


def rearrange(images: Tensor, source: Tensor) -> Tensor:
    """Pixel p of every image (..., h, w), counted by rows, becomes its pixel `source[p]`, or 0 if it is `OUTSIDE`."""
    height, width = images.shape[-2:]
    if source.shape != (height * width,):
        raise GlocalError(
            f"the index map has shape {tuple(source.shape)}; images of {height}x{width} need ({height * width},)."
        )
    source = source.to(images.device)
    flat = images.reshape(-1, height * width)
    moved = flat.gather(1, source.clamp(min=0).expand(flat.shape[0], -1))
    outside = source == OUTSIDE
    if bool(outside.any()):
        moved.masked_fill_(outside, 0)
    return moved.reshape(images.shape)
