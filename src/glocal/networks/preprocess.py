"""The network's door: what becomes of raw images on their way in, in the order crop, flip, scale, normalise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from glocal.challenges.challenge import Augment, Normalise
from glocal.errors import require
from glocal.rng import below, split


class Door:
    """What is raw here is whole numbers, uint8 images; floats are never changed: they are through the door already."""

    def __init__(
        self, normalise: Normalise | None = None, augment: Augment | None = None, device: torch.device | None = None
    ) -> None:
        self.augment = augment
        self.statistics: tuple[Tensor, Tensor] | None = None
        if normalise is not None:
            # Made once, where they are used: a captured graph cannot bring numbers from the host.
            mean, std = (torch.tensor(part, device=device).view(-1, 1, 1) for part in normalise)
            self.statistics = mean, std

    def check(self, x: Tensor, name: str) -> None:
        """Whether the inputs of a challenge of this name can pass."""
        if self.augment is None and self.statistics is None:
            return
        given = f"{name} has inputs of type {x.dtype} and shape {tuple(x.shape[1:])}"
        images = x.dtype == torch.uint8 and x.dim() == 4
        require(images, f"normalise and augment are for uint8 images (channels, height, width); {given}.")
        channels = None if self.statistics is None else self.statistics[0].shape[0]
        require(channels in (None, 1, x.shape[1]), f"normalise has {channels} channels; {given}.")

    def ready(self, x: Tensor) -> Tensor:
        """Raw images (n, channels, height, width) as the network takes them: scaled to [0, 1] and normalised."""
        if x.is_floating_point():
            return x
        x = x.float().div_(255)
        if self.statistics is None:
            return x
        mean, std = self.statistics
        return x.sub_(mean).div_(std)

    def varied(self, x: Tensor, key: Tensor) -> Tensor:
        """Raw images, each cropped and flipped by random numbers of its own: the i-th's depend on key and i alone."""
        if self.augment is None or x.is_floating_point():
            return x
        padding, flip = self.augment
        n = x.shape[0]
        down, across, coin = split(key, torch.arange(3 * n, device=key.device)).view(n, 3).unbind(1)
        top, left = (below(2 * padding + 1, words) for words in (down, across))
        return crop(x, padding, top, left, below(2, coin).bool() if flip else None)


class Open(Door):
    """A door that changes nothing: the network takes whole numbers, as tokens or images, itself."""

    def ready(self, x: Tensor) -> Tensor:
        return x


def crop(x: Tensor, padding: int, top: Tensor, left: Tensor, flip: Tensor | None) -> Tensor:
    """From images (n, ..., h, w) with zeros around them, the h × w pixels that begin at (top, left) of each, mirrored
    left to right where `flip` says so."""
    h, w = x.shape[-2:]
    rows = top.unsqueeze(1) + torch.arange(h, device=x.device)
    columns = torch.arange(w, device=x.device).expand(x.shape[0], w)
    if flip is not None:
        columns = torch.where(flip.unsqueeze(1), w - 1 - columns, columns)
    columns = columns + left.unsqueeze(1)
    pixels = rows.unsqueeze(2) * (w + 2 * padding) + columns.unsqueeze(1)  # (n, h, w), numbered row by row
    padded = functional.pad(x, [padding] * 4).flatten(-2).flatten(1, -2)
    return padded.gather(2, pixels.flatten(1).unsqueeze(1).expand(-1, padded.shape[1], -1)).view(x.shape)
