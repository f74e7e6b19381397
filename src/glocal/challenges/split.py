"""Split by classes: every task brings the next few classes, in their natural order, or other kinds of each."""

from __future__ import annotations

from dataclasses import replace

import torch

from glocal.challenges.challenge import Challenge, Data, Setting, Task
from glocal.challenges.datasets import CIFAR100_SUPERCLASSES, Dataset
from glocal.errors import require


def split(
    name: str, dataset: Dataset, tasks: int, *, classes_per_task: int = 2, setting: Setting = "class"
) -> Challenge:
    """Split a data set: task t has the classes t k, ..., t k + k − 1, where k = `classes_per_task`.

    setting: 'class' or 'task', the accuracy that is reported (see `Challenge`).
    """
    size, classes, available = classes_per_task, dataset.classes, dataset.available_classes
    message = f"classes_per_task is {size!r}; {name} has {classes} classes: allowed 1 to {classes}."
    require(isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= classes, message)
    allowed = "every task brings new classes; allowed: 'class' or 'task'"
    require(setting in ("class", "task"), f"setting of {name} is {setting!r}, but {allowed}.")
    require(
        tasks <= available // size,
        f"{tasks} tasks of {size} classes were requested, but the files on this machine contain {available} of the "
        f"{classes} classes of {name}; allowed: 1 to {available // size} tasks (--tasks {available // size}).",
    )

    def make_task(index: int, seed: int) -> Task:
        task = dataset.load()
        classes = tuple(range(index * size, index * size + size))
        return Task(select_classes(task.train, classes), select_classes(task.test, classes), classes)

    options = {"classes_per_task": size, "setting": setting}
    return dataset.challenge(name, setting, tasks, make_task, seeded=False, options=options)


def superclasses(name: str, dataset: Dataset, tasks: int) -> Challenge:
    """Learn the 20 superclasses of CIFAR-100 in every task, each time from another class of every superclass."""
    groups = dataset.classes // CIFAR100_SUPERCLASSES
    require(tasks <= groups, f"{tasks} tasks of {name} were requested; allowed: 1 to {groups}.")
    by_group = split(name, dataset, tasks, classes_per_task=CIFAR100_SUPERCLASSES)

    def make_task(index: int, seed: int) -> Task:
        task = by_group.task(index, seed)
        train, test = (Data(data.x, data.y % CIFAR100_SUPERCLASSES) for data in (task.train, task.test))
        return Task(train, test, tuple(range(CIFAR100_SUPERCLASSES)))

    return replace(by_group, setting="domain", outputs=CIFAR100_SUPERCLASSES, make_task=make_task, options={})


def select_classes(data: Data, classes: tuple[int, ...]) -> Data:
    """Return the examples of these classes, in their order."""
    selected = torch.isin(data.y, torch.tensor(classes, dtype=data.y.dtype, device=data.y.device))
    return Data(data.x[selected], data.y[selected])
