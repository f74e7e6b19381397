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
from glocal.paper.comparison import FAR, LEVEL, Compared, Comparison, Line, Number, Trend
from glocal.report.groups import plain
from glocal.report.latex import COLOURS, escape
from glocal.report.layout import ABSENT

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMATS = ("rich", "markdown", "latex", "csv", "json")
MEASURES = ("ACC", "FGT")
MARK = "!"
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


def number(x: Number | None) -> str:
    """Mean and deviation; of one seed, which has none, the number alone."""
    if x is None:
        return ABSENT
    return f"{x.mean:.2f}" if math.isnan(x.std) else f"{x.mean:.2f} ± {x.std:.2f}"


def ours(line: Line, x: Compared) -> str:
    """Our number, or why there is none."""
    return "diverged" if x.ours is None and line.diverged == line.seeds else number(x.ours)


def units(x: Compared) -> str:
    if x.units is None:
        return ABSENT
    return f"{x.units:+.1f}".replace("-", "−") + (MARK if x.far else "")


def signed(x: float | None) -> str:
    return ABSENT if x is None or math.isnan(x) else f"{x:+.2f}".replace("-", "−")


def bounds(trend: Trend) -> str:
    return ABSENT if math.isnan(trend.low) else f"[{signed(trend.low)}, {signed(trend.high)}]"


def blocks(made: Comparison, challenge: str) -> list[list[Line]]:
    """The lines of every algorithm of a challenge."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in made.lines:
        if line.challenge == challenge:
            found.setdefault((line.locality, line.algorithm), []).append(line)
    return list(found.values())


def notes(made: Comparison) -> list[str]:
    """What a reader must know of the cells."""
    if not made.lines:
        return ["No runs."]
    seeds = sorted({line.seeds for line in made.lines})
    over = (
        "the T−1 tasks before the last, as published" if made.over == "t-1" else "all T tasks, as the paper states it"
    )
    single = any(line.acc.ours is not None and line.acc.ours.seeds == 1 for line in made.lines)
    whose = "Ours and published" if any(line.acc.published for line in made.lines) else "Ours"
    lines = [
        f"{whose}: mean ± standard deviation over seeds, in percent; ours over {_span(seeds)}, with ddof = 0"
        f"{'; one seed has no deviation' if single else ''}.",
        f"FGT: loss of test accuracy since each task was learnt, averaged over {over}.",
    ]
    if any(line.acc.published for line in made.lines):
        lone = "one seed being taken to vary as the published ones do, " if single else ""
        lines.append(
            "Δ: ours − published, in standard errors √(s²/(n−1) + s'²/(n'−1)) of the two deviations and numbers of "
            f"seeds, {lone}the published ones taken as ddof = 0; {MARK} marks more than {FAR:g}."
        )
        if made.angles == "published":
            lines.append(
                "Ours met the published angles: part of both deviations comes from the same rotations, so Δ should be "
                "smaller than between independent runs."
            )
        elif made.angles:
            lines.append("The angles are not the published ones.")
        if any(line.algorithm == "ogd-published" for line in made.lines):
            lines.append("Beside ogd-published stands the published OGD row; ogd-gtl is OGD as Theorem 2 has it.")
    missing = [name for name in made.challenges if not any(x.acc.published for x in made.lines if x.challenge == name)]
    for name in missing if made.beside else ():
        if name in made.unlike or name not in made.unmasked:
            why = "not of the published size" if name in made.unlike else "without published numbers"
            lines.append(f"{name}: {why}, so there is nothing to compare with.")
    for name in made.unmasked:
        lines.append(
            f"{name}: accuracy among all classes is not compared, for the published one is among the task's own."
        )
    lost = [line for line in made.lines if line.diverged]
    if lost:
        where = ", ".join(f"{x.algorithm} at {plain(x.lr)} on {x.challenge}: {x.diverged} of {x.seeds}" for x in lost)
        lines.append(f"Diverged, and left out of the means: {where}.")
    return lines


def conclusions(made: Comparison) -> list[str]:
    """How the test is made, and what it says of the paper's claim."""
    if not made.trends:
        return ["The paper's test needs four learning rates at least."]
    lines = [
        "Low − high: mean forgetting at the two lowest learning rates minus that at the two highest, in points, with a "
        f"{LEVEL:.0%} t-interval over per-seed differences. The paper (§6.1): always negative for local algorithms, of "
        "both signs for global ones."
    ]
    for challenge in made.challenges:
        own = [trend for trend in made.trends if trend.challenge == challenge]
        for locality in ("local", "global"):
            found = [trend for trend in own if trend.locality == locality]
            if found:
                counts = _counts(found)
                lines.append(f"{challenge}, {locality}: {counts}.")
    return lines


