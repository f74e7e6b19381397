"""Find, verify and download the files of the data sets that `sources.toml` describes.

A file counts only if its size and checksum are right, so it does not matter which folder or mirror it comes from.
Downloads resume: bytes go to `NAME.part`, and the next mirror, or the next attempt, asks only for the rest. The part is
renamed when its checksum is right, so a file under its own name is complete. (pooch, the usual library for this, can
neither resume nor use several mirrors, and does not bound the size of what it extracts.)
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import socket
import tarfile
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from glocal.errors import GlocalError, require_known

Progress = Callable[[int, int], None]
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class SourceFile:
    """A file of a data set, identified by its size and checksums.

    alternatives: other files with the same content, such as the decompressed one.
    subsets: smaller files that hold only the first `classes` classes, used where the original is absent.
    """

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
    search: tuple[str, ...]
    mirrors: tuple[str, ...]
    files: tuple[SourceFile, ...]
    archive: SourceFile | None = None

    @property
    def bytes(self) -> int:
        """The size of a complete download."""
        return self.archive.bytes if self.archive else sum(file.bytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the published checksums: the same wherever the files are, compressed or not."""
        return fingerprint(*self.files)

    def subset_at(self, path: Path) -> SourceFile | None:
        """Return the subset that a file found by `locate` is, or None if it is complete."""
        return next((subset for file in self.files for subset in file.subsets if subset.name == path.name), None)


def fingerprint(*files: SourceFile) -> str:
    """Identify data by the names and checksums of their files."""
    lines = "".join(f"{file.name} {file.md5}\n" for file in files)
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def _source(name: str, table: dict[str, Any]) -> Source:
    def file(entry: dict[str, Any]) -> SourceFile:
        nested: dict[str, Any] = {
            key: tuple(map(file, entry[key])) for key in ("alternatives", "subsets") if key in entry
        }
        return SourceFile(**{**entry, **nested})

    lists = {key: tuple(table[key]) for key in ("search", "mirrors")}
    archive = file(table["archive"]) if "archive" in table else None
    files = tuple(map(file, table["files"]))
    return Source(name, table["title"], table["folder"], **lists, files=files, archive=archive)


SOURCES: dict[str, Source] = {
    name: _source(name, table)
    for name, table in tomllib.loads(Path(__file__).with_name("sources.toml").read_text("utf-8")).items()
}


def find_source(name: str) -> Source:
    """Return the source with this name."""
    require_known("data set", name, SOURCES)
    return SOURCES[name]


def data_folders(data: str | Path | None = None) -> list[Path]:
    """Return the folders that are searched, in order: `data`, `$GLOCAL_DATA`, the user's cache."""
    folders = []
    if data is not None:
        if not str(data):
            raise GlocalError("the data folder is an empty string; give a folder, or leave it out.")
        folders.append(Path(data).expanduser())
    if os.environ.get("GLOCAL_DATA"):
        folders.append(Path(os.environ["GLOCAL_DATA"]).expanduser())
    cache = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is invalid and must be ignored.
    root = Path(cache) if cache and Path(cache).is_absolute() else Path("~/.cache").expanduser()
    folders.append(root / "glocal")
    return list(dict.fromkeys(folders))


def cache_folder() -> Path:
    """Return the folder for files that are computed from the data."""
    return data_folders()[-1]


# --- Finding and verifying files --------------------------------------------------------------------------------------


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
        if good and (file.sha256 is None or _cached_checksum(*key, "sha256") == file.sha256):
            return None
        return f"{path} has the wrong checksum"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


@dataclass(frozen=True)
class _Survey:
    """The result of a search: verified paths by published name, names without a good file, and damaged copies.

    archive: a good copy of the archive, if files are missing.
    """

    paths: dict[str, Path]
    missing: list[str]
    faults: list[str]
    archive: Path | None


def _search(folders: Sequence[Path], files: Sequence[SourceFile]) -> tuple[Path | None, list[str]]:
    """Return the first good copy of any of these files, and the faults of the copies before it."""
    faults: list[str] = []
    for folder in folders:
        for file in files:
            path = folder / file.name
            if not os.path.isfile(path):
                continue
            fault = _fault(path, file)
            if fault is None:
                return Path(os.path.abspath(path)), faults
            faults.append(fault)
    return None, faults


def _survey(source: Source, data: str | Path | None) -> _Survey:
    paths: dict[str, Path] = {}
    faults: list[str] = []
    archive = None
    folders = [root / folder for root in data_folders(data) for folder in source.search]
    for file in source.files:
        path, file_faults = _search(folders, (file, *file.alternatives))
        if path is None and not file_faults and file.subsets:
            # A damaged original is reported, and not replaced silently by a subset.
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


