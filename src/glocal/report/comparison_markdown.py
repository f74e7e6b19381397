"""The comparison for a page."""

from __future__ import annotations

from glocal.paper.comparison import LEVEL, Comparison
from glocal.report import side_by_side
from glocal.report.comparison_texts import MEASURES, blocks, bold, conclusions, heads, notes, row, texts, trend_texts
from glocal.report.groups import plain


def markdown(made: Comparison) -> str:
    parts = [side_by_side.markdown(made)] if len(made.challenges) > 1 else []
    for challenge in made.challenges:
        names = [head for measure in MEASURES for head in heads(measure, made)]
        lines = [f"### {challenge}", "", row(["algorithm", "lr", *names]), row(["---", *["---:"] * (1 + len(names))])]
        for block in blocks(made, challenge):
            for i, line in enumerate(block):
                name = f"`{line.algorithm}` ({line.locality})" if i == 0 else ""
                lines.append(row([name, plain(line.lr), *(bold(text) for text in texts(line, made))]))
        parts.append("\n".join(lines))
    parts.append("  \n".join(notes(made)))
    if made.trends:
        numbers = ["low − high", f"{LEVEL:.0%} interval", *(["published"] if made.beside else []), "seeds"]
        names = ["challenge", "algorithm", *numbers, "the claim"]
        lines = ["### The paper's test", "", row(names), row(["---", "---", *["---:"] * len(numbers), "---"])]
        lines += [row([t.challenge, f"`{t.algorithm}`", *trend_texts(t, made)]) for t in made.trends]
        parts.append("\n".join(lines))
    parts.append("  \n".join(conclusions(made)))
    return "\n\n".join(parts) + "\n"
