r"""Theorem 1 on trained networks: E(t) beside ½ Δ_tᵀ \bar H_{<t} Δ_t, over learning rates (Eq. forgetting-lowerbound).

The theorem equates the two where every θ_o is a minimum, the solutions are near each other, and nothing was forgotten
before. The last holds after the second task, t = 2, whatever the algorithm: E(1) = 0. Beside the theorem's quadratic
stands the whole expansion to second order (Eq. forgetting-quadratic), which asks of these that the solutions are near,
and no more. Losses are those of training examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from glocal.lens.forgetting import forgetting, recursion
from glocal.lens.theorem1 import theorem1
from glocal.paper.studies.cohorts import by_seed
from glocal.paper.studies.lr_plots import finite, listed, lost, names, pens, rate_colours, title
from glocal.paper.studies.row_filters import column, distinct, spearman, told, where
from glocal.paper.studies.trained_runs import after_tasks, rotations, watched
from glocal.paper.study import Piece, Place, Row
from glocal.paper.table1 import COLUMNS
from glocal.report.style import FAINT, INK, TITLE_COLOURS, log_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

COLUMN = COLUMNS["rotated-mnist"]
Options: TypeAlias = dict[str, dict[str, Any]]  # by algorithm
ALGORITHMS: Options = {
    "sgd": {},
    "ewc": dict(COLUMN.row("ewc").options),
    "optimal-hard": {},
    "optimal-soft": {},
    "ogd": {"slots": 500},
}
FULL: Piece = {
    "challenge": COLUMN.challenge,
    "tasks": 10,
    "epochs": COLUMN.epochs,
    "batch_size": COLUMN.batch_size,
    "hidden": 100,
    "lrs": COLUMN.lrs,
    "seeds": COLUMN.seeds,
    "examples": 2_000,
    "steps": 20,
}
DEMO: Piece = FULL | {
    "challenge": "rotated-digits",
    "tasks": 3,
    "epochs": 2,
    "batch_size": 128,
    "hidden": 22,
    "lrs": (0.02, 0.1, 0.5),
    "seeds": COLUMN.seeds[:2],
    "examples": 300,
    "steps": 10,
}
SMALLER: Options = {"optimal-hard": {"rank": 10, "samples": 500}, "optimal-soft": {"samples": 500}}
"""Options of the demo where they are not those of the whole."""
FACTOR = 2.0
"""E(t) counts as foretold by a number that differs from it by no more than this factor."""


def cut(algorithms: Options, smaller: Options, demo: bool) -> list[Piece]:
    """A piece for every algorithm, and for every seed too where it takes long."""
    size = DEMO if demo else FULL
    chosen = {a: o | smaller.get(a, {}) for a, o in algorithms.items()} if demo else algorithms
    whole = [{"algorithm": a, "options": o, **size} for a, o in chosen.items()]
    return whole if demo else by_seed(whole)


def told_cost(algorithms: Options, demo: bool) -> str:
    size = DEMO if demo else FULL
    runs, tasks = len(algorithms) * len(size["lrs"]) * len(size["seeds"]), size["tasks"]
    products = tasks * (tasks - 1 + size["steps"])
    return f"{size['challenge']}: {runs} runs of {tasks} tasks, {products} curvature products for each"


class Prediction:
    """Both sides of the theorem and its premises after every task from the second on."""

    name = "theorem1"
    columns = (
        "algorithm locality lr seed t measured quadratic second_order condition relative forgotten slope lowest reach"
    )

    def pieces(self, demo: bool) -> list[Piece]:
        return cut(ALGORITHMS, SMALLER, demo)

    def cost(self, demo: bool) -> str:
        return told_cost(ALGORITHMS, demo)

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        rows: list[Row] = []
        for member, subject, _ in watched(piece, rotations(piece, place), place.device):
            both, expansion = theorem1(subject, steps=piece["steps"]), recursion(forgetting(subject))
            columns = {
                "measured": both.measured,
                "quadratic": both.quadratic,
                "second_order": expansion.predicted,
                "condition": both.condition,
                "relative": both.relative,
                "forgotten": both.premises.forgotten,
                "slope": both.premises.slope,
                "lowest": both.premises.lowest,
                "reach": both.premises.reach,
            }
            rows += after_tasks(piece, member, columns)
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """A panel for each algorithm, E(t) over the quadratic, coloured by learning rate; and how often they agree."""
        algorithms = names(rows)
        wide = -(-(len(algorithms) + 1) // 2)
        figure.set_size_inches(2.7 * wide + 1.0, 5.6)
        cells = list(figure.subplots(2, wide, squeeze=False).flat)
        for axes in cells[len(algorithms) + 1 :]:
            axes.set_visible(False)
        colours, limits = rate_colours(rows), _limits(rows)
        for axes, algorithm in zip(cells, algorithms, strict=False):
            _scatter(axes, where(rows, algorithm=algorithm), colours, *limits)
        cells[0].legend(loc="lower right", handletextpad=0.1, borderpad=0.2)
        for axes in cells[: len(algorithms) : wide]:
            axes.set_ylabel(r"forgetting $E(t)$, in loss")
        _agreement(cells[len(algorithms)], rows)
        bar = figure.colorbar(colours, ax=cells, label="learning rate", aspect=34, pad=0.02, ticks=distinct(rows, "lr"))
        bar.ax.set_yticklabels([f"{lr:g}" for lr in distinct(rows, "lr")])
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        known = _known(rows)
        if not known:
            return ["Theorem 1 cannot be looked at: no run has a finite loss."]
        lrs, second, later = distinct(known, "lr"), where(known, t=2), _later(known)
        ends = [where(known, lr=lr) for lr in (lrs[0], lrs[-1])]
        shares = {lr: _foretold(where(second, lr=lr), "quadratic") for lr in lrs}
        best, worst = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        beside = listed([_beside(where(second, lr=lr), lr) for lr in dict.fromkeys((lrs[0], lrs[-1]))])
        said = [
            "Theorem 1 says E(t) = ½ Δᵀ H̄ Δ ≥ 0 at minima that lie near each other, where nothing was forgotten "
            f"before. After the second task nothing was, whatever the algorithm: of {_outcome(second, 'E(2)')}: most "
            f"often at a learning rate of {best:g} ({shares[best]:.0f} %), least at {worst:g} ({shares[worst]:.0f} %). "
            f"It is {beside} (medians).",
            "Whether more is forgotten where the quadratic is larger: the rank correlation of the two is, after the "
            f"second task, {_correlations(second)}.",
            *_without_the_premise(later),
            f"The whole second order is within the factor of {_foretold(known, 'second_order'):.0f} % of all E(t).",
            f"Of the premises, from a learning rate of {lrs[0]:g} to one of {lrs[-1]:g}, the largest old gradient "
            f"‖∇L_o(θ_o)‖ goes from {' to '.join(_median(rows, 'slope') for rows in ends)}, and the largest distance "
            f"between solutions from {' to '.join(_apart(rows) for rows in ends)}.",
        ]
        holds = [f"{lr:g}" for lr, share in shares.items() if share >= 50]
        verdict = f"at {listed(holds)}" if holds else "at none of these learning rates"
        return [*said, f"So it foretells half of all E(2) or more {verdict}.", *lost(rows, "measured", " from then on")]


def _known(rows: Sequence[Row]) -> list[Row]:
    """Those of runs as long as they did not diverge."""
    return [row for row in rows if np.isfinite(column([row], "measured"))[0]]


def _outcome(rows: Sequence[Row], name: str) -> str:
    """How many there are, below 0, and foretold."""
    negative = 100 * float((column(rows, "measured") < 0).mean())
    return (
        f"{len(rows)} {name}, {negative:.0f} % are below 0, and the quadratic is within a factor of {FACTOR:g} of "
        f"{_foretold(rows, 'quadratic'):.0f} %"
    )


def _correlations(rows: Sequence[Row]) -> str:
    """Of E(t) and the quadratic, by their ranks."""
    each = []
    for algorithm in names(rows):
        both = (column(where(rows, algorithm=algorithm), name) for name in ("measured", "quadratic"))
        each.append(f"{told(spearman(*both))} for {algorithm}")
    return listed(each)


def _without_the_premise(later: Sequence[Row]) -> list[str]:
    """After later tasks, which find something forgotten."""
    if not later:
        return []
    return [
        "After later tasks the theorem's last premise does not hold: the largest |E| before them is "
        f"{_median(later, 'forgotten')} in the median. Of {_outcome(later, 'such E(t)')}; the rank correlation is "
        f"{_correlations(later)}."
    ]


def agrees(rows: Sequence[Row], name: str) -> np.ndarray:
    """Whether E(t) is above 0, and the number under the name within FACTOR of it."""
    measured, found = column(rows, "measured"), column(rows, name)
    return (measured > 0) & (found >= measured / FACTOR) & (found <= measured * FACTOR)


def _foretold(rows: Sequence[Row], name: str) -> float:
    return 100 * float(agrees(rows, name).mean())


def _beside(rows: Sequence[Row], lr: float) -> str:
    return f"{_median(rows, 'quadratic')} where E(2) = {_median(rows, 'measured')} at {lr:g}"


def _median(rows: Sequence[Row], name: str) -> str:
    found = finite(rows, name)
    return told(float(np.median(found)) if found.size else np.nan)


def _apart(rows: Sequence[Row]) -> str:
    found = finite(rows, "reach")
    return told(float(np.median(found)) ** (1 / 3) if found.size else np.nan)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """From the least E(t) or 0 to the largest number of both sides."""
    found = np.concatenate([finite(rows, name) for name in ("measured", "quadratic")])
    return min(finite(rows, "measured").min(initial=0.0), 0.0), float(found.max(initial=0.0)) or 1.0


def _scatter(axes: Axes, rows: Sequence[Row], colours: ScalarMappable, lowest: float, most: float) -> None:
    """Linear near 0 and logarithmic beyond, for E(t) may be negative; a band for what counts as foretold."""
    linear = min(0.1, most)
    for name in ("x", "y"):
        getattr(axes, f"set_{name}scale")("symlog", linthresh=linear, linscale=0.8)
    axes.set_xlim(-linear / 5, 1.5 * most)
    axes.set_ylim(1.5 * lowest - linear / 5, 1.5 * most)
    line = np.linspace(0, 1.5 * most, 2_000)  # straight lines are none on these axes
    axes.plot(line, line, color=FAINT, linewidth=0.9)
    axes.fill_between(line, line / FACTOR, line * FACTOR, color=FAINT, alpha=0.12, linewidth=0)
    axes.axhline(0, color=FAINT, linewidth=0.6)
    for own, label, size, edge in ((_later(rows), "$t > 2$", 9, "none"), (where(rows, t=2), "$t = 2$", 22, INK)):
        x, y, lr = (column(own, name) for name in ("quadratic", "measured", "lr"))
        shape: dict[str, Any] = {"s": size, "edgecolors": edge, "linewidths": 0.7, "label": label}
        axes.scatter(x, y, c=colours.to_rgba(lr), alpha=0.85, zorder=3, **shape)
    axes.set_title(title(rows), color=TITLE_COLOURS[str(rows[0]["locality"])], loc="left")
    axes.set_xlabel(r"$\frac{1}{2}\,\Delta_t^\top \bar H_{<t}\,\Delta_t$")


def _later(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["t"] != 2]


def _agreement(axes: Axes, rows: Sequence[Row]) -> None:
    styles = pens(rows)
    for algorithm in names(rows):
        own, pen = where(_known(rows), algorithm=algorithm), styles[algorithm]
        lrs = distinct(own, "lr")
        shares = [_foretold(where(own, lr=lr), "quadratic") for lr in lrs]
        axes.plot(lrs, shares, **pen.line(), **pen.point(), label=algorithm)
    log_lr(axes, distinct(rows, "lr"), crowded=True)
    axes.set_ylim(-4, 104)
    axes.set_title(f"within a factor of {FACTOR:g} (% of all $t$)", loc="left")
    axes.legend(fontsize=7, loc="best", labelspacing=0.3, handlelength=2.4)


STUDIES = (Prediction(),)
