"""What several commands share: their decorator, the training options, tables and a progress bar."""

from __future__ import annotations

import sys
import time
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

import tyro

from glocal.sweeps.options import SweepOptions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import ProgressColumn
    from rich.table import Table

T = TypeVar("T")
Output = Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")]
METAVARS = {int: "N", float: "FLOAT", str: "NAME", Path: "PATH"}


@typing.dataclass_transform(frozen_default=True)
def command(kind: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields are the arguments of a command, described so that its help reads well.

    The help does not show the defaults None, False and (). Where Python takes a name or an object, a command takes the
    name.
    """
    dataclass(frozen=True)(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in fields(kind):  # type: ignore[arg-type]
        hint, metadata = hints[field.name], ()
        if typing.get_origin(hint) is Annotated:
            hint, metadata = hint.__origin__, hint.__metadata__
        sequence = typing.get_origin(hint) is tuple
        members = typing.get_args(hint) if sequence or typing.get_origin(hint) in (Union, UnionType) else [hint]
        types = [t for t in members if t is not NoneType and t is not ...]
        metavar = "PATH" if Path in types else METAVARS.get(types[0])
        if str in types and not sequence:
            hint = str | None if field.default is None else str
        if typing.get_origin(types[0]) is Literal and issubclass(kind, SweepOptions):  # which checks its values itself
            hint, metavar = str | None, f"{{{','.join(typing.get_args(types[0]))}}}"
        if metavar and tyro.conf.Positional in metadata:
            metavar = field.name.upper()
        elif metavar and sequence:
            metavar += " ..."
        silent = field.default is None or field.default is False or field.default == ()
        argument = tyro.conf.arg(metavar=metavar, help_behavior_hint="" if silent else None)
        kind.__annotations__[field.name] = Annotated[hint, argument, *metadata]
    return kind


@command
class TrainingOptions(SweepOptions):
    __doc__ = SweepOptions.__doc__


def print_rendered(output: RenderableType) -> None:
    """Print a string as it is, and anything else as rich shows it."""
    from rich.console import Console

    if isinstance(output, str):
        print(output.rstrip())
    else:
        Console().print(output)


def print_lines(*lines: str | None) -> None:
    """Print every line that is not None, wrapped between words."""
    from rich.console import Console

    for line in lines:
        if line is not None:
            Console().print(line, highlight=False, markup=False)


def rich_table(title: str, rows: Sequence[Mapping[str, Any]], right: Collection[str] = (), **options: Any) -> Table:
    """Return a table with a column for every key of the rows; those in `right` are aligned to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for name in rows[0]:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


@contextmanager
def progress_bar(name: str, *columns: ProgressColumn, lines: bool = True) -> Iterator[Callable[..., None]]:
    """Yield a callback (done, total, next item) that updates a bar on a terminal; elsewhere it may print a line."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    start, console = time.perf_counter(), Console(stderr=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), *columns)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(name, total=None)

        def report(done: int, total: int, following: str = "") -> None:
            bars.update(bar, completed=done, total=total, description=f"{name} {following}")
            if lines and not console.is_terminal:
                seconds = time.perf_counter() - start
                print(f"{name} {done}/{total} {seconds:.0f} s {following}", file=sys.stderr, flush=True)

        yield report
