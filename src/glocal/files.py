"""Atomic files and directories, tensors on disk, and locks."""

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

from glocal.errors import GlocalError, first_line


def user_path(given: str | Path) -> Path:
    """Return a path that a user gave, with ~ expanded; raise if nothing can have this name."""
    try:
        path = Path(given).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:  # too long, forbidden, with a zero byte, or of an unknown user
        shown = str(given) if len(str(given)) < 200 else f"{str(given)[:200]}…"
        reason = getattr(error, "strerror", None) or error
        raise GlocalError(f"'{shown}' cannot be used as a path: {reason}. Give another one.") from error
    return path


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    with replacing(path) as part:
        part.write_text(text + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name, with their order: sums over parameters follow it and must not change."""
    # safetensors rejects tensors that share storage, so each one is cloned.
    copies = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    with replacing(path) as part:
        save_file(copies, part, metadata={**(metadata or {}), "order": json.dumps(list(copies))})


def read_tensors(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors whose names start with `prefix`, in the order in which they were written, and the metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        names = json.loads(metadata["order"]) if "order" in metadata else file.keys()
        return {k: file.get_tensor(k) for k in names if k.startswith(prefix)}, metadata


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill; it is renamed to `final` once it is complete."""
    part = _temporary(final)
    part.mkdir()
    try:
        yield part
        if final.exists():
            remove_directory(final)
        part.rename(final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def remove_directory(path: Path) -> None:
    """Remove a directory atomically: rename it first, so that other processes never see a part of it."""
    shutil.rmtree(path.rename(_temporary(path)), ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove directories that `new_directory` left behind when its process was killed, after a day."""
    for part in folder.glob(".*-*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > 86_400:
                shutil.rmtree(part)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")


@contextmanager
def replacing(path: Path, make_folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` if the block succeeds.

    Readers see the old file or the new one, and two processes may write the same file.
    """
    part = _temporary(path)
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def lock_file(path: Path) -> IO[bytes]:
    """Open a file and lock it, against processes of the same machine, until it is closed or the process ends."""
    file = path.open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@contextmanager
def report_damage(path: Path, remedy: str) -> Iterator[None]:
    """Turn any error of reading a file into a GlocalError that names it and says what to do."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise GlocalError(f"'{path}' cannot be read ({first_line(error)}). {remedy}") from error


@contextmanager
def report_os_errors(action: str, path: Path, remedy: str = "Choose a folder that you can write to.") -> Iterator[None]:
    """Turn an OSError into a GlocalError that names the action and the path."""
    try:
        yield
    except OSError as error:
        raise GlocalError(f"cannot {action} '{path}': {error.strerror or error}. {remedy}") from error
