"""One table model, rendered for a terminal, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import io
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal, TypeAlias

import numpy as np
from rich import box
from rich import table as rich_table
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from glocal.errors import unknown

CellKey: TypeAlias = tuple[str, str, float, str]  # locality, algorithm, learning rate, group of columns
ABSENT = "–"
COLORS = {"global": "blue", "local": "red"}  # as in the paper
MAX_LABEL_WIDTH = 24
MIN_TITLE_WIDTH = 14
FORMATS = ("rich", "json", "csv", "latex", "markdown")
LATEX_ESCAPES = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        **{c: f"${c}$" for c in "<>|"},  # in TeX's own fonts, these are other characters of text
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": "--",
        "§": r"\S",
        "·": r"$\cdot$",
        "±": r"$\pm$",
        "−": "$-$",
        "√": r"$\surd$",
        "²": "$^2$",
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
        "Δ": r"$\Delta$",
        "τ": r"$\tau$",
    }
)


@dataclass(frozen=True)
class Cell:
    """A cell's text, an optional standard deviation, and whether it is emphasized."""

    text: str
    std: str = ""
    marked: bool = False

    def __str__(self) -> str:
        return f"{self.text} ± {self.std}" if self.std else self.text


@dataclass(frozen=True)
class Column:
    """A column's name, the group of columns it belongs to, and its alignment."""

    name: str
    group: str = ""
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Section:
    """Consecutive rows that share a label, such as one algorithm at several learning rates."""

    label: str
    locality: str
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def suffix(self) -> str:
        return f" ({self.locality})" if self.locality else ""


