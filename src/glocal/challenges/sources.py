"""Where data sets come from: their files, their checksums, the folders they are looked for in, their mirrors.

A further data set is one more `Source` in `SOURCES`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

from glocal.challenges.checksum import md5_of, sha256_of
from glocal.challenges.download import Progress, download
from glocal.challenges.unpack import unpack
from glocal.errors import GlocalError, unknown

State = Literal["ready", "missing", "damaged"]


@dataclass(frozen=True)
class Form:
    """One form in which a file may lie on disk: its name, its size in bytes, the MD5 and maybe SHA-256 of its bytes."""

    name: str
    bytes: int
    md5: str
    sha256: str | None = None


def _fingerprint(forms: Iterable[Form]) -> str:
    lines = "".join(f"{form.name} {form.md5}\n" for form in forms)
    return "sha256:" + sha256(lines.encode()).hexdigest()


@dataclass(frozen=True)
class Part:
    """A smaller file that holds the first `classes` classes of the original, taken where the original is not."""

    form: Form
    classes: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its checksum: other data than the whole."""
        return _fingerprint([self.form])


@dataclass(frozen=True)
class SourceFile:
    """A file as its publishers offer it, the other forms, such as unzipped, that hold the same content, and parts."""

    original: Form
    others: tuple[Form, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        return self.original.name

    @property
    def forms(self) -> tuple[Form, ...]:
        return (self.original, *self.others)


@dataclass(frozen=True)
class Source:
    """A data set's files. Within each data folder they are looked for in `folders`; `fetch` puts them into `home`.

    archive: a tar file in which the publishers offer them together, each as `home`/NAME.
    """

    name: str
    title: str
    home: str
    folders: tuple[str, ...]
    mirrors: tuple[str, ...]
    files: tuple[SourceFile, ...]
    archive: Form | None = None

    @property
    def bytes(self) -> int:
        """The size of all files as their publishers offer them."""
        return self.archive.bytes if self.archive else sum(file.original.bytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the publishers' checksums: the same wherever and in whichever form the files lie."""
        return _fingerprint(file.original for file in self.files)

    def part_at(self, path: Path) -> Part | None:
        """The part that the found file is, or None if it is whole."""
        return next((part for file in self.files for part in file.parts if part.form.name == path.name), None)


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


def _plain(name: str, size: int, digest: str, sha256_digest: str) -> SourceFile:
    return SourceFile(Form(name, size, digest, sha256_digest))


CIFAR10 = Source(
    name="cifar10",
    title="CIFAR-10: 50,000 + 10,000 photographs in ten classes, 32x32",
    home="cifar-10-batches-py",
    folders=("", "cifar-10-batches-py", "cifar10", "cifar10/cifar-10-batches-py"),
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    archive=Form("cifar-10-python.tar.gz", 170498071, "c58f30108f718f92721af3b95e74349a"),
    files=(
        _plain(
            "data_batch_1",
            31035704,
            "c99cafc152244af753f735de768cd75f",
            "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
        ),
        _plain(
            "data_batch_2",
            31035320,
            "d4bba439e000b95fd0a9bffe97cbabec",
            "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
        ),
        _plain(
            "data_batch_3",
            31035999,
            "54ebc095f3ab1f0389bbae665268c751",
            "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
        ),
        _plain(
            "data_batch_4",
            31035696,
            "634d18415352ddfa80567beed471001a",
            "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
        ),
        _plain(
            "data_batch_5",
            31035623,
            "482c414d41f54cd18b22e5b47cb7c3cb",
            "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
        ),
        _plain(
            "test_batch",
            31035526,
            "40351d587109b95175f43aff81a1287e",
            "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
        ),
    ),
)

TINYIMAGENET = Source(
    name="tinyimagenet",
    title="Tiny-ImageNet: 100,000 + 10,000 photographs in 200 classes, 64x64",
    home="tiny-imagenet",
    folders=("", "tiny-imagenet", "tinyimagenet"),
    mirrors=("https://cs231n.stanford.edu/", "http://cs231n.stanford.edu/"),
    files=(
        SourceFile(
            Form("tiny-imagenet-200.zip", 248100043, "90528d7ca1a48142e341f4ef8d21d0de"),
            parts=(
                Part(
                    Form(
                        "tiny-imagenet-40.zip",
                        19049702,
                        "c8ddd4cdbf29b0cf67e7da60885e11a1",
                        "86886f0f8aaa015f08288b5b892f716966e56970f194f0b67699d41df1366d0d",
                    ),
                    classes=40,
                ),
            ),
        ),
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in (MNIST, CIFAR10, TINYIMAGENET)}


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


def cache_folder() -> Path:
    """Where what is made from the files is kept."""
    return data_folders()[-1]


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, modified_ns: int) -> str:
    """MD5 of a file's bytes; size and time are part of the key, so an unchanged file is read once per process."""
    return md5_of(path)


@lru_cache(maxsize=1024)
def _strong_digest(path: Path, size: int, modified_ns: int) -> str:
    return sha256_of(path)


def _fault(path: Path, form: Form) -> str | None:
    """What is wrong with this copy of the file, or None."""
    try:
        stat = path.stat()
        if stat.st_size != form.bytes:
            return f"{path} has {stat.st_size} bytes instead of {form.bytes}"
        if _digest(path, stat.st_size, stat.st_mtime_ns) != form.md5:
            return f"{path} has the wrong checksum"
        if form.sha256 and _strong_digest(path, stat.st_size, stat.st_mtime_ns) != form.sha256:
            return f"{path} has the wrong checksum"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


@dataclass(frozen=True)
class _Survey:
    """What a search found: good files by name, the names that have none, and every bad copy met on the way.

    in_part: names that have a part of the file only. archive: a good archive of all files, if some are absent.
    """

    found: dict[str, Path]
    absent: tuple[str, ...]
    faults: tuple[str, ...]
    in_part: tuple[str, ...]
    archive: Path | None


def _search(places: Sequence[Path], forms: Sequence[Form]) -> tuple[Path | None, list[str]]:
    """The first good copy in any of the forms, and the faults of the copies met before it."""
    faults: list[str] = []
    for path, form in ((place / form.name, form) for place in places for form in forms):
        if not os.path.isfile(path):
            continue
        fault = _fault(path, form)
        if fault is None:
            return Path(os.path.abspath(path)), faults
        faults.append(fault)
    return None, faults


def _survey(source: Source, data: str | Path | None) -> _Survey:
    found: dict[str, Path] = {}
    faults: list[str] = []
    in_part: list[str] = []
    archive = None
    places = [root / folder for root in data_folders(data) for folder in source.folders]
    for file in source.files:
        path, met = _search(places, file.forms)
        if path is None and not met and file.parts:
            # Not where a copy of the whole is damaged: whoever has it expects all of it to be used.
            path, met = _search(places, [part.form for part in file.parts])
            in_part += [file.name] if path else []
        if path is None:
            faults += met
        else:
            found[file.name] = path
    absent = tuple(file.name for file in source.files if file.name not in found)
    if absent and source.archive:
        archive, met = _search(places, [source.archive])
        faults += met
    return _Survey(found, absent, tuple(faults), tuple(in_part), archive)


def _unpack(source: Source, archive: Path, folder: Path) -> None:
    originals = [file.original for file in source.files]
    unpack(archive, {f"{source.home}/{form.name}": (folder / form.name, form.bytes, form.md5) for form in originals})


def _resolve(source: Source | str) -> Source:
    return source if isinstance(source, Source) else source_named(source)


def locate(source: Source | str, data: str | Path | None = None) -> dict[str, Path]:
    """The verified path of every file of the source, by its published name; an error if one is missing or damaged.

    Every copy counts only if its checksum is right, so which of several folders a file comes from never matters. If
    there is only the archive of the files, it is unpacked into the user's cache.
    """
    source = _resolve(source)
    survey = _survey(source, data)
    if survey.archive:
        _unpack(source, survey.archive, cache_folder() / source.home)
        survey = _survey(source, data)
    if not survey.absent:
        return survey.found
    searched = ", ".join(f"{folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in data_folders(data))
    damage = f"; damaged: {', '.join(survey.faults)}" if survey.faults else ""
    files = ", ".join(survey.absent)
    packed = f" or {source.archive.name}" if source.archive else ""
    home = data_folders(data)[0] / source.home
    raise GlocalError(
        f"{source.name} is not complete: no good {files}{damage}; searched: {searched}. "
        f"Run: glocal data fetch {source.name}, put the original files{packed} into {home}, "
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
        if survey.archive:
            where, size = str(survey.archive.parent), survey.archive.stat().st_size
            note = f"{source.title}; in {survey.archive.name}, unpacked when first used"
        elif survey.faults:
            state, note = "damaged", "; ".join(survey.faults)
        elif survey.absent:
            state, note = "missing", f"missing {', '.join(survey.absent)}; run: glocal data fetch {source.name}"
        else:
            size = sum(path.stat().st_size for path in survey.found.values())
            for path in survey.found.values():
                if part := source.part_at(path):
                    whole = f"all of it: glocal data fetch {source.name}"
                    note = f"{source.title}; of these the first {part.classes} classes, in {path.name}; {whole}"
        records.append(SourceStatus(source.name, state, where, size, note))
    return records


def fetch(
    source_name: str,
    data: str | Path | None = None,
    mirrors: Sequence[str] | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> dict[str, Path]:
    """Download what is not already there into the first data folder, unpack it, and return where every file is.

    `progress(done, total)` counts the bytes of all files to fetch together; `timeout` is in seconds of silence.
    """
    source = source_named(source_name)
    survey = _survey(source, data)
    lacking = {*survey.absent, *survey.in_part}
    folder = data_folders(data)[0] / source.home
    wanted = [file.original for file in source.files if file.name in lacking]
    if source.archive and wanted:
        wanted = [] if survey.archive else [source.archive]
    total = sum(form.bytes for form in wanted)
    before = 0
    for form in wanted:

        def report(done: int, _: int | None, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        urls = [mirror.rstrip("/") + "/" + form.name for mirror in (source.mirrors if mirrors is None else mirrors)]
        download(urls, folder / form.name, size=form.bytes, md5_hex=form.md5, progress=report, timeout=timeout)
        before += form.bytes
    if source.archive and wanted:
        _unpack(source, folder / source.archive.name, folder)
        (folder / source.archive.name).unlink()
    elif survey.archive:
        _unpack(source, survey.archive, folder)
    return locate(source, data)
