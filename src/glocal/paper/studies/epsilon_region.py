r"""The ε-regions of Taylor expansions, Ω^ε_o = {θ : ξ_o(θ) < ε}, and the locality assumption (Assumption 3.2).

The radius is the distance from θ_o at which the error of an expansion of order 0, 1 or 2 (with the whole Hessian)
reaches ε: along principal eigenvectors of the Hessian, along random directions, towards the next solution, and along
the trajectory of plain SGD. The assumption is checked along the trajectory: the smallest ε for which it stays in
Ω^ε_1 ∩ … ∩ Ω^ε_t while task t + 1 is learnt, and when it first leaves for a given ε.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from glocal.lens.approximation import ErrorCurves, error_curves
from glocal.lens.locality_assumption import locality_assumption, region_radii, trajectory_radii
from glocal.lens.perturbation import top_eigenpairs, unit_directions
from glocal.lens.record import record
from glocal.lens.taylor import exact_taylor, taylor
from glocal.lens.trace import TrainingTrace
from glocal.paper.studies.common import (
    DEMO,
    FULL,
    column,
    distinct,
    drop_nonfinite,
    integer_ticks,
    lr_colours,
    make_cohort,
    median,
    medians_by,
    names,
    training_cost,
    where,
)
from glocal.paper.study import Context, Row, Scalar, Summary, WorkItem
from glocal.report.style import COOL, FAINT, INK, MARKERS, WARM, log_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPSILONS = (0.001, 0.01, 0.1, 1.0)
SHOWN_EPSILON = 0.1
"""The ε of the summary and of one panel."""
DIRECTIONS = {
    "principal": ("principal eigenvectors", WARM[0], "X"),
    "random": ("random directions", COOL[0], "o"),
    "update": ("towards the next solution", WARM[3], ">"),
    "trajectory": ("along training", COOL[1], "s"),
}
"""Label, colour and marker."""
ORDER_DASHES = {0: ":", 1: "--", 2: "-"}
GRID = tuple(10.0 ** (exponent / 4) for exponent in range(-12, 13))
TOLERANCE = 0.01


class EpsilonRegion:
    name = "epsilon-region"
    columns = "lr seed kind task order epsilon direction radius distance learnt step smallest"

    def work_items(self, demo: bool) -> list[WorkItem]:
        base = DEMO | {"lrs": [0.01, 0.03, 0.1], "examples": 200, "measured_tasks": [0], "principal": 2, "random": 4}
        if not demo:
            base = FULL | {"lrs": [0.001, 0.005, 0.01, 0.05, 0.1], "examples": 2_000, "measured_tasks": [0, 9]}
            base |= {"principal": 5, "random": 10}
        return [base | {"seeds": [seed]} for seed in ((0, 1) if demo else (0, 1, 2))]

    def cost(self, demo: bool) -> str:
        items = self.work_items(demo)
        item = items[0]
        solutions = len(items) * len(item["lrs"]) * len(item["measured_tasks"])
        rays = solutions * (2 * item["principal"] + item["random"] + 1)
        return f"{training_cost(item, len(items))}; {3 * len(EPSILONS) * rays:,} radii, each of about 50 losses"

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        cohort = make_cohort(item, context)
        rows: list[Row] = []
        for member, trajectory in zip(cohort.members, record(cohort, examples=item["examples"]), strict=True):
            trace = trajectory.trace
            moments = [m for m in trajectory.snapshots if m.finished]
            errors = error_curves(trace, moments, {"": [exact_taylor(trace, o) for o in range(len(trace.tasks))]})[""]
            steps_per_task = trajectory.snapshots[-1].step / len(trace.tasks)
            measured = [*_assumption_rows(errors, steps_per_task), *_trajectory_rows(errors, item["measured_tasks"])]
            for task in item["measured_tasks"]:
                measured += _radius_rows(trace, task, item["principal"], item["random"])
            run: Row = {"lr": member.lr, "seed": member.seed}
            rows += [run | row for row in measured]
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Radius against ε and against the learning rate; smallest ε against tasks; first violation."""
        figure.set_size_inches(10.2, 6.8)
        (by_epsilon, by_lr), (smallest, violations) = figure.subplots(2, 2)
        first_task = int(min(distinct(where(rows, kind="radius"), "task")))
        _draw_radius_by_epsilon(by_epsilon, where(rows, kind="radius", task=first_task))
        _draw_radius_by_lr(by_lr, where(rows, kind="radius", task=first_task, order=2, epsilon=SHOWN_EPSILON))
        _draw_smallest_epsilon(smallest, where(rows, kind="moment"))
        _draw_violations(violations, rows)

    def summarize(self, rows: Sequence[Row]) -> Summary:
        radius_rows = where(rows, kind="radius", order=2, epsilon=SHOWN_EPSILON)
        table: list[Row] = []
        for lr in distinct(rows, "lr"):
            own = where(radius_rows, lr=lr)
            line: Row = {"lr": lr}
            for kind in ("principal", "random", "update"):
                line[f"radius, {kind}"] = median(column(where(own, direction=kind), "radius"))
            line["‖θ_{t+1} − θ_t‖"] = median(column(where(own, direction="update"), "distance"))
            line["smallest ε"] = median([errors.max() for _, errors in _by_seed(where(rows, kind="moment", lr=lr))])
            violations = where(rows, kind="break", epsilon=SHOWN_EPSILON, lr=lr)
            table.append(line | {f"tasks until ξ ≥ {SHOWN_EPSILON:g}": median(column(violations, "learnt"))})
        low, high = (column([table[i]], "smallest ε")[0] for i in (0, -1))
        agrees = "agrees" if high > low else "does not agree"
        verdict = (
            f"Plain SGD satisfies the locality assumption for ε above {low:.2g} at learning rate {table[0]['lr']:g} "
            f"and above {high:.2g} at {table[-1]['lr']:g} (medians): {agrees} with the paper that higher rates violate "
            "it."
        )
        return Summary(table, verdict)


