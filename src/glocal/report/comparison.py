"""Ours beside the published numbers, and the paper's test: for a terminal, a page, a paper, or a program."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from glocal.errors import GlocalError, unknown
from glocal.paper.comparison import Comparison, Line, Trend
from glocal.report.comparison_latex import latex
from glocal.report.comparison_markdown import markdown

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMATS = ("rich", "markdown", "latex", "csv", "json")
TEXT_WIDTH = 100


@overload
def render(made: Comparison, format: Literal["markdown", "latex", "csv", "json"]) -> str: ...
@overload
def render(made: Comparison, format: str) -> RenderableType: ...
def render(made: Comparison, format: str) -> RenderableType:
    """The table in one of the formats; 'csv' has its cells alone, 'json' the test too."""
    if format == "rich":
        from glocal.report.comparison_terminal import TerminalComparison

        return TerminalComparison(made)
    if format == "markdown":
        return markdown(made)
    if format == "latex":
        return latex(made)
    if format == "csv":
        return _csv([cell_row(line) for line in made.lines])
    if format == "json":
        rows = {"cells": [cell_row(x) for x in made.lines], "test": [trend_row(x) for x in made.trends]}
        return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False)
    raise unknown("format", format, FORMATS)


def write_all(made: Comparison, folder: str | Path, name: str = "table1") -> list[Path]:
    """Every format as a file of its own, and the test as a second CSV."""
    folder = Path(folder)
    texts = {
        f"{name}.md": markdown(made),
        f"{name}.tex": latex(made),
        f"{name}.csv": render(made, "csv"),
        f"{name}-test.csv": _csv([trend_row(trend) for trend in made.trends]),
    }
    try:
        from rich.console import Console
    except ImportError:
        pass
    else:
        text = io.StringIO()
        Console(file=text, width=TEXT_WIDTH, color_system=None).print(render(made, "rich"))
        texts[f"{name}.txt"] = text.getvalue()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text_of in texts.items():
            (folder / file).write_text(text_of.rstrip() + "\n", encoding="utf-8")
    except OSError as error:
        raise GlocalError(f"cannot write the table to '{folder}': {error.strerror or error}.") from error
    return [folder / file for file in texts]


def cell_row(line: Line) -> dict[str, Any]:
    """One line as numbers, forgetting both over T−1 tasks and over T."""
    row: dict[str, Any] = {
        "challenge": line.challenge,
        "algorithm": line.algorithm,
        "locality": line.locality,
        "lr": line.lr,
        "tasks": line.tasks,
        "seeds": line.seeds,
        "diverged": line.diverged,
    }
    both = {"acc": line.acc, "forgetting": line.forgetting["t-1"], "forgetting_over_t": line.forgetting["t"]}
    for name, x in both.items():
        for whose, number in (("", x.ours), ("published_", x.published)):
            row[f"{name}_{whose}mean"] = _rounded(number.mean if number else None)
            row[f"{name}_{whose}std"] = _rounded(number.std if number else None)
        row |= {f"{name}_difference": _rounded(x.difference), f"{name}_error": _rounded(x.error)}
        row |= {f"{name}_units": _rounded(x.units), f"{name}_far": x.far if x.units is not None else None}
    return row


def trend_row(trend: Trend) -> dict[str, Any]:
    return {
        "challenge": trend.challenge,
        "algorithm": trend.algorithm,
        "locality": trend.locality,
        "seeds": trend.seeds,
        "difference": _rounded(trend.difference),
        "low": _rounded(trend.low),
        "high": _rounded(trend.high),
        "published": _rounded(trend.published),
        "sign": trend.sign,
        "verdict": trend.verdict,
    }


def _rounded(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else round(x, 6)


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
