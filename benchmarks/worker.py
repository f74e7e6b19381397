"""Run each contender in its own process, which answers requests with one line of JSON each.

Separate processes isolate environments and library settings; long-lived ones make it cheap to alternate between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Measure = Callable[[], float]


class WorkerError(Exception):
    """A worker did not start or stopped answering; the message is the last line that it wrote."""


class Worker:
    """A module of this package, run by the given Python interpreter, that serves measurements."""

    def __init__(self, python: Path, module: str, *arguments: str) -> None:
        self.name = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        # `import glocal` sets MKL_CBWR for this process and its children; a worker that imports glocal sets it again.
        environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"}
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", "-m", f"benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.versions: dict[str, str] = self._read()["versions"]

    def measure(self, name: str) -> float:
        """Request a measurement and wait for its value."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"measure": name}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError(self._last_line()) from None
        return self._read()["value"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_line())
        return json.loads(line)

    def _last_line(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        return last_line(self._log.read()) or f"{self.name} exited with status {status}"

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if kind is not None:
            self._process.terminate()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def last_line(text: str) -> str:
    """Return the last line that is not blank, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def run_command(command: list[str]) -> None:
    """Run an installation command; raise WorkerError with its last line if it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise WorkerError(str(error)) from error
    if process.returncode:
        message = last_line(process.stdout + process.stderr)
        raise WorkerError(message or f"{command[0]} exited with status {process.returncode}")


def serve(versions: Mapping[str, str], measurements: Mapping[str, Measure]) -> None:
    """Answer requests of a `Worker` until stdin is closed. Output of libraries goes to stderr."""
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr

    def send(**message: Any) -> None:
        print(json.dumps(message), file=stdout, flush=True)

    send(versions=dict(versions))
    for line in sys.stdin:
        send(value=measurements[json.loads(line)["measure"]]())


def ms_per_step(epoch: Callable[[], int], min_seconds: float) -> float:
    """Repeat an epoch, which returns its number of model-steps, for `min_seconds`; return milliseconds per step."""
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < min_seconds:
        steps += epoch()
    return 1000 * elapsed / steps
