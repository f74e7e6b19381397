"""Files with good checksums and hostile contents: refused in bounded memory, with a sentence."""

from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from glocal.challenges import datasets
from glocal.challenges.datasets import decode_tinyimagenet, load_mnist, read_digits, read_idx
from glocal.errors import GlocalError

ROOT = "tiny-imagenet-200/"


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "MAX_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(datasets, "MAX_MEMBER_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_limits")
def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(100 << 20), 9))
    tracemalloc.start()
    try:
        for read, error in ((read_idx, ValueError), (read_digits, GlocalError)):
            with pytest.raises(error, match="decompressed"):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"wnids.txt": b"n1", "val/val_annotations.txt": b"", **members}.items():
            archive.writestr(ROOT + name, content)
    return path


def jpeg(width: int, height: int) -> bytes:
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"wnids.txt": bytes(100 << 20)}, "104857600 bytes"),
        ({"train/n1/images/n1_0.JPEG": bytes(100 << 20)}, "104857600 bytes"),
        ({"train/n1/images/n1_0.JPEG": jpeg(5000, 5000)}, "pixels"),
        ({"train/n1/images/n1_0.JPEG": jpeg(64, 63)}, "pixels"),
        ({"val/val_annotations.txt": b"x.JPEG\tn1\n" * 100_000}, "100000 images"),
    ],
)
def test_a_zip_bomb_is_not_unpacked(
    tmp_path: Path, members: dict[str, bytes], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "MAX_IMAGES", 1_000)
    path = write_zip(tmp_path / "bomb.zip", members)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            decode_tinyimagenet(path)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def idx(*shape: int, header: bytes = b"\0\0\x08", content: bytes = bytes(10)) -> bytes:
    return header + struct.pack(f">B{len(shape)}I", len(shape), *shape) + content


@pytest.mark.parametrize(
    "images",
    [
        *(idx(*shape) for shape in ((), (10,), (2**32 - 1, 2**32 - 1), [1] * 200, (9,), (5, 2), (2, 5, 1), (0, 0, 0))),
        *(idx(10, header=header) for header in (b"\0\0\x0d", b"GIF")),
        *(idx(10, 1, 1, 1), b"", b"\0\0\x08\xff"),
    ],
    ids=str,
)
def test_odd_shapes_of_idx_files(tmp_path: Path, images: bytes) -> None:
    (tmp_path / "images").write_bytes(images)
    (tmp_path / "labels").write_bytes(idx(10))
    paths = [tmp_path / name for name in ("images", "labels", "images", "labels")]
    with pytest.raises(GlocalError):
        datasets._load("mnist", load_mnist.__wrapped__, *paths)
