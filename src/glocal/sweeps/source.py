"""Hash a user's class, function or callable object, so that runs of an edited one have another name.

The hash covers the source, or the compiled code where Python does not keep the source (a class in a notebook, the
prompt, `python -`), and what the code takes from outside: closures, global variables, the user's other functions and
classes, and the state of an object. What is installed counts by its name.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import CodeType, FunctionType, GenericAlias, MethodType, ModuleType, UnionType
from typing import Any

import numpy as np
import torch

from glocal.errors import GlocalError

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, enum.Enum, PurePath, np.generic)
PLAIN_TYPES = (*PLAIN, torch.dtype, torch.device, torch.Size, GenericAlias, UnionType)
"""What `repr` describes completely."""
DATACLASS_METHODS = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__"}
DATACLASS_METHODS |= {"__lt__", "__le__", "__gt__", "__ge__", "__match_args__", "__dataclass_params__"}
"""Attributes that the decorator derives from the fields."""
BOOKKEEPING = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}
BOOKKEEPING |= {"__static_attributes__", "__annotate__", "__annotate_func__", "_abc_impl", "__abstractmethods__"}


def source_hash(target: Any) -> str:
    """Return the hash of a user's class, function or callable object; it is the same in every process."""
    return hashlib.sha256(_Text(target).text.encode()).hexdigest()[:16]


class _Text:
    """The text that stands for an object."""

    def __init__(self, target: Any) -> None:
        self.name = getattr(target, "__qualname__", type(target).__name__)
        self.seen: dict[int, Any] = {id(target): target}  # they are kept alive, so that no id is used twice
        own = (
            self._class if isinstance(target, type) else self._function if inspect.isfunction(target) else self._object
        )
        self.text = own(target, self.name)

    def describe(self, value: Any, where: str) -> str:
        """Describe a value, plain data as `repr` does; errors call it `where`."""
        if isinstance(value, PLAIN_TYPES):
            return repr(value)
        if isinstance(value, list | tuple):
            parts = ", ".join(self.describe(part, where) for part in value)
            return f"[{parts}]" if isinstance(value, list) else f"({parts}{',' * (len(value) == 1)})"
        if isinstance(value, set | frozenset):  # its order differs between processes
            return f"{{{', '.join(sorted(self.describe(part, where) for part in value))}}}"
        if isinstance(value, np.ndarray) and value.dtype != object:
            return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return f"tensor {value.dtype} {tuple(value.shape)} {hashlib.sha256(data.tobytes()).hexdigest()}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type) and _is_installed(value):
            return repr(value)
        if inspect.isroutine(value) and not isinstance(value, MethodType) and _is_installed(value):
            return f"{value.__module__}.{value.__qualname__}"
        if id(value) in self.seen:
            return f"#{list(self.seen).index(id(value))}"
        self.seen[id(value)] = value
        if isinstance(value, Mapping):
            items = [f"{self.describe(k, where)}: {self.describe(v, f'{where}[{k!r}]')}" for k, v in value.items()]
            return f"{{{', '.join(items)}}}"
        return self._user_code(value, where)

    def _user_code(self, value: Any, where: str) -> str:
        if isinstance(value, type):
            return self._class(value, where)
        return self._function(value, where) if inspect.isfunction(value) else self._object(value, where)

    def _object(self, value: Any, where: str) -> str:
        """Describe an object by its class and its state."""
        if isinstance(value, functools.partial):
            keywords = self.describe(sorted(value.keywords.items()), where)
            return f"{source_hash(value.func)} {self.describe(value.args, where)} {keywords}"
        if isinstance(value, MethodType):
            return f"{self.describe(value.__func__, where)} of {self.describe(value.__self__, where)}"
        if isinstance(value, property):
            return self.describe((value.fget, value.fset), where)
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self.describe(value.__func__, where)}"
        try:
            reduced = value.__reduce_ex__(4)  # as `copy` and `pickle` take objects apart
        except TypeError:
            raise GlocalError(
                f"a run's name must cover what '{self.name}' computes with, but {where} is a {type(value).__name__}: "
                "use numbers, strings, tensors, functions, or objects that are made of these."
            ) from None
        if isinstance(reduced, str):  # the name of a global object, such as a function with a cache
            return self.describe(getattr(value, "__wrapped__", reduced), where)
        make, arguments, *state = ((list(part) if isinstance(part, Iterator) else part) for part in reduced)
        state = [part for part in state if part is not None]
        return f"{self.describe(make, where)} {self.describe(arguments, where)} {self.describe(state, where)}"

    def _class(self, kind: type, where: str) -> str:
        parts = [base for base in kind.__mro__ if not base.__module__.startswith(("builtins", "glocal."))]
        members = [v for part in parts if not _is_installed(part) for v in vars(part).values()]
        functions = [f for member in members for f in _functions(member) if f.__name__ not in DATACLASS_METHODS]
        return "".join(_source(part) or self._members(part, where) for part in parts) + self._outside(functions, where)

    def _members(self, kind: type, where: str) -> str:
        """Describe a class without its source."""
        members, skipped = dict(sorted(vars(kind).items())), BOOKKEEPING
        if fields := members.pop("__dataclass_fields__", {}):
            skipped = BOOKKEEPING | DATACLASS_METHODS
            members["fields"] = [(f.name, str(f.type), f.default, f.default_factory) for f in fields.values()]
        text = {k: self.describe(v, f"{where}.{k}") for k, v in members.items() if k not in skipped}
        return f"class {kind.__name__} {text}\n"

    def _function(self, function: FunctionType, where: str) -> str:
        text = _source(function)
        if text is None:
            defaults = self.describe((function.__defaults__, function.__kwdefaults__), where)
            text = f"{self._code(function.__code__, where)} {defaults}"
        return text + self._outside([function], where)

    def _code(self, code: CodeType, where: str) -> str:
        consts = [self._code(c, where) if isinstance(c, CodeType) else self.describe(c, where) for c in code.co_consts]
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        return f"{code.co_name} {names} {counts} {code.co_code.hex()} {code.co_exceptiontable.hex()} {consts}"

    def _outside(self, functions: list[FunctionType], where: str) -> str:
        """Describe the variables that functions take from outside, if there are any that their names do not tell."""
        lines = []
        for function in functions:
            for name, value in _outside_variables(function):
                named = isinstance(value, type) or inspect.isroutine(value)
                if isinstance(value, ModuleType) or id(value) in self.seen:
                    continue
                if not (named and _is_installed(value) and value.__name__ == name):
                    lines.append(f"{name} = {self.describe(value, f'{name!r} in {where}')}")
        return "".join(f"\n{line}" for line in dict.fromkeys(lines))


def _source(part: Any) -> str | None:
    """Return the source, or None where Python has not kept it."""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        return None


def _functions(member: Any) -> Iterator[FunctionType]:
    """Yield the functions that a member of a class is made of."""
    wrapped = (getattr(member, name, None) for name in ("__func__", "fget", "fset", "func"))
    yield from (f for f in (member, *wrapped) if inspect.isfunction(f))


def _outside_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the closures and global variables that a function reads."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and cell != type(cell)():  # an empty cell has no value yet
            yield name, cell.cell_contents
    codes = [code]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in function.__globals__:
                yield instruction.argval, function.__globals__[instruction.argval]


def _is_installed(value: Any) -> bool:
    """Return whether a class or function belongs to Python, glocal or an installed package."""
    module = getattr(value, "__module__", None) or "builtins"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    root = module.partition(".")[0]
    return root in {"glocal", *sys.stdlib_module_names} or bool(
        {"site-packages", "dist-packages"} & {*Path(file).parts}
    )
