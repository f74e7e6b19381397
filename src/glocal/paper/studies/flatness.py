r"""How flat every task's solution is, beside the forgetting that followed (§4: why "flatter local minima" forget less;
appendix, fig. sgdstable).

Under a local quadratic approximation an update Δ forgets ½ Δᵀ H_o Δ: no more than ½ λ_max ‖Δ‖², and ½ (tr H_o / P) ‖Δ‖²
if its direction is random. So forgetting should grow with λ_max and with the trace, as long as learning is local and
the updates are of one length; over learning rates neither holds. Plain SGD is compared with stable SGD, a regime made
to find flat solutions, each with the batches that its authors take for five rotations: 64 and 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from glocal.lens.flatness import Flatness, flatness
from glocal.lens.record import train_traces
from glocal.paper.published import SEEDS
from glocal.paper.studies.cohorts import by_seed, challenge_of, cohort_of, cost_of
from glocal.paper.studies.row_filters import column, distinct, spearman, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from glocal.paper.study import Piece, Place, Row

PLAIN, STABLE = "sgd", "stable-sgd"
REGIMES: dict[str, Piece] = {
    PLAIN: {"algorithm": PLAIN, "options": {}, "batch_size": 64},
    STABLE: {"algorithm": STABLE, "options": {"dropout": 0.5, "decay": 0.8}, "batch_size": 16},
}
FULL: Piece = {"challenge": "rotated-mnist", "tasks": 5, "epochs": 5, "hidden": [100, 100], "examples": 2_000}
FULL |= {"lrs": [0.001, 0.005, 0.01, 0.05, 0.1], "seeds": sorted(SEEDS), "steps": 30, "probes": 20}
DEMO: Piece = FULL | {"challenge": "rotated-digits", "tasks": 4, "epochs": 3, "hidden": [50, 50], "examples": 500}
DEMO |= {"lrs": [0.01, 0.05, 0.2], "seeds": sorted(SEEDS[:2]), "steps": 20, "probes": 10}


class Sharpness(NamedTuple):
    """A number that is small where a solution is flat, or where training stayed near it."""

    symbol: str
    meaning: str
    of: Callable[[Sequence[Row]], np.ndarray]


SHARPNESS = (
    Sharpness(r"$\lambda_{\max}(H_o)$", "the top eigenvalue", lambda rows: column(rows, "top")),
    Sharpness(r"$\mathrm{tr}\,H_o$", "the trace", lambda rows: column(rows, "trace")),
    Sharpness(
        r"$\frac{1}{2}\lambda_{\max}\Vert\theta_T-\theta_o\Vert^2$",
        "½ λ_max ‖θ_T − θ_o‖²",
        lambda rows: column(rows, "top") * column(rows, "moved") ** 2 / 2,
    ),
)


class FlatMinima:
    name = "flatness"
    columns = "challenge algorithm lr seed task top top_error trace trace_error after_next at_end moved"

    def pieces(self, demo: bool) -> list[Piece]:
        if demo:
            return [regime | DEMO for regime in REGIMES.values()]
        return by_seed([regime | FULL for regime in REGIMES.values()])

    def cost(self, demo: bool) -> str:
        piece = DEMO if demo else FULL
        solutions = 2 * len(piece["lrs"]) * len(piece["seeds"]) * piece["tasks"]
        products = piece["steps"] + 3 * piece["probes"] // 2
        return f"{cost_of(piece, 2)}; {products} Hessian products at each of {solutions} solutions"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        cohort = replace(cohort_of(piece, place, challenge_of(piece, place)), batch_size=piece["batch_size"])
        rows: list[Row] = []
        for member, subject in zip(cohort.members, train_traces(cohort, piece["examples"]), strict=True):
            about: Row = {"challenge": piece["challenge"], "algorithm": piece["algorithm"]}
            about |= {"lr": member.lr, "seed": member.seed}
            rows += [about | row for row in _rows(flatness(subject, piece["steps"], piece["probes"]))]
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """A point for each solution: forgetting after the last task against three kinds of sharpness."""
        figure.set_size_inches(11.2, 4.4)
        first, tasks, seeds = rows[0], len(distinct(rows, "task")), len(distinct(rows, "seed"))
        about = f"{first['challenge']} · {tasks} tasks · {seeds} seeds · every solution but the last, after all tasks"
        figure.suptitle(about, x=0.012, ha="left", fontweight="bold")
        known = [row for row in rows if np.isfinite(column([row], "at_end")[0])]
        panels = figure.subplots(1, len(SHARPNESS), sharey=True)
        for axes, sharpness in zip(panels, SHARPNESS, strict=True):
            _points(axes, known, sharpness)
        panels[0].set_ylabel(r"forgetting  $L_o(\theta_T) - L_o(\theta_o)$")
        handles, labels = panels[0].get_legend_handles_labels()
        if labels:
            note = "regime and\nlearning rate"
            figure.legend(handles, labels, loc="outside right center", title=note, alignment="left")

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        said = [
            "The paper: near a solution the quadratic approximation makes flat minima forget less, and only as long as "
            "learning is local."
        ]
        said += [sentence for sentence in (_over_all(rows), _at_rates(rows), _pairs(rows)) if sentence]
        return said if len(said) > 1 else [*said, "No forgetting is known of these rows."]


STUDIES = (FlatMinima(),)


def _rows(found: Flatness) -> list[Row]:
    names = ("top", "top_error", "trace", "trace_error", "after_next", "at_end", "moved")
    return [
        {"task": task, **{name: float(getattr(found, name)[task]) for name in names}} for task in range(len(found.top))
    ]


def _within(rows: Sequence[Row], sharpness: Sharpness) -> np.ndarray:
    """The correlation within every regime and learning rate where there is one."""
    groups = product(dict.fromkeys(row["algorithm"] for row in rows), distinct(rows, "lr"))
    own = (where(rows, algorithm=algorithm, lr=lr) for algorithm, lr in groups)
    found = np.array([spearman(sharpness.of(some), column(some, "at_end")) for some in own])
    return found[np.isfinite(found)]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else np.nan


def _points(axes: Axes, rows: Sequence[Row], sharpness: Sharpness) -> None:
    import matplotlib
    from matplotlib.ticker import LogLocator, NullFormatter

    from glocal.report.groups import format_lr
    from glocal.report.style import FAINT

    lrs = distinct(rows, "lr")
    # The brightest end of the map would vanish on white paper.
    hues = matplotlib.colormaps["plasma"](np.linspace(0.0, 0.88, len(lrs)))
    for algorithm, marker in ((PLAIN, "o"), (STABLE, "X")):
        for lr, hue in zip(lrs, hues, strict=True):
            own = where(rows, algorithm=algorithm, lr=lr)
            x, y = sharpness.of(own), column(own, "at_end")
            shown = np.isfinite(x) & (x > 0)
            label = f"{algorithm} {format_lr(lr)}"
            axes.scatter(x[shown], y[shown], s=26, color=[hue], marker=marker, alpha=0.8, linewidths=0, label=label)
    if np.nanmax(sharpness.of(rows), initial=0) > 0:  # there is no logarithmic axis of nothing
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    everywhere, within = spearman(sharpness.of(rows), column(rows, "at_end")), _mean(_within(rows, sharpness))
    axes.set_title(f"rank correlation {_rho(everywhere)}, within rates {_rho(within)}", loc="left")
    axes.set_xlabel(sharpness.symbol)


def _rho(value: float) -> str:
    return "unknown" if np.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _over_all(rows: Sequence[Row]) -> str:
    forgotten = column(rows, "at_end")
    found = [(s, spearman(s.of(rows), forgotten), _within(rows, s)) for s in SHARPNESS]
    if all(np.isnan(rho) for _, rho, _ in found):
        return ""
    listed = "; ".join(f"with {s.meaning} {_rho(rho)}, within {_rho(_mean(within))}" for s, rho, within in found)
    (_, over_all, within), *_ = found
    at_one = "forget more" if _mean(within) > 0 else "do not forget more"
    return (
        f"The rank correlation of forgetting, over all {int(np.isfinite(forgotten).sum())} solutions and on average "
        f"within one regime and learning rate, is: {listed}. By the top eigenvalue sharper solutions {at_one} at one "
        f"learning rate (the correlation is positive in {(within > 0).sum()} of {within.size}); over all rates, which "
        f"change how far training goes, they {'do' if over_all > 0 else 'do not'}."
    )


def _at_rates(rows: Sequence[Row]) -> str:
    """Where learning is local, and where it is not."""
    lrs = distinct(rows, "lr")
    ends = [where(rows, algorithm=PLAIN, lr=lr) for lr in (lrs[0], lrs[-1])]
    low, high = (spearman(SHARPNESS[0].of(own), column(own, "at_end")) for own in ends)
    if len(lrs) < 2 or np.isnan(low) or np.isnan(high):
        return ""
    far = [float(np.nanmedian(column(own, "moved"))) for own in ends]
    verdict = "show" if low > high else "do not show"
    return (
        f"For plain SGD the correlation with the top eigenvalue is {_rho(low)} at {lrs[0]:g}, where training ends at a "
        f"distance of {far[0]:.2g} from the solution, and {_rho(high)} at {lrs[-1]:g}, at {far[1]:.2g} (medians): "
        f"these rows {verdict} that flatness tells more where learning is local."
    )


def _pairs(rows: Sequence[Row]) -> str:
    """The two regimes at the same learning rate, seed and task."""
    keyed = {tuple(row[name] for name in ("algorithm", "lr", "seed", "task")): row for row in rows}
    names = [(key, (STABLE, *key[1:])) for key in keyed if key[0] == PLAIN and (STABLE, *key[1:]) in keyed]
    plain, stable = [keyed[a] for a, _ in names], [keyed[b] for _, b in names]
    known = np.isfinite(column(plain, "at_end")) & np.isfinite(column(stable, "at_end"))
    if not known.any():
        return ""
    flatter, less, nearer = (
        int((column(stable, name) < column(plain, name))[known].sum()) for name in ("top", "at_end", "moved")
    )
    count = int(known.sum())
    verdict = "show" if 2 * flatter > count and 2 * less > count else "do not show"
    return (
        f"At the same learning rate, seed and task stable SGD's solution is flatter than plain SGD's in {flatter} of "
        f"{count} pairs, forgets less in {less}, and is less far from the end in {nearer}: these rows {verdict} that "
        "the stable regime finds flatter minima and forgets less. It has batches of "
        f"{REGIMES[STABLE]['batch_size']}, plain SGD of {REGIMES[PLAIN]['batch_size']}, as their authors have them: it "
        f"makes {REGIMES[PLAIN]['batch_size'] // REGIMES[STABLE]['batch_size']} times as many steps."
    )
