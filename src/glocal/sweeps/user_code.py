"""What users bring in their own files: `path.py:Name`."""

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
    """Whether a name points into a file rather than to something built in."""
    return ".py:" in text or text.endswith(".py")


def load(spec: str, kind: str, with_neighbours: bool = False) -> tuple[Any, str]:
    """The object that 'path.py:Name' names, and the hash of the file it came from. With its neighbours, it may import
    what lies beside it, as if it were run itself; but what names a run is one file."""
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise GlocalError(f"'{spec}' names a file but nothing in it. Write it as path.py:Name, with the {kind}'s name.")
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
    """What a user's function returns; its mistake told in one line."""
    try:
        return make()
    except GlocalError:
        raise
    except Exception as error:
        raise GlocalError(f"'{spec}' failed: {_where(error, Path(spec.rpartition(':')[0]))}") from error


def source_hash(thing: Any) -> str:
    """The hash of what a user's class or function was written as, so that an edited one is another one.

    Of a class, with the classes it builds on; of a partial function, with its arguments.
    """
    if isinstance(thing, functools.partial):
        text = f"{source_hash(thing.func)} {thing.args!r} {sorted(thing.keywords.items())!r}"
    else:
        parts = [c for c in inspect.getmro(thing) if _is_users(c)] if isinstance(thing, type) else [thing]
        text = "".join(_source(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_users(kind: type) -> bool:
    return kind.__module__ != "builtins" and not kind.__module__.startswith("glocal.")


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        name = getattr(thing, "__qualname__", type(thing).__name__)
        raise GlocalError(
            f"the source of '{name}' cannot be read, and a run is named by it: put it in a file."
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
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        beside = isinstance(error, ModuleNotFoundError) and error.name and (path.parent / f"{error.name}.py").is_file()
        why = ". It lies beside it, but a run is named by one file: put both in one, or install it." if beside else ""
        raise GlocalError(f"'{path}' cannot be loaded: {_where(error, path)}{why}") from error
    return module
