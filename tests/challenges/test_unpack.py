"""Extracting files from tar archives, including hostile ones."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from glocal.challenges.download import Source, SourceFile, unpack
from glocal.errors import GlocalError

CONTENT = np.random.default_rng(2).bytes(3_000_000)
WANTED = "batches/one"


def member(name: str, content: bytes = CONTENT, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for info, content in members:
            file.addfile(info, io.BytesIO(content))
    return path


def take(path: Path, target: Path) -> None:
    file = SourceFile(target.name, len(CONTENT), hashlib.md5(CONTENT).hexdigest())
    unpack(Source("set", "A set", "batches", (), (), (file,)), path, target.parent)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_only_listed_members_are_extracted(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar.gz",
        member("../outside"),
        member("/absolute"),
        member("batches/../../outside"),
        member("batches/other"),
        member(WANTED),
    )
    take(path, tmp_path / "in" / "here" / "one")
    assert files(tmp_path) == ["a.tar.gz", "in/here/one"]
    assert (tmp_path / "in/here/one").read_bytes() == CONTENT


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_links_and_special_files_are_not_extracted(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "secret").write_bytes(CONTENT)
    link = member(WANTED, b"", type=kind, linkname=str(tmp_path / "secret"))
    with pytest.raises(GlocalError, match="contains no file batches/one"):
        take(archive(tmp_path / "a.tar.gz", link), tmp_path / "in" / "one")
    assert files(tmp_path) == ["a.tar.gz", "secret"]


def test_a_symlink_at_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"untouched")
    (tmp_path / "one").symlink_to(tmp_path / "victim")
    take(archive(tmp_path / "a.tar.gz", member(WANTED)), tmp_path / "one")
    assert (tmp_path / "victim").read_bytes() == b"untouched"
    assert (tmp_path / "one").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT[:-1], "has 2999999 bytes instead of 3000000"),
        (bytes(len(CONTENT)), "has the wrong checksum"),
    ],
)
def test_wrong_content_is_refused_and_leaves_no_file(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        take(archive(tmp_path / "a.tar.gz", member(WANTED, content)), tmp_path / "in" / "one")
    assert files(tmp_path) == ["a.tar.gz"]


@pytest.mark.parametrize("keep", [0, 5, 100_000, 2_999_000])
def test_a_truncated_archive_is_refused_and_leaves_no_file(tmp_path: Path, keep: int) -> None:
    path = archive(tmp_path / "a.tar.gz", member(WANTED))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(GlocalError, match=r"a\.tar\.gz cannot be unpacked") as raised:
        take(path, tmp_path / "in" / "one")
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == ["a.tar.gz"]


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(GlocalError, match="cannot write"):
        take(archive(tmp_path / "a.tar.gz", member(WANTED)), tmp_path / "file" / "one")