STUDIES = (EpsilonRegion(),)


def _radius_rows(trace: TrainingTrace, task: int, principal: int, random: int) -> Iterator[Row]:
    """Radii of Ω^ε_o along rays, for every order and ε; NaN if the run diverged."""
    update = trace.update(task + 1)
    top, drawn = top_eigenpairs(trace, task, principal).vectors, unit_directions(trace, task, random)
    eigenvectors = torch.cat([top, -top])
    directions = torch.cat([eigenvectors, drawn, update[None]])
    kinds = ["principal"] * len(eigenvectors) + ["random"] * len(drawn) + ["update"]
    lengths = directions.norm(dim=1)
    known = bool(((lengths > 0) & lengths.isfinite()).all())
    for order in (0, 1, 2):
        # An eigenvector and its opposite have the same curvature.
        independent = torch.cat([top, drawn, update[None]])
        expansion = (
            exact_taylor(trace, task, independent) if known and order == 2 else taylor(trace, task, min(order, 1))
        )
        for epsilon in EPSILONS:
            values = torch.full((len(kinds),), torch.nan)
            if known:
                values = region_radii(trace, task, expansion, directions, epsilon, GRID, tolerance=TOLERANCE)
            for kind, radius in zip(kinds, values.tolist(), strict=True):
                row = _row("radius", task=task, order=order, epsilon=epsilon, direction=kind, radius=radius)
                yield row | {"distance": float(update.double().norm())}


def _trajectory_rows(errors: ErrorCurves, tasks: Sequence[int]) -> Iterator[Row]:
    """The largest distance from θ_o before training left Ω^ε_o; inf if it never did."""
    for epsilon in EPSILONS:
        found = trajectory_radii(errors, epsilon)
        inside = torch.where(found.first_outside.isinf(), torch.inf, found.last_inside.nan_to_num(nan=0.0))
        for o in tasks:
            yield _row("radius", task=o, order=2, epsilon=epsilon, direction="trajectory", radius=float(inside[o]))


def _assumption_rows(errors: ErrorCurves, steps_per_task: float) -> Iterator[Row]:
    """The smallest ε of the locality assumption at every moment, and its first violation for every ε."""
    for i, smallest in enumerate(locality_assumption(errors, SHOWN_EPSILON).min_epsilon.tolist()):
        step = int(errors.step[i])
        yield _row("moment", learnt=step / steps_per_task, step=step, smallest=smallest)
    for epsilon in EPSILONS:
        first = locality_assumption(errors, epsilon).first_violation
        if first is None:
            yield _row("break", epsilon=epsilon, learnt=np.inf)
        else:
            known = {"learnt": first.step / steps_per_task, "step": first.step, "smallest": first.error}
            yield _row("break", epsilon=epsilon, task=first.tasks[0], **known)


def _row(kind: str, **values: Scalar) -> Row:
    """kind: radius, moment or break. learnt: tasks learnt, with the fraction of the current one; inf for never."""
    columns = ("task", "order", "epsilon", "direction", "radius", "distance", "learnt", "step", "smallest")
    return {"kind": kind} | dict.fromkeys(columns) | values


