"""Read and validate a user's examples: arrays, tensors, data sets and loaders become two tensors (x, y).

Errors call the data by the `name` that the caller gives, such as "task 1 (train)".
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from glocal.errors import GlocalError, require

MAX_CLASSES = 1_000_000
"""Larger labels are identifiers rather than classes counted from 0."""


def read_examples(
    source: Any, name: str = "the data", max_examples: int | None = None, labels: dict[Hashable, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Convert a user's examples to two tensors of the same length.

    Args:
        source: a pair (x, y) of tensors, arrays or sequences; a data set of pairs; or a DataLoader or another iterable
            of batches (x, y).
        name: what errors call the data.
        max_examples: keep at most this many examples: evenly spaced ones, or the first ones of a source that can only
            be iterated.
        labels: receives the labels that are not numbers, such as strings, and the number that stands for each in y,
            in the order in which they are met; without it such labels are refused.

    Returns:
        x and y with their own dtypes and devices. Memory is shared with the given tensors and arrays where possible.
    """
    require(max_examples is None or max_examples >= 1, f"examples is {max_examples}; allowed: 1 or more.")
    dataset = _indexable(source)
    if _is_batch(source) and not (isinstance(source, list) and all(map(is_tensor_pair, source))):
        x, y = _batch(source, name, labels)
    elif dataset is not None:
        indices = evenly_spaced_indices(len(dataset), max_examples or len(dataset)).tolist()
        x, y = _items((dataset[i] for i in indices), name, labels)
    elif isinstance(source, torch_data.IterableDataset):
        x, y = _items(islice(source, max_examples), name, labels)
    elif isinstance(source, Iterable) and not isinstance(source, Tensor | np.ndarray | Mapping | str | bytes):
        x, y = _batches(source, name, max_examples, labels)
    else:
        allowed = "give a pair (x, y), a Dataset of such pairs, or a DataLoader"
        raise GlocalError(f"{name} is {describe(source)}; {allowed}.")
    if max_examples is not None and len(y) > max_examples:
        rows = evenly_spaced_indices(len(y), max_examples)
        x, y = x[rows], y[rows]
    return x, y


MAX_REREAD_ITEMS = 8
"""Items that are read again to notice random augmentation; a mirror image at random is missed once in 2⁸ times."""


def items_change(source: Any) -> bool:
    """Return whether inputs of a data set differ between two reads, as with random augmentation."""
    dataset = _indexable(source)
    if dataset is None:
        return False
    indices = evenly_spaced_indices(len(dataset), MAX_REREAD_ITEMS).tolist()
    return not all(np.array_equal(_array(dataset[i][0]), _array(dataset[i][0])) for i in indices)


def evenly_spaced_indices(n: int, count: int) -> Tensor:
    """Return `count` indices spread evenly over 0, ..., n − 1, or all n if there are fewer."""
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).round().long()


def is_tensor_pair(value: Any) -> bool:
    """Return whether the value is a pair (x, y) of tensors or arrays."""
    return _is_batch(value) and all(isinstance(part, Tensor | np.ndarray) for part in value)


def describe(value: Any) -> str:
    """Name the type of a value in an error message, and of its parts if it is a container."""
    if is_tensor_pair(value):
        return "one pair (x, y)"
    kind = type(value).__name__
    if not isinstance(value, Mapping | tuple | list):
        return f"a {kind}"
    parts = [repr(part) if isinstance(value, Mapping) else type(part).__name__ for part in value]
    return f"a {kind} of length {len(parts)} ({', '.join(parts[:5])}{', ...' if len(parts) > 5 else ''})"


def check_finite(values: Tensor, name: str) -> None:
    """Refuse NaN and infinity, and name the first example that has them."""
    if values.is_floating_point():
        bad = values.reshape(len(values), -1).isfinite().all(1).logical_not()
        location = f"{int(bad.sum())} of {len(values)} examples, the first at index {int(bad.int().argmax())}"
        require(
            not bad.any(),
            f"{name} contains NaN or infinity in {location}; remove them, or give values that are finite in float32.",
        )


