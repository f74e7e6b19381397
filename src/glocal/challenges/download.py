"""Find, verify and download the files of the data sets that `sources.toml` describes.

A file counts only if its size and checksum are right, so it does not matter which folder or mirror it comes from.
Downloads resume: bytes go to `NAME.part`, and the next mirror, or the next attempt, asks only for the rest. The part is
renamed when its checksum is right, so a file under its own name is complete. (pooch, the usual library for this, can
neither resume nor use several mirrors.)
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from glocal.errors import GlocalError, require, require_known
from glocal.files import lock_file, replacing, report_damage, report_os_errors, user_path

Progress = Callable[[int, int], None]
BLOCK_BYTES = 1 << 16
TIMEOUT_SECONDS = 30.0  # a mirror has failed after so long without a byte
MIN_BYTES_PER_SECOND = 1_000  # and after this time with fewer bytes per second
disk_errors = partial(
    report_os_errors, remedy="Free some space, or set GLOCAL_DATA and XDG_CACHE_HOME to other folders."
)


@dataclass(frozen=True)
class SourceFile:
    """A file of a data set, identified by its size and checksums; `sources.toml` explains the fields."""

    name: str
    bytes: int
    md5: str
    sha256: str | None = None
    classes: int | None = None
    alternatives: tuple[SourceFile, ...] = ()
    subsets: tuple[SourceFile, ...] = ()


@dataclass(frozen=True)
class Source:
    """The files of a data set; `sources.toml` explains the fields."""

    name: str
    title: str
    folder: str
    search: Sequence[str]
    mirrors: Sequence[str]
    files: tuple[SourceFile, ...]
    archive: SourceFile | None = None

    def subset_at(self, path: Path) -> SourceFile | None:
        """Return the subset that a file found by `locate` is, or None if it is complete."""
        return next((subset for file in self.files for subset in file.subsets if subset.name == path.name), None)


def fingerprint(*files: SourceFile) -> str:
    """Return the SHA-256 of published names and checksums: the same wherever the files are, compressed or not."""
    lines = "".join(f"{file.name} {file.md5}\n" for file in files)
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def _parse_file(entry: dict[str, Any]) -> SourceFile:
    nested = {key: tuple(map(_parse_file, entry.get(key, ()))) for key in ("alternatives", "subsets")}
    return SourceFile(**{**entry, **nested})


def _parse_source(name: str, table: dict[str, Any]) -> Source:
    archive = _parse_file(table["archive"]) if "archive" in table else None
    return Source(name, **{**table, "files": tuple(map(_parse_file, table["files"])), "archive": archive})


SOURCES: dict[str, Source] = {
    name: _parse_source(name, table)
    for name, table in tomllib.loads(Path(__file__).with_name("sources.toml").read_text("utf-8")).items()
}


def find_source(name: str) -> Source:
    """Return the source with this name."""
    require_known("data set", name, SOURCES)
    return SOURCES[name]


def data_folders(data: str | Path | None = None) -> list[Path]:
    """Return the folders that are searched, in order: `data`, `$GLOCAL_DATA`, the user's cache."""
    require(data is None or bool(str(data)), "the data folder is an empty string; give a folder, or leave it out.")
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is invalid and must be ignored.
    cache = cache if os.path.isabs(cache) else "~/.cache"
    folders = [data, os.environ.get("GLOCAL_DATA") or None, f"{cache}/glocal"]
    return list(dict.fromkeys(user_path(folder) for folder in folders if folder is not None))


