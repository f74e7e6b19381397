"""The named challenges: data sets, ways to make tasks of them, and their default training settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from glocal.challenges.challenge import Augment, Challenge, Normalise, Setting
from glocal.challenges.datasets import Dataset, open_cifar10, open_digits, open_mnist, open_tinyimagenet
from glocal.challenges.permuted import permuted
from glocal.challenges.rotated import rotated
from glocal.challenges.split import split
from glocal.errors import require, require_known


@dataclass(frozen=True)
class ChallengeInfo:
    """A row of `catalogue`; `train` and `test` are the average numbers of examples per task."""

    name: str
    setting: Setting
    tasks: int
    train: int
    test: int
    description: str
    source: str


@dataclass(frozen=True)
class _Base:
    """A data set: its number of examples and how it is trained on by default."""

    source: str
    description: str
    train: int
    test: int
    open: Callable[[str | Path | None], Dataset]
    epochs: int = 5
    batch_size: int = 128
    normalise: Normalise | None = None
    augment: Augment | None = None


@dataclass(frozen=True)
class _Kind:
    """A way to make tasks of a data set; its options are the keyword-only arguments of `build`."""

    name: str
    setting: Setting
    description: str
    build: Callable[..., Challenge]


_DIGITS = _Base("digits", "5,000 embedded digits", 4_000, 1_000, open_digits)
_MNIST = _Base("mnist", "MNIST digits", 60_000, 10_000, open_mnist)
_CIFAR10 = _Base(
    "cifar10",
    "CIFAR-10 photographs",
    50_000,
    10_000,
    open_cifar10,
    epochs=50,
    batch_size=32,
    normalise=Normalise(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2615)),
    augment=Augment(padding=4, flip=True),
)
_TINYIMAGENET = _Base(
    "tinyimagenet",
    "Tiny-ImageNet photographs",
    100_000,
    10_000,
    open_tinyimagenet,
    epochs=100,
    batch_size=32,
    normalise=Normalise(mean=(0.4802, 0.4480, 0.3975), std=(0.2770, 0.2691, 0.2821)),
    augment=Augment(padding=4, flip=True),
)

_ROTATED = _Kind("rotated", "domain", "each task rotated by a random angle in [0, 180) degrees", rotated)
_PERMUTED = _Kind("permuted", "domain", "each task with its pixels permuted, except the first", permuted)
_SPLIT = _Kind("split", "class", "two new classes in every task", split)
_SPLIT_BY_20 = _Kind(
    "split",
    "class",
    "twenty new classes in every task, as many tasks as the file on this machine has classes for",
    partial(split, classes_per_task=20),
)

_REGISTRY: Mapping[str, tuple[_Kind, _Base, int]] = {
    f"{kind.name}-{base.source}": (kind, base, tasks)
    for base, kind, tasks in (
        (_DIGITS, _ROTATED, 5),
        (_DIGITS, _PERMUTED, 5),
        (_DIGITS, _SPLIT, 5),
        (_MNIST, _ROTATED, 20),
        (_MNIST, _PERMUTED, 10),
        (_MNIST, _SPLIT, 5),
        (_CIFAR10, _SPLIT, 5),
        (_TINYIMAGENET, _SPLIT_BY_20, 10),
    )
}


def catalogue() -> list[ChallengeInfo]:
    """Describe every named challenge, with its default number of tasks. Reads no data."""

    def info(name: str, kind: _Kind, base: _Base, tasks: int) -> ChallengeInfo:
        parts = 1 if kind.setting == "domain" else tasks
        description = f"{base.description}, {kind.description}"
        return ChallengeInfo(
            name, kind.setting, tasks, base.train // parts, base.test // parts, description, base.source
        )

    return [info(name, *row) for name, row in _REGISTRY.items()]


def make(name: str, tasks: int | None = None, data: str | Path | None = None, **options: Any) -> Challenge:
    """Make the challenge with this name.

    Files are found and verified now, and read when the first task is needed. `make(name, challenge.tasks,
    **challenge.options)` makes the same challenge again.

    Args:
        name: one of those in `catalogue`.
        tasks: the number of tasks; by default the catalogue's, or as many as the options and the data allow.
        data: a folder to search first for the data's files.
        options: `angles` for rotated, `identity_first` for permuted, `classes_per_task` and `setting` for split
            challenges.
    """
    require_known("challenge", name, _REGISTRY)
    kind, base, default_tasks = _REGISTRY[name]
    allowed = [p.name for p in signature(kind.build).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    for option in options:
        require_known(f"option of {name}", option, allowed)
    limits = "1 or more" if kind.setting == "domain" else f"1 to {default_tasks}"
    require(
        tasks is None or (isinstance(tasks, int) and not isinstance(tasks, bool) and tasks >= 1),
        f"{tasks!r} tasks of {name} were requested; allowed: {limits}.",
    )
    dataset = base.open(data)
    if tasks is None:
        tasks = _implied_tasks(kind, dataset, options) or default_tasks
    challenge = kind.build(name, dataset, tasks, **options)
    return replace(
        challenge, epochs=base.epochs, batch_size=base.batch_size, normalise=base.normalise, augment=base.augment
    )


def _implied_tasks(kind: _Kind, dataset: Dataset, options: Mapping[str, Any]) -> int | None:
    """Return the number of tasks that the options and the data imply: one per angle, or all available classes."""
    angles = options.get("angles")
    if isinstance(angles, Mapping) and angles and all(isinstance(degrees, Sequence) for degrees in angles.values()):
        return max(1, min(len(degrees) for degrees in angles.values()))
    if isinstance(angles, Sequence):
        return max(1, len(angles))
    parameter = signature(kind.build).parameters.get("classes_per_task")
    size = options.get("classes_per_task", parameter.default if parameter else None)
    return max(1, dataset.available_classes // size) if isinstance(size, int) and size >= 1 else None
