r"""Which algorithms are local or global (Definition 3.1, §5), and how far local approximations hold (Assumption 3.2).

Locality: for every algorithm, test whether \hat L_o depends on the solution θ_o, and compare the result with the
locality that the algorithm declares, which is the paper's for those that the paper classifies.

ε-regions of Taylor expansions, Ω^ε_o = {θ : ξ_o(θ) < ε}: the radius is the distance from θ_o at which the error of an
expansion of order 0, 1 or 2 (with the whole Hessian) reaches ε: along principal eigenvectors of the Hessian, along
random directions, towards the next solution, and along the trajectory of plain SGD. The locality assumption is checked
along the trajectory: the smallest ε for which it stays in Ω^ε_1 ∩ … ∩ Ω^ε_t while task t + 1 is learnt, and when it
first leaves for a given ε.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from glocal.algorithms import ALGORITHMS
from glocal.lens.approximation_error import ErrorCurves, error_curves
from glocal.lens.local_or_global import Verdict, locality
from glocal.lens.locality_assumption import locality_assumption, region_radii, trajectory_radii
from glocal.lens.perturbation import top_eigenpairs, unit_directions
from glocal.lens.record import RecordedRun
from glocal.lens.taylor import exact_taylor, taylor
from glocal.lens.training_trace import TrainingTrace
from glocal.paper.studies import common
from glocal.paper.studies.common import agreement, column, distinct, median, medians_by, names, plot_medians
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import COOL, FAINT, INK, TITLE_COLOURS, WARM, option_axis
from glocal.sweeps import resolve

FULL: WorkItem = {"solutions": 64, "draws": 5, "probes": 16, "examples": 2_000, "epochs": 3, "lr": 0.1, "seed": 0}
DEMO: WorkItem = {"solutions": 10, "draws": 3, "probes": 4, "examples": 160, "epochs": 2, "lr": 0.1, "seed": 0}
SETTINGS = {"rotated": "domain", "split": "task"}


class Locality:
    r"""Each algorithm's verdict, with one row for each θ at which \hat L_o was evaluated."""

    name = "locality"
    columns = (
        "challenge algorithm family declared found p_value explained involved information solutions draws "
        "lost distance probe place probe_explained probe_involved probe_information probe_p_value"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        """The demo has each algorithm once: on rotated digits, or on split ones if it needs new classes."""
        if demo:
            kinds = {name: "rotated" if "domain" in a.settings else "split" for name, a in ALGORITHMS.items()}
            return [{"challenge": f"{kind}-digits", "algorithm": name, **DEMO} for name, kind in kinds.items()]
        return [
            {"challenge": f"{kind}-mnist", "algorithm": name, **FULL}
            for kind, setting in SETTINGS.items()
            for name, a in ALGORITHMS.items()
            if setting in a.settings
        ]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        options = dict(item)
        name, algorithm = options.pop("challenge"), options.pop("algorithm")
        challenge = resolve.challenge(name, data=context.data, setting=SETTINGS[name.partition("-")[0]]).value
        verdict = locality(algorithm, challenge, **options, device=context.device)
        return verdict_rows(verdict, name, ALGORITHMS[algorithm].family)

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        r"""The share of \hat L_o's variance that θ_o explains: ticks at each θ, points for the mean."""
        panels = rows.partition_by("challenge", maintain_order=True)
        max_algorithms = max(panel["algorithm"].n_unique() for panel in panels)
        figure.set_size_inches(4.4 * len(panels) + 0.4, 0.21 * max_algorithms + 1.3)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_shares(axes, panel)
        marks: list[dict[str, Any]] = [
            *({"label": f"declared {kind}", "color": colour} for kind, colour in TITLE_COLOURS.items()),
            {"label": "test disagrees", "color": FAINT, "markerfacecolor": "white", "markeredgewidth": 1.4},
            {"label": "at a single θ", "color": FAINT, "marker": "|", "markersize": 7},
        ]
        handles = [Line2D([], [], linestyle="none", **{"marker": "o", **mark}) for mark in marks]
        figure.legend(handles=handles, loc="outside lower center", ncols=2 * len(panels), handletextpad=0.4)

    def summarize(self, rows: pl.DataFrame) -> Summary:
        columns = ("challenge", "algorithm", "declared", "found", "explained", "information", "p_value")
        table = rows.filter(probe=0).select(columns)
        mismatches = names(table.filter(pl.col("declared") != pl.col("found")))
        total = len(names(table))
        exceptions = f"; it differs for {', '.join(mismatches)}" if mismatches else ""
        agreement = f"{total - len(mismatches)} of {total} algorithms"
        return Summary(table.to_dicts(), f"The test agrees with the declared locality for {agreement}{exceptions}.")


def verdict_rows(verdict: Verdict, challenge: str, family: str) -> list[Row]:
    run: Row = {"challenge": challenge, "algorithm": verdict.algorithm, "family": family}
    run |= {name: getattr(verdict, name) for name in ("declared", "found", "p_value")}
    run |= {"explained": verdict.first_order_index, "involved": verdict.total_index, "information": verdict.information}
    run |= {"solutions": len(verdict.values), "draws": verdict.values.shape[1]}
    run |= {"lost": verdict.num_diverged, "distance": verdict.distance}
    statistics = ("probe_explained", "probe_involved", "probe_information", "probe_p_value")
    values = zip(*(part.tolist() for part in verdict.by_probe[:4]), strict=True)
    return [
        run | {"probe": i, "place": place} | dict(zip(statistics, probe, strict=True))
        for i, (place, probe) in enumerate(zip(verdict.probe_locations, values, strict=True))
    ]


def _draw_shares(axes: Axes, rows: pl.DataFrame) -> None:
    """A line per algorithm: declared global ones first, then by the share."""
    order = pl.col("declared") == "local", pl.col("explained").fill_nan(-1), pl.col("algorithm"), pl.col("probe")
    verdicts = rows.sort(order).partition_by("algorithm", maintain_order=True)
    heights = list(range(len(verdicts)))[::-1]
    for y, probes in zip(heights, verdicts, strict=True):
        first = probes.row(0, named=True)
        colour, explained = TITLE_COLOURS[first["declared"]], 100 * first["explained"]
        axes.plot([0, explained], [y, y], color=colour, linewidth=1.2, alpha=0.5)
        axes.plot(100 * probes["probe_explained"], [y] * len(probes), "|", color=colour, markersize=7, alpha=0.6)
        face = colour if first["declared"] == first["found"] else "white"
        axes.plot(explained, y, "o", color=colour, markerfacecolor=face, markeredgewidth=1.4, zorder=3)
    axes.set_yticks(heights, [probes["algorithm"][0] for probes in verdicts])
    for tick, probes in zip(axes.get_yticklabels(), verdicts, strict=True):
        tick.set_color(TITLE_COLOURS[probes["declared"][0]])
    label = r"share of $\hat L_o$'s variance that $\theta_o$ explains (%)"
    axes.set(xlim=(-4, 104), ylim=(-0.7, len(verdicts) - 0.3), xlabel=label)
    axes.grid(axis="y", visible=False)
    axes.set_title(rows["challenge"][0], fontweight="bold", pad=10)


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


class EpsilonRegion(common.RecordedStudy):
    """Rows of three kinds: radius, moment and break. learnt: tasks learnt, with a fraction of the current one; inf for
    never."""

    name = "epsilon-region"
    columns = "lr seed kind task order epsilon direction radius distance learnt step smallest"

    def items(self, demo: bool) -> list[WorkItem]:
        base = common.FULL | {"lrs": [0.001, 0.005, 0.01, 0.05, 0.1], "seeds": [0, 1, 2, 3, 4], "examples": 2_000}
        base |= {"measured_tasks": [0, 9], "principal": 5, "random": 10}
        if demo:
            base = common.DEMO | {"lrs": [0.01, 0.03, 0.1], "seeds": [0, 1], "examples": 200}
            base |= {"measured_tasks": [0], "principal": 2, "random": 4}
        return common.split_seeds([base])

    def options(self, item: WorkItem, context: Context) -> dict[str, Any]:
        return {"every_epochs": 1}

    def measure_run(self, run: RecordedRun, item: WorkItem) -> Iterator[Row]:
        trace, moments = run.trace, [m for m in run.snapshots if m.finished]
        errors = error_curves(trace, moments, {"": [exact_taylor(trace, o) for o in range(len(trace.tasks))]})[""]
        yield from _assumption_rows(errors, run.snapshots[-1].step / len(trace.tasks))
        yield from _trajectory_rows(errors, item["measured_tasks"])
        for task in item["measured_tasks"]:
            yield from _radius_rows(trace, task, item["principal"], item["random"])

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """Radius against ε and against the learning rate; smallest ε against tasks."""
        figure.set_size_inches(11.6, 4.2)
        by_epsilon, by_lr, smallest = figure.subplots(1, 3)
        radii = rows.filter(kind="radius")
        radii = radii.filter(pl.col("task") == pl.col("task").min())
        _draw_radius_by_epsilon(by_epsilon, radii)
        _draw_radius_by_lr(by_lr, radii.filter(order=2, epsilon=SHOWN_EPSILON))
        _draw_smallest_epsilon(smallest, rows.filter(kind="moment"))
        for axes in (by_epsilon, by_lr, smallest):
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, handlelength=2.6)

    def summarize(self, rows: pl.DataFrame) -> Summary:
        radii = rows.filter(kind="radius", order=2, epsilon=SHOWN_EPSILON)
        table: list[Row] = []
        for lr in distinct(rows, "lr"):
            by_direction = {kind: radii.filter(lr=lr, direction=kind) for kind in ("principal", "random", "update")}
            line: Row = {"lr": lr}
            line |= {f"radius, {kind}": median(column(rays, "radius")) for kind, rays in by_direction.items()}
            line["‖θ_{t+1} − θ_t‖"] = median(column(by_direction["update"], "distance"))
            moments = _known_errors(rows.filter(kind="moment", lr=lr)).partition_by("seed")
            line["smallest ε"] = median([column(run, "smallest").max() for run in moments])
            violations = rows.filter(kind="break", epsilon=SHOWN_EPSILON, lr=lr)
            table.append(line | {f"tasks until ξ ≥ {SHOWN_EPSILON:g}": median(column(violations, "learnt"))})
        (low, low_lr), (high, high_lr) = ((row["smallest ε"], row["lr"]) for row in (table[0], table[-1]))
        verdict = (
            f"Plain SGD satisfies the locality assumption for ε above {low:.2g} at learning rate {low_lr:g} and above "
            f"{high:.2g} at {high_lr:g} (medians): {agreement(high > low)} that higher rates violate it."
        )
        return Summary(table, verdict)