def checksum(path: Path, algorithm: Literal["md5", "sha256"] = "md5") -> str:
    """Return the hexadecimal checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


@lru_cache(maxsize=1024)
def _cached_checksum(path: Path, size: int, modified_ns: int, algorithm: Literal["md5", "sha256"]) -> str:
    """Read an unchanged file only once per process: size and time are part of the key."""
    return checksum(path, algorithm)


def _fault(path: Path, file: SourceFile) -> str | None:
    """Say what is wrong with a copy of a file, or return None if it is good."""
    try:
        stat = path.stat()
        if stat.st_size != file.bytes:
            return f"{path} has {stat.st_size} bytes instead of {file.bytes}"
        key = path, stat.st_size, stat.st_mtime_ns
        good = _cached_checksum(*key, "md5") == file.md5
        good = good and (file.sha256 is None or _cached_checksum(*key, "sha256") == file.sha256)
        return None if good else f"{path} has the wrong checksum"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


class _Survey(NamedTuple):
    """The result of a search: verified paths by published name, names without a good file, and damaged copies."""

    paths: dict[str, Path]
    missing: list[str]
    faults: list[str]
    archive: Path | None  # a good copy of the archive, if files are missing

    def wanted(self, source: Source) -> list[SourceFile]:
        """Return the files that are missing, or there as a subset only."""
        return [f for f in source.files if f.name not in self.paths or source.subset_at(self.paths[f.name])]


def _search(folders: Sequence[Path], files: Sequence[SourceFile]) -> tuple[Path | None, list[str]]:
    """Return the first good copy of any of these files, and the faults of the copies before it."""
    faults: list[str] = []
    for path, file in ((folder / file.name, file) for folder in folders for file in files):
        if path.is_file():
            fault = _fault(path, file)
            if fault is None:
                return path.absolute(), faults
            faults.append(fault)
    return None, faults


def _survey(source: Source, data: str | Path | None) -> _Survey:
    paths: dict[str, Path] = {}
    faults: list[str] = []
    archive = None
    folders = [root / folder for root in data_folders(data) for folder in source.search]
    for file in source.files:
        path, file_faults = _search(folders, (file, *file.alternatives))
        if path is None and not file_faults:  # a damaged original is reported, and not replaced by a subset
            path, file_faults = _search(folders, file.subsets)
        if path is None:
            faults += file_faults
        else:
            paths[file.name] = path
    missing = [file.name for file in source.files if file.name not in paths]
    if missing and source.archive:
        archive, archive_faults = _search(folders, [source.archive])
        faults += archive_faults
    return _Survey(paths, missing, faults, archive)


def locate(name: str, data: str | Path | None = None) -> dict[str, Path]:
    """Return the verified path of every file of a data set, by its published name.

    Raises an error if a file is missing or damaged. If only the archive is there, it is unpacked into the user's cache.
    """
    source = find_source(name)
    survey = _survey(source, data)
    if survey.archive:
        unpack(source, survey.archive, data_folders()[-1] / source.folder)
        survey = _survey(source, data)
    if not survey.missing:
        return survey.paths
    searched = ", ".join(f"{folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in data_folders(data))
    damaged = f"; damaged: {', '.join(survey.faults)}" if survey.faults else ""
    archive = f" or {source.archive.name}" if source.archive else ""
    raise GlocalError(
        f"{name} is not complete: no good {', '.join(survey.missing)}{damaged}; searched: {searched}. "
        f"Run: glocal data fetch {name}, put the original files{archive} into {data_folders(data)[0] / source.folder}, "
        "or set GLOCAL_DATA to the folder that contains them."
    )


@dataclass(frozen=True)
class SourceStatus:
    """The state of a data set on this machine; `bytes` is its size on disk, or that of the download."""

    name: str
    state: Literal["ready", "missing", "damaged"]
    where: str | None
    bytes: int
    note: str


def status(data: str | Path | None = None) -> list[SourceStatus]:
    """Return the state of every data set; missing and damaged files are reported in the note, not raised."""
    return [_status(source, _survey(source, data)) for source in SOURCES.values()]


def _status(source: Source, survey: _Survey) -> SourceStatus:
    paths = [survey.archive] if survey.archive else list(survey.paths.values())
    folder = str(paths[0].parent) if paths else None
    download_bytes = sum(file.bytes for file in ([source.archive] if source.archive else source.files))
    note = source.title
    if survey.archive:
        note += f"; in {survey.archive.name}, unpacked when first used"
    elif survey.faults:
        return SourceStatus(source.name, "damaged", folder, download_bytes, "; ".join(survey.faults))
    elif survey.missing:
        note = f"run: glocal data fetch {source.name}"
        if paths:
            note = f"missing {', '.join(survey.missing)}; {note}"
        return SourceStatus(source.name, "missing", folder, download_bytes, note)
    for path in survey.paths.values():
        if subset := source.subset_at(path):
            note += f"; only the first {subset.classes} classes, in {path.name}; all: glocal data fetch {source.name}"
    return SourceStatus(source.name, "ready", folder, sum(path.stat().st_size for path in paths), note)


def fetch(
    name: str, data: str | Path | None = None, mirrors: Sequence[str] | None = None, progress: Progress | None = None
) -> dict[str, Path]:
    """Download the missing files of a data set, unpack them, and return the paths of all its files.

    Args:
        name: the data set, such as 'mnist'.
        data: the folder to search first and to download to; by default `$GLOCAL_DATA` or the user's cache.
        mirrors: addresses to use instead of the published ones.
        progress: called as `progress(done, total)` with the bytes of all downloads together.
    """
    source = find_source(name)
    folder = data_folders(data)[0] / source.folder
    if not _survey(source, data).wanted(source):
        return locate(name, data)
    with disk_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / ".fetching")
    with lock:  # another process that fetches the same files waits, and finds them
        _fetch(source, folder, data, source.mirrors if mirrors is None else mirrors, progress)
        (folder / ".fetching").unlink(missing_ok=True)
    return locate(name, data)


def _fetch(
    source: Source, folder: Path, data: str | Path | None, mirrors: Sequence[str], progress: Progress | None
) -> None:
    survey = _survey(source, data)
    wanted = survey.wanted(source)
    if source.archive and wanted:
        wanted = [] if survey.archive else [source.archive]
    total, finished = sum(file.bytes for file in wanted), 0

    def report(done: int, _: int) -> None:
        if progress is not None:
            progress(finished + done, total)

    for file in wanted:
        urls = [f"{mirror.rstrip('/')}/{file.name}" for mirror in mirrors]
        download(urls, folder / file.name, size=file.bytes, md5=file.md5, progress=report)
        finished += file.bytes
    if source.archive and wanted:
        unpack(source, folder / source.archive.name, folder)
        (folder / source.archive.name).unlink()
    elif survey.archive:
        unpack(source, survey.archive, folder)


def unpack(source: Source, archive: Path, folder: Path) -> None:
    """Extract the files of a data set, and nothing else, from its verified tar archive."""
    files = {(f"{source.folder}/{file.name}", file.bytes): file.name for file in source.files}
    with report_damage(archive, "Delete it."), tarfile.open(archive, "r|*") as tar:
        for member in tar:
            name = files.get((member.name, member.size))
            if name is not None and (content := tar.extractfile(member)) is not None:
                target = folder / name
                with disk_errors("write", target), replacing(target, make_folder=True) as part, part.open("wb") as file:
                    shutil.copyfileobj(content, file)


class _MirrorFailed(Exception):
    """This mirror cannot provide the file; the next one may."""


def download(urls: Sequence[str], target: Path, *, size: int, md5: str, progress: Progress | None = None) -> None:
    """Download a file of known size and checksum to `target`, from the first URL that provides it."""
    part = target.with_name(target.name + ".part")
    failures = []
    with disk_errors("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if part.is_symlink() or not part.is_file():  # its target is not ours to write to
            part.unlink(missing_ok=True)
        part.touch()
        complete = checksum(part) == md5
        for url in () if complete else urls:
            try:
                _complete(url, part, part.stat().st_size, size, md5, progress)
                complete = True
                break
            except _MirrorFailed as failure:
                failures.append(f"{urlsplit(url).netloc or url}: {failure}")
        if complete:
            os.replace(part, target)
            return
        if part.stat().st_size == 0:
            part.unlink()
    raise GlocalError(
        f"could not fetch {target.name} ({'; '.join(failures) or 'no mirror was given'}); try again, or put the "
        f"original file into {target.parent}."
    )


def _complete(url: str, part: Path, offset: int, size: int, md5: str, progress: Progress | None) -> None:
    """Append what follows `offset` to `part`. If that fails without a new byte, ask for the whole file."""
    try:
        with part.open("r+b") as file:
            for position, block in _receive(url, offset, size):
                if position == 0:
                    file.truncate(0)
                file.seek(position)
                file.write(block)
                if progress is not None:
                    progress(min(position + len(block), size), size)
        if checksum(part) != md5:
            os.truncate(part, 0)
            raise _MirrorFailed("wrong checksum")
    except _MirrorFailed:
        if offset == 0 or part.stat().st_size > offset:
            raise
        _complete(url, part, 0, size, md5, progress)


def _open(request: Request) -> Any:
    """Return the response, if all headers come in time; urlopen limits only the time between two bytes."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(urlopen(request, timeout=TIMEOUT_SECONDS))
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    if not wait([answer], 2 * TIMEOUT_SECONDS).done:
        raise _MirrorFailed(f"no complete answer in {2 * TIMEOUT_SECONDS:g} s")
    return answer.result()


