"""Tiny-ImageNet: small zips in the original's layout, damaged ones, and the real subset in $GLOCAL_DATA."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from glocal.challenges import Augment, Normalise, datasets, fetch, make, prepare, status
from glocal.challenges.datasets import decode_tinyimagenet, load_tinyimagenet
from glocal.challenges.download import SOURCES, Source, SourceFile
from glocal.errors import GlocalError
from glocal.sweeps import resolve

TINYIMAGENET = SOURCES["tinyimagenet"]
ROOT = "tiny-imagenet-200/"
WNIDS = [f"n{number:08}" for number in (300, 7, 150, 42)]
"""Not sorted, as in the original file."""


def jpeg(colour: tuple[int, int, int] | int, side: int = 64) -> bytes:
    """Encode an image of one colour, which JPEG hardly changes; an integer gives one gray channel."""
    buffer = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", (side, side), colour).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def colour_of(label: int, number: int) -> tuple[int, int, int]:
    return (60 * label, 20 * number, 100)


@dataclass
class Zip:
    """The members of a zip; image `number` of class `label` has the colour `colour_of(label, number)`."""

    classes: int = 4
    members: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        labels = {wnid: label for label, wnid in enumerate(sorted(WNIDS))}
        wnids = [wnid for wnid in WNIDS if labels[wnid] < self.classes]
        self.members[f"{ROOT}wnids.txt"] = "\n".join(wnids).encode()
        self.members[f"{ROOT}words.txt"] = b"n00000007\ta thing\n"
        rows = []
        for wnid in wnids:
            self.members[f"{ROOT}train/{wnid}/{wnid}_boxes.txt"] = b""
            # Eleven images, so that numbers and names are ordered differently.
            for number in (10, *range(10)):
                self.members[f"{ROOT}train/{wnid}/images/{wnid}_{number}.JPEG"] = jpeg(colour_of(labels[wnid], number))
            for number in (0, 1):
                name = f"val_{2 * labels[wnid] + number}.JPEG"
                self.members[f"{ROOT}val/images/{name}"] = jpeg(colour_of(labels[wnid], number))
                rows.append(f"{name}\t{wnid}\t0\t0\t63\t63\n")
        self.members[f"{ROOT}val/val_annotations.txt"] = "".join(rows).encode()
        self.members[f"{ROOT}test/images/test_0.JPEG"] = b"never looked at"

    def content(self) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name, content in self.members.items():
                file.writestr(zipfile.ZipInfo(name), content)
        return buffer.getvalue()

    def write(self, path: Path) -> Path:
        path.write_bytes(self.content())
        return path


def described(name: str, content: bytes) -> SourceFile:
    return SourceFile(name, len(content), hashlib.md5(content).hexdigest())


@pytest.fixture
def tiny(only_source: Callable[[Source], None], monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Replace the real data set by one with four classes and a subset with two of them."""
    complete, subset = Zip().content(), Zip(classes=2).content()
    file = replace(
        described("tiny-imagenet-200.zip", complete),
        subsets=(replace(described("tiny-imagenet-40.zip", subset), classes=2),),
    )
    only_source(replace(TINYIMAGENET, files=(file,), mirrors=()))
    monkeypatch.setattr(datasets, "TINYIMAGENET_CLASSES", 4)
    return {"tiny-imagenet-200.zip": complete, "tiny-imagenet-40.zip": subset}