STUDIES = (Locality(), EpsilonRegion())


def _radius_rows(trace: TrainingTrace, task: int, principal: int, random: int) -> Iterator[Row]:
    """Radii of Ω^ε_o along rays, for every order and ε; NaN if the run diverged."""
    update = trace.update(task + 1)
    top, random_vectors = top_eigenpairs(trace, task, principal).vectors, unit_directions(trace, task, random)
    directions = torch.cat([top, -top, random_vectors, update[None]])
    kinds = ["principal"] * 2 * len(top) + ["random"] * len(random_vectors) + ["update"]
    lengths = directions.norm(dim=1)
    finite = bool(((lengths > 0) & lengths.isfinite()).all())
    # An eigenvector and its opposite have the same curvature.
    independent = torch.cat([top, random_vectors, update[None]])
    for order in (0, 1, 2):
        exact = finite and order == 2
        expansion = exact_taylor(trace, task, independent) if exact else taylor(trace, task, min(order, 1))
        for epsilon in EPSILONS:
            values = torch.full((len(kinds),), torch.nan)
            if finite:
                values = region_radii(trace, task, expansion, directions, epsilon, GRID, tolerance=TOLERANCE)
            for kind, radius in zip(kinds, values.tolist(), strict=True):
                row: Row = {"kind": "radius", "task": task, "order": order, "epsilon": epsilon, "direction": kind}
                yield row | {"radius": radius, "distance": float(update.double().norm())}