def _receive(url: str, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the file in blocks with their positions, from `offset` on, or from 0 if the server cannot resume."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise _MirrorFailed("not an http or https address")
    headers = {"User-Agent": "glocal", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        with _open(Request(url, headers=headers)) as response:
            position = offset if response.status == 206 else 0
            length = response.headers.get("Content-Length", "")
            if length.isdecimal() and length != str(size - position):
                raise _MirrorFailed(f"offers {length[:20]} bytes instead of {size - position}")
            yield position, b""
            received = 0
            # One byte more than the file has, to notice a server that sends too much.
            started = time.monotonic()
            while block := response.read1(min(BLOCK_BYTES, size + 1 - position)):
                received, seconds = received + len(block), time.monotonic() - started
                if seconds > TIMEOUT_SECONDS and received < seconds * MIN_BYTES_PER_SECOND:
                    raise _MirrorFailed(f"sent {received} bytes in {seconds:.0f} s")
                yield position, block
                position += len(block)
    except HTTPError as error:
        error.close()
        raise _MirrorFailed(f"HTTP {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        inner = error.reason if isinstance(error, URLError) else error
        raise _MirrorFailed(getattr(inner, "strerror", None) or " ".join(str(inner).split())) from error
    if position < size:
        raise _MirrorFailed(f"stopped after {position} of {size} bytes")
