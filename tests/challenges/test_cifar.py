"""Batches of CIFAR-10 and CIFAR-100: pickles written opcode by opcode as Python 2 does, and hostile ones."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glocal.challenges import Augment, Normalise, fetch, locate, make, status
from glocal.challenges.datasets import read_cifar_batch
from glocal.challenges.download import SOURCES, Source, SourceFile, fingerprint
from glocal.errors import GlocalError
from glocal.sweeps import resolve

HOME = "cifar-10-batches-py"
CIFAR10, CIFAR100 = SOURCES["cifar10"], SOURCES["cifar100"]
BATCHES = tuple(file.name for file in CIFAR10.files)


def string(text: bytes) -> bytes:
    """SHORT_BINSTRING or BINSTRING: a `str` of Python 2."""
    return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def labels_of(labels: list[int]) -> bytes:
    return b"](" + b"".join(map(integer, labels)) + b"e"


def array(content: bytes, shape: tuple[int, ...]) -> bytes:
    """Encode an array as numpy does in pickles of protocol 2."""
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + integer(0) + b"\x85" + string(b"b")
    dtype = b"cnumpy\ndtype\n" + string(b"u1") + integer(0) + integer(1) + b"\x87R("
    dtype += integer(3) + string(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
    sizes = b"(" + b"".join(map(integer, shape)) + b"t"
    state = b"(" + integer(1) + sizes + dtype + b"\x89" + string(content) + b"t"
    return reconstruct + b"\x87R" + state + b"b"


def batch(*items: tuple[bytes, bytes]) -> bytes:
    return b"\x80\x02}(" + b"".join(string(key) + value for key, value in items) + b"u."


def written(images: np.ndarray, labels: list[int], key: bytes = b"labels", **more: list[int]) -> bytes:
    flat = images.reshape(len(images), -1)
    return batch(
        (b"batch_label", string(b"a batch")),
        (key, labels_of(labels)),
        *((other.encode(), labels_of(values)) for other, values in more.items()),
        (b"data", array(flat.tobytes(), flat.shape)),
    )


IMAGES = np.random.default_rng(3).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
GOOD = written(IMAGES, [0, 9, 3, 3])


def read(tmp_path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    (tmp_path / "data_batch_1").write_bytes(content)
    images, labels = read_cifar_batch(tmp_path / "data_batch_1", b"labels")
    return images, labels


def loaded(content: bytes) -> dict[bytes, Any]:
    """Load with Python's unpickler, which runs what the pickle names and warns about its age."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch_dict: dict[bytes, Any] = pickle.loads(content, encoding="bytes")
    return batch_dict


def test_numpy_reads_the_hand_written_pickle() -> None:
    theirs = loaded(GOOD)
    np.testing.assert_array_equal(theirs[b"data"], IMAGES.reshape(4, -1))
    assert theirs[b"labels"] == [0, 9, 3, 3]


def test_a_batch_is_read_as_images_and_labels(tmp_path: Path) -> None:
    images, labels = read(tmp_path, GOOD)
    np.testing.assert_array_equal(images, IMAGES)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(labels, np.array([0, 9, 3, 3], dtype=np.int64), strict=True)


class Canary:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable, tuple]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_functions_in_a_hostile_pickle_are_reported_and_not_called(tmp_path: Path, protocol: int) -> None:
    sign = tmp_path / "called"
    hostile = pickle.dumps({"data": Canary(os.system, f"touch {sign}"), "labels": []}, protocol)
    with pytest.raises(pickle.UnpicklingError, match=r"asks for .*\.system, which is not data and was not run"):
        read(tmp_path, hostile)
    assert not sign.exists()
    pickle.loads(hostile)
    assert sign.exists(), "the pickle does call the function when loaded by Python"


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'touch SIGN'\ntR.",
        b"(S'touch SIGN'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch SIGN'\no.",
        b'c__builtin__\neval\n(S\'open("SIGN", "w")\'\ntR.',
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0atouch SIGN\x85R.",
        b"cnumpy\nfromfile\n(S'SIGN'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct.__init__.__globals__\n.",
    ],
)
def test_opcodes_that_name_functions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match=r"asks for .* was not run"):
        read(tmp_path, code)
    assert not (tmp_path / "SIGN").exists()


