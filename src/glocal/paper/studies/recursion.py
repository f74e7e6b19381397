r"""Forgetting predicted and measured: Eq. forgetting-quadratic for every pair of tasks, and Eq. eqt:forgetting-rec for
their average, of plain SGD over learning rates.

Both are exact for quadratic losses. A linear network with squared error has such: there, in double precision, the two
must agree to rounding, at every learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import one_hot

from glocal.challenges.challenge import Challenge, Data, Task
from glocal.lens.forgetting import Forgetting, forgetting, recursion
from glocal.lens.record import train_traces
from glocal.paper.studies.cohorts import DEMO, FULL, by_seed, challenge_of, cohort_of, cost_of
from glocal.paper.studies.lr_plots import listed, rate_colours
from glocal.paper.studies.row_filters import against, column, distinct, median, told, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from glocal.paper.study import Piece, Place, Row, Scalar

EXACT = 1e-9
"""What rounding in double precision may leave of a difference."""
TERMS = {"gradient": "gradient", "quadratic": "Hessian", "remainder": "beyond the second order"}


class Recursion:
    name = "recursion"
    columns = (
        "network lr seed kind task learnt measured predicted before gradient quadratic v remainder gradient_share "
        "quadratic_share remainder_share"
    )

    def pieces(self, demo: bool) -> list[Piece]:
        return self._networks(demo) if demo else by_seed(self._networks(demo))

    def _networks(self, demo: bool) -> list[Piece]:
        """All seeds of both networks."""
        if demo:
            base = DEMO | {"seeds": [0, 1], "examples": 500}
            lrs, slow = [0.01, 0.03, 0.1, 0.3], [0.001, 0.01]
        else:
            base = FULL | {"seeds": [0, 1, 2, 3, 4], "examples": 2_000}
            lrs, slow = [0.001, 0.005, 0.01, 0.05, 0.1], [0.0001, 0.001, 0.01]
        # The inputs' largest second moment bounds the rates at which linear regression is stable.
        return [{"network": "mlp"} | base | {"lrs": lrs}, {"network": "linear"} | base | {"hidden": [], "lrs": slow}]

    def cost(self, demo: bool) -> str:
        pieces = self._networks(demo)
        pairs = (
            sum(len(p["lrs"]) * len(p["seeds"]) for p in pieces) * pieces[0]["tasks"] * (pieces[0]["tasks"] - 1) // 2
        )
        return f"{'; '.join(cost_of(piece, 1) for piece in pieces)}; {pairs:,} Hessian products"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        challenge = challenge_of(piece, place)
        linear = piece["network"] == "linear"
        cohort = cohort_of(piece, place, regression(challenge) if linear else challenge)
        rows: list[Row] = []
        for member, subject in zip(cohort.members, train_traces(cohort, piece["examples"]), strict=True):
            pairs = forgetting(subject.double() if linear else subject)
            run: Row = {"network": piece["network"], "lr": member.lr, "seed": member.seed}
            rows += [run | row for row in (*_pairs(pairs), *_averages(pairs))]
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Predicted against measured, of both networks; the share of every term; the average over time."""
        figure.set_size_inches(10.2, 7.0)
        (pairs, exact), (shares, average) = figure.subplots(2, 2)
        _against_measured(pairs, where(rows, network="mlp", kind="pair"))
        pairs.set_title("Every pair of tasks, network with hidden layers", loc="left")
        _against_measured(exact, where(rows, network="linear", kind="pair"))
        exact.set_title("Every pair, linear network with squared error", loc="left")
        _shares(shares, where(rows, network="mlp", kind="pair"))
        _average(average, where(rows, network="mlp", kind="average"))

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        said = [_agreement(rows), _terms(rows), _recursion(rows), _quadratic_case(rows)]
        return [sentence for sentence in said if sentence]


STUDIES = (Recursion(),)


def regression(challenge: Challenge) -> Challenge:
    """The same tasks with squared error to the classes' unit vectors."""

    def make_task(index: int, seed: int, device: torch.device | None = None) -> Task:
        task = challenge.task(index, seed, device)
        train, test = (Data(d.x, one_hot(d.y, challenge.outputs).float()) for d in (task.train, task.test))
        return Task(train, test, task.classes)

    return replace(challenge, make_task=make_task, loss="squared-error")


