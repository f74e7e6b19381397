"""Markdown that all pages of the reproduction are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def join(parts: Iterable[str]) -> str:
    """Return "a, b and c"."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def code(names: Iterable[str]) -> str:
    return join(f"`{name}`" for name in names)


def table(lines: Sequence[Mapping[str, str]], right: bool = False) -> str:
    """Return a table of lines with the same keys; `right` aligns all but the first column to the right."""
    rule = ["---", *["---:" if right else "---"] * (len(lines[0]) - 1)]
    rows = [list(lines[0]), rule, *(list(line.values()) for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
