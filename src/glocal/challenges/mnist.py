"""MNIST from its four original files: 60,000 digits to train on, 10,000 to test on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from glocal.challenges.challenge import Data, Task
from glocal.challenges.idx import read_idx
from glocal.errors import GlocalError

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
CLASSES = 10


def _pair(images_file: Path, labels_file: Path) -> Data:
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (28, 28):
        raise GlocalError(
            f"{images_file} holds {images.dtype} of shape {images.shape}; MNIST images are uint8 (n, 28, 28)."
        )
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1] or (labels >= CLASSES).any():
        raise GlocalError(
            f"{labels_file} holds {labels.dtype} of shape {labels.shape}; "
            f"the {len(images)} images need as many uint8 labels from 0 to {CLASSES - 1}."
        )
    return Data(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))


@lru_cache(maxsize=2)
def load(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Task:
    """All ten digits as one task, images uint8 (n, 1, 28, 28). Read once per process; treat it as read-only."""
    train, test = _pair(train_images, train_labels), _pair(test_images, test_labels)
    return Task(train=train, test=test, classes=tuple(range(CLASSES)))
