"""Tiny-ImageNet from its original zip: 200 classes, 500 images of each to train on, 50 (its `val`) to test on.

Classes are numbered in the sorted order of their WordNet ids. The JPEGs, some of them gray, are decoded once, by
several threads, and kept as pixels in the user's cache.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glocal.challenges.challenge import Augment, Data, Normalise, Task
from glocal.challenges.tensor_cache import keep, kept
from glocal.errors import GlocalError

FILE = "tiny-imagenet-200.zip"
ROOT = "tiny-imagenet-200/"
CLASSES = 200
SIDE = 64
SHAPE = (3, SIDE, SIDE)
NORMALISE = Normalise(mean=(0.4802, 0.4480, 0.3975), std=(0.2770, 0.2691, 0.2821))
AUGMENT = Augment(padding=4, flip=True)
TRAIN_IMAGE = re.compile(re.escape(ROOT) + r"train/([^/]+)/images/[^/]*?(\d+)\.JPEG")
CHUNK = 1024
"""Images read from the zip before they are decoded together."""

Progress = Callable[[int, int], None]


def _damaged(path: Path, why: object) -> GlocalError:
    reason = " ".join(str(why).split())
    return GlocalError(f"{path} is damaged: {reason}; put the original file in its place.")


@contextmanager
def _zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    # A damaged zip may also claim encryption or an unknown compression: RuntimeError, NotImplementedError.
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error, RuntimeError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error


def _lines(path: Path, archive: zipfile.ZipFile, name: str) -> list[str]:
    try:
        return archive.read(ROOT + name).decode("ascii").split("\n")
    except KeyError:
        raise _damaged(path, f"it holds no {ROOT}{name}") from None
    except UnicodeDecodeError:
        raise _damaged(path, f"{ROOT}{name} is not text") from None


def _list(path: Path, archive: zipfile.ZipFile, classes: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Names in the zip and labels of the images to train on, by class and number, and of those to test on."""
    wnids = sorted(line.strip() for line in _lines(path, archive, "wnids.txt") if line.strip())
    if len(wnids) != classes or len(set(wnids)) != classes:
        raise _damaged(path, f"{ROOT}wnids.txt lists {len(set(wnids))} classes instead of {classes}")
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    names = archive.namelist()
    numbered = [(labels.get(m[1], -1), int(m[2]), m[0]) for m in map(TRAIN_IMAGE.fullmatch, names) if m]
    train = [(name, label) for label, _, name in sorted(numbered) if label >= 0]
    rows = [line.split("\t") for line in _lines(path, archive, "val/val_annotations.txt") if line.strip()]
    if not all(len(row) > 1 and row[1] in labels for row in rows):
        raise _damaged(path, f"{ROOT}val/val_annotations.txt names other classes than {ROOT}wnids.txt")
    test = [(f"{ROOT}val/images/{row[0]}", labels[row[1]]) for row in rows]
    there = set(names)
    for part, images in (("train", train), ("val", test)):
        absent = set(range(classes)) - {label for _, label in images}
        if absent:
            raise _damaged(path, f"it has no {part} images of {wnids[min(absent)]}")
        for name, _ in images:
            if name not in there:
                raise _damaged(path, f"it holds no {name}")
    return train, test


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise GlocalError("Tiny-ImageNet's images are JPEGs: reading them needs pillow; pip install pillow.") from error
    return Image


def decode(path: Path, classes: int, progress: Progress | None = None) -> dict[str, Tensor]:
    """All images of the zip, uint8 (n, 3, 64, 64), and their labels; `progress(done, total)` counts images."""
    pillow = _pillow()

    def one(content: bytes, name: str, target: np.ndarray) -> None:
        try:
            with pillow.open(io.BytesIO(content), formats=["JPEG"]) as image:
                size = image.size
                if size == (SIDE, SIDE):
                    target[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except Exception as error:  # Pillow's ways to fail on damaged images are many.
            raise _damaged(path, f"{name} is not a whole JPEG") from error
        if size != (SIDE, SIDE):
            raise _damaged(path, f"{name} has {size[0]}x{size[1]} pixels instead of {SIDE}x{SIDE}")

    with _zip(path) as archive, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        train, test = _list(path, archive, classes)
        total = len(train) + len(test)
        done = 0
        tensors = {}
        for part, listed in (("train", train), ("test", test)):
            images = np.empty((len(listed), *SHAPE), dtype=np.uint8)
            for start in range(0, len(listed), CHUNK):
                names = [name for name, _ in listed[start : start + CHUNK]]
                # The zip is read by this thread alone: its reader is not made for several.
                list(pool.map(one, [archive.read(name) for name in names], names, images[start : start + CHUNK]))
                done += len(names)
                if progress is not None:
                    progress(done, total)
            tensors[f"{part}_x"] = torch.from_numpy(images)
            tensors[f"{part}_y"] = torch.tensor([label for _, label in listed])
    return tensors


def prepare(path: Path, md5: str, classes: int, cache: Path, progress: Progress | None = None) -> dict[str, Tensor]:
    """The images and labels of the zip with this MD5, from `cache`, where they are put if they are not there yet."""
    about = {"decoded": "1", "zip": md5}
    file = cache / f"{md5}.safetensors"
    tensors = kept(file, about)
    if tensors is None:
        tensors = decode(path, classes, progress)
        keep(file, tensors, about)
    return tensors


@lru_cache(maxsize=1)
def load(path: Path, md5: str, classes: int, cache: Path) -> Task:
    """All classes as one task, images uint8 (n, 3, 64, 64). Read once per process; treat it as read-only."""
    tensors = prepare(path, md5, classes, cache)
    train, test = (Data(tensors[f"{part}_x"], tensors[f"{part}_y"]) for part in ("train", "test"))
    return Task(train=train, test=test, classes=tuple(range(classes)))
