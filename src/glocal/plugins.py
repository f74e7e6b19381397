"""What users bring in their own files: `path.py:Name`."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
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
    neighbours = _neighbours(path)
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in (path, *neighbours))).hexdigest()[:16]
    module = _module(path, digest, neighbours)
    if not hasattr(module, name):
        allowed = [
            k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        raise unknown(f"{kind} in {location}:", name, allowed)
    return getattr(module, name), digest


def _neighbours(path: Path) -> dict[Path, str]:
    """The files beside it that it imports, and those that they import, each with its module's name: a run is named by
    all of them. What is installed comes first."""
    folder, waiting = path.absolute().parent, [path]
    found: dict[Path, str] = {}
    while waiting:
        for name in _imported(waiting.pop()):
            files = [folder / f"{name}.py", *sorted((folder / name).glob("**/*.py"))]
            new = [file for file in files if file.is_file() and file not in found and file != path.absolute()]
            if new and not _installed(name, folder):
                found |= dict.fromkeys(new, name)
                waiting += new
    return {file: found[file] for file in sorted(found)}


def _installed(name: str, folder: Path) -> bool:
    """Whether Python would find a module of this name elsewhere than in a folder of a user's file."""
    at = PathFinder.find_spec(name, [p for p in sys.path if p not in FOLDERS and Path(p).absolute() != folder])
    return name in sys.stdlib_module_names or at is not None


def _let_import(folder: Path, names: Iterable[str]) -> None:
    """Let a user's file find its neighbours, as if it were run itself, and as they are now."""
    here = str(folder)
    if here not in sys.path:
        FOLDERS.append(here)
    for loaded in list(sys.modules):
        file = getattr(sys.modules[loaded], "__file__", None)
        if loaded.partition(".")[0] in names and file and any(Path(file).is_relative_to(f) for f in FOLDERS):
            del sys.modules[loaded]
    if here in FOLDERS:
        sys.path[:] = [p for p in sys.path if p not in FOLDERS] + [here, *(f for f in FOLDERS if f != here)]


FOLDERS: list[str] = []
"""Those of users' files that import their neighbours, behind all else that Python looks through."""


def _imported(path: Path) -> list[str]:
    """The modules that a file names in its imports, the first part of each."""
    try:
        parts = list(ast.walk(ast.parse(path.read_bytes())))
    except SyntaxError:
        return []  # told when it is loaded
    plain = [alias.name for part in parts if isinstance(part, ast.Import) for alias in part.names]
    plain += [part.module for part in parts if isinstance(part, ast.ImportFrom) and part.module and not part.level]
    return list(dict.fromkeys(name.partition(".")[0] for name in plain))


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


def _module(path: Path, digest: str, neighbours: Mapping[Path, str]) -> Any:
    name = f"glocal_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if neighbours:
        _let_import(path.absolute().parent, set(neighbours.values()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise GlocalError(f"'{path}' cannot be loaded: {_where(error, path)}") from error
    return module
