"""Fetching one file from the first mirror that can give it whole.

Bytes go to `NAME.part`, which survives a broken connection: the next mirror, or the next try, asks for the rest alone.
The finished part is renamed into place only when its checksum is right, so a file under its own name is always whole.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from glocal.challenges.checksum import md5_of
from glocal.challenges.disk import writing
from glocal.errors import GlocalError

Progress = Callable[[int, int | None], None]
BLOCK = 1 << 16


class _MirrorFailed(Exception):
    """This mirror cannot give the file; the next one may."""


class _CannotResume(_MirrorFailed):
    """This mirror does not continue from where we are; it may still give the file from its start."""


@contextmanager
def _network() -> Iterator[None]:
    """Whatever goes wrong on the wire is the mirror's failure, told in a few words."""
    try:
        yield
    except HTTPError as error:
        error.close()
        raise (_CannotResume if error.code == 416 else _MirrorFailed)(f"HTTP {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        inner = error.reason if isinstance(error, URLError) else error
        if isinstance(inner, TimeoutError):
            reason = "timed out"
        elif isinstance(inner, ConnectionRefusedError):
            reason = "connection refused"
        elif isinstance(inner, socket.gaierror):
            reason = "host not found"
        else:
            reason = " ".join(str(inner).split()) or type(inner).__name__
        raise _MirrorFailed(reason) from error


def _open(url: str, asked: int, timeout: float) -> http.client.HTTPResponse:
    if urlsplit(url).scheme not in ("http", "https"):
        raise _MirrorFailed("not an http or https address")
    headers = {"User-Agent": "glocal", "Accept-Encoding": "identity"}
    if asked:
        headers["Range"] = f"bytes={asked}-"
    response: http.client.HTTPResponse = urlopen(Request(url, headers=headers), timeout=timeout)
    return response


def _start(response: http.client.HTTPResponse, asked: int, size: int) -> int:
    """The position of the answer's first byte: `asked` if the server sends the rest, 0 if it sends the whole file."""
    if response.status == 206:
        given = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", given.strip())
        if match is None or int(match[1]) != asked:
            raise _CannotResume(f"was asked for the bytes from {asked} and answered '{given}'")
        start, offered = asked, match[2]
    elif response.status == 200:
        start, offered = 0, response.headers.get("Content-Length", "")
    else:
        raise _MirrorFailed(f"HTTP {response.status}")
    if offered.isdecimal() and int(offered) != size:
        raise _MirrorFailed(f"offers {offered} bytes instead of {size}")
    return start


def _some(response: http.client.HTTPResponse, limit: int) -> bytes:
    """What has arrived, up to `limit` bytes; nothing at the end, come it early or not."""
    try:
        return response.read1(limit)
    except http.client.IncompleteRead as cut:
        return cut.partial


def _receive(url: str, part: Path, asked: int, size: int, progress: Progress, timeout: float) -> None:
    """Ask one mirror once for the bytes from `asked` on, and keep what it gives, even if it stops early."""
    with _network():
        response = _open(url, asked, timeout)
    with response:
        done = _start(response, asked, size)
        with writing(part):
            file = part.open("r+b" if done else "wb")
            file.seek(done)
        with file:
            progress(done, size)
            while True:
                with _network():
                    # One byte more than the file has unmasks a server that would send too much.
                    block = _some(response, min(BLOCK, size + 1 - done))
                if not block:
                    break
                with writing(part):
                    file.write(block)
                    file.flush()
                done += len(block)
                progress(min(done, size), size)
    if done < size:
        raise _MirrorFailed(f"stopped after {done} of {size} bytes")


def _obtain(url: str, part: Path, size: int, md5_hex: str, progress: Progress, timeout: float) -> None:
    """Complete `part` from one mirror: the rest if there is a start and both agree, otherwise all of it."""
    asked = part.stat().st_size if part.exists() else 0
    if asked:
        try:
            _receive(url, part, asked, size, progress, timeout)
            if md5_of(part) == md5_hex:
                return
        except _CannotResume:
            pass
        # The start or the rest is wrong, and nothing tells which.
        part.unlink()
    _receive(url, part, 0, size, progress, timeout)
    if md5_of(part) != md5_hex:
        part.unlink()
        raise _MirrorFailed("wrong checksum")


def download(
    urls: Sequence[str],
    target: Path,
    *,
    size: int,
    md5_hex: str,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> None:
    """Put the file with this size and checksum at `target`, from the first of `urls` that can give it."""
    part = target.with_name(target.name + ".part")
    report: Progress = progress or (lambda done, total: None)
    whole = False
    with writing(part):
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab"):
            pass
        if part.stat().st_size >= size:
            whole = md5_of(part) == md5_hex
            if not whole:
                part.unlink()
    failures = []
    for url in () if whole else urls:
        try:
            _obtain(url, part, size, md5_hex, report, timeout)
        except _MirrorFailed as failure:
            failures.append(f"{urlsplit(url).netloc or url}: {failure}")
        else:
            whole = True
            break
    with writing(target):
        if whole:
            os.replace(part, target)
            return
        if part.exists() and part.stat().st_size == 0:
            part.unlink()
    tried = "; ".join(failures) or "no mirror was given"
    raise GlocalError(
        f"could not fetch {target.name} ({tried}); try again, or put the original file into {target.parent} yourself."
    )
