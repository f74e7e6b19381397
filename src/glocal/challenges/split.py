"""Split by classes: every task brings the next few classes, in their natural order."""

from __future__ import annotations

import torch

from glocal.challenges.challenge import Challenge, Data, Setting, Task
from glocal.challenges.dataset import Dataset
from glocal.errors import GlocalError


def only(data: Data, classes: tuple[int, ...]) -> Data:
    """The examples of these classes, in the order they come in."""
    mine = torch.isin(data.y, torch.tensor(classes, dtype=data.y.dtype, device=data.y.device))
    return Data(data.x[mine], data.y[mine])


def split(
    name: str, dataset: Dataset, tasks: int, *, classes_per_task: int = 2, setting: Setting = "class"
) -> Challenge:
    """Task t holds classes t k, ..., t k + k - 1 for k = `classes_per_task`, under their own labels."""
    size = classes_per_task
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= dataset.classes:
        raise GlocalError(
            f"classes_per_task is {size!r}; {name} has {dataset.classes} classes, so 1 to {dataset.classes}."
        )
    if setting not in ("class", "task"):
        raise GlocalError(
            f"setting is {setting!r}; {name} brings new classes with every task: allowed 'class' or 'task'."
        )
    held = dataset.classes if dataset.held is None else dataset.held
    most = held // size
    if tasks > most:
        has = f"{name} has {dataset.classes} classes"
        if held < dataset.classes:
            has = f"the data on this machine hold {held} of the {dataset.classes} classes of {name}"
        raise GlocalError(f"{tasks} tasks of {size} classes were asked for; {has}: 1 to {most} tasks (--tasks {most}).")

    def make_task(index: int, seed: int) -> Task:
        whole = dataset.load()
        classes = tuple(range(index * size, index * size + size))
        return Task(only(whole.train, classes), only(whole.test, classes), classes)

    return Challenge(
        name=name,
        setting=setting,
        tasks=tasks,
        outputs=dataset.classes,
        input_shape=dataset.input_shape,
        make_task=make_task,
        seeded=False,
        fingerprint=dataset.fingerprint,
        options={"classes_per_task": size, "setting": setting},
    )
