"""`glocal list`: what there is."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glocal.cli.common import Names

if TYPE_CHECKING:
    from glocal.algorithms import Algorithm

Row = dict[str, Any]
COLUMNS = {
    "algorithms": ("name", "locality", "family", "settings", "memory", "grows"),
    "options": ("algorithm", "option", "default", "description"),
    "challenges": ("name", "setting", "tasks", "train", "test", "description"),
    "networks": ("name", "description"),
    "experiments": ("name", "command", "description"),
}
NOTES = {
    "algorithms": "Settings: task (the task is known at test), class (it is not), domain (same classes), or all.\n"
    "Grows: numbers kept after T tasks of a network with P parameters and K outputs.\n"
    "Options: glocal list options."
}


@dataclass(frozen=True)
class List:
    """List the algorithms and their options, challenges, networks and experiments that have a name."""

    what: Annotated[
        Literal["all", "algorithms", "options", "challenges", "networks", "experiments"], tyro.conf.Positional
    ] = "all"
    """Which of them."""
    own: Names = ()
    """Your own algorithms, path.py:Name, listed with the others."""
    json: bool = False
    """As a JSON list of objects."""

    def __call__(self) -> None:
        sections = {kind: _rows(kind, self.own) for kind in (COLUMNS if self.what == "all" else [self.what])}
        if self.json:
            print(json_format.dumps([{"kind": k, **row} for k, rows in sections.items() for row in rows], indent=1))
            return
        from rich.console import Console

        console = Console()
        for kind, rows in sections.items():
            console.print(_table(kind, rows))
            if kind in NOTES:
                console.print(NOTES[kind])


def _table(kind: str, rows: list[Row]) -> Any:
    from rich.table import Table

    table = Table(title=kind.capitalize(), title_justify="left")
    for column in COLUMNS[kind]:
        table.add_column(column, justify="right" if column in ("tasks", "train", "test") else "left")
    for row in rows:
        table.add_row(*(_text(row[column]) for column in COLUMNS[kind]))
    return table


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return "all" if len(value) == 3 else ", ".join(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rows(kind: str, own: Iterable[str] = ()) -> list[Row]:
    if kind == "algorithms":
        import dataclasses

        return [
            {
                "name": name,
                "locality": a.locality,
                "family": a.family,
                "settings": list(a.settings),
                "memory": a.remembers,
                "grows": a.grows,
                "options": {f.name: f.default for f in dataclasses.fields(a)},
                "description": (a.__doc__ or "").strip().splitlines()[0],
            }
            for name, a in _algorithms(own).items()
        ]
    if kind == "options":
        return _options(own)
    if kind == "challenges":
        import dataclasses

        from glocal.challenges import catalogue

        return [dataclasses.asdict(entry) for entry in catalogue()]
    if kind == "networks":
        from glocal.networks import NETWORKS

        return [{"name": name, "description": description} for name, (_, description) in NETWORKS.items()]
    from glocal.cli.demo import Demo
    from glocal.paper.experiments import EXPERIMENTS
    from glocal.paper.studies import TITLES

    summary = (Demo.__doc__ or "").strip().splitlines()[0]
    named = [{"name": e.name, "command": e.command, "description": e.description} for e in EXPERIMENTS.values()]
    studies = [{"name": n, "command": f"glocal paper {n}", "description": t} for n, (_, t) in TITLES.items()]
    return [{"name": "demo", "command": "glocal demo", "description": summary}, *named, *studies]


def _algorithms(own: Iterable[str]) -> dict[str, type[Algorithm]]:
    from glocal.algorithms import ALGORITHMS
    from glocal.sweeps import resolve

    mine = [type(resolve.algorithm(spec).value) for spec in own]
    return {**ALGORITHMS, **{resolve.name_of(a): a for a in mine}}


def _options(own: Iterable[str]) -> list[Row]:
    """Every option of every algorithm, described by the docstring under its field."""
    import dataclasses

    from glocal.sweeps.resolve import field_descriptions

    return [
        {
            "name": f"{name}.{f.name}",
            "algorithm": name,
            "option": f.name,
            "default": f.default,
            "description": described.get(f.name, ""),
        }
        for name, a in _algorithms(own).items()
        for described in [field_descriptions(a)]
        for f in dataclasses.fields(a)
    ]
