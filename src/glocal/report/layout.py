"""The layout of the paper's Table 1: a block for each algorithm, a line for each rate, ACC and FGT by challenge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glocal.report.groups import plain

ABSENT = "–"
DIVERGED = "diverged"
SCOPE_NOTES = {
    "class": "class-incremental (among all classes)",
    "task": "task-incremental (among the task's own classes)",
    "domain": "domain-incremental (all tasks share their classes)",
}


@dataclass(frozen=True)
class Entry:
    """One number of the table: its mean and deviation as they are printed, or why there is none."""

    mean: str
    std: str = ""
    best: bool = False


@dataclass(frozen=True)
class Line:
    """One learning rate of a block: (ACC, FGT) for every challenge."""

    lr: str
    entries: dict[str, tuple[Entry, Entry]]


@dataclass(frozen=True)
class Block:
    algorithm: str
    locality: str
    lines: list[Line]


def challenges(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["challenge"] for row in rows))


def blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """All rows, laid out. The best ACC and the lowest FGT of every block and challenge are marked."""
    made = []
    for locality, algorithm in sorted({(row["locality"], row["algorithm"]) for row in rows}):
        own = [row for row in rows if (row["locality"], row["algorithm"]) == (locality, algorithm)]
        lines = []
        for lr in sorted({row["lr"] for row in own}):
            entries = {}
            for challenge in challenges(rows):
                rivals = [row for row in own if row["challenge"] == challenge]
                row = next((row for row in rivals if row["lr"] == lr), None)
                entries[challenge] = (_entry(row, rivals, "acc", max), _entry(row, rivals, "forgetting", min))
            lines.append(Line(plain(lr), entries))
        made.append(Block(algorithm, locality, lines))
    return made


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know of the numbers: over which seeds, tasks and classes, and what was left out."""
    if not rows:
        return ["No runs."]
    first = rows[0]
    tasks = "the T−1 tasks before the last" if first["forgetting_over"] == "t-1" else "all T tasks"
    by_loss = first["forgetting_by"] == "loss"
    forgetting = "rise in test loss" if by_loss else "loss of test accuracy in points"
    scopes = dict.fromkeys((row["challenge"], SCOPE_NOTES[_kind(row)]) for row in rows)
    told = dict.fromkeys(note for _, note in scopes)
    which = next(iter(told)) if len(told) == 1 else "; ".join(f"{name}: {note}" for name, note in scopes)
    lines = [
        f"Mean ± standard deviation over {_span(row['seeds'] for row in rows)}, after {_span_tasks(rows)}.",
        f"ACC: average test accuracy in percent, {which}.",
        f"FGT: {forgetting} since each task was learnt, averaged over {tasks}.",
    ]
    lost = [row for row in rows if row["diverged"]]
    if lost:
        where = ", ".join(
            f"{row['algorithm']} at {plain(row['lr'])} on {row['challenge']}: {row['diverged']} of {row['seeds']}"
            for row in lost
        )
        lines.append(f"Diverged, and left out of the means: {where}.")
    else:
        lines.append("No run diverged.")
    return lines


def heads(rows: Sequence[dict[str, Any]], up: str, down: str) -> tuple[str, str]:
    by_loss = bool(rows) and rows[0]["forgetting_by"] == "loss"
    return f"ACC ({up})", f"FGT, loss ({down})" if by_loss else f"FGT ({down})"


def _entry(
    row: dict[str, Any] | None, rivals: Iterable[dict[str, Any]], name: Literal["acc", "forgetting"], best: Any
) -> Entry:
    if row is None:
        return Entry(ABSENT)
    mean, std = row[f"{name}_mean"], row[f"{name}_std"]
    if mean is None:
        return Entry(DIVERGED if row["diverged"] == row["seeds"] else ABSENT)
    means = [other[f"{name}_mean"] for other in rivals if other[f"{name}_mean"] is not None]
    alone = row["seeds"] - row["diverged"] == 1  # of one there is no deviation
    spread = "" if alone else f"{std:.2f}" if std is not None else ABSENT
    return Entry(f"{mean:.2f}", spread, mean == best(means))


def _kind(row: dict[str, Any]) -> str:
    return "domain" if row["setting"] == "domain" else str(row["scope"])


def _span(counts: Iterable[int]) -> str:
    low, high = min(found := set(counts)), max(found)
    return f"{low} seed{'s' if low > 1 else ''}" if low == high else f"{low} to {high} seeds"


def _span_tasks(rows: Sequence[dict[str, Any]]) -> str:
    found = sorted({row["tasks"] for row in rows})
    if len(found) == 1:
        return f"T = {found[0]} task{'s' if found[0] > 1 else ''}"
    return "T = " + ", ".join(f"{n} ({' and '.join(_having(rows, n))})" for n in found) + " tasks"


def _having(rows: Sequence[dict[str, Any]], tasks: int) -> list[str]:
    return list(dict.fromkeys(row["challenge"] for row in rows if row["tasks"] == tasks))
