"""The comparison for a paper."""

from __future__ import annotations

from glocal.paper.comparison import LEVEL, Comparison
from glocal.report import side_by_side
from glocal.report.comparison_texts import blocks, coloured, conclusions, notes, tex, texts, trend_texts
from glocal.report.groups import plain
from glocal.report.latex import escape


def latex(made: Comparison) -> str:
    """The challenges side by side where there are several, a `table` for each beside its published numbers, and one
    for the test."""
    parts = [r"% \usepackage{booktabs, multirow, xcolor}"]
    if len(made.challenges) > 1:
        parts.append(side_by_side.latex(made))
    under = ["ours", "published", r"$\Delta$"]
    each, title = (len(under), "ours and published") if made.beside else (1, "ours")
    for challenge in made.challenges:
        said = tex(" ".join(notes(made.on(challenge))))
        body = []
        for block in blocks(made, challenge):
            name = f"\\multirow{{{len(block)}}}{{*}}{{{coloured(block[0].algorithm, block[0].locality)}}}"
            rows = [
                " & ".join([name if i == 0 else "", plain(x.lr), *map(tex, texts(x, made))]).strip() + r" \\"
                for i, x in enumerate(block)
            ]
            body.append("\n".join(rows))
        parts.append(
            "\n".join(
                [
                    r"\begin{table}[t]",
                    r"\centering",
                    f"\\caption{{\\textbf{{{escape(challenge)}}}, {title}. {said}}}",
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
                    tex(t.challenge),
                    coloured(t.algorithm, t.locality),
                    *map(tex, trend_texts(t, made)),
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
                    f"\\caption{{{tex(' '.join(conclusions(made)))}}}",
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