@dataclass(frozen=True)
class Table:
    """Sections of rows under columns that may be grouped.

    The label column comes first and is not in `columns`. `records` are the same numbers for programs, unrounded.
    """

    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    title: str = ""
    label: str = "algorithm"
    notes: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show as many groups of columns beside each other as fit the terminal, the others below."""
        star = console.color_system is None
        wide = options.update(width=1_000, max_width=1_000)
        groups = list(dict.fromkeys(column.group for column in self.columns if column.group))
        pages: list[list[str]] = []
        for group in groups or [""]:
            candidate = [*pages[-1], group] if pages else [group]
            if pages and Measurement.get(console, wide, self._rich(candidate, star)).maximum > options.max_width:
                pages.append([group])
            else:
                pages[-1:] = [candidate]
        if self.title and self.sections:
            yield Text(self.title, style="italic")
        for page in pages if self.sections else []:
            yield self._rich(page, star)
            yield Text("")
        for note in self.notes:
            yield Text(note.replace("Bold: ", "*: ") if star else note, style="dim")

    def _rich(self, groups: Sequence[str], star: bool) -> rich_table.Table:
        """Build the part of the table that has the ungrouped columns and those of these groups."""
        indices = [i for i, column in enumerate(self.columns) if column.group in ("", *groups)]
        grouped_indices = [i for i in indices if self.columns[i].group]
        table = rich_table.Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style=""
        )
        headers = [Text(self.label), *map(self._header, indices)]
        height = max(header.plain.count("\n") for header in headers)
        label, *names = (Text("\n" * (height - header.plain.count("\n"))) + header for header in headers)
        table.add_column(label, max_width=MAX_LABEL_WIDTH)
        for i, name in zip(indices, names, strict=True):
            name.justify = "left"
            is_right = self.columns[i].align == "right"
            table.add_column(
                name, justify=self.columns[i].align, no_wrap=is_right, overflow="ellipsis" if is_right else "fold"
            )
        rules = any(len(section.rows) > 1 for section in self.sections)
        for section in self.sections:
            rows = [r for r in section.rows if not grouped_indices or any(r[i].text != ABSENT for i in grouped_indices)]
            if rows and rules and table.row_count:
                table.add_section()
            color = COLORS.get(section.locality, "")
            first = Text.assemble((section.label, f"bold {color}"), (section.suffix, color))
            for number, row in enumerate(rows):
                cells = (_terminal_cell(row[i], star, self.columns[i]) for i in indices)
                table.add_row(Text("") if number else first, *cells)
        return table

    def _header(self, index: int) -> Text:
        """Return a column's header: its name and, above it in the first column of a group, the group's title."""
        parts = [Text(self.columns[index].name)]
        if self._begins_group(index):
            widest = max(len(str(row[index])) for section in self.sections for row in section.rows)
            width = max(widest, MIN_TITLE_WIDTH)
            lines = textwrap.wrap(self.columns[index].group, width, break_long_words=False, break_on_hyphens=False)
            parts.insert(0, Text("\n".join(lines), style="bold"))
        return Text("\n").join(part for part in parts if part)

    def _begins_group(self, index: int) -> bool:
        group = self.columns[index].group
        return bool(group) and (index == 0 or self.columns[index - 1].group != group)

    def text(self, width: int = 100) -> str:
        """Render as a terminal of this width shows it, without colors."""
        console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())

    def markdown(self) -> str:
        """Render a Markdown table with the notes below it."""
        names = [f"{c.group}: {c.name}" if self._begins_group(i) else c.name for i, c in enumerate(self.columns)]
        rules = ["---:" if column.align == "right" else "---" for column in self.columns]
        lines = [[self.label, *(name.replace("|", "\\|") for name in names)], ["---", *rules]]
        for section in self.sections:
            for i, row in enumerate(section.rows):
                label = "" if i else f"{_markdown_code(section.label)}{section.suffix}"
                lines.append([label, *(f"**{cell}**" if cell.marked else str(cell) for cell in row)])
        title = [f"### {self.title}"] if self.title else []
        body = ["\n".join(f"| {' | '.join(cells)} |" for cells in lines)] if self.sections else []
        return "\n\n".join([*title, *body, "  \n".join(self.notes)]).rstrip()

    def latex(self) -> str:
        """Render a `table` environment (booktabs, multirow, xcolor) with the notes as its caption."""
        groups = [(name, len(list(columns))) for name, columns in groupby(column.group for column in self.columns)]
        spans = [rf"\multicolumn{{{n}}}{{c}}{{\textbf{{{escape(g)}}}}}" if g else "& " * (n - 1) for g, n in groups]
        header = [f" & {' & '.join(spans)} \\\\"] if any(column.group for column in self.columns) else []
        names = [escape(name) for name in (self.label, *(column.name for column in self.columns))]
        title = [f"\\textbf{{{escape(self.title)}}}."] if self.title else []
        rules = any(len(section.rows) > 1 for section in self.sections)
        return "\n".join(
            [
                r"\begin{table}[t]",
                r"\centering",
                f"\\caption{{{' '.join([*title, *map(escape, self.notes)])}}}",
                f"\\begin{{tabular}}{{l{''.join(column.align[0] for column in self.columns)}}}",
                r"\toprule",
                *header,
                f"{' & '.join(names)} \\\\",
                r"\midrule",
                ("\n\\midrule\n" if rules else "\n").join(_latex_section(section) for section in self.sections),
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
            ]
        )


def by_learning_rate(
    names: Sequence[str] | Mapping[str, Sequence[str]], cells: Mapping[CellKey, Sequence[Cell]], **options: Any
) -> Table:
    """Lay out cells as the paper's Table 1: a section per algorithm, a line per learning rate, a column per name.

    Groups of columns share the names or have their own. A cell without an entry is absent. `options`: those of `Table`.
    """
    groups = list(dict.fromkeys(group for *_, group in cells))
    names_of = names if isinstance(names, Mapping) else dict.fromkeys(groups, names)
    columns = (Column("lr", align="left"), *(Column(name, group) for group in groups for name in names_of[group]))
    lines: dict[tuple[str, str], list[tuple[Cell, ...]]] = {}
    for locality, algorithm, lr in sorted({key[:3] for key in cells}):
        parts = (cells.get((locality, algorithm, lr, group), [Cell(ABSENT)] * len(names_of[group])) for group in groups)
        lines.setdefault((locality, algorithm), []).append((Cell(format_lr(lr)), *chain.from_iterable(parts)))
    sections = (Section(algorithm, locality, tuple(rows)) for (locality, algorithm), rows in lines.items())
    return Table(columns, tuple(sections), **options)


def render(tables: Sequence[Table], format: str) -> RenderableType:
    """Render tables one below the other: a rich renderable for 'rich', else a string.

    'json' and 'csv' hold the records of the first table.
    """
    if format == "rich":
        return Group(tables[0], *(part for table in tables[1:] for part in (Text(""), table)))
    if format == "markdown":
        return "\n\n".join(table.markdown() for table in tables) + "\n"
    if format == "latex":
        return "\n\n".join([r"% \usepackage{booktabs, multirow, xcolor}", *(table.latex() for table in tables)]) + "\n"
    if format == "json":
        return to_json(tables[0].records)
    if format == "csv":
        return to_csv(tables[0].records)
    raise unknown("format", format, FORMATS)


def to_json(value: object) -> str:
    """Write strict JSON: NaN and infinity are errors."""
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Write records as CSV with a header; nothing without records."""
    import polars

    return polars.DataFrame(records, infer_schema_length=None).write_csv() if records else ""


