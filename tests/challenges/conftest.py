"""Shared fixtures: private data folders, the real data sets in $GLOCAL_DATA, and a mirror with faults."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from glocal.challenges import download
from glocal.challenges.download import Source, SourceFile

REAL_DATA = os.environ.get("GLOCAL_DATA")


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tests away from the user's data and cache."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.delenv("GLOCAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("no_proxy", "*")
    return cache / "glocal"


def folder_with(file: str) -> Path:
    """Return the data folder with the real file, or skip the test."""
    if REAL_DATA and (Path(REAL_DATA) / file).is_file():
        return Path(REAL_DATA).resolve()
    pytest.skip(f"{file} is not in $GLOCAL_DATA")


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """A folder with the complete MNIST in `mnist/`."""
    return folder_with("mnist/train-images-idx3-ubyte.gz")


@pytest.fixture(scope="session")
def cifar_folder() -> Path:
    """A folder with the complete CIFAR-10 in `cifar-10-batches-py/`."""
    return folder_with("cifar-10-batches-py/data_batch_1")


@pytest.fixture(scope="session")
def tinyimagenet_folder() -> Path:
    """A folder with the first 40 classes of Tiny-ImageNet."""
    return folder_with("tiny-imagenet-40.zip")


@pytest.fixture
def only_source(monkeypatch: pytest.MonkeyPatch) -> Callable[[Source], None]:
    """Replace the registered data sets by a single one."""

    def replace(source: Source) -> None:
        for name in list(download.SOURCES):
            monkeypatch.delitem(download.SOURCES, name)
        monkeypatch.setitem(download.SOURCES, source.name, source)

    return replace


def idx_bytes(array: np.ndarray) -> bytes:
    """Encode an array of bytes as an idx file, as the format defines it."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@dataclass
class TinyMnist:
    """A small replacement of MNIST with the same file names."""

    source: Source
    contents: dict[str, bytes]
    arrays: dict[str, np.ndarray]

    def write(self, folder: Path, unzipped: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents.items():
            if unzipped:
                (folder / name.removesuffix(".gz")).write_bytes(gzip.decompress(content))
            else:
                (folder / name).write_bytes(content)


@pytest.fixture
def tiny_mnist(only_source: Callable[[Source], None]) -> TinyMnist:
    random = np.random.default_rng(0)
    arrays, contents, files = {}, {}, []
    for part, count in (("train", 60), ("t10k", 30)):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8) % 10
    for name, array in arrays.items():
        plain = idx_bytes(array)
        zipped = gzip.compress(plain, mtime=0)
        contents[f"{name}.gz"] = zipped
        alternative = SourceFile(name, len(plain), hashlib.md5(plain).hexdigest())
        md5 = hashlib.md5(zipped).hexdigest()
        files.append(SourceFile(f"{name}.gz", len(zipped), md5, alternatives=(alternative,)))
    source = Source("mnist", "a tiny MNIST", "mnist", ("", "mnist", "MNIST/raw"), (), tuple(files))
    only_source(source)
    return TinyMnist(source, contents, arrays)


@dataclass
class Mirror:
    """A local web server that serves `contents`, possibly with a fault, and records requests and bytes sent.

    Faults: 'cut' closes after `cut_after` bytes of a file and 'stall' falls silent; 'no-range' answers every range with
    the whole; 'missing' is 404; 'wrong' sends other bytes of the right length; 'page' a short page; 'other-range' a
    range not asked for; 'unsatisfiable' answers every range with 416; 'endless' never says or keeps its length;
    'silent' never answers; 'drip' sends a byte now and then, 'drip-headers' a byte of a header; 'long-length' and
    'longest-length' have absurd lengths.
    """

    contents: dict[str, bytes]
    fault: str | None = None
    cut_after: int = 0
    asked: list[str | None] = field(default_factory=list)
    sent: int = 0
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        content = self.contents.get(request.path.lstrip("/"))
        if self.fault == "silent":
            self.released.wait(10)
            return
        if self.fault == "drip-headers":
            request.send_response(200)
            request.flush_headers()
            with contextlib.suppress(OSError):
                for _ in range(250):
                    request.wfile.write(b"x")
                    self.released.wait(0.02)
            return
        if content is None or self.fault == "missing":
            request.send_error(404)
            return
        if self.fault == "wrong":
            content = bytes(255 - byte for byte in content)
        if self.fault == "page":
            content = b"<html>log in first</html>"
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if wanted and (self.fault == "unsatisfiable" or start >= len(content)):
            request.send_error(416)
            return
        if self.fault in ("no-range", "page"):
            start = 0
        if self.fault == "other-range" and wanted:
            start = 1
        body = content[start:]
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.fault == "endless":
            body = body + bytes(1000)
        elif self.fault == "long-length":
            request.send_header("Content-Length", "9" * 5000)
        elif self.fault == "longest-length":
            request.send_header("Content-Length", "9" * 4300)
        else:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        body = body[: self.cut_after] if self.fault in ("cut", "stall") else body
        # Counted before it is written, for the client may have it before this thread goes on.
        self.sent += len(body)
        if self.fault == "drip":
            with contextlib.suppress(OSError):
                for byte in body[: self.cut_after]:
                    request.wfile.write(bytes([byte]))
                    self.released.wait(0.02)
            return
        request.wfile.write(body)
        if self.fault == "stall":
            self.released.wait(10)


@pytest.fixture
def mirror() -> Iterator[Callable[..., Mirror]]:
    """Start mirrors: `mirror(contents, fault=None, cut_after=0)`."""
    started: list[tuple[ThreadingHTTPServer, threading.Thread, Mirror]] = []

    def start(contents: dict[str, bytes], fault: str | None = None, cut_after: int = 0) -> Mirror:
        mirror_server = Mirror(contents, fault, cut_after)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror_server.answer(self)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        mirror_server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
        thread.start()
        started.append((server, thread, mirror_server))
        return mirror_server

    yield start
    for server, thread, mirror_server in started:
        mirror_server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
