"""What a user gives the lens, as it takes it: tasks in any form as tensors, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import data as loading
from torch.utils.data import DataLoader, Dataset

from glocal import losses
from glocal.challenges.challenge import Data
from glocal.engine.loader import evenly_spaced
from glocal.errors import GlocalError, require
from glocal.losses import LOSSES, AutogradLoss, Loss

TaskData: TypeAlias = "Data | tuple[Tensor, Tensor] | Dataset[Any] | Iterable[tuple[Tensor, Tensor]]"
AnyLoss: TypeAlias = "str | Loss | Callable[[Tensor, Tensor], Tensor]"
AT_ONCE = 500
"""Examples read, or passed through the network, at once."""


def listed(what: str, given: Any) -> list[Any]:
    """Tasks or checkpoints as a list."""
    single = isinstance(given, str | Mapping | Tensor | Dataset | DataLoader | nn.Module) or _is_pair(given)
    many = isinstance(given, Iterable) and not single
    require(many, f"{what} are a list, one item each; {_said(given)} was given.")
    return list(given)


def gathered(task: TaskData, examples: int | None = None, device: torch.device | str = "cpu") -> Data:
    """At most so many examples, all if not said: evenly spaced ones where any can be taken, of tensors, map-style
    Datasets and DataLoaders of one; the first of what else comes in batches."""
    require(examples is None or examples >= 1, f"examples = {examples} were given; allowed: 1 and more.")
    x, y = _paired(task) if _is_pair(task) else _read(task, examples)
    some = Data(x, y) if examples is None else evenly_spaced(Data(x, y), examples)
    return Data(some.x.to(device), some.y.to(device))


def chosen(given: AnyLoss) -> Loss:
    """The loss by its name, or from a function."""
    if isinstance(given, str):
        return losses.get(given)
    if isinstance(given, AutogradLoss):
        return AutogradLoss(given.mean)  # it is shown examples of these tasks
    if hasattr(given, "per_sample"):
        return given  # type: ignore[return-value]
    if isinstance(given, type):
        raise GlocalError(
            f"a loss is a function of outputs and y; the class {given.__name__} was given: make one of it, "
            f"{given.__name__}()."
        )
    if not callable(given):
        allowed = ", ".join(map(repr, LOSSES))
        raise GlocalError(f"a loss is {allowed}, or a function of outputs and y; {given!r} was given.")
    return AutogradLoss(given)


def _is_pair(task: Any) -> bool:
    return isinstance(task, tuple | list) and len(task) == 2 and all(isinstance(part, Tensor) for part in task)


def _paired(batch: Any) -> Data:
    require(
        _is_pair(batch),
        f"a task's batches are pairs of tensors (x, y); {_of_what(batch)} was given. A generator can make pairs of "
        "others, and a module around the network can take one tensor apart.",
    )
    x, y = batch
    shapes = f"x {tuple(x.shape)} and y {tuple(y.shape)} were given"
    fits = x.dim() > 0 and y.dim() > 0 and len(x) == len(y)
    require(fits, f"a task has as many inputs as labels, along their first dimension; {shapes}.")
    require(len(y) > 0, f"a task without examples was given; allowed: 1 and more. {shapes[0].upper()}{shapes[1:]}.")
    return Data(x, y)


def _read(task: Any, examples: int | None) -> Data:
    taken = _taken(task)
    if taken is not None:
        places = torch.arange(len(taken))
        if examples is not None and len(places):
            places = evenly_spaced(Data(places, places), examples).x
        task = DataLoader(loading.Subset(taken, places.tolist()), batch_size=AT_ONCE)
    elif isinstance(task, Dataset):
        task = DataLoader(task, batch_size=AT_ONCE)
    if not isinstance(task, Iterable):
        raise GlocalError(f"a task is (x, y), a DataLoader or a Dataset; {_said(task)} was given.")
    batches: list[Data] = []
    count = 0
    try:
        for batch in task:
            batches.append(_paired(batch))
            count += len(batches[-1].y)
            if examples is not None and count >= examples:
                break
    except TypeError as error:  # of what torch cannot put together, such as images that are no tensors
        raise GlocalError(f"a task's examples cannot be read as tensors (x, y): {error}") from error
    require(count > 0, "a task without examples was given; allowed: 1 and more.")
    try:
        x, y = (torch.cat(parts)[:examples] for parts in zip(*batches, strict=True))
    except RuntimeError as error:
        raise GlocalError(f"a task's batches have one shape but for their lengths: {error}") from error
    return Data(x, y)


def _taken(task: Any) -> Any:
    """A data set of which any example can be taken, if the task is one, or gives all of one in some order."""
    if isinstance(task, DataLoader):
        sampler = task.sampler
        shuffled = type(sampler) is loading.RandomSampler and not sampler.replacement
        every = type(sampler) is loading.SequentialSampler or shuffled
        plain = task.collate_fn is loading.default_collate and type(task.batch_sampler) is loading.BatchSampler
        complete = every and plain and len(sampler) == len(task.dataset)  # type: ignore[arg-type]
        return _taken(task.dataset) if complete else None
    whole = isinstance(task, Dataset) and not isinstance(task, loading.IterableDataset)
    return task if whole and hasattr(task, "__len__") else None


def _of_what(batch: Any) -> str:
    """A batch in words."""
    if isinstance(batch, Mapping):
        return f"a dict of {', '.join(map(repr, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch)}"
    return f"a {type(batch).__name__}"


def _said(given: Any) -> str:
    return "one (x, y)" if _is_pair(given) else f"a {type(given).__name__}"
