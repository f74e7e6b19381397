"""What users bring in their own files: `path.py:Name`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glocal.errors import GlocalError, unknown


def is_file_spec(text: str) -> bool:
    """Whether a name points into a file rather than to something built in."""
    return ".py:" in text or text.endswith(".py")


def load(spec: str, kind: str) -> tuple[Any, str]:
    """The object that 'path.py:Name' names, and the hash of the file it came from."""
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise GlocalError(f"'{spec}' names a file but nothing in it. Write it as path.py:Name, with the {kind}'s name.")
    path = Path(location).expanduser()
    if not path.is_file():
        raise GlocalError(f"there is no file '{location}' to load the {kind} '{name}' from.")
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()[:16]
    module = _module(path, digest)
    if not hasattr(module, name):
        allowed = [
            k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        raise unknown(f"{kind} in {location}:", name, allowed)
    return getattr(module, name), digest


def source_hash(thing: Callable[..., Any] | type) -> str:
    """The hash of what a user's class or function was written as, so that an edited one is another one."""
    try:
        text = inspect.getsource(thing)
    except (OSError, TypeError):
        text = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', repr(thing))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _module(path: Path, digest: str) -> Any:
    name = f"glocal_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else "?")
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise GlocalError(f"'{path}' cannot be loaded: line {line}: {reason}") from error
    return module
