"""Files that are written completely or not at all, tensors with checksums, and locks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save_file as save_arrays

from glocal.errors import GlocalError, first_line, printable

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES = 1 << 26
"""Size of the largest text file that is read."""
FIRST_BYTES = 1 << 16
"""Read first: as many bytes are allocated as are asked for, and most files are short."""
A = TypeVar("A")
T = TypeVar("T")
CHECKSUMS, CHECKSUM = "glocal.tensors", "glocal.metadata"
"""Keys in a safetensors file's metadata: one checksum per tensor, and that of all other metadata.

They are two, so that damage to the name of one does not make the file look like one that never had checksums.
"""


class DamagedError(GlocalError):
    """A file that can be read, but whose content is not what was written, or is not there."""


class StorageError(GlocalError):
    """A file or folder that the system does not let us read or write."""


def user_path(given: str | Path) -> Path:
    """Return a path that a user gave, with ~ expanded; raise if nothing can have this name."""
    try:
        path = Path(given).expanduser()
        if not str(path).isprintable():
            raise ValueError("it has control characters")
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    # It is too long, has a zero byte, begins with ~ and an unknown user ...
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        text = str(given) if len(str(given)) < 200 else f"{str(given)[:200]}…"
        reason = getattr(error, "strerror", None) or error
        raise GlocalError(f"'{text}' cannot be used as a path: {reason}. Give another one.") from error
    return path


def write_json(path: Path, value: object) -> str:
    """Write a value as JSON, atomically, and return the checksum of the file."""
    content = (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    with replacing(path) as part:
        part.write_bytes(content)
    return short_hash(content)


def read_text(path: Path) -> str:
    """Read a text file."""
    return _read(path).decode()


def _read(path: Path) -> bytes:
    """Read a file, but nothing that never ends, such as a device."""
    with path.open("rb") as file:
        content = file.read(FIRST_BYTES)
        if len(content) == FIRST_BYTES:
            content += file.read(MAX_BYTES + 1 - FIRST_BYTES)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_BYTES} bytes")
    return content


def read_json(path: Path, checksum: str | None = None) -> Any:
    """Read a JSON file; raise ValueError if it is not the one with this checksum."""
    content = _read(path)
    if checksum not in (None, short_hash(content)):
        raise ValueError(f"{path.name} does not agree with its checksum")
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {first_line(error)}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Control characters in its strings are escaped, because they may be shown on a terminal."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {printable(k): clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return list(map(clean, value))
        return printable(value) if isinstance(value, str) else value

    text = text if isinstance(text, str) else text.decode()
    # Without escapes, a string has the characters of the text.
    is_clean = "\\" not in text and text.replace("\n", "").isprintable()
    return json.loads(text) if is_clean else clean(json.loads(text))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name, with checksums and their order: sums over parameters follow it and must not change."""
    from safetensors.torch import save_file

    # safetensors rejects tensors that share storage, so each one is cloned.
    _write_tensors(path, {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, metadata, save_file)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write contiguous arrays of numpy as `write_tensors` writes tensors, without torch."""
    _write_tensors(path, arrays, metadata, save_arrays)


def _write_tensors(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, save: Callable[..., None]
) -> None:
    header = {**(metadata or {}), "order": json.dumps(list(tensors))}
    header[CHECKSUMS] = json.dumps([_tensor_checksum(t) for t in tensors.values()])
    header[CHECKSUM] = short_hash(json.dumps(header, sort_keys=True).encode())
    with replacing(path) as part:
        part.touch()
        mode = part.stat().st_mode  # what the umask allows; safetensors makes files that others cannot read
        try:
            save(tensors, part, metadata=header)
        except SafetensorError as error:  # safetensors reports a full disk in this way
            raise OSError(first_line(error)) from error
        part.chmod(mode)


def read_tensors(path: Path, prefix: str | tuple[str, ...] = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors whose names start with `prefix`, in the order in which they were written, and the metadata.

    Raise ValueError if one of them, or the metadata, does not agree with its checksum. Files without checksums, which
    are a user's own or of an earlier version, are read as they are.
    """
    with path.open("rb"):  # an OSError says why a file cannot be read; an error of safetensors does not
        pass
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        names = json.loads(metadata["order"]) if "order" in metadata else file.keys()
        tensors = {k: file.get_tensor(k) for k in names if k.startswith(prefix)}
    return tensors, _check_tensors(tensors, names, metadata, path)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read all tensors of a file as arrays of numpy, and the metadata: `read_tensors`, but faster for small tensors."""
    with path.open("rb") as file:
        content = file.read(os.fstat(file.fileno()).st_size)
    arrays = load_arrays(content)
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
    names = json.loads(metadata["order"]) if "order" in metadata else list(arrays)
    ordered = {k: arrays[k] for k in names}
    return ordered, _check_tensors(ordered, names, metadata, path)


def _check_tensors(
    tensors: Mapping[str, Tensor | np.ndarray], names: list[str], metadata: dict[str, str], path: Path
) -> dict[str, str]:
    """Check tensors and metadata against their checksums, and return the other metadata."""
    for name, checksum in _pop_checksums(metadata, names, path).items():
        if name in tensors and _tensor_checksum(tensors[name]) != checksum:
            raise ValueError(f"{name} in {path.name} does not agree with its checksum")
    return metadata


def has_checksums(path: Path) -> bool:
    """Return whether a safetensors file was written with checksums."""
    with safe_open(path, framework="np") as file:
        return CHECKSUM in (file.metadata() or {})


def read_rows(path: Path, row: int) -> dict[str, Tensor]:
    """Read one row of every tensor, without checking checksums, which are those of whole tensors."""
    with safe_open(path, framework="pt") as file:
        return {k: file.get_slice(k)[row] for k in json.loads(file.metadata()["order"])}


def _pop_checksums(metadata: dict[str, str], names: list[str], path: Path) -> dict[str, str]:
    """Take the checksums out of the metadata, check that of the metadata, and return those of the tensors."""
    if not metadata.keys() & {CHECKSUMS, CHECKSUM}:
        return {}
    if metadata.pop(CHECKSUM, "") != short_hash(json.dumps(metadata, sort_keys=True).encode()):
        raise ValueError(f"the metadata of {path.name} do not agree with their checksum")
    return dict(zip(names, json.loads(metadata.pop(CHECKSUMS)), strict=True))


def _tensor_checksum(tensor: Tensor | np.ndarray) -> str:
    content: Any
    if isinstance(tensor, np.ndarray):
        kind, content = _torch_name(tensor.dtype), tensor.tobytes()
    else:
        import torch

        kind, content = str(tensor.dtype), tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return short_hash(f"{kind} {tuple(tensor.shape)}".encode(), content)


@cache
def _torch_name(kind: np.dtype) -> str:
    return f"torch.{kind}"


def short_hash(*parts: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of bytes, one part after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


@contextmanager
def new_directory(final: Path, instead_of: os.stat_result | None = None) -> Iterator[Path]:
    """Yield a temporary directory to fill; it is renamed to `final` once it is complete.

    Only the directory `instead_of` is replaced; raise FileExistsError if there is another one by then.
    """
    part = _temporary(final)
    part.mkdir()
    try:
        yield part
        with suppress(FileNotFoundError):
            if instead_of is not None and os.path.samestat(final.stat(), instead_of):
                remove_directory(final)
        try:
            part.rename(final)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # or EEXIST, which is a FileExistsError
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from error
            raise
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def remove_directory(path: Path) -> None:
    """Remove a directory atomically: rename it first, so that other processes never see a part of it."""
    shutil.rmtree(path.rename(_temporary(path)), ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what `new_directory` and `replacing` left behind when their process was killed, after a day."""
    for part in folder.glob(".*-*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > 86_400:
                shutil.rmtree(part) if part.is_dir() else part.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")


@contextmanager
def replacing(path: Path, make_folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` if the block succeeds.

    Readers see the old file or the new one, also after a power failure, and two processes may write the same file.
    """
    part = _temporary(path)
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Write a folder's entries to the disk: without it, a renamed file can be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> IO[bytes]:
    """Open a file and lock it, against processes of the same machine, until it is closed or the process ends."""
    file = path.open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@contextmanager
def report_damage(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors of reading a file into a GlocalError that names it and says what to do.

    Wrong content, or a file missing in a folder, is damage; what cannot be opened is not, and must not be deleted.
    """
    try:
        yield
    except (GlocalError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(error, OSError):
            reason = first_line(error)
        elif isinstance(error, FileNotFoundError) and path.is_dir():
            reason = f"it has no {Path(error.filename or '').name}"
        else:
            advice = remedy if isinstance(error, FileNotFoundError) else "Check its permissions and its disk."
            raise GlocalError(f"'{path}' cannot be read: {error.strerror or first_line(error)}. {advice}") from error
        raise DamagedError(f"'{path}' is damaged or has another format ({reason}). {remedy}") from error


def read_twice(read: Callable[[A], T], argument: A) -> T:
    """Read again what seems damaged: to a reader, a signal at the wrong moment looks like damage."""
    try:
        return read(argument)
    except DamagedError:
        return read(argument)


@contextmanager
def report_os_errors(action: str, path: Path, remedy: str = "Choose a folder that you can write to.") -> Iterator[None]:
    """Turn an OSError into a StorageError that names the action and the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {action} '{path}': {error.strerror or error}. {remedy}") from error
