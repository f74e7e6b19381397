"""A challenge from a user's own data: arrays, tensors, data sets or loaders, checked before any training."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from glocal.challenges.challenge import (
    Challenge,
    Data,
    LossFunction,
    LossName,
    Setting,
    Task,
    TransformFunction,
    fingerprint,
)
from glocal.errors import GlocalError, require, require_known
from glocal.inputs import as_inputs, as_labels, as_targets, describe, items_change, read_examples
from glocal.losses import PerSampleLoss
from glocal.rng import generator

SPLITS = {2: ("train", "test"), 3: ("train", "validation", "test")}


def from_tasks(
    name: str,
    tasks: Sequence[Any],
    setting: Setting = "class",
    outputs: int | None = None,
    loss: LossName | LossFunction = "cross-entropy",
    transform: TransformFunction | None = None,
) -> Challenge:
    """Make a challenge from a list of tasks, each a pair (train, test) or a triple (train, validation, test).

    All data are read and checked at once. Arrays are kept, not copied: do not change them afterwards, because the
    challenge's fingerprint is computed from their bytes.

    Args:
        name: the challenge's name in tables and stored runs.
        tasks: one pair or triple per task; each part is a pair (x, y), a data set of such pairs, or a DataLoader.
            x is (n, *input_shape): uint8 images; floats, which become float32; or integers of another type, which are
            tokens and become int64. y is (n,) class labels, or (n, outputs) targets for squared error. Labels are
            integers from 0, or strings or other hashable values, which are numbered in sorted order (or as they are
            met, if they cannot be sorted) and recorded in the challenge's options.
        setting: 'class' or 'task' if tasks differ in their classes, which may come back in later tasks; 'domain' if
            all tasks have the same classes.
        outputs: the network's number of outputs; by default the smallest that fits the labels.
        loss: 'cross-entropy'; 'squared-error'; 'binary-cross-entropy' for targets (n, outputs) in [0, 1], of which
            several may be 1; or a function (outputs, targets) -> one loss per example, (n,). Integers (n,) are class
            labels for it, and all other targets become floats (n, columns). Runs are named by its code.
        transform: random augmentation, a function (x, key) -> x of the same shape and dtype. It is applied to every
            training batch of one run, (n, *input_shape), as the network takes it: images are scaled to [0, 1]. The key
            is a scalar tensor, different at every step; functions of `glocal.rng` make random numbers of it. Runs are
            named by its code.

    Example:
        >>> import torch
        >>> from glocal import rng
        >>> def mirror(x, key):
        ...     coins = rng.uniform(key, len(x)) < 0.5
        ...     return torch.where(coins.view(-1, 1, 1, 1), x.flip(-1), x)
        >>> x, y = torch.rand(20, 1, 4, 4), torch.arange(20) % 2
        >>> from_tasks("mirrored", [((x, y), (x, y))], setting="domain", transform=mirror).augment is mirror
        True
    """
    named = isinstance(name, str) and bool(name.strip()) and name.isprintable()
    require(named, f"the challenge's name is {name!r}; give a short text, such as 'my-digits'.")
    require_known("setting", setting, get_args(Setting))
    if not callable(loss):
        require_known("loss", loss, get_args(LossName))
    require(transform is None or callable(transform), f"transform is {transform!r}; give a function (x, key) -> x.")
    listed = isinstance(tasks, list | tuple) and bool(tasks)
    require(listed, f"the tasks of {name} are {describe(tasks)}; give a list with one pair (train, test) per task.")
    sources = [_read_task(number, task, loss) for number, task in enumerate(tasks, 1)]
    classes = _number_classes([source for task in sources for source in task.values()])
    checked = [_check_task(number, task, loss, classes) for number, task in enumerate(sources, 1)]
    _check_splits(checked)
    if checked[0].classes:
        _check_classes(checked, setting)
    else:
        message = f"setting is '{setting}' with targets that are not classes; give setting='domain'."
        require(setting == "domain", message)
    outputs = _outputs(checked, outputs, loss)
    if callable(loss):
        y = torch.cat([data.y[:2] for task in checked for data in task.splits.values()])
        y = y[torch.arange(2) % len(y)]
        PerSampleLoss(loss).check(torch.randn(2, outputs, generator=generator(0, "loss")), y)
    return Challenge(
        name=name,
        setting=setting,
        tasks=len(checked),
        outputs=outputs,
        input_shape=tuple(checked[0].train.x.shape[1:]),
        make_task=lambda index, seed: checked[index],
        seeded=False,
        fingerprint=fingerprint(checked),
        options={"classes": [c if isinstance(c, str) else repr(c) for c in classes]} if classes else {},
        loss=loss,
        augment=transform,
        validation=None if checked[0].validation is None else "own",
        input_dtype=torch.int64 if checked[0].train.x.dtype == torch.int64 else torch.float32,
    )


class _Examples(NamedTuple):
    """Examples as they were read; `labels` are the labels that y stands for where they are not numbers."""

    x: Tensor
    y: Tensor
    labels: dict[Hashable, int]


def _read_task(number: int, task: Any, loss: LossName | LossFunction) -> dict[str, _Examples]:
    """Read the splits of a task, by name."""
    allowed = "give a pair (train, test) or a triple (train, validation, test), each (x, y), a Dataset or a DataLoader"
    require(isinstance(task, list | tuple) and len(task) in SPLITS, f"task {number} is {describe(task)}; {allowed}.")
    splits = {}
    for split, source in zip(SPLITS[len(task)], task, strict=True):
        labels: dict[Hashable, int] = {}
        numbered = labels if loss == "cross-entropy" or callable(loss) else None
        x, y = read_examples(source, f"task {number} ({split})", labels=numbered)
        splits[split] = _Examples(x, y, labels)
        if items_change(source):
            warnings.warn(
                f"the items of task {number} ({split}) differ when they are read again. They are read once, so random "
                "augmentation in the data set stays as it was then: remove it, and give from_tasks a `transform`.",
                stacklevel=4,
            )
    return splits


def _number_classes(sources: Sequence[_Examples]) -> dict[Hashable, int]:
    """Number the labels that are not numbers: sorted if they can be compared, otherwise as they are met."""
    labels = list(dict.fromkeys(label for source in sources for label in source.labels))
    mixed = f"some tasks have labels that are numbers and others have {labels[:1]}; give all the same kind of labels."
    require(not labels or all(source.labels for source in sources), mixed)
    with suppress(TypeError):
        labels = sorted(labels)  # type: ignore[type-var]
    return {label: number for number, label in enumerate(labels)}


def _check_task(
    number: int, sources: Mapping[str, _Examples], loss: LossName | LossFunction, classes: Mapping[Hashable, int]
) -> Task:
    """Check and convert the splits of a task."""
    splits = {}
    for split, (x, y, labels) in sources.items():
        name = f"task {number} ({split})"
        y = torch.tensor([classes[label] for label in labels])[y] if labels else y
        has_classes = loss == "cross-entropy" or (callable(loss) and y.ndim == 1 and not y.is_floating_point())
        y = as_labels(y, f"y of {name}") if has_classes else as_targets(y, f"y of {name}")
        if loss == "binary-cross-entropy":
            message = f"y of {name} has targets outside [0, 1]; give 1 for the labels of an example and 0 for others."
            require(bool(((y >= 0) & (y <= 1)).all()), message)
        splits[split] = Data(as_inputs(x, f"x of {name}"), y)
        if split != "train" and has_classes:
            untrained = sorted({*y.unique().tolist()} - {*splits["train"].y.unique().tolist()})
            if untrained:
                warnings.warn(
                    f"{name} has labels that the task is not trained on, such as {untrained[:5]}: is it the "
                    "data of another task? After every task, all earlier ones are tested on their own data.",
                    stacklevel=4,
                )
    all_labels = torch.cat([data.y.flatten() for data in splits.values() if not data.y.is_floating_point()] or [y[:0]])
    return Task(**splits, classes=tuple(int(c) for c in torch.unique(all_labels).tolist()))


def _check_splits(tasks: Sequence[Task]) -> None:
    """Require one shape and dtype of all inputs, because one network reads them all, and of all targets."""
    first = tasks[0].train
    for number, task in enumerate(tasks, 1):
        mixed = f"task {number} and task 1 differ in whether they have validation data; give it for all tasks or none."
        require((task.validation is None) == (tasks[0].validation is None), mixed)
        for split, data in task.splits.items():
            for kind, values, expected in (("inputs", data.x, first.x), ("targets", data.y, first.y)):
                require(
                    values.shape[1:] == expected.shape[1:] and values.dtype == expected.dtype,
                    f"the {kind} of task {number} ({split}) have shape {tuple(values.shape[1:])} and {values.dtype}, "
                    f"those of task 1 (train) {tuple(expected.shape[1:])} and {expected.dtype}; give all tasks {kind} "
                    "of the same shape and dtype.",
                )


def _check_classes(tasks: Sequence[Task], setting: Setting) -> None:
    """Require the same classes in all tasks of a domain challenge, and not the same in all tasks of the others.

    Classes may come back in later tasks, and a task may bring any number of new ones.
    """
    first = tasks[0].classes
    other = next((n for n, task in enumerate(tasks, 1) if task.classes != first), None)
    if setting == "domain" and other is not None:
        difference = f"task {other} has the classes {list(tasks[other - 1].classes)} and task 1 {list(first)}"
        raise GlocalError(f"{difference}; give all tasks of a 'domain' challenge the same classes, or setting='class'.")
    same = setting != "domain" and other is None and len(tasks) > 1
    remedy = "relabel its examples, or give setting='domain'"
    require(not same, f"all tasks have the classes {list(first)}; {remedy}.")


def _outputs(tasks: Sequence[Task], outputs: int | None, loss: LossName | LossFunction) -> int:
    """Return the network's number of outputs: the given one if it fits, otherwise the smallest that does."""
    if tasks[0].classes:
        smallest = 1 + max(max(task.classes) for task in tasks)
        fits, allowed = range(smallest, sys.maxsize), f"class {smallest - 1} occurs; give {smallest} or more"
    else:
        smallest = tasks[0].train.y.shape[1]
        fits, allowed = range(smallest, smallest + 1), f"the targets have {smallest} columns; give {smallest}"
    if callable(loss):  # it may need more or fewer, such as a mean and a variance for every target
        fits = range(1, sys.maxsize)
    fitting = isinstance(outputs, Integral) and int(outputs) in fits
    require(outputs is None or fitting, f"outputs is {outputs!r}, but {allowed}, or leave it out.")
    return int(outputs or smallest)