def locate(source: Source | str, data: str | Path | None = None) -> dict[str, Path]:
    """Return the verified path of every file of a data set, by its published name.

    Raises an error if a file is missing or damaged. If only the archive is there, it is unpacked into the user's cache.
    """
    source = source if isinstance(source, Source) else find_source(source)
    survey = _survey(source, data)
    if survey.archive:
        _unpack_source(source, survey.archive, cache_folder() / source.folder)
        survey = _survey(source, data)
    if not survey.missing:
        return survey.paths
    searched = ", ".join(f"{folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in data_folders(data))
    damaged = f"; damaged: {', '.join(survey.faults)}" if survey.faults else ""
    archive = f" or {source.archive.name}" if source.archive else ""
    target = data_folders(data)[0] / source.folder
    raise GlocalError(
        f"{source.name} is not complete: no good {', '.join(survey.missing)}{damaged}; searched: {searched}. "
        f"Run: glocal data fetch {source.name}, put the original files{archive} into {target}, "
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
    where = next((str(path.parent) for path in survey.paths.values()), None)
    if survey.archive:
        note = f"{source.title}; in {survey.archive.name}, unpacked when first used"
        return SourceStatus(source.name, "ready", str(survey.archive.parent), survey.archive.stat().st_size, note)
    if survey.faults:
        return SourceStatus(source.name, "damaged", where, source.bytes, "; ".join(survey.faults))
    if survey.missing:
        note = f"missing {', '.join(survey.missing)}; run: glocal data fetch {source.name}"
        return SourceStatus(source.name, "missing", where, source.bytes, note)
    note = source.title
    for path in survey.paths.values():
        if subset := source.subset_at(path):
            note += f"; only the first {subset.classes} classes, in {path.name}; all: glocal data fetch {source.name}"
    size = sum(path.stat().st_size for path in survey.paths.values())
    return SourceStatus(source.name, "ready", where, size, note)


def fetch(
    source_name: str,
    data: str | Path | None = None,
    mirrors: Sequence[str] | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> dict[str, Path]:
    """Download the missing files of a data set, unpack them, and return the paths of all its files.

    Args:
        source_name: the data set, such as 'mnist'.
        data: the folder to search first and to download to; by default `$GLOCAL_DATA` or the user's cache.
        mirrors: addresses to use instead of the published ones.
        progress: called as `progress(done, total)` with the bytes of all downloads together.
        timeout: seconds without a byte after which a mirror has failed.
    """
    source = find_source(source_name)
    survey = _survey(source, data)
    folder = data_folders(data)[0] / source.folder
    complete = {name for name, path in survey.paths.items() if source.subset_at(path) is None}
    wanted = [file for file in source.files if file.name not in complete]
    if source.archive and wanted:
        wanted = [] if survey.archive else [source.archive]
    total = sum(file.bytes for file in wanted)
    finished = 0
    for file in wanted:

        def report(done: int, _: int, finished: int = finished) -> None:
            if progress is not None:
                progress(finished + done, total)

        urls = [f"{mirror.rstrip('/')}/{file.name}" for mirror in (source.mirrors if mirrors is None else mirrors)]
        download(urls, folder / file.name, size=file.bytes, md5=file.md5, progress=report, timeout=timeout)
        finished += file.bytes
    if source.archive and wanted:
        _unpack_source(source, folder / source.archive.name, folder)
        (folder / source.archive.name).unlink()
    elif survey.archive:
        _unpack_source(source, survey.archive, folder)
    return locate(source, data)


# --- Writing files ----------------------------------------------------------------------------------------------------


@contextmanager
def disk_errors(path: Path, hint: str = "use another data folder") -> Iterator[None]:
    """Report that a file cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise GlocalError(f"cannot write {path} ({reason}); free some space, or {hint}.") from error


@contextmanager
def atomic_write(target: Path, hint: str = "use another data folder") -> Iterator[Path]:
    """Yield a temporary path beside `target`, and rename it to `target` if the block succeeds.

    Readers see the old file or the new one, and two processes may write the same file.
    """
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with disk_errors(part, hint):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        with disk_errors(target, hint):
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def unpack(archive: Path, members: Mapping[str, tuple[Path, SourceFile]]) -> None:
    """Extract known files from a tar archive that may be damaged or hostile.

    Only regular files that are listed in `members`, by their names in the archive, are extracted, each to the given
    path: no path, link or size in the archive decides what is written where.
    """

    def damaged(reason: object) -> GlocalError:
        text = " ".join(str(reason).split())
        return GlocalError(f"{archive} cannot be unpacked: {text}; replace it with the original file.")

    remaining = dict(members)
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                if member.name not in remaining or not member.isreg():
                    continue
                target, file = remaining.pop(member.name)
                content = tar.extractfile(member)
                if member.size != file.bytes or content is None:
                    raise damaged(f"{member.name} has {member.size} bytes instead of {file.bytes}")
                with atomic_write(target) as part:
                    with disk_errors(part):
                        output = part.open("wb")
                    with output:
                        while block := content.read(BLOCK_BYTES):
                            with disk_errors(part):
                                output.write(block)
                    if checksum(part) != file.md5:
                        raise damaged(f"{member.name} has the wrong checksum")
                if not remaining:
                    return
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise damaged(str(error) or type(error).__name__) from error
    raise damaged(f"it contains no file {', '.join(remaining)}")


def _unpack_source(source: Source, archive: Path, folder: Path) -> None:
    unpack(archive, {f"{source.folder}/{file.name}": (folder / file.name, file) for file in source.files})


# --- Downloading one file ---------------------------------------------------------------------------------------------


class _MirrorFailed(Exception):
    """This mirror cannot provide the file; the next one may."""


class _CannotResume(_MirrorFailed):
    """This mirror cannot continue a partial download; it may still send the whole file."""


def download(
    urls: Sequence[str], target: Path, *, size: int, md5: str, progress: Progress | None = None, timeout: float = 30.0
) -> None:
    """Download a file of known size and checksum to `target`, from the first URL that provides it."""
    part = target.with_name(target.name + ".part")
    report: Progress = progress or (lambda done, total: None)
    complete = False
    with disk_errors(part):
        target.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        if part.stat().st_size >= size:
            complete = checksum(part) == md5
            if not complete:
                part.unlink()
    failures = []
    for url in () if complete else urls:
        try:
            _complete(url, part, size, md5, report, timeout)
        except _MirrorFailed as failure:
            failures.append(f"{urlsplit(url).netloc or url}: {failure}")
        else:
            complete = True
            break
    with disk_errors(target):
        if complete:
            os.replace(part, target)
            return
        if part.exists() and part.stat().st_size == 0:
            part.unlink()
    raise GlocalError(
        f"could not fetch {target.name} ({'; '.join(failures) or 'no mirror was given'}); try again, or put the "
        f"original file into {target.parent}."
    )


def _complete(url: str, part: Path, size: int, md5: str, progress: Progress, timeout: float) -> None:
    """Complete `part` from one mirror: append the rest, or start again if the result is wrong."""
    offset = part.stat().st_size if part.exists() else 0
    if offset:
        try:
            _receive(url, part, offset, size, progress, timeout)
            if checksum(part) == md5:
                return
        except _CannotResume:
            pass
        part.unlink()  # the old bytes or the new ones are wrong, and it is unknown which
    _receive(url, part, 0, size, progress, timeout)
    if checksum(part) != md5:
        part.unlink()
        raise _MirrorFailed("wrong checksum")


def _receive(url: str, part: Path, offset: int, size: int, progress: Progress, timeout: float) -> None:
    """Request the bytes from `offset` on, and keep what arrives even if the connection breaks."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise _MirrorFailed("not an http or https address")
    headers = {"User-Agent": "glocal", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    with _network_errors():
        response: http.client.HTTPResponse = urlopen(Request(url, headers=headers), timeout=timeout)
    with response:
        done = _first_byte(response, offset, size)
        with disk_errors(part):
            file = part.open("r+b" if done else "wb")
            file.seek(done)
        with file:
            progress(done, size)
            while True:
                with _network_errors():
                    try:
                        # One byte more than the file has, to notice a server that sends too much.
                        block = response.read1(min(BLOCK_BYTES, size + 1 - done))
                    except http.client.IncompleteRead as incomplete:
                        block = incomplete.partial
                if not block:
                    break
                with disk_errors(part):
                    file.write(block)
                    file.flush()
                done += len(block)
                progress(min(done, size), size)
    if done < size:
        raise _MirrorFailed(f"stopped after {done} of {size} bytes")


def _first_byte(response: http.client.HTTPResponse, offset: int, size: int) -> int:
    """Return the position of the response's first byte: `offset`, or 0 if the server sends the whole file."""
    if response.status == 206:
        content_range = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range.strip())
        if match is None or int(match[1]) != offset:
            raise _CannotResume(f"was asked for the bytes from {offset} and answered '{content_range}'")
        start, offered = offset, match[2]
    elif response.status == 200:
        start, offered = 0, response.headers.get("Content-Length", "")
    else:
        raise _MirrorFailed(f"HTTP {response.status}")
    if offered.isdecimal() and int(offered) != size:
        raise _MirrorFailed(f"offers {offered} bytes instead of {size}")
    return start


@contextmanager
def _network_errors() -> Iterator[None]:
    """Convert every network error to a failure of the mirror, with a short reason."""
    try:
        yield
    except HTTPError as error:
        error.close()
        raise (_CannotResume if error.code == 416 else _MirrorFailed)(f"HTTP {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        inner = error.reason if isinstance(error, URLError) else error
        names = {
            TimeoutError: "timed out",
            ConnectionRefusedError: "connection refused",
            socket.gaierror: "host not found",
        }
        known = next((name for kind, name in names.items() if isinstance(inner, kind)), None)
        raise _MirrorFailed(known or " ".join(str(inner).split()) or type(inner).__name__) from error
