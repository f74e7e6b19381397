"""Files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glocal.errors import GlocalError


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    with _replacing(path) as part:
        part.write_text(text + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Tensors by name. Their order is kept too: sums over parameters follow it, and must not change on the way."""
    # safetensors refuses tensors that share storage; a clone of every leaf shares nothing.
    own = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    with _replacing(path) as part:
        save_file(own, part, metadata={**(metadata or {}), "order": json.dumps(list(own))})


def read_tensors(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors, or those whose names begin so."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        return {k: file.get_tensor(k) for k in json.loads(metadata["order"]) if k.startswith(prefix)}, metadata


DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)
"""What reading a damaged file can raise."""


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """A directory to fill, which appears under its name only when it is complete."""
    part = final.parent / f".{final.name}-{uuid.uuid4().hex[:8]}"
    part.mkdir()
    try:
        yield part
        if final.exists():
            outdated = part.with_name(part.name + "-old")
            final.rename(outdated)
            part.rename(final)
            shutil.rmtree(outdated)
        else:
            part.rename(final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def remove_directory(path: Path) -> None:
    """All at once for whoever looks: it is renamed first, and what a sudden death leaves is a leftover."""
    gone = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}-old")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path, older_than: float = 86_400) -> None:
    """Unfinished directories of processes that died in the middle of `new_directory`, more than a day ago."""
    for part in folder.glob(".*-*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > older_than:
                shutil.rmtree(part)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class Lock:
    """An advisory lock on a file, which the system gives back when its holder dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def take(self, wait: bool) -> bool:
        file = self.path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    def give_back(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Lock:
        self.take(wait=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


@contextmanager
def telling(action: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal into a line that says what was being done, and where."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise GlocalError(f"cannot {action} '{path}': {reason}. Choose a folder you may write to.") from error
