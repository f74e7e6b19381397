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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from glocal.errors import GlocalError
from glocal.paper.studies import get
from glocal.paper.tables import Cost, total, write_table
from glocal.precision import full_precision
from glocal.store.store import Store
from glocal.sweeps.resolve import choose_device, device_name

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
    Store.create(place.store)
    rows: list[Row] = []
    for number, piece in enumerate(pieces):
        if tell is not None:
            tell(number, len(pieces), described(piece))
        kept = _kept(study, piece, place)
        if not kept.exists():
            begun = time.perf_counter()
            with full_precision():
                measured = study.measure(piece, place)
            ended = datetime.now(UTC).isoformat(timespec="seconds")
            _write(kept, piece, measured, Cost(time.perf_counter() - begun, device_name(place.device), ended))
        rows += [_numbered(row) for row in _read(kept)["rows"]]
    if tell is not None:
        tell(len(pieces), len(pieces), "")
    return rows


def took(study: Study, place: Place, demo: bool = False) -> Cost | None:
    """What all pieces of a conducted study took, whenever that was; None where one of them does not say."""
    return total(Cost.of(_read(_kept(study, piece, place)).get("cost")) for piece in study.pieces(demo))


def _kept(study: Study, piece: Piece, place: Place) -> Path:
    """Where a piece's rows are."""
    return place.store / "studies" / study.name / f"{key(study, piece)}.json"


def key(study: Study, piece: Piece) -> str:
    canonical = json.dumps([VERSION, study.name, piece], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def described(piece: Piece) -> str:
    """A piece in one short line."""
    return " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in piece.items())


def _write(path: Path, piece: Piece, rows: list[Row], cost: Cost) -> None:
    """Numbers that are none are written as names: JSON has no others."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    content = {"piece": piece, "cost": asdict(cost), "rows": [_named(row) for row in rows]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, allow_nan=False))
        os.replace(part, path)
    except OSError as error:
        raise GlocalError(f"cannot write to the store '{path.parent}': {error.strerror or error}.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not all(isinstance(row, dict) for row in content["rows"]):
            raise ValueError("rows have names")
        return content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GlocalError(f"'{path}' cannot be read. Delete it and run the command again.") from error


def _named(row: Row) -> Row:
    return {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _numbered(row: Row) -> Row:
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in row.items()}


def draw(study: Study, rows: Sequence[Row], path: Path) -> Path:
    """The study's figure as a file."""
    from glocal.report.style import drawn

    return drawn(lambda figure: study.draw(rows, figure), path)


def publish(study: Study, rows: Sequence[Row], out: Path, cost: Cost | None = None) -> list[Path]:
    """The table, with what it cost where that is known, and the figure as PNG and PDF."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = [write_table(rows, out / f"{study.name}.parquet", cost)]
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
        print("Wrote", ", ".join(map(str, publish(study, rows, options.out, took(study, place, options.demo)))))
    except GlocalError as error:
        print(f"glocal: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("glocal: stopped. Run the same command again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