def _pairs(found: Forgetting) -> Iterator[Row]:
    """Task o after task t, both counted from 0, for o < t."""
    named = {"measured": found.measured, "predicted": found.predicted, "remainder": found.remainder}
    named |= {"gradient": found.gradient, "quadratic": found.quadratic}
    named |= {f"{term}_share": share for term, share in found.shares._asdict().items()}
    for t in range(1, len(found.measured)):
        for o in range(t):
            yield _row("pair", task=o, learnt=t + 1, **{name: float(matrix[t, o]) for name, matrix in named.items()})


def _averages(found: Forgetting) -> Iterator[Row]:
    """E(t) over t tasks, and what the update Δ_t adds to it."""
    whole = recursion(found)
    named = {"measured": whole.measured, "predicted": whole.predicted, "before": whole.before}
    named |= {"gradient": whole.gradient, "quadratic": whole.quadratic, "v": whole.v}
    named |= {"remainder": whole.measured - whole.predicted}
    for t in range(1, len(found.measured)):
        yield _row("average", learnt=t + 1, **{name: float(vector[t]) for name, vector in named.items()})


def _row(kind: str, **values: Scalar) -> Row:
    """kind: pair or average. learnt: tasks by then."""
    terms = ("measured", "predicted", "before", "gradient", "quadratic", "v", "remainder")
    shares = ("gradient_share", "quadratic_share", "remainder_share")
    return {"kind": kind} | dict.fromkeys(("task", "learnt", *terms, *shares)) | values


def _against_measured(axes: Axes, rows: Sequence[Row]) -> None:
    """A point for each pair, coloured by the learning rate; a line where prediction and measurement agree."""
    from glocal.report.style import FAINT

    colours = rate_colours(rows)
    both = np.concatenate([column(rows, "measured"), column(rows, "predicted")])
    for lr in distinct(rows, "lr"):
        own = where(rows, lr=lr)
        x, y = column(own, "measured"), column(own, "predicted")
        axes.scatter(x, y, s=14, color=[colours.to_rgba(np.array(lr))], alpha=0.75, linewidths=0, label=f"{lr:g}")
    limits = _symmetric(axes, both, "xy")
    axes.plot(limits, limits, color=FAINT, linewidth=0.9, linestyle=":", zorder=0)
    axes.set(
        xlabel="measured  $L_o(\\theta_t) - L_o(\\theta_o)$",
        ylabel="predicted to second order",
        xlim=limits,
        ylim=limits,
    )
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "alignment": "left"}
    axes.legend(title="learning rate", handletextpad=0.2, markerscale=1.6, **beside)


def _symmetric(axes: Axes, values: np.ndarray, which: str) -> tuple[float, float]:
    """Logarithmic axes that go through 0, for forgetting may be negative: three decades, and linear below them."""
    from matplotlib.ticker import NullLocator, SymmetricalLogLocator

    known = values[np.isfinite(values)]
    largest = float(np.abs(known).max(initial=1e-9))
    linear = 10.0 ** (np.ceil(np.log10(largest)) - 3)
    for name in which:
        getattr(axes, f"set_{name}scale")("symlog", linthresh=linear)
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear))
        axis.set_minor_locator(NullLocator())
    return (1.6 * min(float(known.min(initial=0)), -linear / 2), 1.6 * max(float(known.max(initial=0)), linear))


def _shares(axes: Axes, rows: Sequence[Row]) -> None:
    """The mean share of every term, one above the other."""
    from glocal.report.style import COOL, WARM, log_lr

    lrs = distinct(rows, "lr")
    below = np.zeros(len(lrs))
    for (term, label), colour in zip(TERMS.items(), (COOL[2], COOL[0], WARM[1]), strict=True):
        found = [column(where(rows, lr=lr), f"{term}_share") for lr in lrs]
        share = np.array([f[np.isfinite(f)].mean() if np.isfinite(f).any() else 0.0 for f in found])
        axes.fill_between(lrs, below, below + share, color=colour, alpha=0.85, linewidth=0, label=label)
        below = below + share
    log_lr(axes, lrs)
    axes.set(ylabel="mean share of the magnitudes", ylim=(0, 1), xlim=(lrs[0], lrs[-1]))
    axes.set_title("What forgetting is made of", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.2)


