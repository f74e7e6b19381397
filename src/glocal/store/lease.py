"""Leases: which process works in a folder, on any file system that several machines share.

Every attempt to work in a folder is a numbered directory in it: 0001, 0002, ... The last one holds the lease. `mkdir`
succeeds for one process only, on NFS too, so no two processes hold the same number. The holder rewrites the file
`lease.json` in its directory every few seconds. A contender makes the next directory once

- the holder has released its lease, or
- the file has not changed for as many seconds of the contender's own clock as it promises, or
- the holder was a process of this machine and has ended.

The clocks of two machines are never compared. A process that was stopped and wakes up after its lease expired is fenced
off: an attempt writes to its own directory only, no other attempt does, and `Lease.check` raises `LeaseLost`.

(filelock's SoftFileLease takes an expired lease over by exchanging two names, which NFS refuses.)
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

EXPIRY_SECONDS = 60.0
"""A lease expires when its holder has written no heartbeat for this long."""
HEARTBEATS_PER_EXPIRY = 6
"""Heartbeats that a holder writes in this time."""


class LeaseLost(Exception):
    """Another process has taken over the folder."""


class LeaseObserver:
    """What a contender has seen of other processes' leases, and since when it has not changed."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[bytes, float]] = {}

    def look(self, folder: Path) -> Seen:
        """Return the last attempt at a folder."""
        number = _last_attempt(folder)
        if number == 0:
            return NO_ATTEMPT
        path, content = attempt_path(folder, number) / "lease.json", b""
        with suppress(FileNotFoundError):
            content = path.read_bytes()
        try:
            about: dict[str, Any] = json.loads(content)
            expiry = float(about["expiry"])
        except (ValueError, KeyError, TypeError):  # created or rewritten at this moment
            about, expiry = {}, EXPIRY_SECONDS
        seen, since = self._seen.get(path, (None, 0.0))
        if seen != content:
            since = time.monotonic()
            self._seen[path] = content, since
        free = about.get("released") or _has_ended(about) or time.monotonic() - since > expiry
        return Seen(number, about, held=not free)


class Seen(NamedTuple):
    """The last attempt at a folder: its number, 0 if there is none; what it says about itself; whether it holds on."""

    number: int
    about: dict[str, Any]
    held: bool


NO_ATTEMPT = Seen(0, {}, held=False)


class Lease:
    """The lease of a folder, held until `release` or until another process takes it after its expiry.

    path: the attempt's own directory, the only place to write to.
    about: what others may read: the machine, the process, since when, and what `note` adds.
    """

    def __init__(self, folder: Path, number: int, expiry: float) -> None:
        self.folder, self.number, self.path = folder, number, attempt_path(folder, number)
        self.about: dict[str, Any] = {"expiry": expiry, "since": datetime.now(UTC).isoformat(timespec="seconds")}
        self.about |= {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}
        self.about |= {"start": _start_time(os.getpid()), "beat": 0}
        self._file = (self.path / "lease.json").open("xb", buffering=0)
        self._lock, self._released = threading.Lock(), threading.Event()
        self._beat()
        threading.Thread(target=self._keep_beating, args=(expiry / HEARTBEATS_PER_EXPIRY,), daemon=True).start()

    @classmethod
    def take(cls, folder: Path, watch: LeaseObserver, expiry: float = EXPIRY_SECONDS) -> Lease | None:
        """Take the lease of a folder, or return None if another process holds it."""
        last = watch.look(folder)
        if last.held:
            return None
        number = last.number + 1  # after the one that was seen free: a later one may not be
        try:
            attempt_path(folder, number).mkdir()
            return cls(folder, number, expiry)
        except (FileExistsError, FileNotFoundError):  # another process was faster, or removed the folder
            return None

    def check(self) -> None:
        """Raise LeaseLost if another process has taken the folder, or removed it."""
        try:
            same_file = os.path.samestat(os.fstat(self._file.fileno()), (self.path / "lease.json").stat())
        except (FileNotFoundError, ValueError):
            same_file = False
        if not same_file or _last_attempt(self.folder) != self.number:
            raise LeaseLost(f"another process has taken over '{self.folder}'.")

    def note(self, **about: Any) -> None:
        """Tell others about the progress."""
        self.about |= about
        self._beat()

    def release(self, **about: Any) -> None:
        """Give the lease back, and tell others why."""
        if not self._released.is_set():
            self._released.set()
            self.note(**about, released=True)
            with self._lock:
                self._file.close()

    def _keep_beating(self, seconds: float) -> None:
        while not self._released.wait(seconds):
            self._beat()

    def _beat(self) -> None:
        # In place: another machine that opens a file again sees what was written, but may remember a replaced name.
        # What cannot be written now may be the next time; if not, the lease expires.
        with self._lock, suppress(OSError, ValueError):
            self.about["beat"] += 1
            content = json.dumps(self.about).encode()
            os.pwrite(self._file.fileno(), content, 0)
            os.ftruncate(self._file.fileno(), len(content))
            os.fsync(self._file.fileno())


def attempt_path(folder: Path, number: int) -> Path:
    """Return the directory of an attempt."""
    return folder / f"{number:04}"


def was_released(attempt: Path) -> bool:
    """Return whether the holder of an attempt gave its lease back; one that was killed did not."""
    with suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((attempt / "lease.json").read_bytes()).get("released"))
    return False


def _last_attempt(folder: Path) -> int:
    """Return the number of the last attempt, or 0 without any."""
    with suppress(FileNotFoundError):
        return max((int(name) for name in os.listdir(folder) if name.isdecimal()), default=0)
    return 0


def _has_ended(about: dict[str, Any]) -> bool:
    """Return whether a process is known to have ended: one of this machine, as far as /proc tells."""
    same_machine = about.get("machine") == _machine() and bool(about.get("start"))
    return same_machine and _start_time(about["pid"]) != about["start"]


def _machine() -> str:
    """Identify this machine since it was started, and its numbering of processes."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _start_time(pid: int) -> str:
    """Return when a process of this machine was started, or '' if there is none or no /proc."""
    with suppress(OSError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
