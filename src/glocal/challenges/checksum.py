"""Checksums: MD5, by which publishers identify their files, guards against damage; SHA-256 against malice too."""

from __future__ import annotations

from hashlib import md5, sha256
from pathlib import Path
from typing import Any


def _feed(digest: Any, path: Path) -> str:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def md5_of(path: Path) -> str:
    """MD5 of a file's bytes, in hexadecimal."""
    return _feed(md5(usedforsecurity=False), path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return _feed(sha256(), path)
