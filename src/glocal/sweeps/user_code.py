"""Load users' classes and functions from their files: `path.py:Name`."""

from __future__ import annotations

import functools
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
    """Return whether a name points into a file rather than to something built in."""
    return ".py:" in text or text.endswith(".py")


def load(spec: str, kind: str, with_neighbours: bool = False) -> tuple[Any, str]:
    """Load an object from a file.

    Args:
        spec: path.py:Name.
        kind: what is loaded, for error messages.
        with_neighbours: let the file import modules in its own folder, as a script can. Not for what identifies a
            run: its hash covers one file.

    Returns:
        The object, and the hash of its file.
    """
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise GlocalError(f"'{spec}' names a file but no {kind} in it. Write path.py:Name.")
    path = Path(location).expanduser()
    if not path.is_file():
        raise GlocalError(f"there is no file '{location}' to load the {kind} '{name}' from.")
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()[:16]
    if with_neighbours and str(path.absolute().parent) not in sys.path:
        sys.path.append(str(path.absolute().parent))
    module = _module(path, digest)
    if not hasattr(module, name):
        allowed = [
            k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        raise unknown(f"{kind} in {location}:", name, allowed)
    return getattr(module, name), digest


def call(make: Callable[[], Any], spec: str) -> Any:
    """Call a user's function; its exception becomes an error of one line."""
    try:
        return make()
    except GlocalError:
        raise
    except Exception as error:
        raise GlocalError(f"'{spec}' failed: {_where(error, Path(spec.rpartition(':')[0]))}") from error


def source_hash(target: Any) -> str:
    """Hash the source of a user's class or function, so that runs of an edited one have another name.

    A class is hashed with its bases, a partial function with its arguments.
    """
    if isinstance(target, functools.partial):
        text = f"{source_hash(target.func)} {target.args!r} {sorted(target.keywords.items())!r}"
    else:
        parts = [c for c in inspect.getmro(target) if _is_users(c)] if isinstance(target, type) else [target]
        text = "".join(_source(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_users(kind: type) -> bool:
    return kind.__module__ != "builtins" and not kind.__module__.startswith("glocal.")


def _source(target: Any) -> str:
    try:
        return inspect.getsource(target)
    except (OSError, TypeError):
        name = getattr(target, "__qualname__", type(target).__name__)
        raise GlocalError(
            f"the source of '{name}' cannot be read, but runs are identified by it: put it in a file."
        ) from None


def _where(error: BaseException, path: Path) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
    line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else "?")
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"line {line}: {reason}"


def _module(path: Path, digest: str) -> Any:
    name = f"glocal_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = ""
        if missing and (path.parent / f"{missing}.py").is_file():
            hint = f". A run is identified by one file: put {missing}.py into it, or install {missing} as a package."
        raise GlocalError(f"'{path}' cannot be loaded: {_where(error, path)}{hint}") from error
    return module
