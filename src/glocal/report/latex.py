r"""The table for a paper: booktabs, global algorithms blue and local ones red, as in the paper's Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glocal.report.layout import ABSENT, Entry, blocks, challenges, heads, notes

COLOURS = {"global": "blue", "local": "red"}
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "·": r"$\cdot$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "λ": r"$\lambda$",
    "γ": r"$\gamma$",
}


def latex(rows: Sequence[dict[str, Any]]) -> str:
    """A `table` environment; the notes are its caption."""
    names = challenges(rows)
    both = " & ".join(heads(rows, r"$\uparrow$", r"$\downarrow$"))
    spans = "".join(f" & \\multicolumn{{2}}{{c}}{{\\textbf{{{escape(name)}}}}}" for name in names)
    body = []
    for block in blocks(rows):
        title = f"\\textcolor{{{COLOURS[block.locality]}}}{{{escape(block.algorithm)}}} ({block.locality})"
        lines = []
        for i, line in enumerate(block.lines):
            first = f"\\multirow{{{len(block.lines)}}}{{*}}{{{title}}}" if i == 0 else ""
            entries = [_number(entry) for name in names for entry in line.entries[name]]
            lines.append(" & ".join([first, line.lr, *entries]).strip() + r" \\")
        body.append("\n".join(lines))
    return "\n".join(
        [
            r"% \usepackage{booktabs, multirow, xcolor}",
            r"\begin{table}[t]",
            r"\centering",
            f"\\caption{{{escape(' '.join(notes(rows)))} Bold: the best ACC and the lowest FGT of each algorithm.}}",
            f"\\begin{{tabular}}{{ll{'cc' * len(names)}}}",
            r"\toprule",
            rf"\multirow{{2}}{{*}}{{Algorithm}} & \multirow{{2}}{{*}}{{lr}}{spans} \\",
            rf" & {(' & ' + both) * len(names)} \\",
            r"\midrule",
            "\n\\midrule\n".join(body),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def escape(text: str) -> str:
    return "".join(SPECIAL.get(c, c) for c in text)


def _number(entry: Entry) -> str:
    mean = f"\\mathbf{{{entry.mean}}}" if entry.best else entry.mean
    if not entry.std:
        return "--" if entry.mean == ABSENT else f"${mean}$" if entry.best else mean
    return f"${mean}_{{\\,\\textcolor{{gray}}{{\\pm\\,{entry.std.replace(ABSENT, '-')}}}}}$"
