"""Hash a user's class, function or callable object, so that runs of an edited one have another name.

The hash covers the compiled code, which is what runs (a file may have been edited since it was imported), and what the
code takes from outside: closures, global variables, defaults, class attributes, the user's other functions and classes,
and the state of an object. What is installed counts by its name. Another version of Python compiles code differently
and repeats the runs; a run of path.py:Name is identified by the file instead.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from glocal.errors import GlocalError
from glocal.files import short_hash

PLAIN = {bool, int, float, complex, str, bytes, type(None), type(...), range, slice}
REPRESENTED = (PurePath, np.generic, torch.dtype, torch.device, torch.Size, GenericAlias, UnionType)
"""What `repr` describes completely: objects of exactly the first types, and of subclasses of the second."""
UNBOUND = (type(None), ModuleType)
"""What a function that is no method has for `__self__`."""
DATACLASS_METHODS = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__"}
DATACLASS_METHODS |= {"__lt__", "__le__", "__gt__", "__ge__", "__match_args__", "__dataclass_params__"}
"""Attributes that the decorator derives from the fields."""
READS_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
UNNAMED_READS = {"globals", "eval", "exec"}
"""Functions that read what their code does not name."""
READS_CLOSURE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
BOOKKEEPING = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}
BOOKKEEPING |= {"__static_attributes__", "__annotate__", "__annotate_func__", "_abc_impl", "__abstractmethods__"}


def source_hash(target: Any) -> str:
    """Return the hash of a user's class, function or callable object; it is the same in every process."""
    try:
        return short_hash(_Text(target).text.encode("utf-8", "surrogatepass"))
    except RecursionError:
        name = getattr(target, "__qualname__", type(target).__name__)
        raise GlocalError(f"'{name}' computes with objects that are nested too deeply to name its runs.") from None


class _Text:
    """The text that stands for an object."""

    def __init__(self, target: Any) -> None:
        self.name = getattr(target, "__qualname__", type(target).__name__)
        self.seen: dict[int, Any] = {}  # they are kept alive, so that no id is used twice
        self.text = self.describe(target, self.name)

    def describe(self, value: Any, place: str) -> str:
        """Describe a value, plain data as `repr` does; errors call it `place`."""
        kind = type(value)  # a subclass may have attributes and methods of its own
        if kind in PLAIN or isinstance(value, REPRESENTED) or (isinstance(value, enum.Enum) and _from_library(kind)):
            return repr(value)
        if kind in (list, tuple):
            parts = ", ".join(self.describe(part, place) for part in value)
            return f"[{parts}]" if kind is list else f"({parts}{',' * (len(value) == 1)})"
        if kind in (set, frozenset):  # its order differs between processes
            return f"{{{', '.join(sorted(self.describe(part, place) for part in value))}}}"
        if kind is np.ndarray and value.dtype != object:
            return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            entries = value.to_sparse_coo().coalesce()
            return f"sparse {tuple(value.shape)} {self.describe([entries.indices(), entries.values()], place)}"
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            text = f"tensor {value.dtype} {tuple(value.shape)} {hashlib.sha256(data.tobytes()).hexdigest()}"
            if value.requires_grad != isinstance(value, nn.Parameter):
                text += " trainable" if value.requires_grad else " frozen"
            plain = _from_library(kind) and not vars(value)
            return text if plain else f"{text} {self.describe((kind, vars(value)), place)}"
        if isinstance(value, ModuleType) and is_installed(value.__name__):
            return f"module {value.__name__}"
        bound = not isinstance(getattr(value, "__self__", None), UNBOUND)
        if hasattr(value, "__qualname__") and _from_library(value) and not bound and not inspect.isgenerator(value):
            return f"{getattr(value, '__module__', None)}.{value.__qualname__}{self._closure(value, place)}"
        if id(value) in self.seen:
            return f"#{list(self.seen).index(id(value))}"
        self.seen[id(value)] = value
        if kind in (dict, MappingProxyType):
            items = [f"{self.describe(k, place)}: {self.describe(v, f'{place}[{k!r}]')}" for k, v in value.items()]
            return f"{{{', '.join(items)}}}"
        if isinstance(value, type):
            return self._class(value, place)
        return self._function(value, place) if inspect.isfunction(value) else self._object(value, place)

    def _closure(self, function: Any, place: str) -> str:
        """Describe what an installed function was made from, as far as that can be described."""
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
        if not cells or id(function) in self.seen:
            return ""
        self.seen[id(function)] = function
        try:
            return f" of {self.describe(cells, place)}"
        except GlocalError:
            return ""

    def _object(self, value: Any, place: str) -> str:
        """Describe an object by its class and its state."""
        if isinstance(value, functools.partial):
            return f"partial {self.describe((value.func, value.args, sorted(value.keywords.items())), place)}"
        if isinstance(value, MethodType | BuiltinMethodType):
            function = getattr(value, "__func__", value.__name__)
            return f"{self.describe(function, place)} of {self.describe(value.__self__, place)}"
        if isinstance(value, property):
            return self.describe((value.fget, value.fset), place)
        if isinstance(value, staticmethod | classmethod | functools.cached_property):
            function = value.func if isinstance(value, functools.cached_property) else value.__func__
            return f"{type(value).__name__} {self.describe(function, place)}"
        try:
            reduced = value.__reduce_ex__(4)  # as `copy` and `pickle` take objects apart
        except Exception:
            raise GlocalError(
                f"a run's name must cover what '{self.name}' computes with, but {place} is a {type(value).__name__}: "
                "use numbers, strings, tensors, functions, or objects that are made of these."
            ) from None
        if isinstance(reduced, str):  # the name of a global object, such as a function with a cache
            return self.describe(getattr(value, "__wrapped__", reduced), place)
        make, arguments, *state = ((list(part) if isinstance(part, Iterator) else part) for part in reduced)
        state = [part for part in state if part is not None]
        return f"{self.describe(make, place)} {self.describe(arguments, place)} {self.describe(state, place)}"

    def _class(self, kind: type, place: str) -> str:
        bases = [self.describe(base, place) for base in (type(kind), *kind.__bases__)]
        members, skipped = dict(sorted(vars(kind).items())), BOOKKEEPING
        if fields := members.pop("__dataclass_fields__", {}):
            skipped = BOOKKEEPING | DATACLASS_METHODS
            members["fields"] = [(f.name, str(f.type), f.default, f.default_factory) for f in fields.values()]
        text = {k: self.describe(v, f"{place}.{k}") for k, v in members.items() if k not in skipped}
        return f"class {kind.__name__} {bases} {text}\n"

    def _function(self, function: FunctionType, place: str) -> str:
        variables = {name: self.describe(v, f"{name!r} in {place}") for name, v in _outside_variables(function)}
        defaults = self.describe((function.__defaults__, function.__kwdefaults__, vars(function)), place)
        return f"{self._code(function.__code__, place)} {defaults} {variables}"

    def _code(self, code: CodeType, place: str) -> str:
        consts = [self._code(c, place) if isinstance(c, CodeType) else self.describe(c, place) for c in code.co_consts]
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        return f"{code.co_name} {names} {counts} {code.co_code.hex()} {code.co_exceptiontable.hex()} {consts}"


