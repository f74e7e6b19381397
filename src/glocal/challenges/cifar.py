"""CIFAR-10 from its original Python batches: 50,000 images to train on, 10,000 to test on.

A batch is a pickle of Python 2: a dict with the bytes keys `data`, a uint8 array (n, 3072) whose rows hold the red, the
green and the blue plane of an image, and `labels`, a list of n integers. A pickle may name any function and have it
called, so here a name gives an inert stand-in, for the three names of numpy that an array needs, or an error.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glocal.challenges.challenge import Augment, Data, Normalise, Task
from glocal.errors import GlocalError

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
CLASSES = 10
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
NORMALISE = Normalise(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2615))
AUGMENT = Augment(padding=4, flip=True)


class _StandIn:
    """What a pickle gets in place of numpy's objects: it keeps what it is made of, and does nothing."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_StandIn):
    """numpy's `_reconstruct(ndarray, ...)`, then its state: (version, shape, dtype, Fortran order, bytes)."""

    __slots__ = ()


class _Type(_StandIn):
    """numpy's `dtype(code, ...)`."""

    __slots__ = ()


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
}


class _Refused(Exception):
    """The pickle names something that is not data."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _Refused(f"{module}.{name}")
        return _STAND_INS[module, name]


def _require_small_memo(content: bytes) -> None:
    """A pickle numbers what it will refer to. The number is room that is made at once, and no more than bytes are."""
    for code, number, _ in pickletools.genops(content):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(number)) > len(content):
            raise pickle.UnpicklingError(f"{number} is no number of an object")


def _pixels(found: Any) -> np.ndarray | None:
    """The uint8 array that a stand-in describes, or None if it describes another thing."""
    if not (isinstance(found, _Array) and isinstance(found.state, tuple) and len(found.state) == 5):
        return None
    _, shape, kind, fortran, content = found.state
    if not (isinstance(kind, _Type) and kind.arguments[:1] in ((b"u1",), (b"|u1",)) and isinstance(content, bytes)):
        return None
    if not (isinstance(shape, tuple) and len(shape) == 2 and shape[1] == PIXELS and not fortran):
        return None
    if type(shape[0]) is not int or len(content) != shape[0] * PIXELS:
        return None
    return np.frombuffer(content, np.uint8).reshape(-1, *SHAPE)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A batch's uint8 images (n, 3, 32, 32) and int64 labels (n,). Nothing that the file names is run."""

    def malformed(why: str) -> GlocalError:
        return GlocalError(f"{path} is not a CIFAR-10 batch: {why}; put the original file in its place.")

    try:
        content = path.read_bytes()
    except OSError as error:
        raise GlocalError(f"{path} cannot be read ({error.strerror}); put the original file in its place.") from error
    try:
        _require_small_memo(content)
        batch = _Reader(io.BytesIO(content), encoding="bytes").load()
    except _Refused as refused:
        raise malformed(f"it asks for {refused}, which is not data and was not run") from None
    except Exception as error:  # A malformed pickle fails in every way there is.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise malformed(f"its pickle is cut off or damaged ({reason})") from error
    if not isinstance(batch, dict):
        raise malformed(f"it holds a {type(batch).__name__} instead of a dict")
    for key in (b"data", b"labels"):
        if key not in batch:
            raise malformed(f"it has no '{key.decode()}'")
    images, labels = _pixels(batch[b"data"]), batch[b"labels"]
    if images is None:
        raise malformed(f"its 'data' are not a whole uint8 array (n, {PIXELS})")
    if not isinstance(labels, list) or len(labels) != len(images):
        given = f"{len(labels)} labels" if isinstance(labels, list) else f"a {type(labels).__name__} of labels"
        raise malformed(f"it has {len(images)} images and {given}")
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise malformed(f"its labels are not all whole numbers from 0 to {CLASSES - 1}")
    return images, np.array(labels, dtype=np.int64)


def _data(paths: tuple[Path, ...]) -> Data:
    images, labels = zip(*map(read_batch, paths), strict=True)
    return Data(torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels)))


@lru_cache(maxsize=2)
def load(train: tuple[Path, ...], test: Path) -> Task:
    """All ten classes as one task, images uint8 (n, 3, 32, 32). Read once per process; treat it as read-only."""
    return Task(train=_data(train), test=_data((test,)), classes=tuple(range(CLASSES)))
