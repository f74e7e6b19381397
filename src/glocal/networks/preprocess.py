"""Preprocessing of raw images: crop, flip, scale, normalize, in this order."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from glocal.challenges.challenge import Augment, Normalise, TransformFunction
from glocal.errors import GlocalError, first_line, require
from glocal.rng import below, seeded_only, split


class InputTransform:
    """Scale uint8 images to [0, 1], normalize their channels, and augment them in training.

    Inputs of other types count as prepared and are changed only by a user's augmentation, a function (x, key) -> x.
    """

    def __init__(
        self,
        normalise: Normalise | None = None,
        augment: Augment | TransformFunction | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.augmentation = augment
        self.statistics: tuple[Tensor, Tensor] | None = None
        if normalise is not None:
            # On the device from the start: a captured CUDA graph cannot copy from the host.
            mean, std = (torch.tensor(part, device=device).view(-1, 1, 1) for part in normalise)
            self.statistics = mean, std

    def check(self, x: Tensor, name: str) -> None:
        """Raise an error if the inputs of the challenge of this name cannot be transformed."""
        if callable(self.augmentation):
            self._check_function(self.augmentation, x[:2])
        if not isinstance(self.augmentation, Augment) and self.statistics is None:
            return
        description = f"{name} has inputs of type {x.dtype} and shape {tuple(x.shape[1:])}"
        images = x.dtype == torch.uint8 and x.dim() == 4
        require(images, f"normalise and augment need uint8 images (channels, height, width); {description}.")
        channels = None if self.statistics is None else self.statistics[0].shape[0]
        require(channels in (None, 1, x.shape[1]), f"normalise has {channels} channels; {description}.")

    def _check_function(self, function: TransformFunction, x: Tensor) -> None:
        """Raise an error if a user's augmentation fails, or changes the shape or dtype."""
        x, name = self.normalize(x), getattr(function, "__name__", type(function).__name__)
        inputs = x.clone()
        transform = partial(function, inputs, torch.zeros((), dtype=torch.long, device=x.device))
        try:
            y = seeded_only(transform, f"the transform '{name}'", "its key (glocal.rng)")
        except GlocalError:
            raise
        except Exception as error:
            arguments = f"x of shape {tuple(x.shape)} and {x.dtype}, and a key"
            raise GlocalError(f"the transform '{name}' does not accept {arguments}: {first_line(error)}.") from error
        same = torch.equal(inputs, x)
        require(same, f"the transform '{name}' changes its inputs in place: work on a copy, x.clone().")
        same = isinstance(y, Tensor) and (y.shape, y.dtype) == (x.shape, x.dtype)
        output = f"{tuple(y.shape)} and {y.dtype}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        require(
            same, f"the transform '{name}' must return {tuple(x.shape)} and {x.dtype} like its input, not {output}."
        )

    def prepare(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Return stored inputs as the network takes them, augmented if there is a key."""
        if key is None or self.augmentation is None:
            return self.normalize(x)
        if isinstance(self.augmentation, Augment):
            return self.normalize(self.augment(x, key))
        return self.augmentation(self.normalize(x), key)

    def normalize(self, x: Tensor) -> Tensor:
        """Scale raw images (n, channels, height, width) to [0, 1] and normalize their channels."""
        if x.dtype != torch.uint8:
            return x
        x = x.float().div_(255)
        return x if self.statistics is None else x.sub_(self.statistics[0]).div_(self.statistics[1])

    def augment(self, x: Tensor, key: Tensor) -> Tensor:
        """Crop and flip raw images at random. The draws for image i depend only on `key` and i."""
        if not isinstance(self.augmentation, Augment) or x.dtype != torch.uint8:
            return x
        padding, flip = self.augmentation
        n = x.shape[0]
        rows, columns, coins = split(key, torch.arange(3 * n, device=key.device)).view(n, 3).unbind(1)
        top, left = (below(2 * padding + 1, words) for words in (rows, columns))
        return crop(x, padding, top, left, below(2, coins).bool() if flip else None)


def crop(x: Tensor, padding: int, top: Tensor, left: Tensor, flip: Tensor | None) -> Tensor:
    """Pad images (n, ..., h, w) with zeros on every side and crop h × w pixels from each.

    `top` and `left` are the first row and column of each crop; those in `flip` are mirrored left to right; all (n,).
    """
    h, w = x.shape[-2:]
    rows = top.unsqueeze(1) + torch.arange(h, device=x.device)
    columns = torch.arange(w, device=x.device).expand(x.shape[0], w)
    if flip is not None:
        columns = torch.where(flip.unsqueeze(1), w - 1 - columns, columns)
    columns = columns + left.unsqueeze(1)
    pixels = rows.unsqueeze(2) * (w + 2 * padding) + columns.unsqueeze(1)  # (n, h, w), row-major
    padded = functional.pad(x, [padding] * 4).flatten(-2).flatten(1, -2)
    return padded.gather(2, pixels.flatten(1).unsqueeze(1).expand(-1, padded.shape[1], -1)).view(x.shape)