def _trajectory_rows(errors: ErrorCurves, tasks: Sequence[int]) -> Iterator[Row]:
    """The largest distance from θ_o before training left Ω^ε_o; inf if it never did."""
    for epsilon in EPSILONS:
        radii = trajectory_radii(errors, epsilon)
        distances = torch.where(radii.first_outside.isinf(), torch.inf, radii.last_inside.nan_to_num(nan=0.0))
        for o in tasks:
            row: Row = {"kind": "radius", "task": o, "order": 2, "epsilon": epsilon, "direction": "trajectory"}
            yield row | {"radius": float(distances[o])}


def _assumption_rows(errors: ErrorCurves, steps_per_task: float) -> Iterator[Row]:
    """The smallest ε of the locality assumption at every moment, and its first violation for every ε."""
    for i, smallest in enumerate(locality_assumption(errors, SHOWN_EPSILON).min_epsilon.tolist()):
        step = int(errors.step[i])
        yield {"kind": "moment", "learnt": step / steps_per_task, "step": step, "smallest": smallest}
    for epsilon in EPSILONS:
        row: Row = {"kind": "break", "epsilon": epsilon, "learnt": np.inf}
        if first := locality_assumption(errors, epsilon).first_violation:
            row |= {"task": first.tasks[0], "learnt": first.step / steps_per_task}
            row |= {"step": first.step, "smallest": first.error}
        yield row


