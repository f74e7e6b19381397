"""Our Table 1 in the paper's layout: an algorithm and a learning rate a line, the challenges side by side; forgetting
over the T−1 tasks before the last, as published, and over all T, as the paper states it."""

from __future__ import annotations

from collections.abc import Sequence

from glocal.paper.comparison import Comparison, Line
from glocal.report.comparison_texts import coloured, ours, row, tex
from glocal.report.groups import plain
from glocal.report.latex import escape
from glocal.report.layout import ABSENT

HEADS = ("ACC", "FGT over T−1", "over T")
CAPTION = "Ours: mean ± standard deviation over seeds (ddof = 0), in percent; – where there are no runs."


def markdown(made: Comparison) -> str:
    names = [f"{challenge}: {HEADS[0]}" for challenge in made.challenges]
    heads = [head for name in names for head in (name, *HEADS[1:])]
    lines = ["### Side by side", "", row(["algorithm", "lr", *heads]), row(["---", *["---:"] * (1 + len(heads))])]
    for (algorithm, locality), rates in _algorithms(made).items():
        for i, lr in enumerate(rates):
            lines.append(
                row([f"`{algorithm}` ({locality})" if i == 0 else "", plain(lr), *_cells(made, algorithm, lr)])
            )
    return "\n".join([*lines, "", CAPTION])


def latex(made: Comparison) -> str:
    under = "".join(f" & {tex(head)}" for _ in made.challenges for head in HEADS)
    spans = "".join(f" & \\multicolumn{{{len(HEADS)}}}{{c}}{{\\textbf{{{escape(c)}}}}}" for c in made.challenges)
    body = []
    for (algorithm, locality), rates in _algorithms(made).items():
        name = f"\\multirow{{{len(rates)}}}{{*}}{{{coloured(algorithm, locality)}}}"
        body.append(
            "\n".join(
                " & ".join([name if i == 0 else "", plain(lr), *map(tex, _cells(made, algorithm, lr))]).strip() + r" \\"
                for i, lr in enumerate(rates)
            )
        )
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            f"\\caption{{{tex(CAPTION)}}}",
            rf"\begin{{tabular}}{{ll{'c' * len(HEADS) * len(made.challenges)}}}",
            r"\toprule",
            rf"\multirow{{2}}{{*}}{{Algorithm}} & \multirow{{2}}{{*}}{{lr}}{spans} \\",
            rf" & {under} \\",
            r"\midrule",
            "\n\\midrule\n".join(body),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _algorithms(made: Comparison) -> dict[tuple[str, str], list[float]]:
    """Global before local, each with the learning rates that it has on any challenge."""
    found: dict[tuple[str, str], set[float]] = {}
    for line in sorted(made.lines, key=lambda line: (line.locality, line.algorithm)):
        found.setdefault((line.algorithm, line.locality), set()).add(line.lr)
    return {who: sorted(rates) for who, rates in found.items()}


def _cells(made: Comparison, algorithm: str, lr: float) -> list[str]:
    here = {line.challenge: line for line in made.lines if (line.algorithm, line.lr) == (algorithm, lr)}
    return [text for challenge in made.challenges for text in _texts(here.get(challenge))]


def _texts(line: Line | None) -> Sequence[str]:
    if line is None:
        return [ABSENT] * len(HEADS)
    return [ours(line, x) for x in (line.acc, line.forgetting["t-1"], line.forgetting["t"])]
