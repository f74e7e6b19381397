"""The challenges that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from glocal.challenges import cifar, tinyimagenet
from glocal.challenges.challenge import Augment, Challenge, Normalise, Setting
from glocal.challenges.dataset import Dataset, cifar10_dataset, digits_dataset, mnist_dataset, tinyimagenet_dataset
from glocal.challenges.permuted import permuted
from glocal.challenges.rotated import rotated
from glocal.challenges.split import split
from glocal.errors import GlocalError, unknown


@dataclass(frozen=True)
class Entry:
    """What `catalogue` says of a challenge: `train` and `test` are examples per task, on average."""

    name: str
    setting: Setting
    tasks: int
    train: int
    test: int
    description: str
    source: str


@dataclass(frozen=True)
class _Base:
    """A data set that challenges are cut from: how many examples it has, and how they are learnt from by default."""

    source: str
    noun: str
    train: int
    test: int
    open: Callable[[str | Path | None], Dataset]
    epochs: int = 5
    batch_size: int = 128
    normalise: Normalise | None = None
    augment: Augment | None = None


@dataclass(frozen=True)
class _Kind:
    """A way to cut a data set into tasks; its options are the keyword arguments of `build`."""

    name: str
    setting: Setting
    description: str
    build: Callable[..., Challenge]


_DIGITS = _Base("digits", "5,000 embedded digits", 4_000, 1_000, lambda data: digits_dataset())
_MNIST = _Base("mnist", "MNIST digits", 60_000, 10_000, mnist_dataset)
_CIFAR10 = _Base(
    "cifar10", "CIFAR-10 photographs", 50_000, 10_000, cifar10_dataset, 50, 32, cifar.NORMALISE, cifar.AUGMENT
)
_TINYIMAGENET = _Base(
    "tinyimagenet",
    "Tiny-ImageNet photographs",
    100_000,
    10_000,
    tinyimagenet_dataset,
    100,
    32,
    tinyimagenet.NORMALISE,
    tinyimagenet.AUGMENT,
)

_ROTATED = _Kind("rotated", "domain", "each task turned by its own random angle in [0, 180) degrees", rotated)
_PERMUTED = _Kind("permuted", "domain", "each task with its pixels in another order, the first as they are", permuted)
_SPLIT = _Kind("split", "class", "two new classes with every task", split)
_SPLIT_BY_20 = _Kind(
    "split",
    "class",
    "twenty new classes with every task, as far as the classes of the file on this machine go",
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


def catalogue() -> list[Entry]:
    """Every named challenge with its default number of tasks. Reads no data."""

    def entry(name: str, kind: _Kind, base: _Base, tasks: int) -> Entry:
        share = 1 if kind.setting == "domain" else tasks
        description = f"{base.noun}, {kind.description}"
        return Entry(name, kind.setting, tasks, base.train // share, base.test // share, description, base.source)

    return [entry(name, *row) for name, row in _REGISTRY.items()]


def _default_tasks(kind: _Kind, tasks: int, dataset: Dataset, options: Mapping[str, Any]) -> int:
    """The data and options may imply the number of tasks: one per angle given, as many as there are classes for."""
    angles = options.get("angles")
    if isinstance(angles, Mapping) and angles and all(isinstance(each, Sequence) for each in angles.values()):
        return max(1, min(len(each) for each in angles.values()))
    if isinstance(angles, Sequence):
        return max(1, len(angles))
    by_class = signature(kind.build).parameters.get("classes_per_task")
    if by_class is None:
        return tasks
    size = options.get("classes_per_task", by_class.default)
    held = dataset.classes if dataset.held is None else dataset.held
    return max(1, held // size) if isinstance(size, int) and size >= 1 else tasks


def make(name: str, tasks: int | None = None, data: str | Path | None = None, **options: Any) -> Challenge:
    """The challenge of this name, ended after `tasks` tasks.

    data: a folder to look for the data's files in first.
    options: `angles` for rotated, `identity_first` for permuted, `classes_per_task` and `setting` for split challenges.
    Files are found and verified now; they are read when the first task is asked for. A challenge is made again by
    `make(name, challenge.tasks, **challenge.options)`.
    """
    if name not in _REGISTRY:
        raise unknown("challenge", name, _REGISTRY)
    kind, base, default = _REGISTRY[name]
    allowed = [p.name for p in signature(kind.build).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {name}", option, allowed)
    if tasks is not None and (not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1):
        most = f"1 to {default}" if kind.setting != "domain" else "1 or more"
        raise GlocalError(f"{tasks!r} tasks of {name} were asked for; allowed: {most}.")
    dataset = base.open(data)
    if tasks is None:
        tasks = _default_tasks(kind, default, dataset, options)
    made = kind.build(name, dataset, tasks, **options)
    return replace(made, epochs=base.epochs, batch_size=base.batch_size, normalise=base.normalise, augment=base.augment)
