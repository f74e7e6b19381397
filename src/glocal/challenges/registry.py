"""The named challenges: data sets, ways to make tasks of them, and their default training settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from glocal.challenges.challenge import Augment, Challenge, Normalise, Setting
from glocal.challenges.datasets import (
    Dataset,
    known_fingerprints,
    open_cifar10,
    open_cifar100,
    open_cifar100_superclasses,
    open_digits,
    open_fashion_mnist,
    open_mnist,
    open_tinyimagenet,
)
from glocal.challenges.permuted import permuted
from glocal.challenges.rotated import rotated
from glocal.challenges.split import split, superclasses
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
    """A way to make tasks of a data set; its options are the keyword-only arguments of `build`.

    disjoint: whether every task has examples of its own, rather than all of them.
    """

    setting: Setting
    description: str
    build: Callable[..., Challenge]
    disjoint: bool = True


_PHOTOGRAPHS = {"batch_size": 32, "augment": Augment(padding=4, flip=True)}
_CIFAR10_STATISTICS = Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615))
_CIFAR100_STATISTICS = Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_TINYIMAGENET_STATISTICS = Normalise((0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821))
_CIFAR10_TRAINING = {**_PHOTOGRAPHS, "epochs": 50, "normalise": _CIFAR10_STATISTICS}
_CIFAR100_TRAINING = {**_PHOTOGRAPHS, "epochs": 50, "normalise": _CIFAR100_STATISTICS}
_TINYIMAGENET_TRAINING = {**_PHOTOGRAPHS, "epochs": 100, "normalise": _TINYIMAGENET_STATISTICS}

_DIGITS = _Source("digits", "5,000 embedded digits", 4_000, 1_000, open_digits)
_MNIST = _Source("mnist", "MNIST digits", 60_000, 10_000, open_mnist)
_FASHION_MNIST = _Source("fashion-mnist", "Fashion-MNIST articles", 60_000, 10_000, open_fashion_mnist)
_CIFAR10 = _Source("cifar10", "CIFAR-10 photographs", 50_000, 10_000, open_cifar10, _CIFAR10_TRAINING)
_CIFAR100 = _Source("cifar100", "CIFAR-100 photographs", 50_000, 10_000, open_cifar100, _CIFAR100_TRAINING)
_CIFAR100_SUPERCLASSES = _CIFAR100._replace(open=open_cifar100_superclasses)
_TINYIMAGENET = _Source(
    "tinyimagenet", "Tiny-ImageNet photographs", 100_000, 10_000, open_tinyimagenet, _TINYIMAGENET_TRAINING
)

_ROTATED = _Kind("domain", "each task rotated by a random angle in [0, 180) degrees", rotated, disjoint=False)
_PERMUTED = _Kind("domain", "each task with its pixels permuted, except the first", permuted, disjoint=False)
_SPLIT = _Kind("class", "two new classes in every task", split)
_SPLIT_BY_5 = _Kind("class", "five new classes in every task", partial(split, classes_per_task=5))
_SPLIT_BY_10 = _Kind("class", "ten new classes in every task", partial(split, classes_per_task=10))
_SUPERCLASSES = _Kind("domain", "another of the five classes of every superclass in each task", superclasses)
_TWENTY_CLASSES = "twenty new classes in every task, as many tasks as the file on this machine has classes for"
_SPLIT_BY_20 = _Kind("class", _TWENTY_CLASSES, partial(split, classes_per_task=20))

_REGISTRY: Mapping[str, tuple[_Kind, _Source, int]] = {
    "rotated-digits": (_ROTATED, _DIGITS, 5),
    "permuted-digits": (_PERMUTED, _DIGITS, 5),
    "split-digits": (_SPLIT, _DIGITS, 5),
    "rotated-mnist": (_ROTATED, _MNIST, 20),
    "permuted-mnist": (_PERMUTED, _MNIST, 10),
    "split-mnist": (_SPLIT, _MNIST, 5),
    "permuted-fashion-mnist": (_PERMUTED, _FASHION_MNIST, 10),
    "split-fashion-mnist": (_SPLIT, _FASHION_MNIST, 5),
    "split-cifar10": (_SPLIT, _CIFAR10, 5),
    "split-cifar100": (_SPLIT_BY_5, _CIFAR100, 20),
    "split-cifar100-by-10": (_SPLIT_BY_10, _CIFAR100, 10),
    "cifar100-superclass": (_SUPERCLASSES, _CIFAR100_SUPERCLASSES, 5),
    "split-tinyimagenet": (_SPLIT_BY_20, _TINYIMAGENET, 10),
}


def catalogue() -> list[ChallengeInfo]:
    """Describe every named challenge, with its default number of tasks. Reads no data."""
    rows = []
    for name, (kind, source, tasks) in _REGISTRY.items():
        parts = tasks if kind.disjoint else 1
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
    allowed = default_options(name)
    for option in options:
        require_known(f"option of {name}", option, allowed)
    countable = tasks is None or (isinstance(tasks, int) and not isinstance(tasks, bool) and tasks >= 1)
    require(countable, f"{tasks!r} tasks of {name} were requested; allowed: 1 or more.")
    dataset = source.open(data)
    if tasks is None:
        tasks = _implied_tasks(dataset, **{**allowed, **options}) or default_tasks
    return replace(kind.build(name, dataset, tasks, **options), **source.training)


def is_named(config: Mapping[str, Any]) -> bool:
    """Return whether the challenge of a run is the named one: a user's own of the same name has other data."""
    entry = _REGISTRY.get(str(config["name"]))
    return entry is not None and str(config.get("fingerprint")) in known_fingerprints(entry[1].name)


def default_options(name: str) -> dict[str, Any]:
    """Return the options of a named challenge with their defaults."""
    parameters = signature(_REGISTRY[name][0].build).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY}


def _implied_tasks(dataset: Dataset, angles: Any = None, classes_per_task: Any = None, **_: Any) -> int | None:
    """Return the number of tasks that the options and the data imply: one per angle, or all available classes."""
    lists = list(angles.values()) if isinstance(angles, Mapping) else [angles]
    if lists and all(isinstance(degrees, Sequence) for degrees in lists):
        return max(1, min(map(len, lists)))
    if isinstance(classes_per_task, int) and classes_per_task >= 1:
        return max(1, dataset.available_classes // classes_per_task)
    return None