def as_inputs(x: Tensor, name: str) -> Tensor:
    """Return x (n, *input_shape) on the CPU: uint8 images unchanged, finite floats as float32, tokens as int64."""
    allowed = "give one row per example: (n, features), (n, tokens) or (n, channels, height, width)"
    require(x.ndim >= 2, f"{name} has shape {tuple(x.shape)}; {allowed}.")
    allowed = "give uint8 (images, 0 to 255), floats, or integers of another type (tokens)"
    require(x.dtype != torch.bool and not x.is_complex(), f"{name} has dtype {x.dtype}; {allowed}.")
    require(x.layout == torch.strided, f"{name} is a sparse tensor; give x.to_dense().")
    if x.dtype == torch.uint8:
        remedy = "which may be pixels or tokens: give pixels as x.float() / 255, tokens as x.long()"
        require(x.ndim > 2, f"{name} is uint8 of shape {tuple(x.shape)}, {remedy}.")
        return x.cpu()
    x = x.to("cpu", torch.float32 if x.is_floating_point() else torch.int64)
    check_finite(x, name)
    return x


def as_labels(y: Tensor, name: str) -> Tensor:
    """Return class labels (n,) on the CPU as int64."""
    require(y.ndim == 1, f"{name} has shape {tuple(y.shape)}; cross-entropy needs one class label per example: (n,).")
    integral = not y.is_complex() and (not y.is_floating_point() or bool((y.isfinite() & (y == y.round())).all()))
    require(integral, f"{name} has labels that are not integers; give classes 0, 1, 2, ..., or loss='squared-error'.")
    y = y.to("cpu", torch.int64)
    require(int(y.min()) >= 0, f"{name} contains class {int(y.min())}; classes are counted from 0.")
    message = f"{name} contains class {int(y.max())}, and a network has an output for every number up to it"
    require(int(y.max()) < MAX_CLASSES, f"{message}: renumber the classes 0, 1, 2, ...")
    return y


def as_targets(y: Tensor, name: str) -> Tensor:
    """Return real targets (n, outputs) on the CPU as float32; targets (n,) become one column."""
    y = y.unsqueeze(1) if y.ndim == 1 else y
    message = f"{name} has shape {tuple(y.shape)} and dtype {y.dtype}; give real targets (n, columns)."
    require(y.ndim == 2 and not y.is_complex(), message)
    y = y.to("cpu", torch.float32)
    check_finite(y, name)
    return y


