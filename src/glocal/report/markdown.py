"""The table for a page of documentation: a line for each algorithm, a column for each learning rate, and the cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glocal.report.layout import ABSENT, Entry, blocks, challenges, notes


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table for each challenge, and the notes."""
    parts = [_table(name, [row for row in rows if row["challenge"] == name]) for name in challenges(rows)]
    about = [
        *notes(rows),
        "Memory: what the algorithm keeps after the last task. Time: seconds a run, its share of its cohort's.",
    ]
    return "\n\n".join([*parts, "  \n".join(about)])


def _table(challenge: str, rows: Sequence[dict[str, Any]]) -> str:
    made = blocks(rows)
    rates = list(
        dict.fromkeys(line.lr for line in sorted((li for b in made for li in b.lines), key=lambda li: float(li.lr)))
    )
    heads = ["algorithm", "", *(f"lr {rate}" for rate in rates), "memory", "time"]
    lines = [f"### {challenge}: ACC / FGT", "", _line(heads), _line(["---", "---", *["---:"] * (len(rates) + 2)])]
    for block in made:
        own = [row for row in rows if row["algorithm"] == block.algorithm and row["locality"] == block.locality]
        cells = {line.lr: " / ".join(_number(e) for e in line.entries[challenge]) for line in block.lines}
        cost = [
            _size(max(row["memory_bytes"] for row in own)),
            f"{sum(row['seconds'] for row in own) / len(own):.2g} s",
        ]
        lines.append(_line([f"`{block.algorithm}`", block.locality, *(cells.get(r, ABSENT) for r in rates), *cost]))
    return "\n".join(lines)


def _number(entry: Entry) -> str:
    text = f"{entry.mean} ± {entry.std}" if entry.std else entry.mean
    return f"**{text}**" if entry.best else text


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
