"""Argument types and parsers that several commands share."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from glocal.errors import GlocalError, require_known
from glocal.sweeps.options import SweepOptions

_no_hint = {"help_behavior_hint": ""}  # the description says what happens by default
Count = Annotated[int | None, tyro.conf.arg(metavar="N", **_no_hint)]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", **_no_hint)]
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", **_no_hint)]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", **_no_hint)]
Numbers = Annotated[tuple[float, ...], tyro.conf.arg(metavar="LR ...", **_no_hint)]
Integers = Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED ...", **_no_hint)]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", **_no_hint)]
PathName = Annotated[Path | None, tyro.conf.arg(metavar="PATH", **_no_hint)]
Flag = Annotated[bool, tyro.conf.arg(**_no_hint)]
ChallengeName = Annotated[str, tyro.conf.arg(metavar="CHALLENGE"), tyro.conf.Positional]
AlgorithmName = Annotated[str, tyro.conf.arg(metavar="ALGORITHM"), tyro.conf.Positional]
StorePath = Annotated[Path, tyro.conf.arg(metavar="STORE"), tyro.conf.Positional]


def _flag_types(kind: type[SweepOptions]) -> type[SweepOptions]:
    """Annotate fields for the command line: names instead of Python objects, no `None` in the help."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        union = get_origin(hints[field.name]) in (Union, UnionType)
        types = [t for t in (get_args(hints[field.name]) if union else [hints[field.name]]) if t is not type(None)]
        choices = [value for t in types if get_origin(t) is Literal for value in get_args(t)]
        value_type: Any = str if str in types or choices else hints[field.name]
        plain = {int: "N", float: "FLOAT", str: "NAME"}
        metavar = f"{{{','.join(choices)}}}" if choices else "PATH" if Path in types else plain.get(types[0])
        hint = "" if field.default is None or value_type is bool else None
        value_type = value_type | None if field.default is None else value_type
        argument = tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)
        kind.__annotations__[field.name] = Annotated[value_type, argument]
    return kind


@_flag_types
class TrainingOptions(SweepOptions):
    __doc__ = SweepOptions.__doc__


def short_name(algorithm: str) -> str:
    """Return 'ewc' for ewc, 'Mine' for path/to/file.py:Mine."""
    return algorithm.rpartition(":")[2]


def parse_options(texts: Iterable[str], algorithms: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Parse 'ewc.penalty=1,10', or 'penalty=10' for a single algorithm, to {algorithm: {option: values}}."""
    names = [short_name(a) for a in algorithms]
    options: dict[str, dict[str, list[Any]]] = {}
    for text in texts:
        target, equals, values = text.partition("=")
        algorithm, dot, option = target.rpartition(".")
        if not equals or not option or not values:
            raise GlocalError(f"an option is written NAME=VALUE or ALGORITHM.NAME=VALUE; '{text}' was given.")
        if not dot:
            if len(names) != 1:
                raise GlocalError(f"with several algorithms name the one that the option is for: ALGORITHM.{text}.")
            algorithm = names[0]
        require_known("algorithm in --options:", algorithm, names)
        options.setdefault(algorithm, {})[option] = values.split(",")
    return options


def combinations(options: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the options' values."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback (done, total, next item) that draws a bar on a terminal and prints a line per item elsewhere."""
    start = time.perf_counter()

    def print_line(done: int, total: int, following: str) -> None:
        print(f"{name} {done}/{total} {time.perf_counter() - start:.0f} s {following}", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield print_line
        return
    from rich import progress
    from rich.console import Console

    text, count = progress.TextColumn("{task.description}"), progress.MofNCompleteColumn()
    columns = text, progress.BarColumn(), count, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(name, total=None)
        yield lambda done, total, following: bars.update(
            bar, completed=done, total=total, description=f"{name} {following}"
        )
