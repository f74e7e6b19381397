"""What several commands share: their decorator, the training options, tables and a progress bar."""

from __future__ import annotations

import sys
import time
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro

from glocal.sweeps.options import SweepOptions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import ProgressColumn
    from rich.table import Table

T = TypeVar("T")
OUTPUT = tyro.conf.arg(aliases=["-o"], metavar="FILE")
FigureFile = Annotated[Path, OUTPUT, tyro.conf.arg(help="File to write: .png, .pdf, .svg or .pgf.")]
DataFolder = Annotated[Path | None, tyro.conf.arg(help="Folder to search first for data sets.")]
OwnChallenge = Annotated[
    str | None, tyro.conf.arg(metavar="NAME", help="path.py:function of the run's challenge, if it is your own.")
]
OwnNetwork = Annotated[
    str | None, tyro.conf.arg(metavar="NAME", help="path.py:function of the run's network, if it is your own.")
]
Device = Annotated[str, tyro.conf.arg(metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
StoreToRead = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="The store to read.")]
TableFormat = Annotated[Literal["rich", "markdown", "latex", "csv", "json"], tyro.conf.arg(help="Output format.")]
SCOPE_HELP = "Accuracy among all classes or among the task's classes; by default that of the challenge's setting."
AccuracyScope = Annotated[Literal["class", "task"] | None, tyro.conf.arg(help=SCOPE_HELP)]
METAVARS = {Path: "PATH", int: "N", float: "FLOAT", str: "NAME"}
LINE_SECONDS = 5
"""Minimum time between two progress lines when the output is not a terminal."""


@typing.dataclass_transform(frozen_default=True)
def command(kind: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields are the arguments of a command.

    The help shows positional arguments by their names, and does not show the defaults None, False and ().
    """
    dataclass(frozen=True)(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in fields(kind):  # type: ignore[arg-type]
        hint, metavar = hints[field.name], None
        choices = next((get_args(t) for t in (hint, *get_args(hint)) if get_origin(t) is Literal), ())
        if choices and issubclass(kind, SweepOptions):  # which checks the value itself and suggests the closest one
            hint, metavar = str | None, f"{{{','.join(choices)}}}"
        elif not choices and tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            metavar = field.name.upper() if field.default is MISSING else f"[{field.name.upper()}]"
        elif get_origin(hint) is tuple:
            metavar = f"{METAVARS[get_args(hint)[0]]} ..."
        elif get_origin(hint) is not Annotated:
            metavar = next((text for t, text in METAVARS.items() if t in (hint, *get_args(hint))), None)
        silent = field.default is None or field.default is False or field.default == ()
        argument = tyro.conf.arg(metavar=metavar, help_behavior_hint="" if silent else None)
        kind.__annotations__[field.name] = Annotated[hint, argument]
    return kind


@command
class TrainingOptions(SweepOptions):
    __doc__ = SweepOptions.__doc__
    network: str = "mlp"


def print_rendered(output: RenderableType) -> None:
    """Print a string as it is, and anything else as rich shows it."""
    from rich.console import Console

    if isinstance(output, str):
        print(output.rstrip())
    else:
        Console(markup=False, emoji=False).print(output)


def rich_table(title: str, rows: Sequence[Mapping[str, Any]], right: Collection[str] = ()) -> Table:
    """Return a table with a column for every key of the rows; those in `right` are aligned to the right.

    The first column, of names, is as wide as they are.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.collapse_padding = True
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row.values()))
    return table


@contextmanager
def progress_bar(name: str, *columns: ProgressColumn, lines: bool = True) -> Iterator[Callable[..., None]]:
    """Yield a callback (done, total, next item) that updates a bar on a terminal.

    Elsewhere it prints a line every `LINE_SECONDS` and at the end, if `lines`.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, markup=False)
    start = last_print = time.perf_counter()
    default_columns = (TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:])
    columns = (*default_columns, TimeElapsedColumn(), *columns)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(name, total=None)

        def report(done: int, total: int, following: str = "") -> None:
            bars.update(bar, completed=done, total=total, description=f"{name} {following}")
            nonlocal last_print
            now = time.perf_counter()
            if lines and not console.is_terminal and (now - last_print > LINE_SECONDS or 0 < done == total):
                print(f"{name} {done}/{total} {now - start:.0f} s {following}", file=sys.stderr, flush=True)
                last_print = now

        yield report