def _average(axes: Axes, rows: Sequence[Row]) -> None:
    """E(t) as it is measured, and as Eq. eqt:forgetting-rec adds it up."""
    from matplotlib.ticker import MaxNLocator

    from glocal.report.style import FAINT

    colours, lrs, seen = rate_colours(rows), distinct(rows, "lr"), []
    for lr in dict.fromkeys((lrs[0], lrs[len(lrs) // 2], lrs[-1])):
        for name, dashes in (("measured", "-"), ("predicted", "--")):
            learnt, found = against(where(rows, lr=lr), "learnt", name)
            shown = np.isfinite(found)
            axes.plot(
                learnt[shown],
                found[shown],
                color=colours.to_rgba(np.array(lr)),
                linestyle=dashes,
                marker="o",
                markersize=3.5,
            )
            seen.append(found)
        axes.plot([], [], color=colours.to_rgba(np.array(lr)), label=f"learning rate {lr:g}")
    for name, dashes in (("measured", "-"), ("by the recursion", "--")):
        axes.plot([], [], color=FAINT, linestyle=dashes, label=name)
    axes.set_ylim(_symmetric(axes, np.concatenate(seen), "y"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="tasks learnt  $t$", ylabel="average forgetting  $E(t)$")
    axes.set_title("The average, task by task", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, columnspacing=1.2)


def _errors(rows: Sequence[Row]) -> np.ndarray:
    """|predicted − measured| / |measured|; inf where it is not a number."""
    measured, predicted = column(rows, "measured"), column(rows, "predicted")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.abs(predicted - measured) / np.abs(measured), nan=np.inf, posinf=np.inf)


def _agreement(rows: Sequence[Row]) -> str:
    pairs = where(rows, network="mlp", kind="pair")
    lrs = distinct(pairs, "lr")
    if not lrs:
        return ""
    found = {lr: median(_errors(where(pairs, lr=lr))) for lr in lrs}
    verdict = "agree" if found[lrs[0]] < found[lrs[-1]] else "do not agree"
    named = listed([f"{told(error)} at learning rate {lr:g}" for lr, error in found.items()])
    return (
        "The paper writes forgetting as its quadratic approximation, which holds while learning is local, and the rows "
        f"{verdict}: of its measured size, the prediction for a pair of tasks misses a share of {named} (medians)."
    )


def _terms(rows: Sequence[Row]) -> str:
    pairs = where(rows, network="mlp", kind="pair")
    said = []
    for lr in dict.fromkeys(distinct(pairs, "lr")[:1] + distinct(pairs, "lr")[-1:]):
        own = where(pairs, lr=lr)
        shares = [(label, column(own, f"{term}_share")) for term, label in TERMS.items()]
        known = [f"{label} {100 * s[np.isfinite(s)].mean():.0f} %" for label, s in shares if np.isfinite(s).any()]
        if known:
            said.append(f"at {lr:g} {', '.join(known)}")
    return f"The terms' mean shares of forgetting are {'; '.join(said)}." if said else ""


def _recursion(rows: Sequence[Row]) -> str:
    averages = where(rows, network="mlp", kind="average")
    last = where(averages, learnt=max(distinct(averages, "learnt"), default=0))
    said = []
    for lr in dict.fromkeys(distinct(last, "lr")[:1] + distinct(last, "lr")[-1:]):
        own = where(last, lr=lr)
        measured, predicted = (median(column(own, name)) for name in ("measured", "predicted"))
        said.append(f"{told(predicted)} where {told(measured)} is measured at {lr:g}")
    return f"After the last task the recursion gives E(T) = {' and '.join(said)} (medians over seeds)." if said else ""


def _quadratic_case(rows: Sequence[Row]) -> str:
    """Relative to the largest forgetting of all: that of a pair may be 0."""
    pairs = where(rows, network="linear", kind="pair")
    measured, predicted = column(pairs, "measured"), column(pairs, "predicted")
    if not len(pairs):
        return ""
    known = np.isfinite(measured)
    scale = np.abs(measured[known]).max(initial=0)
    gap = np.abs(predicted - measured)[known].max(initial=0) / scale if scale > 0 else np.nan
    verdict = "exact, as it must be" if gap < EXACT else "not exact, as it should be"
    lost = f"; {len(pairs) - known.sum()} pairs are of runs that diverged" if not known.all() else ""
    return (
        f"On quadratic losses, those of the linear network, the prediction is {verdict}: of {known.sum()} pairs none "
        f"misses by more than {told(gap)} of the largest forgetting{lost}."
    )
