r"""A study: an experiment that is made of pieces of work, a table that they fill, and a figure drawn from the table.

A piece is measured once: its rows are written to the store when it is done, and asking again goes on with the others.
Table and figure are made of rows alone, so both can be made again from the Parquet file without measuring anything. On
a machine without the command line's libraries: `python -m glocal.paper.study NAME --help`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from glocal.errors import GlocalError
from glocal.laboratory import choose_device
from glocal.paper.studies import get
from glocal.store.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scalar: TypeAlias = str | int | float | bool | None
Piece: TypeAlias = dict[str, Any]  # what is to be measured, in words and numbers that JSON can hold
Row: TypeAlias = dict[str, Scalar]  # of the table; a piece makes many
VERSION = 1
"""Raised when the same piece would give other rows than before."""


@dataclass(frozen=True)
class Place:
    """Where a piece is measured: on what device, with whose data, and with which store for runs."""

    device: torch.device
    data: Path | None
    store: Path


class Study(Protocol):
    """An experiment of the paper."""

    name: str
    columns: str
    """The names that all its rows have, with spaces between; a table may have others beside them."""

    def pieces(self, demo: bool) -> Sequence[Piece]:
        """The whole experiment, or one of the same kind on embedded data that takes less than a minute on two cores."""
        ...

    def cost(self, demo: bool) -> str:
        """What it takes, in a few words: runs, steps, products."""
        ...

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        """One piece of work."""
        ...

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """The figure, in the looks of `report.style`."""
        ...

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        """What the paper says, and what these rows show: a few sentences with the numbers in them."""
        ...


def conduct(
    study: Study, place: Place, demo: bool = False, tell: Callable[[int, int, str], None] | None = None
) -> list[Row]:
    """All rows of a study: those the store holds, and those of the pieces it misses, measured now.

    `tell` hears how many pieces are done, of how many, and which one comes next.
    """
    pieces = study.pieces(demo)
    folder = Store.create(place.store).path / "studies" / study.name
    rows: list[Row] = []
    for number, piece in enumerate(pieces):
        if tell is not None:
            tell(number, len(pieces), described(piece))
        kept = folder / f"{key(study, piece)}.json"
        if not kept.exists():
            _write(kept, piece, study.measure(piece, place))
        rows += _read(kept)
    if tell is not None:
        tell(len(pieces), len(pieces), "")
    return rows


def key(study: Study, piece: Piece) -> str:
    canonical = json.dumps([VERSION, study.name, piece], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def described(piece: Piece) -> str:
    """A piece in one short line."""
    return " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in piece.items())


def _write(path: Path, piece: Piece, rows: list[Row]) -> None:
    """Numbers that are none are written as names: JSON has no others."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"piece": piece, "rows": [_named(row) for row in rows]}, allow_nan=False))
        os.replace(part, path)
    except OSError as error:
        raise GlocalError(f"cannot write to the store '{path.parent}': {error.strerror or error}.") from error


def _read(path: Path) -> list[Row]:
    try:
        return [_numbered(row) for row in json.loads(path.read_text())["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GlocalError(f"'{path}' cannot be read. Delete it and run the command again.") from error


def _named(row: Row) -> Row:
    return {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _numbered(row: Row) -> Row:
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in row.items()}


def write_table(rows: Sequence[Row], path: Path) -> Path:
    """The rows as Parquet, by whichever library is there."""
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    try:
        import polars

        polars.DataFrame(columns).write_parquet(path)
    except ImportError:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def read_table(path: Path, study: Study | None = None) -> list[Row]:
    """The rows of a Parquet file, which have to have a study's columns if one is named."""
    if not path.exists():
        raise GlocalError(f"there is no table at '{path}'.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GlocalError(f"the table '{path}' cannot be read: {error.strerror or error}.") from error
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1":
        raise GlocalError(f"'{path}' is no table of a study: it is not Parquet, or not the whole file.")
    try:
        rows = _parquet(content)
    except ImportError as error:
        raise GlocalError(f"to read '{path}' polars or pyarrow must be installed.") from error
    except Exception as error:  # every library has its own
        raise GlocalError(f"'{path}' is no table of a study: {str(error).partition(chr(10))[0]}.") from error
    if not rows:
        raise GlocalError(f"'{path}' is no table of a study: it has no rows.")
    if study is not None and (missing := [name for name in study.columns.split() if name not in rows[0]]):
        raise GlocalError(f"'{path}' is no table of {study.name}: it has no {', '.join(missing)}.")
    return rows


def _parquet(content: bytes) -> list[Row]:
    try:
        import polars

        return polars.read_parquet(content).to_dicts()
    except ImportError:
        import pyarrow
        import pyarrow.parquet

        return pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()


def draw(study: Study, rows: Sequence[Row], path: Path) -> Path:
    """The study's figure as a file."""
    from glocal.report.style import drawn

    return drawn(lambda figure: study.draw(rows, figure), path)


def publish(study: Study, rows: Sequence[Row], out: Path) -> list[Path]:
    """The table, and the figure as PNG and PDF."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = [write_table(rows, out / f"{study.name}.parquet")]
        return paths + [draw(study, rows, out / f"{study.name}{suffix}") for suffix in (".png", ".pdf")]
    except OSError as error:
        raise GlocalError(f"cannot write to '{out}': {error.strerror or error}.") from error


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal; elsewhere a line for every piece."""
    started = time.perf_counter()

    def line(done: int, pieces: int, following: str) -> None:
        print(f"{name} {done}/{pieces} {time.perf_counter() - started:.0f} s {following}", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(name, total=None)
        yield lambda done, pieces, following: bars.update(
            bar, completed=done, total=pieces, description=f"{name} {following}"
        )


def main(arguments: Iterable[str] | None = None) -> int:
    """A study without the command line's libraries."""
    parser = argparse.ArgumentParser(prog="python -m glocal.paper.study", description="One of the paper's experiments.")
    parser.add_argument("name", help="as in `glocal paper list`")
    parser.add_argument("--demo", action="store_true", help="a small one on embedded data")
    parser.add_argument("--store", type=Path, default=Path("runs-paper"), help="where pieces are kept")
    parser.add_argument("--data", type=Path, help="a folder with data sets")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("."), help="a folder for the table and the figure")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        study = get(options.name)
        place = Place(choose_device(options.device), options.data, options.store)
        with progress(study.name) as tell:
            rows = conduct(study, place, options.demo, tell)
        print("\n".join(study.conclude(rows)))
        print("Wrote", ", ".join(map(str, publish(study, rows, options.out))))
    except GlocalError as error:
        print(f"glocal: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("glocal: stopped. Run the same command again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
