"""What a user gives the lens, as it takes it: tasks in any form as tensors, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from glocal import losses
from glocal.challenges.challenge import Data
from glocal.errors import GlocalError, require
from glocal.inputs import describe, is_tensor_pair, read_examples
from glocal.losses import LOSSES, AutogradLoss, Loss

TaskData: TypeAlias = "Data | tuple[Tensor, Tensor] | Dataset[Any] | Iterable[tuple[Tensor, Tensor]]"
AnyLoss: TypeAlias = "str | Loss | Callable[[Tensor, Tensor], Tensor]"
AT_ONCE = 500
"""Examples read, or passed through the network, at once."""


def listed(what: str, given: Any) -> list[Any]:
    """Return tasks or checkpoints as a list, and refuse a single one."""
    single = isinstance(given, str | Mapping | Tensor | Dataset | DataLoader | nn.Module) or is_tensor_pair(given)
    require(
        isinstance(given, Iterable) and not single,
        f"{what} must be a list with one item per {what.removesuffix('s')}; {describe(given)} was given.",
    )
    return list(given)


def gathered(
    task: TaskData, examples: int | None = None, device: torch.device | str = "cpu", name: str = "the task"
) -> Data:
    """Return at most `examples` examples of a task (all by default) as tensors on a device; see `read_examples`."""
    x, y = read_examples(task, name, examples)
    return Data(x.to(device), y.to(device))


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
