"""The table for a terminal: as many challenges side by side as its width holds, the others below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from glocal.report.layout import Block, Entry, blocks, challenges, heads, notes

COLOURS = {"global": "blue", "local": "red"}  # the paper's; the words stand beside them
GAP = 2  # between ACC and FGT
BETWEEN = 3  # between columns: rich's padding and divider
WIDEST_NAME = 24


class TerminalTable:
    """A rich renderable. Where the console shows no bold, a star marks what would be bold."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.blocks = blocks(rows)
        self.challenges = challenges(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        star = "*" if console.color_system is None else ""
        columns = {name: _Column(name, self.blocks, heads(self.rows, "↑", "↓"), star) for name in self.challenges}
        for names in self._pages(columns, options.max_width):
            yield self._table([columns[name] for name in names])
            yield Text("")
        for note in notes(self.rows):
            yield Text(note, style="dim")
        if self.rows:
            mark = "Starred" if star else "Bold"
            yield Text(f"{mark}: the best ACC and the lowest FGT of each algorithm.", style="dim")

    def _pages(self, columns: dict[str, _Column], width: int) -> list[list[str]]:
        """Challenges that fit beside each other."""
        names = max([cell_len("algorithm"), *(cell_len(t.plain) for b in self.blocks for t in _names(b))])
        fixed = min(names, WIDEST_NAME) + BETWEEN + max([2, *(len(line.lr) for b in self.blocks for line in b.lines)])
        pages: list[list[str]] = []
        room = 0
        for name, column in columns.items():
            if not pages or column.width + BETWEEN > room:
                pages.append([])
                room = width - fixed
            pages[-1].append(name)
            room -= column.width + BETWEEN
        return pages

    def _table(self, columns: list[_Column]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="")
        height = max(len(column.title) for column in columns)
        blank = "\n" * height
        table.add_column(Text(f"{blank}algorithm"), max_width=WIDEST_NAME)
        table.add_column(Text(f"{blank}lr"), no_wrap=True)
        for column in columns:
            table.add_column(column.header(height), no_wrap=True)
        for number, block in enumerate(self.blocks):
            lines = [line for line in block.lines if any(column.has(line.entries) for column in columns)]
            names = _names(Block(block.algorithm, block.locality, lines))
            if lines and number and table.row_count:
                table.add_section()
            for line, name in zip(lines, names, strict=False):
                table.add_row(name, line.lr, *(column.cell(line.entries) for column in columns))
        return table


class _Column:
    """One challenge: its name over ACC and FGT, each with its numbers under one another."""

    def __init__(self, challenge: str, blocks: Sequence[Block], heads: tuple[str, str], star: str) -> None:
        self.challenge, self.heads, self.star = challenge, heads, star
        pairs = [line.entries[challenge] for block in blocks for line in block.lines]
        self.means = [max((len(pair[i].mean) for pair in pairs if pair[i].std), default=0) for i in (0, 1)]
        self.stds = [max((len(pair[i].std) for pair in pairs), default=0) for i in (0, 1)]
        texts = [[heads[i], *(self._number(pair[i], i).plain for pair in pairs)] for i in (0, 1)]
        self.widths = [max(map(cell_len, column)) for column in texts]
        self.width = sum(self.widths) + GAP
        self.title = textwrap.wrap(challenge, self.width, break_on_hyphens=False) or [""]

    def has(self, entries: dict[str, tuple[Entry, Entry]]) -> bool:
        return any(entry.mean != "–" for entry in entries[self.challenge])

    def header(self, height: int) -> Text:
        lines = [""] * (height - len(self.title)) + [part.center(self.width) for part in self.title]
        heads = (" " * GAP).join(head.center(width) for head, width in zip(self.heads, self.widths, strict=True))
        return Text("\n".join(lines), style="bold").append(f"\n{heads}", style="not bold")

    def cell(self, entries: dict[str, tuple[Entry, Entry]]) -> Text:
        parts = [self._number(entry, i) for i, entry in enumerate(entries[self.challenge])]
        for part, width in zip(parts, self.widths, strict=True):
            part.pad_right(width - part.cell_len)
        return Text(" " * GAP).join(parts)

    def _number(self, entry: Entry, i: int) -> Text:
        if not entry.std:
            return Text(entry.mean.center(self.means[i]), style="dim")
        text = Text(entry.mean.rjust(self.means[i]), style="bold" if entry.best else "")
        text.append(f" ± {entry.std.rjust(self.stds[i])}", style="not bold dim")
        return text.append(self.star if entry.best else "")


def _names(block: Block) -> list[Text]:
    """The first cells of a block's lines: the name, and below it, where there is a line, the locality."""
    colour = COLOURS[block.locality]
    if len(block.lines) == 1:
        return [Text.assemble((block.algorithm, f"bold {colour}"), (f" ({block.locality})", colour))]
    filling = [Text("")] * (len(block.lines) - 2)
    return [Text(block.algorithm, style=f"bold {colour}"), Text(f"({block.locality})", style=colour), *filling]