def mean_std(mean: float | None, std: float | None, marked: bool = False, spec: str = "z.2f") -> Cell:
    """Make a cell of a mean and a standard deviation in a format; None or NaN is absent."""
    if mean is None or math.isnan(mean):
        return Cell(ABSENT)
    return Cell(f"{mean:{spec}}", "" if std is None or math.isnan(std) else f"{std:{spec}}", marked)


def signed(x: float | None, spec: str = ".2f") -> str:
    """Format a number with its sign; None or NaN is absent."""
    return ABSENT if x is None or math.isnan(x) else f"{x:+{spec}}".replace("-", "−")


def finite(x: float | None, digits: int | None = None) -> float | None:
    """Return a number, rounded to significant digits if these are given, or None if it is NaN or infinite."""
    if x is None or not math.isfinite(x):
        return None
    return x if digits is None else float(f"{x:.{digits}g}")


def format_lr(lr: float) -> str:
    """Format a learning rate without exponent: 0.001, 0.1, 1."""
    return np.format_float_positional(lr, trim="-")


def _markdown_code(text: str) -> str:
    """Format a text as code in a cell of a Markdown table."""
    quotes = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{quotes}{space}{text}{space}{quotes}".replace("|", "\\|")


def escape(text: str) -> str:
    """Escape text for LaTeX."""
    return text.translate(LATEX_ESCAPES)


def _terminal_cell(cell: Cell, star: bool, column: Column) -> Text:
    """Emphasize a marked cell by bold text or, on a terminal without colors, by a star."""
    text = Text(cell.text, style="bold" if cell.marked else "")
    if cell.std:
        text.append(f" ± {cell.std}", style="not bold dim")
    return text.append("*" if cell.marked else " ") if star and column.align == "right" else text


def _latex_section(section: Section) -> str:
    color, count, label = COLORS.get(section.locality), len(section.rows), escape(section.label)
    label = (f"\\textcolor{{{color}}}{{{label}}}" if color else label) + section.suffix
    first = f"\\multirow{{{count}}}{{*}}{{{label}}}" if count > 1 else label
    return "\n".join(
        " & ".join(["" if i else first, *map(_latex_cell, row)]).strip() + r" \\" for i, row in enumerate(section.rows)
    )


def _latex_cell(cell: Cell) -> str:
    if cell.std or cell.text.startswith("-"):
        text, std = (_powers(part) for part in (cell.text, cell.std))
        mean = f"\\mathbf{{{text}}}" if cell.marked else text
        return f"${mean}_{{\\,\\textcolor{{gray}}{{\\pm\\,{std}}}}}$" if std else f"${mean}$"
    text = _powers(escape(cell.text.replace("e−", "e-")), "$")
    return f"\\textbf{{{text}}}" if cell.marked else text


def _powers(text: str, delimiter: str = "") -> str:
    """Write numbers such as 1e-05 with powers of ten, between dollar signs as `delimiter` outside of formulas."""
    return re.sub(r"(?<=\d)e(?:\+|(?=-))(-?)0*(\d+)\b", rf"{delimiter}\\times10^{{\1\2}}{delimiter}", text)