def _outside_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the closures and global variables that a function reads."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # an empty one has no value yet
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        entry: tuple[str, Any] = "", None
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname == "EXTENDED_ARG":
                continue
            if name in UNNAMED_READS and instruction.opname in READS_GLOBAL and name not in function.__globals__:
                raise GlocalError(
                    f"a run's name must cover what '{function.__qualname__}' computes with, but it uses {name}: make "
                    "what it reads a global variable or an option."
                )
            if _is_user_module(entry[1]) and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                entry = f"{entry[0]}.{name}", getattr(entry[1], name, None)  # only this is taken from the module
                continue
            if entry[0]:
                yield entry
            entry = "", None
            if instruction.opname in READS_GLOBAL and name in function.__globals__:
                entry = name, function.__globals__[name]
            elif instruction.opname in READS_CLOSURE and name in closure and name != "__class__":
                entry = name, closure[name]
            elif instruction.opname == "IMPORT_NAME" and not is_installed(name):
                raise GlocalError(
                    f"a run's name must cover what '{function.__qualname__}' computes with, but it imports '{name}' "
                    "when it is called: import it at the top of the file."
                )


def _is_user_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and not is_installed(value.__name__)


def _from_library(value: Any) -> bool:
    """Return whether a class or function is installed; those of `make_dataclass` only say so."""
    module = getattr(value, "__module__", None)
    generated = module == "types" and not hasattr(sys.modules["types"], value.__name__)
    return is_installed(module) and not generated


def is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python, glocal or an installed package."""
    root = (module or "builtins").partition(".")[0]
    if root in {"glocal", *sys.stdlib_module_names}:
        return root != "__main__"
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None and root not in sys.modules:
        spec = importlib.util.find_spec(root) if root else None
        file = spec.origin if spec else None
    return bool({"site-packages", "dist-packages"} & {*Path(file or "").parts})
