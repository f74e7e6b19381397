"""The comparison for a terminal: ACC and FGT side by side where its width holds them, else one after the other."""

from __future__ import annotations

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from glocal.paper.comparison import Comparison, Line
from glocal.report.comparison_texts import MARK, MEASURES, blocks, conclusions, heads, notes, texts, trend_texts
from glocal.report.groups import plain
from glocal.report.terminal import COLOURS

WIDE = 96
"""From so many cells on both measures stand beside each other."""


class TerminalComparison:
    """A rich renderable."""

    def __init__(self, made: Comparison) -> None:
        self.made = made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        each = len(heads(MEASURES[0], self.made))
        whole = options.max_width >= WIDE or each == 1
        parts = [slice(0, 2 * each)] if whole else [slice(0, each), slice(each, 2 * each)]
        for challenge in self.made.challenges:
            for part in parts:
                yield self._cells(challenge, part)
                yield Text("")
        for note in notes(self.made):
            yield Text(note, style="dim")
        if self.made.trends:
            yield Text("")
            yield self._test()
        yield Text("")
        for sentence in conclusions(self.made):
            yield Text(sentence, style="dim")

    def _cells(self, challenge: str, part: slice) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=challenge, title_justify="left", header_style=""
        )
        table.add_column("algorithm")
        table.add_column("lr")
        for head in [head for measure in MEASURES for head in heads(measure, self.made)][part]:
            table.add_column(head, justify="right", no_wrap=True)
        for number, block in enumerate(blocks(self.made, challenge)):
            if number:
                table.add_section()
            for i, line in enumerate(block):
                cells = [Text(t, style="bold" if t.endswith(MARK) else "") for t in texts(line, self.made)[part]]
                table.add_row(_name(line, i, len(block)), plain(line.lr), *cells)
        return table

    def _test(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title="The paper's test", header_style="")
        table.title_justify = "left"
        several = len(self.made.challenges) > 1
        published = ("published",) if self.made.beside else ()
        for head in ("algorithm", "low − high", "interval", *published, "seeds", "the claim"):
            table.add_column(head, justify="right" if head in ("low − high", "published", "seeds") else "left")
        for t in self.made.trends:
            name = f"{t.algorithm} · {t.challenge}" if several else t.algorithm
            table.add_row(Text(name, style=COLOURS[t.locality]), *trend_texts(t, self.made))
        return table


def _name(line: Line, index: int, count: int) -> Text:
    colour = COLOURS[line.locality]
    if count == 1:
        return Text(f"{line.algorithm} ({line.locality})", style=colour)
    return Text(["" if index > 1 else f"({line.locality})", line.algorithm][index == 0], style=colour)
