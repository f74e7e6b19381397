"""A challenge made of anybody's own data: arrays, tensors or map-style data sets, all checked before any training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from glocal.challenges.challenge import Challenge, Data, LossName, Setting, Task
from glocal.errors import GlocalError, unknown


def _array(item: Any) -> np.ndarray:
    """One example's input as an array; a picture (PIL's, say) becomes channels first, as networks read it."""
    if isinstance(item, Tensor):
        return item.detach().cpu().numpy()
    array = np.asarray(item)
    if hasattr(item, "mode") and hasattr(item, "size") and not isinstance(item, np.ndarray):
        return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return array


def _tensor(values: Any, where: str) -> Tensor:
    """Arrays, tensors and lists of them as one CPU tensor, whose memory is shared where it can be."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, list | tuple) and not values:
        raise GlocalError(f"{where} are empty; give at least one example.")
    try:
        array = np.stack([_array(v) for v in values]) if isinstance(values, list | tuple) else np.asarray(values)
        # torch reads neither foreign byte orders nor negative strides, and warns of memory it may not write to.
        array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise GlocalError(
            f"{where} cannot be made one tensor ({why}); give numbers in examples of one shape."
        ) from error


def _parts(given: Any, where: str) -> tuple[Any, Any]:
    """The inputs and the labels in a pair (x, y) or in a map-style data set."""
    if isinstance(given, list | tuple):
        if len(given) != 2:
            raise GlocalError(
                f"{where} is a {type(given).__name__} of {len(given)}; give a pair (x, y), or a Dataset of such."
            )
        return given[0], given[1]
    is_map = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    if not is_map or isinstance(given, Tensor | np.ndarray | Mapping | str | bytes):
        raise GlocalError(
            f"{where} is a {type(given).__name__}; give a pair (x, y), or a map-style Dataset of such pairs."
        )
    inputs, labels = [], []
    for index in range(len(given)):
        item = given[index]
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise GlocalError(
                f"{where}, item {index}, is a {type(item).__name__}; a Dataset's items must be pairs (x, y)."
            )
        inputs.append(item[0])
        labels.append(item[1])
    return inputs, labels


def _inputs(values: Any, where: str) -> Tensor:
    x = _tensor(values, where)
    if x.ndim < 2:
        raise GlocalError(
            f"{where} have shape {tuple(x.shape)}; give one row per example: (n, features) or (n, c, h, w)."
        )
    if x.shape[0] == 0:
        raise GlocalError(f"{where} are empty; give at least one example.")
    if x.dtype == torch.uint8:
        return x
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise GlocalError(
            f"{where} are {kind}; give uint8 (images, 0 to 255) or floats, as x.astype('float32') makes them."
        )
    if not bool(torch.isfinite(x).all()):
        raise GlocalError(f"{where} hold NaN or infinity; give finite numbers.")
    return x.to(torch.float32)


def _labels(values: Any, where: str) -> Tensor:
    y = _tensor(values, where)
    if y.ndim != 1:
        raise GlocalError(
            f"{where} have shape {tuple(y.shape)}; cross-entropy needs one class number per example: (n,)."
        )
    if y.is_complex() or (y.is_floating_point() and not bool((y == y.round()).all() & torch.isfinite(y).all())):
        raise GlocalError(f"{where} are not whole numbers; give class numbers 0, 1, 2, ..., or loss='squared-error'.")
    y = y.to(torch.int64)
    if y.numel() and int(y.min()) < 0:
        raise GlocalError(f"{where} hold the class {int(y.min())}; classes are counted from 0.")
    return y


def _targets(values: Any, where: str) -> Tensor:
    y = _tensor(values, where)
    y = y.unsqueeze(1) if y.ndim == 1 else y
    if y.ndim != 2 or y.is_complex():
        raise GlocalError(f"{where} have shape {tuple(y.shape)}; squared error needs real targets (n, outputs).")
    y = y.to(torch.float32)
    if not bool(torch.isfinite(y).all()):
        raise GlocalError(f"{where} hold NaN or infinity; give finite numbers.")
    return y


def _data(given: Any, where: str, loss: LossName) -> Data:
    inputs, labels = _parts(given, where)
    x = _inputs(inputs, f"{where} inputs")
    y = _labels(labels, f"{where} labels") if loss == "cross-entropy" else _targets(labels, f"{where} targets")
    if len(x) != len(y):
        raise GlocalError(f"{where} has {len(x)} inputs and {len(y)} labels; give one label per input.")
    return Data(x, y)


def _task(number: int, given: Any, loss: LossName) -> Task:
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise GlocalError(
            f"task {number} is a {type(given).__name__}; give a pair (train, test), each (x, y) or a Dataset."
        )
    train, test = (
        _data(part, f"task {number}'s {which}", loss) for part, which in zip(given, ("train", "test"), strict=True)
    )
    labels = torch.cat([train.y, test.y]) if loss == "cross-entropy" else torch.zeros(0)
    return Task(train, test, tuple(int(c) for c in torch.unique(labels).tolist()))


