"""Extracting files from tar archives."""

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


def archive(path: Path, *names: str) -> Path:
    """Write an archive with these names, all with the same content."""
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(CONTENT)
            file.addfile(info, io.BytesIO(CONTENT))
    return path


def take(path: Path, target: Path) -> None:
    file = SourceFile(target.name, len(CONTENT), hashlib.md5(CONTENT).hexdigest())
    unpack(Source("set", "A set", "batches", (), (), (file,)), path, target.parent)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_only_listed_members_are_extracted(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar.gz",
        "../outside",
        "/absolute",
        "batches/../../outside",
        "batches/other",
        WANTED,
    )
    take(path, tmp_path / "in" / "here" / "one")
    assert files(tmp_path) == ["a.tar.gz", "in/here/one"]
    assert (tmp_path / "in/here/one").read_bytes() == CONTENT


def test_a_symlink_at_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"untouched")
    (tmp_path / "one").symlink_to(tmp_path / "victim")
    take(archive(tmp_path / "a.tar.gz", WANTED), tmp_path / "one")
    assert (tmp_path / "victim").read_bytes() == b"untouched"
    assert (tmp_path / "one").read_bytes() == CONTENT


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(GlocalError, match="cannot write"):
        take(archive(tmp_path / "a.tar.gz", WANTED), tmp_path / "file" / "one")