def test_images_are_sorted_by_class_and_number_and_gray_ones_have_three_channels(tmp_path: Path) -> None:
    archive = Zip()
    archive.members[f"{ROOT}train/{WNIDS[1]}/images/{WNIDS[1]}_3.JPEG"] = jpeg(77)
    reports: list[tuple[int, int]] = []
    decoded = decode_tinyimagenet(archive.write(tmp_path / "a.zip"), lambda done, total: reports.append((done, total)))
    assert decoded["train_y"].tolist() == [label for label in range(4) for _ in range(11)]
    assert sorted(decoded["test_y"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = np.array([colour_of(label, number) for label in range(4) for number in range(11)])
    expected[3] = 77
    assert decoded["train_x"].shape == (44, 3, 64, 64) and decoded["train_x"].dtype == torch.uint8
    assert np.abs(decoded["train_x"].numpy() - expected[:, :, None, None]).max() <= 3
    tested = np.array([colour_of(label, 0)[0] for label in decoded["test_y"].tolist()])
    assert np.abs(decoded["test_x"][:, 0, 5, 5].numpy() - tested).max() <= 3
    assert reports[-1] == (52, 52)


def test_axes_are_channels_rows_columns(tmp_path: Path) -> None:
    image = Image.new("RGB", (64, 64))
    image.paste((250, 0, 0), (0, 0, 64, 16))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    archive = Zip()
    archive.members[f"{ROOT}train/{WNIDS[1]}/images/{WNIDS[1]}_0.JPEG"] = buffer.getvalue()
    first = decode_tinyimagenet(archive.write(tmp_path / "a.zip"))["train_x"][0]
    assert first[0, 4, 60] > 240 and first[0, 60, 4] < 10 and first[2, 4, 60] < 10


def flipped_bits(content: bytes) -> list[bytes]:
    """Return copies of a safetensors file with one bit flipped in the header, in the first tensor and in the last."""
    header_bytes = int.from_bytes(content[:8], "little")
    copies = [bytearray(content) for _ in range(4)]
    positions = content.index(b"train_x"), content.index(b"crc32") + 10, 8 + header_bytes + 100, len(content) - 1
    for copy, position in zip(copies, positions, strict=True):
        copy[position] ^= 1
    return [bytes(copy) for copy in copies]


def test_images_are_decoded_once_and_cached(
    tmp_path: Path, tiny: dict[str, bytes], own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(tiny["tiny-imagenet-200.zip"])
    challenge = make("split-tinyimagenet", data=tmp_path, classes_per_task=2)
    assert not own_folders.exists(), "nothing is decoded before a task is asked for"
    first = challenge.task(1, 0)
    (file,) = (own_folders / "tiny-imagenet").iterdir()
    load_tinyimagenet.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "decode_tinyimagenet", lambda *_: pytest.fail("decoded again"))
        again = make("split-tinyimagenet", data=tmp_path, classes_per_task=2).task(1, 0)
    for ours, theirs in zip((*first.train, *first.test), (*again.train, *again.test), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    good = file.read_bytes()
    for damage in (good[:-1], good[:100], b"", good[:9] + b"?" + good[10:], *flipped_bits(good)):
        load_tinyimagenet.cache_clear()
        file.write_bytes(damage)
        repaired = make("split-tinyimagenet", data=tmp_path, classes_per_task=2).task(1, 0)
        pairs = zip((*first.train, *first.test), (*repaired.train, *repaired.test), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert [path.name for path in file.parent.iterdir()] == [file.name]
        assert file.stat().st_size == len(good)


def test_an_unwritable_cache_is_an_error(tmp_path: Path, tiny: dict[str, bytes], own_folders: Path) -> None:
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(tiny["tiny-imagenet-200.zip"])
    own_folders.write_text("not a folder")
    with pytest.raises(GlocalError, match=r"cannot write .* XDG_CACHE_HOME to other folders"):
        prepare("tinyimagenet", tmp_path)


def test_a_subset_limits_the_number_of_tasks(tmp_path: Path, tiny: dict[str, bytes]) -> None:
    (tmp_path / "tiny-imagenet-40.zip").write_bytes(tiny["tiny-imagenet-40.zip"])
    part = make("split-tinyimagenet", data=tmp_path, classes_per_task=1)
    assert (part.tasks, part.outputs) == (2, 4)
    assert part.task(1, 0).classes == (1,)
    with pytest.raises(
        GlocalError,
        match=r"3 tasks .*this machine contain 2 of the 4 classes of split-tinyimagenet; allowed: 1 to 2",
    ):
        make("split-tinyimagenet", 3, data=tmp_path, classes_per_task=1)
    (record,) = status(tmp_path)
    assert record.state == "ready"
    assert "only the first 2 classes, in tiny-imagenet-40.zip; all: glocal data fetch tinyimagenet" in record.note
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(tiny["tiny-imagenet-200.zip"])
    whole = make("split-tinyimagenet", data=tmp_path, classes_per_task=1)
    assert whole.tasks == 4
    assert whole.fingerprint != part.fingerprint
    assert torch.equal(whole.task(1, 0).train.x, part.task(1, 0).train.x)
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"damaged")
    with pytest.raises(GlocalError, match=r"tiny-imagenet-200\.zip has 7 bytes instead of"):
        make("split-tinyimagenet", data=tmp_path)


def test_fetch_replaces_a_subset_by_the_complete_file(tmp_path: Path, tiny: dict[str, bytes], mirror: Callable) -> None:
    (tmp_path / "tiny-imagenet-40.zip").write_bytes(tiny["tiny-imagenet-40.zip"])
    server = mirror(tiny)
    paths = fetch("tinyimagenet", tmp_path, [server.url])
    assert paths["tiny-imagenet-200.zip"] == tmp_path / "tiny-imagenet" / "tiny-imagenet-200.zip"
    assert paths["tiny-imagenet-200.zip"].read_bytes() == tiny["tiny-imagenet-200.zip"]
    fetch("tinyimagenet", tmp_path, [server.url])
    assert len(server.asked) == 1
    reports: list[tuple[int, int]] = []
    prepare("tinyimagenet", tmp_path, lambda done, total: reports.append((done, total)))
    assert reports[-1] == (52, 52)
    prepare("tinyimagenet", tmp_path, lambda done, total: pytest.fail("decoded again"))


def test_the_real_subset(tinyimagenet_folder: Path) -> None:
    (file,) = TINYIMAGENET.files
    (subset,) = file.subsets
    content = (tinyimagenet_folder / subset.name).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert subset == replace(described(subset.name, content), sha256=sha256, classes=40)
    if (tinyimagenet_folder / file.name).exists():
        pytest.skip("the whole is there too")
    resolved = resolve.challenge("split-tinyimagenet", data=tinyimagenet_folder)
    challenge = resolved.value
    assert (challenge.tasks, challenge.outputs, challenge.input_shape) == (2, 200, (3, 64, 64))
    assert (challenge.setting, challenge.epochs, challenge.batch_size) == ("class", 100, 32)
    assert challenge.normalise == Normalise((0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821))
    assert challenge.augment == Augment(padding=4, flip=True)
    assert resolved.config["augment"] == {"padding": 4, "flip": True}
    for index in range(2):
        task = challenge.task(index, 11)
        assert task.classes == tuple(range(20 * index, 20 * index + 20))
        assert task.train.y.bincount().tolist()[20 * index :] == [200] * 20
        assert task.test.y.bincount().tolist()[20 * index :] == [20] * 20
        assert task.train.x.shape == (4_000, 3, 64, 64) and task.train.x.dtype == torch.uint8
    with zipfile.ZipFile(tinyimagenet_folder / subset.name) as archive:
        wnid = sorted(archive.read(f"{ROOT}wnids.txt").decode().split())[20]
        raw = archive.read(f"{ROOT}train/{wnid}/images/{wnid}_0.JPEG")
    theirs = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(challenge.task(1, 0).train.x[0].numpy(), theirs)
