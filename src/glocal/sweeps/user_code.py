"""A user's code in files, path.py:Name: load it, call it, and report its errors in one line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glocal.algorithms import Algorithm
from glocal.errors import GlocalError, first_line, require, unknown
from glocal.files import report_os_errors, short_hash, user_path
from glocal.optimizers import Optimizer
from glocal.sweeps.source import is_installed

USER_MODULE = "glocal_user_"
"""How the names of modules begin that were loaded from a user's file."""


def is_file_spec(text: str) -> bool:
    """Return whether a name points into a file rather than to something built in."""
    return ".py:" in text or text.endswith(".py")


def load_object(spec: str, kind: str, with_neighbours: bool = False) -> tuple[Any, str]:
    """Load a user's object from path.py:Name; return it and the hash of its file. Errors call it a `kind`.

    An algorithm or optimiser is also found by its `name`, which is what tables and commands call it.

    with_neighbours: let the file import modules in its own folder, as a script can. Not for what identifies a run: its
        hash covers one file.
    """
    path, name, digest = *_user_file(spec, kind), file_hash(spec, kind)
    if with_neighbours and str(path.absolute().parent) not in sys.path:
        sys.path.append(str(path.absolute().parent))
    module = _module(path, digest)
    if hasattr(module, name):
        return getattr(module, name), digest
    objects = {k: v for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__}
    named = {v for v in objects.values() if isinstance(v, type) and issubclass(v, Algorithm | Optimizer)}
    matches = {v for v in named if vars(v).get("name") == name}
    if len(matches) != 1:
        raise unknown(f"{kind} in {path}:", name, objects)
    return matches.pop(), digest


def file_hash(spec: str, kind: str) -> str:
    """Return the hash of the file of path.py:Name, without loading it."""
    path, name = _user_file(spec, kind)
    with report_os_errors(f"load the {kind} '{name}' from", path, "Give another file."):
        return short_hash(path.read_bytes())


def _user_file(spec: str, kind: str) -> tuple[Path, str]:
    location, _, name = spec.rpartition(":")
    require(bool(location and name), f"'{spec}' names a file but no {kind} in it. Write path.py:Name.")
    path = user_path(location)
    require(path.is_file(), f"there is no file '{location}' to load the {kind} '{name}' from.")
    return path, name


def call_user_code(function: Callable[[], Any], spec: str) -> Any:
    """Call a user's function; its exception, or its wish to exit, becomes an error of one line."""
    try:
        return function()
    except GlocalError:
        raise
    except (Exception, SystemExit) as error:
        raise GlocalError(f"'{spec}' failed: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the line in which an error was raised, of the user's code if possible, and the error."""
    frames = user_frames(error) or traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}: "
    return f"{place}{type(error).__name__}: {first_line(error)}"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return those frames of an error's traceback that are the user's code."""
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = zip(traceback.extract_tb(error.__traceback__), modules, strict=True)
    return [frame for frame, module in frames if not is_installed(module)]


def _module(path: Path, digest: str) -> Any:
    name = f"{USER_MODULE}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = ""
        if missing and (path.parent / f"{missing}.py").is_file():
            hint = f". A run is identified by one file: put {missing}.py into it, or install {missing} as a package."
        raise GlocalError(f"'{path}' cannot be loaded: {describe_error(error)}{hint}") from error
    return module
