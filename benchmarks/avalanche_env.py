"""Avalanche's own environment: it pins other libraries than glocal does, and nobody needs it but the benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.process import ROOT

HOME = ROOT / ".venv-avalanche"
TORCH, AVALANCHE = "torch==2.13.0", "avalanche-lib==0.6.0"


class NoEnvironment(Exception):
    """The environment could not be made; the message says why, in a line."""


def python() -> Path:
    """The environment's Python; made first where it is absent."""
    interpreter, finished = HOME / "bin" / "python", HOME / ".installed"
    if not finished.exists() and not _imports(interpreter):
        pip = [str(interpreter), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        _run([sys.executable, "-m", "venv", str(HOME)])
        _run([*pip, TORCH])  # alone and first: what comes with it finds it there and pulls no other build
        _run([*pip, TORCH, AVALANCHE])
    finished.touch()
    return interpreter


def _imports(interpreter: Path) -> bool:
    """Whether an environment somebody made by hand has both libraries."""
    if not interpreter.exists():
        return False
    look = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('avalanche')))"
    return subprocess.run([str(interpreter), "-c", look]).returncode == 0


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NoEnvironment(str(error)) from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NoEnvironment(lines[-1] if lines else f"{command[0]} ended with status {done.returncode}")
