r"""The ε-regions of Taylor expansions, Ω^ε_o = {θ : ξ_o(θ) < ε}, and the locality assumption (§3.2) over learning
rates.

How far from θ_o the error of an expansion of order 0, 1 or 2 (with the whole Hessian) stays below ε: along the
Hessian's principal eigenvectors, along random directions, towards the next solution, and on the way that plain SGD
took. And for which ε that way stays in Ω^ε_1 ∩ … ∩ Ω^ε_t while task t + 1 is learnt, and when it no longer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from glocal.lens.approximation import Curves, curves
from glocal.lens.record import record
from glocal.lens.region import assumption, principal_directions, radii, random_directions, stay
from glocal.lens.taylor import taylor
from glocal.lens.taylor_full import whole, within
from glocal.lens.trace import TrainingTrace
from glocal.paper.studies.cohorts import DEMO, FULL, challenge_of, cohort_of, cost_of
from glocal.paper.studies.lr_plots import listed, rate_colours
from glocal.paper.studies.row_filters import against, column, distinct, median, told, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from glocal.paper.study import Piece, Place, Row, Scalar

EPSILONS = (0.001, 0.01, 0.1, 1.0)
SHOWN = 0.1
"""The ε of which a panel is about, and a sentence."""
DIRECTIONS = {
    "principal": "principal eigenvectors",
    "random": "random directions",
    "update": "towards the next solution",
    "trajectory": "on the way of training",
}
GRID = tuple(10.0 ** (exponent / 4) for exponent in range(-12, 13))
TOLERANCE = 0.01


class EpsilonRegion:
    name = "epsilon-region"
    columns = "lr seed kind task order epsilon direction radius distance learnt step smallest"

    def pieces(self, demo: bool) -> list[Piece]:
        if demo:
            base = DEMO | {"lrs": [0.01, 0.03, 0.1], "examples": 200, "looked_at": [0], "principal": 2, "random": 4}
            return [base | {"seeds": [seed]} for seed in (0, 1)]
        lrs = [0.001, 0.005, 0.01, 0.05, 0.1]
        base = FULL | {"lrs": lrs, "examples": 2_000, "looked_at": [0, 9], "principal": 5, "random": 10}
        return [base | {"seeds": [seed]} for seed in (0, 1, 2)]

    def cost(self, demo: bool) -> str:
        pieces = self.pieces(demo)
        one = pieces[0]
        rays = len(pieces) * len(one["lrs"]) * len(one["looked_at"]) * (2 * one["principal"] + one["random"] + 1)
        return f"{cost_of(one, len(pieces))}; {3 * len(EPSILONS) * rays:,} borders, each of about 50 losses"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        cohort = cohort_of(piece, place, challenge_of(piece, place))
        rows: list[Row] = []
        for member, seen in zip(cohort.members, record(cohort, 1, piece["examples"]), strict=True):
            subject = seen.trace
            moments = [m for m in seen.snapshots if m.finished]
            along = curves(subject, moments, [whole(subject, o) for o in range(len(subject.tasks))])
            steps = seen.snapshots[-1].step / len(subject.tasks)
            found = [*_kept(along, steps), *_on_the_way(along, piece["looked_at"])]
            for task in piece["looked_at"]:
                found += _around(subject, task, piece["principal"], piece["random"])
            run: Row = {"lr": member.lr, "seed": member.seed}
            rows += [run | row for row in found]
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """The radius against ε, and against the learning rate; the smallest ε against tasks, and the first break."""
        figure.set_size_inches(10.2, 6.8)
        (by_epsilon, by_lr), (smallest, breaks) = figure.subplots(2, 2)
        _radius_by_epsilon(by_epsilon, rows)
        _radius_by_lr(by_lr, rows)
        _smallest(smallest, rows)
        _breaks(breaks, rows)

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        said = [_shape(rows), _growth(rows), _assumption(rows), _first_breaks(rows)]
        return [sentence for sentence in said if sentence]


STUDIES = (EpsilonRegion(),)


def _around(subject: TrainingTrace, task: int, principal: int, random: int) -> Iterator[Row]:
    """The radii of Ω^ε_o along rays, for every order and ε; NaN where the run has diverged."""
    update = subject.update(task + 1)
    own, drawn = principal_directions(subject, task, principal), random_directions(subject, task, random)
    directions = torch.cat([own, drawn, update[None]])
    kinds = ["principal"] * len(own) + ["random"] * len(drawn) + ["update"]
    lengths = directions.norm(dim=1)
    known = bool(((lengths > 0) & lengths.isfinite()).all())
    for order in (0, 1, 2):
        # Opposite eigenvectors have the same curvature.
        independent = torch.cat([own[:principal], drawn, update[None]])
        expansion = within(subject, task, independent) if known and order == 2 else taylor(subject, task, min(order, 1))
        for epsilon in EPSILONS:
            found = torch.full((len(kinds),), torch.nan)
            if known:
                found = radii(subject, task, expansion, directions, epsilon, GRID, TOLERANCE).radii
            for kind, radius in zip(kinds, found.tolist(), strict=True):
                row = _row("radius", task=task, order=order, epsilon=epsilon, direction=kind, radius=radius)
                yield row | {"distance": float(update.double().norm())}


def _on_the_way(along: Curves, tasks: Sequence[int]) -> Iterator[Row]:
    """How far from θ_o training was before it left Ω^ε_o; inf where it never did."""
    for epsilon in EPSILONS:
        found = stay(along, epsilon)
        inside = torch.where(found.outside.isinf(), torch.inf, found.inside.nan_to_num(nan=0.0))
        for o in tasks:
            yield _row("radius", task=o, order=2, epsilon=epsilon, direction="trajectory", radius=float(inside[o]))


def _kept(along: Curves, steps: float) -> Iterator[Row]:
    """The smallest ε of the locality assumption at every moment, and its first break for every ε; `steps` of a task."""
    for i, smallest in enumerate(assumption(along, SHOWN).smallest.tolist()):
        step = int(along.step[i])
        yield _row("moment", learnt=step / steps, step=step, smallest=smallest)
    for epsilon in EPSILONS:
        found = assumption(along, epsilon).first_break
        if found is None:
            yield _row("break", epsilon=epsilon, learnt=np.inf)
        else:
            where = {"learnt": found.step / steps, "step": found.step, "smallest": found.error, "task": found.broken[0]}
            yield _row("break", epsilon=epsilon, **where)


def _row(kind: str, **values: Scalar) -> Row:
    """kind: radius, moment or break. learnt: how many tasks, and which part of the one in training, inf: never."""
    names = ("task", "order", "epsilon", "direction", "radius", "distance", "learnt", "step", "smallest")
    return {"kind": kind} | dict.fromkeys(names) | values


def _radius_by_epsilon(axes: Axes, rows: Sequence[Row]) -> None:
    """Of the first task at the middle learning rate: colours tell directions, dashes orders."""
    from glocal.report.style import FAINT

    lrs = distinct(rows, "lr")
    lr = lrs[len(lrs) // 2]
    shown = where(rows, kind="radius", lr=lr, task=_first(rows))
    for kind, (colour, marker) in _marks().items():
        for order, dashes in ((0, ":"), (1, "--"), (2, "-")):
            epsilons, found = _finite(against(where(shown, direction=kind, order=order), "epsilon", "radius"))
            if kind != "trajectory":
                axes.plot(epsilons, found, color=colour, linestyle=dashes, marker=marker, markersize=4)
    for order, dashes in ((0, ":"), (1, "--"), (2, "-")):
        axes.plot([], [], color=FAINT, linestyle=dashes, label=f"order {order}")
    axes.set(xscale="log", yscale="log", xlabel=r"$\varepsilon$", ylabel=r"radius of $\Omega_1^\varepsilon$")
    axes.set_title(f"Radius and ε, at learning rate {lr:g}", loc="left")
    axes.legend(loc="upper left", handlelength=2.6)


def _radius_by_lr(axes: Axes, rows: Sequence[Row]) -> None:
    """Of the second order at one ε, beside the distance that training goes in one task."""
    from glocal.report.style import INK, log_lr

    shown = where(rows, kind="radius", order=2, epsilon=SHOWN, task=_first(rows))
    for kind, (colour, marker) in _marks().items():
        own = where(shown, direction=kind)
        lrs, found = _finite(against(own, "lr", "radius"))
        axes.plot(lrs, found, color=colour, marker=marker, linestyle="-", label=DIRECTIONS[kind])
        ranges = [column(where(own, lr=lr), "radius") for lr in lrs]
        low, high = ([f(r[np.isfinite(r)], initial=at) for r in ranges] for f, at in ((np.min, np.inf), (np.max, 0.0)))
        if kind != "trajectory":
            axes.fill_between(lrs, low, high, color=colour, alpha=0.12, linewidth=0)
    lrs, found = _finite(against(where(shown, direction="update"), "lr", "distance"))
    axes.plot(
        lrs, found, color=INK, marker="x", linestyle="--", label=r"$\Vert\theta_2 - \theta_1\Vert$, where training went"
    )
    log_lr(axes, distinct(rows, "lr"))
    axes.set(yscale="log", ylabel=r"radius of $\Omega_1^\varepsilon$, order 2")
    axes.set_title(f"Radius and learning rate, ε = {SHOWN:g}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def _smallest(axes: Axes, rows: Sequence[Row]) -> None:
    """The least ε that holds up to a moment, for every learning rate."""
    from matplotlib.ticker import MaxNLocator

    from glocal.report.style import FAINT

    colours = rate_colours(rows)
    for lr in distinct(rows, "lr"):
        learnt, found = _running(where(rows, kind="moment", lr=lr))
        axes.plot(learnt[found > 0], found[found > 0], color=colours.to_rgba(np.array(lr)), label=f"{lr:g}")
    axes.axhline(SHOWN, color=FAINT, linestyle=":", linewidth=0.9)
    axes.set(yscale="log", xlabel="tasks learnt", ylabel="smallest ε so far")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(r"The ε that $\Omega^\varepsilon_1 \cap \dots \cap \Omega^\varepsilon_t$ needs", loc="left")
    axes.legend(title="learning rate", loc="lower right", ncols=2)


def _breaks(axes: Axes, rows: Sequence[Row]) -> None:
    """When the assumption first breaks, against the learning rate, for every ε."""
    from matplotlib.ticker import MaxNLocator

    from glocal.report.style import COOL, FAINT, MARKERS, log_lr

    latest = max(distinct(where(rows, kind="moment"), "learnt"))
    never = latest + 0.1 * max(latest - 1, 1)
    for epsilon, colour, marker in zip(EPSILONS, COOL, MARKERS["global"], strict=False):
        lrs, found = against(where(rows, kind="break", epsilon=epsilon), "lr", "learnt")
        axes.plot(
            lrs, np.minimum(found, never), color=colour, marker=marker, markeredgecolor="white", label=f"{epsilon:g}"
        )
    axes.axhline(never, color=FAINT, linestyle=":", linewidth=0.9, zorder=0)
    axes.text(
        1,
        1.01 * never,
        "never ",
        transform=axes.get_yaxis_transform(),
        color=FAINT,
        fontsize=8,
        ha="right",
        va="bottom",
    )
    log_lr(axes, distinct(rows, "lr"))
    axes.set(ylabel="tasks learnt at the first break", ylim=(None, 1.08 * never))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("When the locality assumption breaks", loc="left")
    axes.legend(title="ε", loc="center left", bbox_to_anchor=(1.02, 0.5))


def _marks() -> dict[str, tuple[str, str]]:
    """A colour and a marker for each kind of direction."""
    from glocal.report.style import COOL, WARM

    return dict(zip(DIRECTIONS, ((WARM[0], "X"), (COOL[0], "o"), (WARM[3], ">"), (COOL[1], "s")), strict=True))


def _first(rows: Sequence[Row]) -> int:
    """The first of the tasks that were looked at."""
    return int(min(distinct(where(rows, kind="radius"), "task")))


def _finite(line: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    x, y = line
    shown = np.isfinite(y)
    return x[shown], y[shown]


def _running(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """The largest error up to every moment, the median over seeds."""
    at = np.array(distinct(rows, "learnt"))
    runs = [where(rows, seed=seed) for seed in dict.fromkeys(row["seed"] for row in rows)]
    both = [(column(run, "learnt"), np.nan_to_num(column(run, "smallest"), nan=np.inf, posinf=np.inf)) for run in runs]
    return _finite((at, np.array([median([error[when <= x].max(initial=0) for when, error in both]) for x in at])))


def _ends(rows: Sequence[Row]) -> tuple[float, float]:
    lrs = distinct(rows, "lr")
    return lrs[0], lrs[-1]


def _radius(rows: Sequence[Row], direction: str, lr: float, column_name: str = "radius") -> float:
    """Of the second order, with the ε that is shown, over all tasks that were looked at."""
    found = where(rows, kind="radius", order=2, epsilon=SHOWN, direction=direction, lr=lr)
    return median(column(found, column_name))


def _shape(rows: Sequence[Row]) -> str:
    """A ball has one radius."""
    parts = []
    for lr in _ends(rows):
        principal, random, update = (_radius(rows, kind, lr) for kind in ("principal", "random", "update"))
        went = _radius(rows, "update", lr, "distance")
        parts.append(
            f"at learning rate {lr:g} {told(principal)} along principal eigenvectors, {told(random)} along random "
            f"directions and {told(update)} towards the next solution, which is {told(went)} away"
        )
    return (
        f"The paper takes the ε-region of an expansion for a ball. For order 2 and ε = {SHOWN:g} its radius is "
        f"{'; '.join(parts)} (medians)."
    )


def _growth(rows: Sequence[Row]) -> str:
    """radius ∝ ε^q, fitted to medians."""
    found = []
    for order in (0, 1, 2):
        powers = []
        for lr in distinct(rows, "lr"):
            for kind in ("principal", "random", "update"):
                own = where(rows, kind="radius", order=order, direction=kind, lr=lr)
                x, y = _finite(against(own, "epsilon", "radius"))
                if (y > 0).sum() > 1:
                    powers.append(float(np.polyfit(np.log(x[y > 0]), np.log(y[y > 0]), 1)[0]))
        if powers:
            found.append(f"ε^{np.median(powers):.2f} for order {order}")
    if not found:
        return ""
    return (
        f"The radius grows as {listed(found)}. An error of C rᵖ, the paper's for order p, would give 1 for order 1 and "
        "½ for order 2; the first term that a smooth loss leaves out gives 1, ½ and ⅓ for the orders 0, 1 and 2."
    )


def _assumption(rows: Sequence[Row]) -> str:
    """What ε all of training needs."""
    needed = {}
    for lr in distinct(rows, "lr"):
        own = where(rows, kind="moment", lr=lr)
        runs = [where(own, seed=seed) for seed in dict.fromkeys(row["seed"] for row in own)]
        needed[lr] = median([np.nan_to_num(column(run, "smallest"), nan=np.inf, posinf=np.inf).max() for run in runs])
    low, high = _ends(rows)
    verdict = "agree" if needed[high] > needed[low] else "do not agree"
    named = listed([f"{told(epsilon)} at {lr:g}" for lr, epsilon in needed.items()])
    return (
        "The paper breaks the locality assumption by raising the learning rate, and the rows "
        f"{verdict}: plain SGD's whole way is within the ε-regions of all finished tasks for ε above {named} "
        "(medians over seeds; looked at when epochs end)."
    )


def _first_breaks(rows: Sequence[Row]) -> str:
    found = []
    for lr in distinct(rows, "lr"):
        own = where(rows, kind="break", epsilon=SHOWN, lr=lr)
        learnt = median(column(own, "learnt"))
        found.append(f"{f'after {told(learnt)} tasks' if np.isfinite(learnt) else 'never'} at {lr:g}")
    return (
        f"With ε = {SHOWN:g} it first breaks {listed(found)} (medians). Seeds "
        "draw the angles, and the first tasks of some are nearly alike."
    )
