"""Writing data to disk, and what is said when that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glocal.errors import GlocalError


@contextmanager
def writing(path: Path, instead: str = "name a writable data folder") -> Iterator[None]:
    """Whatever goes wrong on the disk no other mirror can mend."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise GlocalError(f"cannot write {path} ({reason}); make room for it, or {instead}.") from error