def _is_batch(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _indexable(source: Any) -> Any:
    """Return the map-style data set that `source` is, or that a DataLoader reads completely, or None."""
    if isinstance(source, torch_data.DataLoader):
        sampler = source.sampler
        shuffled = type(sampler) is torch_data.RandomSampler and not sampler.replacement
        complete = shuffled or type(sampler) is torch_data.SequentialSampler
        plain = source.collate_fn is torch_data.default_collate
        plain = plain and type(source.batch_sampler) is torch_data.BatchSampler
        reads_all = complete and plain and len(sampler) == len(source.dataset)  # type: ignore[arg-type]
        return source.dataset if reads_all else None
    if isinstance(source, tuple | list | Tensor | np.ndarray | Mapping | str | bytes | torch_data.IterableDataset):
        return None
    return source if hasattr(source, "__getitem__") and hasattr(source, "__len__") else None


def _items(items: Iterable[Any], name: str, labels: dict[Hashable, int] | None) -> tuple[Tensor, Tensor]:
    """Stack the examples (x, y) of a data set."""
    pairs = list(items)
    for index, item in enumerate(pairs):
        require(_is_batch(item), f"item {index} of {name} is {describe(item)}; a Dataset's items must be pairs (x, y).")
    return _batch(tuple(zip(*pairs, strict=True)) or ((), ()), name, labels)


def _batches(
    batches: Iterable[Any], name: str, max_examples: int | None, labels: dict[Hashable, int] | None
) -> tuple[Tensor, Tensor]:
    """Concatenate batches (x, y) until there are `max_examples` examples."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for index, batch in enumerate(batches):
        require(
            _is_batch(batch),
            f"batch {index} of {name} is {describe(batch)}; batches must be pairs (x, y). A generator can convert "
            "others, and a module around the network can split one tensor into several inputs.",
        )
        pairs.append(_batch(batch, name, labels))
        if max_examples is not None and sum(len(y) for _, y in pairs) >= max_examples:
            break
    require(bool(pairs), f"{name} has no examples; give at least one.")
    try:
        x, y = (torch.cat(parts)[:max_examples] for parts in zip(*pairs, strict=True))
        return x, y
    except RuntimeError as error:
        raise GlocalError(f"the batches of {name} differ in more than their lengths: {error}") from error


def _batch(pair: Any, name: str, labels: dict[Hashable, int] | None) -> tuple[Tensor, Tensor]:
    targets = pair[1] if labels is None else _numbered(pair[1], labels, name)
    x, y = _tensor(pair[0], f"x of {name}"), _tensor(targets, f"y of {name}")
    shapes = f"x of {name} has shape {tuple(x.shape)} and y {tuple(y.shape)}"
    aligned = x.ndim > 0 and y.ndim > 0 and len(x) == len(y)
    require(aligned, f"{shapes}; both need the same length, one row per example.")
    require(len(y) > 0, f"{name} has no examples ({shapes}); give at least one.")
    return x, y


def _numbered(values: Any, labels: dict[Hashable, int], name: str) -> Any:
    """Return the numbers of labels that are not numbers themselves, adding new ones to `labels`; others unchanged."""
    if not isinstance(values, tuple | list):
        array = None if isinstance(values, Tensor) else np.asarray(values)
        values = values if array is None or array.dtype.kind not in "OSU" or array.ndim != 1 else array.tolist()
    if not isinstance(values, tuple | list) or not any(map(_is_label, values)):
        return values
    missing = next((i for i, v in enumerate(values) if v is None or (isinstance(v, float) and math.isnan(v))), None)
    require(missing is None, f"y of {name} has no label at index {missing} (None or NaN); remove such examples.")
    return [labels.setdefault(value, len(labels)) for value in values]


def _is_label(value: Any) -> bool:
    """Return whether a target is a class label that is not a number: a string, an enum, a tuple of those."""
    if isinstance(value, tuple):
        return any(map(_is_label, value))
    numeric = isinstance(value, Number | np.generic | Tensor | np.ndarray) and not isinstance(value, str | bytes)
    return isinstance(value, Hashable) and not numeric


def _tensor(values: Any, name: str) -> Tensor:
    """Convert a tensor, an array or a sequence of either to one tensor."""
    if isinstance(values, Tensor):
        return values.detach()
    first = values[0] if isinstance(values, tuple | list) and values else values
    message = f"{name} is {describe(first)}; give one tensor, which a module around the network can split"
    require(not isinstance(first, Mapping), f"{message} into several inputs.")
    try:
        if isinstance(values, tuple | list):
            if not values:
                return torch.zeros(0)
            if all(isinstance(value, Tensor) for value in values):
                return torch.stack([value.detach() for value in values])
            array = np.stack([_array(value) for value in values])
        else:
            array = np.asarray(values)
        # torch reads neither foreign byte orders nor negative strides, and warns about read-only memory.
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise GlocalError(
            f"{name} cannot be converted to one tensor ({reason}); give numbers, in examples of one shape."
        ) from error


def _array(item: Any) -> np.ndarray:
    """Convert one example to an array; a PIL image becomes (channels, height, width), as networks read it."""
    if isinstance(item, Tensor):
        return item.detach().cpu().numpy()
    array = np.asarray(item)
    if hasattr(item, "mode") and hasattr(item, "size") and not isinstance(item, np.ndarray):
        return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return array
