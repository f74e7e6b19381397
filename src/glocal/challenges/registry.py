"""The named challenges: data sets, ways to make tasks of them, and their default training settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

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


class _Source(NamedTuple):
    """A data set: its number of examples, and the fields of its challenges that say how to train on it."""

    name: str
    description: str
    train: int
    test: int
    open: Callable[[str | Path | None], Dataset]
    training: Mapping[str, Any] = {}


class _Kind(NamedTuple):
    """A way to make tasks of a data set; its options are the keyword-only arguments of `build`."""

    name: str
    setting: Setting
    description: str
    build: Callable[..., Challenge]


_PHOTOGRAPHS = {"batch_size": 32, "augment": Augment(padding=4, flip=True)}
_CIFAR10_STATISTICS = Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615))
_TINYIMAGENET_STATISTICS = Normalise((0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821))
_CIFAR10_TRAINING = {**_PHOTOGRAPHS, "epochs": 50, "normalise": _CIFAR10_STATISTICS}
_TINYIMAGENET_TRAINING = {**_PHOTOGRAPHS, "epochs": 100, "normalise": _TINYIMAGENET_STATISTICS}

_DIGITS = _Source("digits", "5,000 embedded digits", 4_000, 1_000, open_digits)
_MNIST = _Source("mnist", "MNIST digits", 60_000, 10_000, open_mnist)
_CIFAR10 = _Source("cifar10", "CIFAR-10 photographs", 50_000, 10_000, open_cifar10, _CIFAR10_TRAINING)
_TINYIMAGENET = _Source(
    "tinyimagenet", "Tiny-ImageNet photographs", 100_000, 10_000, open_tinyimagenet, _TINYIMAGENET_TRAINING
)

_ROTATED = _Kind("rotated", "domain", "each task rotated by a random angle in [0, 180) degrees", rotated)
_PERMUTED = _Kind("permuted", "domain", "each task with its pixels permuted, except the first", permuted)
_SPLIT = _Kind("split", "class", "two new classes in every task", split)
_TWENTY_CLASSES = "twenty new classes in every task, as many tasks as the file on this machine has classes for"
_SPLIT_BY_20 = _Kind("split", "class", _TWENTY_CLASSES, partial(split, classes_per_task=20))

_REGISTRY: Mapping[str, tuple[_Kind, _Source, int]] = {
    f"{kind.name}-{source.name}": (kind, source, tasks)
    for kind, source, tasks in (
        (_ROTATED, _DIGITS, 5),
        (_PERMUTED, _DIGITS, 5),
        (_SPLIT, _DIGITS, 5),
        (_ROTATED, _MNIST, 20),
        (_PERMUTED, _MNIST, 10),
        (_SPLIT, _MNIST, 5),
        (_SPLIT, _CIFAR10, 5),
        (_SPLIT_BY_20, _TINYIMAGENET, 10),
    )
}


def catalogue() -> list[ChallengeInfo]:
    """Describe every named challenge, with its default number of tasks. Reads no data."""
    rows = []
    for name, (kind, source, tasks) in _REGISTRY.items():
        parts = 1 if kind.setting == "domain" else tasks
        sizes = source.train // parts, source.test // parts
        description = f"{source.description}, {kind.description}"
        rows.append(ChallengeInfo(name, kind.setting, tasks, *sizes, description, source.name))
    return rows


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
    kind, source, default_tasks = _REGISTRY[name]
    allowed = {p.name: p.default for p in signature(kind.build).parameters.values() if p.kind is Parameter.KEYWORD_ONLY}
    for option in options:
        require_known(f"option of {name}", option, allowed)
    countable = tasks is None or (isinstance(tasks, int) and not isinstance(tasks, bool) and tasks >= 1)
    require(countable, f"{tasks!r} tasks of {name} were requested; allowed: 1 or more.")
    dataset = source.open(data)
    if tasks is None:
        tasks = _implied_tasks(dataset, **{**allowed, **options}) or default_tasks
    return replace(kind.build(name, dataset, tasks, **options), **source.training)


def _implied_tasks(dataset: Dataset, angles: Any = None, classes_per_task: Any = None, **_: Any) -> int | None:
    """Return the number of tasks that the options and the data imply: one per angle, or all available classes."""
    lists = list(angles.values()) if isinstance(angles, Mapping) else [angles]
    if lists and all(isinstance(degrees, Sequence) for degrees in lists):
        return max(1, min(map(len, lists)))
    if isinstance(classes_per_task, int) and classes_per_task >= 1:
        return max(1, dataset.available_classes // classes_per_task)
    return None
