"""The orchestrator's side of a worker: start it, ask it, and know why it died."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class WorkerError(Exception):
    """A worker could not start or stopped answering; the message is the last line it wrote."""


class Worker:
    """A module of this package, run by some Python, that serves measurements."""

    def __init__(self, python: Path, module: str, *arguments: str) -> None:
        self.name = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        # `import glocal` fixes how MKL rounds, for this process and its children; each worker decides for itself.
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

    def measure(self, what: str) -> float:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"measure": what}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        return self._read()["value"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else f"{self.name} ended with status {status}"

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