def _by_seed(moments: Sequence[Row]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tasks learnt and errors of every run; errors that are not finite are infinite."""
    runs = [where(moments, seed=seed) for seed in names(moments, "seed")]
    return [(column(r, "learnt"), np.nan_to_num(column(r, "smallest"), nan=np.inf, posinf=np.inf)) for r in runs]


def _draw_radius_by_epsilon(axes: Axes, rows: Sequence[Row]) -> None:
    """At the middle learning rate: colours for directions, dashes for orders."""
    lrs = distinct(rows, "lr")
    lr = lrs[len(lrs) // 2]
    for kind, (_, colour, marker) in DIRECTIONS.items():
        for order, dashes in ORDER_DASHES.items():
            own = where(rows, lr=lr, direction=kind, order=order)
            if kind != "trajectory":
                points = drop_nonfinite(*medians_by(own, "epsilon", "radius"))
                axes.plot(*points, color=colour, linestyle=dashes, marker=marker, markersize=4)
    for order, dashes in ORDER_DASHES.items():
        axes.plot([], [], color=FAINT, linestyle=dashes, label=f"order {order}")
    axes.set(xscale="log", yscale="log", xlabel=r"$\varepsilon$", ylabel=r"radius of $\Omega_1^\varepsilon$")
    axes.set_title(f"Radius and ε, at learning rate {lr:g}", loc="left")
    axes.legend(loc="upper left", handlelength=2.6)


def _draw_radius_by_lr(axes: Axes, rows: Sequence[Row]) -> None:
    """Order 2 at one ε, with the distance that training moves in one task."""
    for kind, (label, colour, marker) in DIRECTIONS.items():
        own = where(rows, direction=kind)
        lrs, values = drop_nonfinite(*medians_by(own, "lr", "radius"))
        axes.plot(lrs, values, color=colour, marker=marker, linestyle="-", label=label)
        ranges = [column(where(own, lr=lr), "radius") for lr in lrs]
        low, high = ([f(r[np.isfinite(r)], initial=x) for r in ranges] for f, x in ((np.min, np.inf), (np.max, 0.0)))
        if kind != "trajectory":
            axes.fill_between(lrs, low, high, color=colour, alpha=0.12, linewidth=0)
    lrs, values = drop_nonfinite(*medians_by(where(rows, direction="update"), "lr", "distance"))
    axes.plot(lrs, values, color=INK, marker="x", linestyle="--", label=r"$\Vert\theta_2 - \theta_1\Vert$")
    log_lr(axes, distinct(rows, "lr"))
    axes.set(yscale="log", ylabel=r"radius of $\Omega_1^\varepsilon$, order 2")
    axes.set_title(f"Radius and learning rate, ε = {SHOWN_EPSILON:g}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def _draw_smallest_epsilon(axes: Axes, rows: Sequence[Row]) -> None:
    """The largest error up to every moment, the median over seeds, for every learning rate."""
    colours = lr_colours(rows)
    for lr in distinct(rows, "lr"):
        own = where(rows, lr=lr)
        learnt = np.array(distinct(own, "learnt"))
        running = [median([error[when <= x].max(initial=0) for when, error in _by_seed(own)]) for x in learnt]
        x, y = drop_nonfinite(learnt, np.array(running))
        axes.plot(x[y > 0], y[y > 0], color=colours.to_rgba(np.array(lr)), label=f"{lr:g}")
    axes.axhline(SHOWN_EPSILON, color=FAINT, linestyle=":", linewidth=0.9)
    axes.set(yscale="log", xlabel="tasks learnt", ylabel="smallest ε so far")
    integer_ticks(axes)
    axes.set_title(
        r"Smallest ε with $\theta \in \Omega^\varepsilon_1 \cap \dots \cap \Omega^\varepsilon_t$", loc="left"
    )
    axes.legend(title="learning rate", loc="lower right", ncols=2)


def _draw_violations(axes: Axes, rows: Sequence[Row]) -> None:
    """When the assumption is first violated, against the learning rate, for every ε."""
    latest = max(distinct(where(rows, kind="moment"), "learnt"))
    never = latest + 0.1 * max(latest - 1, 1)
    for epsilon, colour, marker in zip(EPSILONS, COOL, MARKERS["global"], strict=False):
        lrs, learnt = medians_by(where(rows, kind="break", epsilon=epsilon), "lr", "learnt")
        style: dict[str, Any] = {"color": colour, "marker": marker, "markeredgecolor": "white"}
        axes.plot(lrs, np.minimum(learnt, never), **style, label=f"{epsilon:g}")
    axes.axhline(never, color=FAINT, linestyle=":", linewidth=0.9, zorder=0)
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    axes.text(1, 1.01 * never, "never ", color=FAINT, fontsize=8, **place)
    log_lr(axes, distinct(rows, "lr"))
    axes.set(ylabel="tasks learnt at the first violation", ylim=(None, 1.08 * never))
    integer_ticks(axes, "y")
    axes.set_title("When the locality assumption is violated", loc="left")
    axes.legend(title="ε", loc="center left", bbox_to_anchor=(1.02, 0.5))
