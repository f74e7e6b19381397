"""Downloads against a real server with injected faults."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glocal.challenges.download import download
from glocal.errors import GlocalError

CONTENT = np.random.default_rng(1).bytes(200_000)
FILES = {"digits.gz": CONTENT}
MD5 = hashlib.md5(CONTENT).hexdigest()


def get(target: Path, *mirrors: str, timeout: float = 5.0, **more: Any) -> None:
    urls = [f"{mirror}/digits.gz" for mirror in mirrors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glocal.challenges.download.TIMEOUT_SECONDS", timeout)
        download(urls, target, size=len(CONTENT), md5=MD5, **more)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder" / "digits.gz"


def part_of(target: Path) -> Path:
    return target.with_name("digits.gz.part")


def refused() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_download_is_complete_and_progress_counts_its_bytes(target: Path, mirror: Callable) -> None:
    reports: list[tuple[int, int | None]] = []
    get(target, mirror(FILES).url, progress=lambda done, total: reports.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert not part_of(target).exists()
    assert reports[0] == (0, len(CONTENT))
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert reports == sorted(reports)


def test_a_broken_connection_is_resumed_at_the_next_attempt(target: Path, mirror: Callable) -> None:
    server = mirror(FILES, "cut", cut_after=120_000)
    with pytest.raises(GlocalError, match=r"stopped after 120000 of 200000 bytes"):
        get(target, server.url)
    assert not target.exists()
    assert part_of(target).read_bytes() == CONTENT[:120_000]
    server.fault = None
    get(target, server.url)
    assert target.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=120000-"]
    assert server.sent == len(CONTENT), "no byte may be fetched twice"


def test_a_broken_connection_is_resumed_by_the_next_mirror(target: Path, mirror: Callable) -> None:
    first, second = mirror(FILES, "cut", cut_after=70_000), mirror(FILES)
    get(target, first.url, second.url)
    assert target.read_bytes() == CONTENT
    assert second.asked == ["bytes=70000-"]
    assert first.sent + second.sent == len(CONTENT)


def test_a_stalled_connection_keeps_every_received_byte(target: Path, mirror: Callable) -> None:
    first, second = mirror(FILES, "stall", cut_after=90_001), mirror(FILES)
    get(target, first.url, second.url, timeout=0.3)
    assert target.read_bytes() == CONTENT
    assert second.asked == ["bytes=90001-"]


@pytest.mark.parametrize("fault", ["no-range", "unsatisfiable", "other-range"])
def test_a_server_that_cannot_resume_sends_the_whole_file(target: Path, mirror: Callable, fault: str) -> None:
    server = mirror(FILES, fault)
    target.parent.mkdir(parents=True)
    part_of(target).write_bytes(CONTENT[:50_000])
    get(target, server.url)
    assert target.read_bytes() == CONTENT
    assert server.asked[0] == "bytes=50000-"


@pytest.mark.parametrize("start", [bytes(50_000), bytes(200_000), bytes(200_001)], ids=["short", "full", "too long"])
def test_a_partial_file_with_wrong_bytes_is_discarded(target: Path, mirror: Callable, start: bytes) -> None:
    target.parent.mkdir(parents=True)
    part_of(target).write_bytes(start)
    get(target, mirror(FILES).url)
    assert target.read_bytes() == CONTENT


def test_a_complete_partial_file_needs_no_server(target: Path) -> None:
    target.parent.mkdir(parents=True)
    part_of(target).write_bytes(CONTENT)
    get(target, refused())
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "HTTP 404"),
        ("wrong", "wrong checksum"),
        ("page", "offers 25 bytes instead of 200000"),
        ("endless", "wrong checksum"),
        ("silent", "timed out"),
        ("drip-headers", "no complete answer in 0.6 s"),
        ("long-length", "offers 99999"),
        ("longest-length", "offers 99999"),
    ],
)
def test_a_faulty_mirror_is_skipped(target: Path, mirror: Callable, fault: str, message: str) -> None:
    bad = mirror(FILES, fault)
    with pytest.raises(GlocalError, match=message) as raised:
        get(target, bad.url, timeout=0.3)
    assert "\n" not in str(raised.value)
    assert bad.url.removeprefix("http://") in str(raised.value)
    assert str(target.parent) in str(raised.value)
    assert list(target.parent.iterdir()) == [], "nothing of a bad mirror may stay"
    get(target, bad.url, mirror(FILES).url, timeout=0.3)
    assert target.read_bytes() == CONTENT


def test_a_drip_of_bytes_ends(target: Path, mirror: Callable) -> None:
    """Every byte comes in time, and all of them would take days."""
    drip = mirror(FILES, "drip", cut_after=1_000)
    started = time.monotonic()
    get(target, drip.url, mirror(FILES).url, timeout=0.3)
    assert target.read_bytes() == CONTENT
    assert time.monotonic() - started < 5


def test_a_symbolic_link_is_not_followed(target: Path, mirror: Callable, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    target.parent.mkdir(parents=True)
    for link in (part_of(target), target):
        link.symlink_to(tmp_path / "precious")
    get(target, mirror(FILES).url)
    assert target.read_bytes() == CONTENT and not target.is_symlink()
    assert (tmp_path / "precious").read_text() == "precious"


def test_the_error_names_every_mirrors_failure(target: Path, mirror: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        if host == "nowhere.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    gone = refused()
    with pytest.raises(GlocalError) as raised:
        get(target, gone, mirror(FILES, "missing").url, "ftp://somewhere", "http://nowhere.invalid")
    for text in (
        "Connection refused",
        "HTTP 404",
        "not an http or https address",
        "nowhere.invalid: Name or service not known",
    ):
        assert text in str(raised.value)


def test_a_download_without_mirrors_is_an_error(target: Path) -> None:
    with pytest.raises(GlocalError, match="no mirror was given"):
        get(target)


def test_an_unwritable_folder_is_reported_before_any_download(tmp_path: Path, mirror: Callable) -> None:
    (tmp_path / "file").write_text("not a folder")
    server = mirror(FILES)
    with pytest.raises(GlocalError, match=r"cannot write .*Not a directory"):
        get(tmp_path / "file" / "mnist" / "digits.gz", server.url)
    assert server.asked == []


def test_a_failing_progress_callback_is_not_mistaken_for_a_bad_mirror(target: Path, mirror: Callable) -> None:
    def broken(done: int, total: int | None) -> None:
        raise ValueError("the callback's own")

    with pytest.raises(ValueError, match="the callback's own"):
        get(target, mirror(FILES).url, progress=broken)