def _check_inputs(tasks: Sequence[Task]) -> None:
    first = tasks[0].train.x
    for number, task in enumerate(tasks):
        for which, data in (("train", task.train), ("test", task.test)):
            if data.x.shape[1:] != first.shape[1:]:
                raise GlocalError(
                    f"task {number}'s {which} inputs have shape {tuple(data.x.shape[1:])} and task 0's train inputs "
                    f"{tuple(first.shape[1:])}; one network reads them all, so give all the same shape."
                )
            if data.x.dtype != first.dtype:
                raise GlocalError(
                    f"task {number}'s {which} inputs are {data.x.dtype} and task 0's train inputs {first.dtype}; "
                    "give all as uint8 or all as floats."
                )


def _check_classes(tasks: Sequence[Task], setting: Setting) -> None:
    seen = set(tasks[0].classes)
    for number, task in enumerate(tasks[1:], start=1):
        if setting == "domain" and set(task.classes) != seen:
            raise GlocalError(
                f"task {number} has the classes {list(task.classes)} and task 0 {sorted(seen)}; setting 'domain' keeps "
                "the classes: give all tasks the same ones, or setting='class'."
            )
        if setting != "domain" and set(task.classes) <= seen:
            raise GlocalError(
                f"task {number} brings no new class (it has {list(task.classes)}); setting '{setting}' needs one in "
                "every task: relabel them, or give setting='domain'."
            )
        seen |= set(task.classes)


def _outputs(tasks: Sequence[Task], outputs: int | None, loss: LossName) -> int:
    """The width of the network's last layer: as given, or the least that fits."""
    if outputs is not None and (not isinstance(outputs, int) or isinstance(outputs, bool) or outputs < 1):
        raise GlocalError(f"outputs is {outputs!r}; give a whole number from 1 on, or leave it out.")
    if loss == "cross-entropy":
        needed = 1 + max(max(task.classes) for task in tasks)
        if outputs is not None and outputs < needed:
            raise GlocalError(
                f"outputs is {outputs}, but class {needed - 1} occurs; give {needed} or more, or leave it out."
            )
        return outputs or needed
    needed = int(tasks[0].train.y.shape[1])
    for number, task in enumerate(tasks):
        for which, data in (("train", task.train), ("test", task.test)):
            if data.y.shape[1] != (outputs or needed):
                raise GlocalError(
                    f"task {number}'s {which} targets have {data.y.shape[1]} columns; {outputs or needed} are needed, "
                    "one per output."
                )
    return needed


def _fingerprint(tasks: Sequence[Task]) -> str:
    """SHA-256 of every tensor's dtype, shape and bytes, in order."""
    digest = sha256()
    for task in tasks:
        for tensor in (*task.train, *task.test):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return "sha256:" + digest.hexdigest()


def from_tasks(
    name: str,
    tasks: Sequence[Any],
    setting: Setting = "class",
    outputs: int | None = None,
    loss: LossName = "cross-entropy",
) -> Challenge:
    """A challenge from a list of tasks, each a pair (train, test), each of these a pair (x, y) or a map-style Dataset.

    x is (n, *input_shape): uint8 images, or floats, which become float32. y is (n,) class numbers counted from 0, or
    (n, outputs) targets for loss 'squared-error'. All is read and checked now. Arrays are kept, not copied: do not
    change them afterwards, for the challenge's fingerprint is that of the bytes given.
    """
    if not isinstance(name, str) or not name.strip():
        raise GlocalError(f"the challenge's name is {name!r}; give a short text, such as 'my-digits'.")
    if setting not in get_args(Setting):
        raise unknown("setting", setting, get_args(Setting))
    if loss not in get_args(LossName):
        raise unknown("loss", loss, get_args(LossName))
    if loss == "squared-error" and setting != "domain":
        raise GlocalError(
            f"setting is '{setting}' with loss 'squared-error', which has no classes; give setting='domain'."
        )
    if not isinstance(tasks, list | tuple) or not tasks:
        what = "empty" if isinstance(tasks, list | tuple) else f"a {type(tasks).__name__}"
        raise GlocalError(f"the tasks of {name} are {what}; give a list of pairs (train, test), one per task.")
    made = [_task(number, given, loss) for number, given in enumerate(tasks)]
    _check_inputs(made)
    if loss == "cross-entropy":
        _check_classes(made, setting)
    return Challenge(
        name=name,
        setting=setting,
        tasks=len(made),
        outputs=_outputs(made, outputs, loss),
        input_shape=tuple(made[0].train.x.shape[1:]),
        make_task=lambda index, seed: made[index],
        seeded=False,
        fingerprint=_fingerprint(made),
        loss=loss,
    )