def markdown(made: Comparison) -> str:
    parts = []
    for challenge in made.challenges:
        names = [head for measure in MEASURES for head in heads(measure, made)]
        lines = [f"### {challenge}", "", _row(["algorithm", "lr", *names]), _row(["---", *["---:"] * (1 + len(names))])]
        for block in blocks(made, challenge):
            for i, line in enumerate(block):
                name = f"`{line.algorithm}` ({line.locality})" if i == 0 else ""
                lines.append(_row([name, plain(line.lr), *(_bold(text) for text in texts(line, made))]))
        parts.append("\n".join(lines))
    parts.append("  \n".join(notes(made)))
    if made.trends:
        numbers = ["low − high", f"{LEVEL:.0%} interval", *(["published"] if made.beside else []), "seeds"]
        names = ["challenge", "algorithm", *numbers, "the claim"]
        lines = ["### The paper's test", "", _row(names), _row(["---", "---", *["---:"] * len(numbers), "---"])]
        lines += [_row([t.challenge, f"`{t.algorithm}`", *trend_texts(t, made)]) for t in made.trends]
        parts.append("\n".join(lines))
    parts.append("  \n".join(conclusions(made)))
    return "\n\n".join(parts) + "\n"


def latex(made: Comparison) -> str:
    """A `table` for each challenge in the paper's layout, and one for the test."""
    parts = [r"% \usepackage{booktabs, multirow, xcolor}"]
    under = ["ours", "published", r"$\Delta$"]
    each, title = (len(under), "ours and published") if made.beside else (1, "ours")
    for challenge in made.challenges:
        body = []
        for block in blocks(made, challenge):
            title = f"\\multirow{{{len(block)}}}{{*}}{{{_coloured(block[0].algorithm, block[0].locality)}}}"
            rows = [
                " & ".join([title if i == 0 else "", plain(x.lr), *map(_tex, texts(x, made))]).strip() + r" \\"
                for i, x in enumerate(block)
            ]
            body.append("\n".join(rows))
        parts.append(
            "\n".join(
                [
                    r"\begin{table}[t]",
                    r"\centering",
                    f"\\caption{{\\textbf{{{escape(challenge)}}}, {title}. {_tex(' '.join(notes(made)))}}}",
                    rf"\begin{{tabular}}{{ll{2 * 'c' * each}}}",
                    r"\toprule",
                    r"\multirow{2}{*}{Algorithm} & \multirow{2}{*}{lr} & "
                    rf"\multicolumn{{{each}}}{{c}}{{ACC ($\uparrow$)}} & "
                    rf"\multicolumn{{{each}}}{{c}}{{FGT ($\downarrow$)}} \\",
                    rf" & & {' & '.join(2 * under[:each])} \\",
                    r"\midrule",
                    "\n\\midrule\n".join(body),
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    if made.trends:
        rows = [
            " & ".join(
                [
                    _tex(t.challenge),
                    _coloured(t.algorithm, t.locality),
                    *map(_tex, trend_texts(t, made)),
                ]
            )
            + r" \\"
            for t in made.trends
        ]
        parts.append(
            "\n".join(
                [
                    r"\begin{table}[t]",
                    r"\centering",
                    f"\\caption{{{_tex(' '.join(conclusions(made)))}}}",
                    rf"\begin{{tabular}}{{ll{'c' * (4 if made.beside else 3)}l}}",
                    r"\toprule",
                    rf"Challenge & Algorithm & low $-$ high & {100 * LEVEL:.0f}\% & "
                    rf"{'published & ' if made.beside else ''}seeds & claim \\",
                    r"\midrule",
                    *rows,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def heads(measure: str, made: Comparison) -> list[str]:
    return [f"{measure}, ours", *(["published", "Δ"] if made.beside else [])]


def texts(line: Line, made: Comparison) -> list[str]:
    """The cells of a line: ours, published and Δ of ACC and of FGT, or ours alone."""
    both = line.acc, line.forgetting[made.over]
    if not made.beside:
        return [ours(line, x) for x in both]
    return [text for x in both for text in (ours(line, x), number(x.published), units(x))]


def trend_texts(trend: Trend, made: Comparison) -> list[str]:
    """The cells of the test: the difference, its interval, the published one, seeds and verdict."""
    published = [signed(trend.published)] if made.beside else []
    return [signed(trend.difference), bounds(trend), *published, str(trend.seeds), trend.verdict]


def _counts(found: Sequence[Trend]) -> str:
    said = {"negative": "negative", "positive": "positive", "either": "not settled", "unknown": "without an interval"}
    by_sign = {sign: [t.algorithm for t in found if t.sign == sign] for sign in said}
    return "; ".join(f"{said[sign]}: {', '.join(names)}" for sign, names in by_sign.items() if names)


def _span(seeds: Sequence[int]) -> str:
    low, high = seeds[0], seeds[-1]
    return f"{low} seed{'s' if low > 1 else ''}" if low == high else f"{low} to {high} seeds"


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


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bold(text: str) -> str:
    return f"**{text}**" if text.endswith(MARK) else text


def _tex(text: str) -> str:
    return escape(text).replace("Δ", r"$\Delta$").replace("√", r"$\surd$").replace("²", "$^2$").replace("§", r"\S")


def _coloured(algorithm: str, locality: str) -> str:
    return f"\\textcolor{{{COLOURS[locality]}}}{{{escape(algorithm)}}}"
