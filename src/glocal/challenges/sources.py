"""Where data sets come from: their files, their checksums, the folders they are looked for in, their mirrors.

A further data set is one more `Source` in `SOURCES`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

from glocal.challenges.checksum import md5_of
from glocal.challenges.download import Progress, download
from glocal.errors import GlocalError, unknown

State = Literal["ready", "missing", "damaged"]


@dataclass(frozen=True)
class Form:
    """One form in which a file may lie on disk: its name, its size in bytes and the MD5 of its bytes."""

    name: str
    bytes: int
    md5: str


@dataclass(frozen=True)
class SourceFile:
    """A file as its publishers offer it, and the other forms, such as unzipped, that hold the same content."""

    original: Form
    others: tuple[Form, ...] = ()

    @property
    def name(self) -> str:
        return self.original.name

    @property
    def forms(self) -> tuple[Form, ...]:
        return (self.original, *self.others)


@dataclass(frozen=True)
class Source:
    """A data set's files. Within each data folder they are looked for in `folders`; `fetch` puts them into `home`."""

    name: str
    title: str
    home: str
    folders: tuple[str, ...]
    mirrors: tuple[str, ...]
    files: tuple[SourceFile, ...]

    @property
    def bytes(self) -> int:
        """The size of all files as their publishers offer them."""
        return sum(file.original.bytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the publishers' checksums: the same wherever and in whichever form the files lie."""
        lines = "".join(f"{file.name} {file.original.md5}\n" for file in self.files)
        return "sha256:" + sha256(lines.encode()).hexdigest()


def _zipped(name: str, size: int, digest: str, unzipped_size: int, unzipped_digest: str) -> SourceFile:
    return SourceFile(Form(f"{name}.gz", size, digest), (Form(name, unzipped_size, unzipped_digest),))


MNIST = Source(
    name="mnist",
    title="MNIST: 60,000 + 10,000 handwritten digits, 28x28",
    home="mnist",
    folders=("", "mnist", "MNIST/raw"),
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    files=(
        _zipped(
            "train-images-idx3-ubyte",
            9912422,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            47040016,
            "6bbc9ace898e44ae57da46a324031adb",
        ),
        _zipped(
            "train-labels-idx1-ubyte",
            28881,
            "d53e105ee54ea40749a09fcbcd1e9432",
            60008,
            "a25bea736e30d166cdddb491f175f624",
        ),
        _zipped(
            "t10k-images-idx3-ubyte",
            1648877,
            "9fb629c4189551a2d022fa330f9573f3",
            7840016,
            "2646ac647ad5339dbf082846283269ea",
        ),
        _zipped(
            "t10k-labels-idx1-ubyte",
            4542,
            "ec29112dd5afa0611ce80d1b7f02629c",
            10008,
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in (MNIST,)}


def source_named(name: str) -> Source:
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


def data_folders(data: str | Path | None = None) -> list[Path]:
    """Where files are looked for, first to last: the folder given, `$GLOCAL_DATA`, the user's cache."""
    folders = []
    if data is not None:
        if not str(data):
            raise GlocalError("the data folder given is an empty string; give a folder, or leave it out.")
        folders.append(Path(data).expanduser())
    if os.environ.get("GLOCAL_DATA"):
        folders.append(Path(os.environ["GLOCAL_DATA"]).expanduser())
    cache = os.environ.get("XDG_CACHE_HOME")
    # A relative XDG_CACHE_HOME is invalid by its specification, and to be ignored.
    root = Path(cache) if cache and Path(cache).is_absolute() else Path("~/.cache").expanduser()
    folders.append(root / "glocal")
    return list(dict.fromkeys(folders))


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, modified_ns: int) -> str:
    """MD5 of a file's bytes; size and time are part of the key, so an unchanged file is read once per process."""
    return md5_of(path)


def _fault(path: Path, form: Form) -> str | None:
    """What is wrong with this copy of the file, or None."""
    try:
        stat = path.stat()
        if stat.st_size != form.bytes:
            return f"{path} has {stat.st_size} bytes instead of {form.bytes}"
        if _digest(path, stat.st_size, stat.st_mtime_ns) != form.md5:
            return f"{path} has the wrong checksum"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


@dataclass(frozen=True)
class _Survey:
    """What a search found: good files by name, the names that have none, and every bad copy met on the way."""

    found: dict[str, Path]
    absent: tuple[str, ...]
    faults: tuple[str, ...]


def _survey(source: Source, data: str | Path | None) -> _Survey:
    found: dict[str, Path] = {}
    faults: list[str] = []
    places = [root / folder for root in data_folders(data) for folder in source.folders]
    for file in source.files:
        met: list[str] = []
        for path, form in ((place / form.name, form) for place in places for form in file.forms):
            if not os.path.isfile(path):
                continue
            fault = _fault(path, form)
            if fault is None:
                found[file.name] = Path(os.path.abspath(path))
                break
            met.append(fault)
        else:
            faults += met
    absent = tuple(file.name for file in source.files if file.name not in found)
    return _Survey(found, absent, tuple(faults))


def _resolve(source: Source | str) -> Source:
    return source if isinstance(source, Source) else source_named(source)


def locate(source: Source | str, data: str | Path | None = None) -> dict[str, Path]:
    """The verified path of every file of the source, by its published name; an error if one is missing or damaged.

    Every copy counts only if its checksum is right, so which of several folders a file comes from never matters.
    """
    source = _resolve(source)
    survey = _survey(source, data)
    if not survey.absent:
        return survey.found
    searched = ", ".join(f"{folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in data_folders(data))
    damage = f"; damaged: {', '.join(survey.faults)}" if survey.faults else ""
    files = ", ".join(survey.absent)
    home = data_folders(data)[0] / source.home
    raise GlocalError(
        f"{source.name} is not complete: no good {files}{damage}; searched: {searched}. "
        f"Run: glocal data fetch {source.name}, put the original files into {home}, "
        "or name the folder they are in with GLOCAL_DATA."
    )


@dataclass(frozen=True)
class SourceStatus:
    """How a source stands: `where` its first file was found, the `bytes` its files take on disk or would to fetch."""

    name: str
    state: State
    where: str | None
    bytes: int
    note: str


def status(data: str | Path | None = None) -> list[SourceStatus]:
    """How every source stands on this machine. Never an error: what is missing or damaged is said in the note."""
    records = []
    for source in SOURCES.values():
        survey = _survey(source, data)
        where = next((str(path.parent) for path in survey.found.values()), None)
        size = source.bytes
        state: State = "ready"
        note = source.title
        if survey.faults:
            state, note = "damaged", "; ".join(survey.faults)
        elif survey.absent:
            state, note = "missing", f"missing {', '.join(survey.absent)}; run: glocal data fetch {source.name}"
        else:
            size = sum(path.stat().st_size for path in survey.found.values())
        records.append(SourceStatus(source.name, state, where, size, note))
    return records


def fetch(
    source_name: str,
    data: str | Path | None = None,
    mirrors: Sequence[str] | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> dict[str, Path]:
    """Download what is not already there into the first data folder, and return where every file is.

    `progress(done, total)` counts the bytes of all files to fetch together; `timeout` is in seconds of silence.
    """
    source = source_named(source_name)
    absent = set(_survey(source, data).absent)
    wanted = [file.original for file in source.files if file.name in absent]
    total = sum(form.bytes for form in wanted)
    folder = data_folders(data)[0] / source.home
    before = 0
    for form in wanted:

        def report(done: int, _: int | None, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        urls = [mirror.rstrip("/") + "/" + form.name for mirror in (source.mirrors if mirrors is None else mirrors)]
        download(urls, folder / form.name, size=form.bytes, md5_hex=form.md5, progress=report, timeout=timeout)
        before += form.bytes
    return locate(source, data)
