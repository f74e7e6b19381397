"""What the cells of the comparison say, and the sentences around them, for every format."""

from __future__ import annotations

import math
from collections.abc import Sequence

from glocal.paper.comparison import ENDS, FAR, LEVEL, Compared, Comparison, Line, Number, Trend
from glocal.report.groups import plain
from glocal.report.latex import COLOURS, escape
from glocal.report.layout import ABSENT

MEASURES = ("ACC", "FGT")
MARK = "!"


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
            lines.append("Beside ogd-published stands the published OGD row; ogd-gtl is the paper's OGD-GTL.")
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
    if not made.trends and not _untested(made):
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
                lines.append(f"{challenge}, {locality}: {_counts(found)}.")
        against = [t for t in own if t.locality == "local" and t.published is not None and t.published >= 0]
        if against:
            named = ", ".join(f"{trend.algorithm} ({signed(trend.published)})" for trend in against)
            lines.append(f"{challenge}: against the claim by the published numbers themselves: {named}.")
        if untested := _untested(made.on(challenge)):
            lines.append(f"{challenge}: not tested, for all runs of a rate at one end diverged: {', '.join(untested)}.")
    return lines


def _untested(made: Comparison) -> list[str]:
    """Algorithms with runs at enough learning rates, of which no seed is left at both ends."""
    tested = {trend.algorithm for trend in made.trends}
    own = {name: [line for line in made.lines if line.algorithm == name] for name in _names(made) if name not in tested}
    return [name for name, lines in own.items() if len(lines) >= 2 * ENDS and _an_end_is_lost(lines)]


def _an_end_is_lost(lines: Sequence[Line]) -> bool:
    """Whether all seeds of a rate at one end diverged."""
    ordered = sorted(lines, key=lambda line: line.lr)
    return any(line.diverged == line.seeds for line in (*ordered[:ENDS], *ordered[-ENDS:]))


def _names(made: Comparison) -> list[str]:
    return list(dict.fromkeys(line.algorithm for line in made.lines))


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


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def bold(text: str) -> str:
    return f"**{text}**" if text.endswith(MARK) else text


def tex(text: str) -> str:
    return escape(text).replace("Δ", r"$\Delta$").replace("√", r"$\surd$").replace("²", "$^2$").replace("§", r"\S")


def coloured(algorithm: str, locality: str) -> str:
    return f"\\textcolor{{{COLOURS[locality]}}}{{{escape(algorithm)}}}"
