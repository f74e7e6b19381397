"""MD5, by which publishers identify their files: a guard against damage, not against malice."""

from __future__ import annotations

from hashlib import md5
from pathlib import Path


def md5_of(path: Path) -> str:
    """MD5 of a file's bytes, in hexadecimal."""
    digest = md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