@dataclass
class TinyCifar:
    """A small replacement of CIFAR-10 with the same file names."""

    source: Source
    contents: dict[str, bytes]
    packed: bytes
    images: np.ndarray
    labels: np.ndarray

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)


def described(name: str, content: bytes) -> SourceFile:
    return SourceFile(name, len(content), hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest())


@pytest.fixture
def tiny_cifar(only_source: Callable[[Source], None]) -> TinyCifar:
    random = np.random.default_rng(4)
    images = random.integers(0, 256, (6, 20, 3, 32, 32), dtype=np.uint8)
    labels = np.stack([random.permutation(np.arange(20) % 10) for _ in range(6)])
    contents = {name: written(x, y.tolist()) for name, x, y in zip(BATCHES, images, labels, strict=True)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for name, content in {"readme.html": b"<html>", **contents}.items():
            info = tarfile.TarInfo(f"{HOME}/{name}")
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    packed = buffer.getvalue()
    files = tuple(described(name, content) for name, content in contents.items())
    source = replace(CIFAR10, mirrors=(), files=files, archive=described("cifar-10-python.tar.gz", packed))
    only_source(source)
    return TinyCifar(source, contents, packed, images, labels)


@pytest.mark.parametrize("inner", ["", HOME, f"cifar10/{HOME}"])
def test_the_challenge_splits_the_batches_by_class(tmp_path: Path, tiny_cifar: TinyCifar, inner: str) -> None:
    tiny_cifar.write(tmp_path / inner)
    challenge = make("split-cifar10", data=tmp_path)
    assert (challenge.setting, challenge.tasks, challenge.outputs) == ("class", 5, 10)
    assert (challenge.epochs, challenge.batch_size, challenge.input_shape) == (50, 32, (3, 32, 32))
    x, y = tiny_cifar.images[:5].reshape(100, 3, 32, 32), tiny_cifar.labels[:5].reshape(100)
    for index in range(5):
        task = challenge.task(index, 0)
        assert task.classes == (2 * index, 2 * index + 1)
        np.testing.assert_array_equal(task.train.x.numpy(), x[y // 2 == index], strict=True)
        np.testing.assert_array_equal(task.train.y.numpy(), y[y // 2 == index])
        np.testing.assert_array_equal(task.test.x.numpy(), tiny_cifar.images[5][tiny_cifar.labels[5] // 2 == index])
    with pytest.raises(GlocalError, match="10 classes of split-cifar10; allowed: 1 to 5 tasks"):
        make("split-cifar10", 6, data=tmp_path)


def test_normalisation_and_augmentation_are_part_of_the_config(tmp_path: Path, tiny_cifar: TinyCifar) -> None:
    tiny_cifar.write(tmp_path)
    resolved = resolve.challenge("split-cifar10", data=tmp_path, setting="task")
    assert resolved.value.setting == "task"
    assert resolved.value.normalise == Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615))
    assert resolved.value.augment == Augment(padding=4, flip=True)
    assert resolved.config["normalise"] == {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2615]}
    assert resolved.config["augment"] == {"padding": 4, "flip": True}
    assert not {"normalise", "augment"} & set(resolve.challenge("split-digits").config)


def test_an_archive_is_unpacked_into_the_cache_once(tmp_path: Path, tiny_cifar: TinyCifar, own_folders: Path) -> None:
    packed = tmp_path / "cifar-10-python.tar.gz"
    packed.write_bytes(tiny_cifar.packed)
    (record,) = status(tmp_path)
    assert (record.state, record.where, record.bytes) == ("ready", str(tmp_path), len(tiny_cifar.packed))
    assert "unpacked when first used" in record.note
    paths = locate("cifar10", tmp_path)
    assert {name: path.read_bytes() for name, path in paths.items()} == tiny_cifar.contents
    assert {path.parent for path in paths.values()} == {own_folders / HOME}
    assert [path.name for path in tmp_path.iterdir()] == [packed.name]
    packed.unlink()
    assert locate("cifar10", tmp_path) == paths
    assert make("split-cifar10", data=tmp_path).fingerprint == fingerprint(*tiny_cifar.source.files)


def test_fetch_downloads_the_archive_and_unpacks_it(tmp_path: Path, tiny_cifar: TinyCifar, mirror: Callable) -> None:
    server = mirror({"cifar-10-python.tar.gz": tiny_cifar.packed})
    reports: list[tuple[int, int | None]] = []
    paths = fetch("cifar10", tmp_path, [server.url], lambda done, total: reports.append((done, total)))
    assert reports[-1] == (len(tiny_cifar.packed), len(tiny_cifar.packed))
    assert {name: path.read_bytes() for name, path in paths.items()} == tiny_cifar.contents
    assert sorted(path.name for path in (tmp_path / HOME).iterdir()) == sorted(tiny_cifar.contents)
    assert fetch("cifar10", tmp_path, [server.url]) == paths
    assert len(server.asked) == 1
    (tmp_path / HOME / "data_batch_3").write_bytes(b"damaged")
    fetch("cifar10", tmp_path, [server.url])
    assert (tmp_path / HOME / "data_batch_3").read_bytes() == tiny_cifar.contents["data_batch_3"]


def test_fetch_unpacks_an_existing_archive_and_keeps_it(tmp_path: Path, tiny_cifar: TinyCifar) -> None:
    packed = tmp_path / "cifar-10-python.tar.gz"
    packed.write_bytes(tiny_cifar.packed)
    paths = fetch("cifar10", tmp_path, mirrors=[])
    assert {path.parent for path in paths.values()} == {tmp_path / HOME}
    assert packed.exists()


def test_errors_name_missing_and_damaged_files(tmp_path: Path, tiny_cifar: TinyCifar) -> None:
    with pytest.raises(GlocalError, match=r"no good data_batch_1, .*glocal data fetch cifar10.*python\.tar\.gz into"):
        make("split-cifar10", data=tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(tiny_cifar.packed[:-1])
    with pytest.raises(GlocalError, match=r"damaged: .*cifar-10-python\.tar\.gz has \d+ bytes instead of"):
        make("split-cifar10", data=tmp_path)
    assert status(tmp_path)[0].state == "damaged"


def test_a_file_with_the_right_md5_and_the_wrong_sha256_is_refused(
    tmp_path: Path, tiny_cifar: TinyCifar, only_source: Callable[[Source], None]
) -> None:
    """MD5 collisions can be constructed."""
    tiny_cifar.write(tmp_path)
    first, *others = tiny_cifar.source.files
    only_source(replace(tiny_cifar.source, files=(replace(first, sha256="0" * 64), *others)))
    with pytest.raises(GlocalError, match="data_batch_1 has the wrong checksum"):
        locate("cifar10", tmp_path)


@dataclass
class TinyCifar100:
    """A small replacement of CIFAR-100: fine class c has the superclass SUPERCLASS[c]."""

    source: Source
    contents: dict[str, bytes]
    images: dict[str, np.ndarray]
    fine: dict[str, np.ndarray]


SUPERCLASS = np.random.default_rng(9).permutation(np.arange(100) % 20)


@pytest.fixture
def tiny_cifar100(tmp_path: Path, only_source: Callable[[Source], None]) -> TinyCifar100:
    random, contents, images, fine = np.random.default_rng(5), {}, {}, {}
    for name, repeats in (("train", 3), ("test", 1)):
        images[name] = random.integers(0, 256, (100 * repeats, 3, 32, 32), dtype=np.uint8)
        fine[name] = random.permutation(np.repeat(np.arange(100), repeats))
        coarse = SUPERCLASS[fine[name]].tolist()
        contents[name] = written(images[name], fine[name].tolist(), b"fine_labels", coarse_labels=coarse)
        (tmp_path / name).write_bytes(contents[name])
    source = replace(CIFAR100, files=tuple(described(*item) for item in contents.items()), archive=None)
    only_source(source)
    return TinyCifar100(source, contents, images, fine)


@pytest.mark.parametrize(("name", "tasks", "size"), [("split-cifar100", 20, 5), ("split-cifar100-by-10", 10, 10)])
def test_cifar100_is_split_by_its_fine_classes(
    tmp_path: Path, tiny_cifar100: TinyCifar100, name: str, tasks: int, size: int
) -> None:
    challenge = make(name, data=tmp_path)
    assert (challenge.tasks, challenge.outputs, challenge.setting) == (tasks, 100, "class")
    assert challenge.fingerprint == fingerprint(*tiny_cifar100.source.files)
    for index in range(tasks):
        task = challenge.task(index, 0)
        assert task.classes == tuple(range(size * index, size * index + size))
        for data, part in ((task.train, "train"), (task.test, "test")):
            rows = tiny_cifar100.fine[part] // size == index
            np.testing.assert_array_equal(data.x.numpy(), tiny_cifar100.images[part][rows], strict=True)
            np.testing.assert_array_equal(data.y.numpy(), tiny_cifar100.fine[part][rows])
    assert make("split-cifar100", data=tmp_path, classes_per_task=10).task(9, 0).classes == tuple(range(90, 100))


def test_superclasses_are_learnt_from_other_classes_in_every_task(tmp_path: Path, tiny_cifar100: TinyCifar100) -> None:
    challenge = make("cifar100-superclass", data=tmp_path)
    assert (challenge.tasks, challenge.outputs, challenge.setting) == (5, 20, "domain")
    fine_of: dict[bytes, int] = {}
    for images, fine in zip(tiny_cifar100.images.values(), tiny_cifar100.fine.values(), strict=True):
        fine_of |= {image.tobytes(): c for image, c in zip(images, fine, strict=True)}
    seen: set[int] = set()
    for index in range(5):
        task = challenge.task(index, 0)
        classes = []
        for data in (task.train, task.test):
            fine = np.array([fine_of[image.numpy().tobytes()] for image in data.x])
            np.testing.assert_array_equal(data.y.numpy(), SUPERCLASS[fine])
            classes.append(set(fine.tolist()))
        assert task.classes == tuple(range(20)) and classes[0] == classes[1] and len(classes[0]) == 20
        assert not seen & classes[0]
        seen |= classes[0]
        assert classes[0] == {np.flatnonzero(s == SUPERCLASS)[index] for s in range(20)}  # in their natural order
    with pytest.raises(GlocalError, match="6 tasks of cifar100-superclass were requested; allowed: 1 to 5"):
        make("cifar100-superclass", 6, data=tmp_path)


def test_damaged_and_hostile_files_of_cifar100_are_refused(
    tmp_path: Path, tiny_cifar100: TinyCifar100, only_source: Callable[[Source], None]
) -> None:
    (tmp_path / "test").write_bytes(tiny_cifar100.contents["test"][:-1])
    with pytest.raises(GlocalError, match=r"no good test; damaged: .*test has \d+ bytes instead of"):
        make("cifar100-superclass", data=tmp_path)
    hostile = pickle.dumps({"data": Canary(os.system, f"touch {tmp_path / 'called'}")}, 2)
    (tmp_path / "test").write_bytes(hostile)
    files = tiny_cifar100.source.files[0], described("test", hostile)
    only_source(replace(tiny_cifar100.source, files=files))
    challenge = make("split-cifar100", data=tmp_path)
    with pytest.raises(GlocalError, match=r"system, which is not data and was not run"):
        challenge.task(0, 0)
    assert not (tmp_path / "called").exists()


def test_the_real_files(cifar_folder: Path) -> None:
    for file in CIFAR10.files:
        content = (cifar_folder / HOME / file.name).read_bytes()
        assert file == described(file.name, content)
    challenge = make("split-cifar10", data=cifar_folder)
    pixels = []
    for index in range(5):
        task = challenge.task(index, 11)
        assert task.train.x.shape == (10_000, 3, 32, 32) and task.train.x.dtype == torch.uint8
        assert task.train.y.bincount().tolist()[-2:] == [5_000, 5_000]
        assert task.test.y.bincount().tolist()[-2:] == [1_000, 1_000]
        pixels.append(task.train.x.double().mean((0, 2, 3)) / 255)
    # The means that the challenge declares are those of the data.
    mean = torch.stack(pixels).mean(0)
    assert torch.allclose(mean, torch.tensor(challenge.normalise.mean, dtype=torch.float64), atol=1e-4)  # type: ignore[union-attr]


def test_real_files_equal_numpys_reader(cifar_folder: Path) -> None:
    path = cifar_folder / HOME / "test_batch"
    theirs = loaded(path.read_bytes())
    images, labels = read_cifar_batch(path, b"labels")
    np.testing.assert_array_equal(images.reshape(10_000, -1), theirs[b"data"])
    assert labels.tolist() == theirs[b"labels"]