def _known_errors(moments: pl.DataFrame) -> pl.DataFrame:
    """Replace errors that are not numbers by infinity."""
    return moments.with_columns(pl.col("smallest").cast(pl.Float64).fill_null(np.inf).fill_nan(np.inf))


def _draw_radius_by_epsilon(axes: Axes, rows: pl.DataFrame) -> None:
    """At the middle learning rate: colours for directions, dashes for orders."""
    lrs = distinct(rows, "lr")
    lr = lrs[len(lrs) // 2]
    for order, dashes in ORDER_DASHES.items():
        for kind, (_, colour, marker) in list(DIRECTIONS.items())[:3]:
            radii = rows.filter(lr=lr, direction=kind, order=order)
            style: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4}
            plot_medians(axes, radii, "epsilon", "radius", **style)
        axes.plot([], [], color=FAINT, linestyle=dashes, label=f"order {order}")
    axes.set(title=f"Radius and ε, at learning rate {lr:g}", xscale="log", yscale="log")
    axes.set(xlabel=r"$\varepsilon$", ylabel=r"radius of $\Omega_1^\varepsilon$")


def _draw_radius_by_lr(axes: Axes, rows: pl.DataFrame) -> None:
    """Order 2 at one ε, with the distance that training moves in one task."""
    for kind, (label, colour, marker) in DIRECTIONS.items():
        radii = rows.filter(direction=kind)
        plot_medians(axes, radii, "lr", "radius", color=colour, marker=marker, linestyle="-", label=label)
        if kind != "trajectory":
            band = common.curve(radii, "radius", common.median_range)
            axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.12, linewidth=0)
    style: dict[str, Any] = {"color": INK, "marker": "x", "linestyle": "--"}
    label = r"$\Vert\theta_2 - \theta_1\Vert$"
    plot_medians(axes, rows.filter(direction="update"), "lr", "distance", **style, label=label)
    option_axis(axes, distinct(rows, "lr"), "lr")
    axes.set(title=f"Radius and learning rate, ε = {SHOWN_EPSILON:g}", yscale="log")
    axes.set_ylabel(r"radius of $\Omega_1^\varepsilon$, order 2")


def _draw_smallest_epsilon(axes: Axes, rows: pl.DataFrame) -> None:
    """The largest error up to every moment, the median over seeds, for every learning rate."""
    colours = common.lr_colours(rows)
    running = _known_errors(rows).with_columns(pl.col("smallest").cum_max().over("lr", "seed"))
    for lr in distinct(rows, "lr"):
        last = running.filter(lr=lr).group_by("seed", "learnt").agg(pl.col("smallest").max())
        x, y = common.drop_nonfinite(*medians_by(last, "learnt", "smallest"))
        axes.plot(x[y > 0], y[y > 0], color=colours.to_rgba(np.array(lr)), label=f"learning rate {lr:g}")
    axes.axhline(SHOWN_EPSILON, color=FAINT, linestyle=":", linewidth=0.9)
    axes.set_title(r"Smallest ε with $\theta \in \Omega^\varepsilon_1 \cap \dots \cap \Omega^\varepsilon_t$")
    axes.set(yscale="log", xlabel="tasks learnt", ylabel="smallest ε so far")
    common.integer_ticks(axes)
