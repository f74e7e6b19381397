r"""The rank of the average Hessian \bar H_{<t} = (1/t) Σ_{o<t} H_o as tasks are learnt (§4.1; appendix, fig. HRRM): the
size of the space in which an update forgets.

Plain SGD on rotations, with a network so small that the Hessians are made as dense matrices and all their eigenvalues
found, in double precision. What counts as zero is a matter of choice, and all choices of `lens.rank` are shown: |λ|
above thresholds, above parts of the largest, the effective rank, the participation ratio; and the numerical rank of a
matrix in single precision, |λ| > P ε |λ|_max with ε = 2⁻²³, as torch.linalg.matrix_rank has it. The paper names no
learning rate; 0.1 is its highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from glocal.algorithms import SGD
from glocal.engine.cohort import Cohort, Member
from glocal.lens.rank import ABSOLUTE, RELATIVE, Ranks, rank
from glocal.lens.record import train_traces
from glocal.networks import MLP, mlp
from glocal.paper.published import SEEDS
from glocal.paper.studies.cohorts import challenge_of
from glocal.paper.studies.row_filters import column, distinct, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from glocal.paper.study import Piece, Place, Row
    from glocal.report.style import Pen

FULL: Piece = {"challenge": "rotated-mnist", "tasks": 5, "epochs": 5, "batch_size": 128, "lr": 0.1}
FULL |= {"hidden": [22, 22], "pooled": 1, "examples": 2_000}
DEMO: Piece = FULL | {"challenge": "rotated-digits", "hidden": [16, 16], "pooled": 4, "examples": 500}
"""Seven by seven pixels in place of 28 by 28."""
NUMERICAL, EFFECTIVE, PARTICIPATION = "numerical", "effective", "participation"
NAMES = {NUMERICAL: "numerical rank", EFFECTIVE: "effective rank", PARTICIPATION: "participation ratio"}


class Pooled(nn.Module):
    """An MLP that sees images whose pixels are means over squares of this side."""

    def __init__(self, shape: Sequence[int], outputs: int, side: int, hidden: Sequence[int]) -> None:
        super().__init__()
        channels, height, width = shape
        self.side, self.network = side, MLP(channels * (height // side) * (width // side), outputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(avg_pool2d(x, self.side))


class HessianRank:
    name = "hessian-rank"
    columns = "challenge seed lr parameters tasks kind threshold rank top"

    def pieces(self, demo: bool) -> list[Piece]:
        return [DEMO | {"seed": s} for s in SEEDS[:3]] if demo else [FULL | {"seed": s} for s in SEEDS]

    def cost(self, demo: bool) -> str:
        pieces = self.pieces(demo)
        piece, matrices = pieces[0], len(pieces) * pieces[0]["tasks"]
        size = "1,242" if demo else "18,006"
        return (
            f"{len(pieces)} runs of {piece['tasks']} tasks of {piece['challenge']}, {piece['epochs']} epochs each; "
            f"{matrices} dense Hessians of {size} parameters on {piece['examples']:,} examples, and their eigenvalues"
        )

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        hidden, side = piece["hidden"], piece["pooled"]
        make = partial(mlp, hidden=hidden) if side == 1 else partial(Pooled, side=side, hidden=hidden)
        members = (Member(piece["seed"], piece["lr"], SGD()),)
        how = piece["epochs"], piece["batch_size"], 1, place.device
        (subject,) = train_traces(Cohort(challenge_of(piece, place), make, members, *how), piece["examples"])
        numerical = subject.num_params * torch.finfo(torch.float32).eps
        found = rank(subject.double(), ABSOLUTE, (*RELATIVE, numerical), method="dense")
        about: Row = {"challenge": piece["challenge"], "seed": piece["seed"], "lr": piece["lr"]}
        return [about | row for row in _rows(found)]

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Ranks against the number of tasks in the average: means over seeds, and their range; and their growth."""
        from glocal.report.style import FAINT

        figure.set_size_inches(11.2, 4.6)
        first, seeds, largest = rows[0], len(distinct(rows, "seed")), int(max(distinct(rows, "tasks")))
        about = f"{first['challenge']} · {largest} tasks · {first['parameters']:,} parameters · {seeds} seeds"
        figure.suptitle(f"{about} · plain SGD, learning rate {first['lr']:g}", x=0.012, ha="left", fontweight="bold")
        left, middle, right = figure.subplots(1, 3)
        for definition, pen in _pens(rows).items():
            axes = left if definition.kind == "absolute" else middle
            found = definition.curve(rows)
            known = np.isfinite(found.mean)
            style = {**pen.line(), **pen.point(), "markersize": 4.5}
            axes.plot(found.tasks[known], found.mean[known], **style, label=definition.label)
            axes.fill_between(found.tasks, found.low, found.high, color=pen.colour, alpha=0.14, linewidth=0)
            if known[0] and found.mean[0] > 0:
                right.plot(found.tasks[known], found.mean[known] / found.mean[0], **style)
        right.plot([1, largest], [1, largest], color=FAINT, linestyle=":", linewidth=1.2)
        right.annotate("linear", (largest, largest), (-4, 0), textcoords="offset points", color=FAINT, ha="right")
        left.set_ylabel(r"rank of $\bar H_{<t}$")
        for axes, title in (
            (left, r"eigenvalues of larger $|\lambda|$"),
            (middle, "free of the scale"),
            (right, "growth"),
        ):
            axes.set_title(title, loc="left")
            axes.set_xlabel("tasks in the average, $t - 1$")
            axes.set_xticks(range(1, largest + 1))
        right.set_ylabel("rank in parts of the first")
        for axes in (panel for panel in (left, middle) if panel.lines):
            if axes.dataLim.height > 0:  # there is no logarithmic axis of nothing
                axes.set_yscale("log", nonpositive="mask")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, handlelength=2.6)

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        found = {d: d.curve(rows) for d in _definitions(rows)}
        powers = {d: curve.power for d, curve in found.items() if np.isfinite(curve.power)}
        said = [
            "The paper: the rank of the average Hessian is small beside P, and grows sub-linearly with the tasks. What "
            "it calls effective rank is the number of eigenvalues above a threshold; under that name here stands "
            "exp(−Σ p log p) with p = |λ| / Σ|λ|, which needs none."
        ]
        if not powers:
            return [*said, "No rank is known of these rows."]
        size = column(rows, "parameters")[0]
        for d, curve in found.items():
            if d.kind == NUMERICAL and d in powers:
                said.append(
                    f"Of {size:,.0f} directions the numerical rank is {curve.mean[0]:,.0f} after the first task and "
                    f"{curve.mean[-1]:,.0f} after {curve.tasks[-1]:.0f}, {curve.mean[-1] / size:.0%} of them."
                )
        ends = {d: curve.mean[-1] for d, curve in found.items() if np.isfinite(curve.mean[-1])}
        if len(ends) > 1:
            few, many = min(ends, key=lambda d: ends[d]), max(ends, key=lambda d: ends[d])
            said.append(
                f"How small it is depends on what counts as zero: from {ends[few]:,.0f} by {few.label} to "
                f"{ends[many]:,.0f}, {ends[many] / size:.0%} of them, by {many.label}."
            )
        steepest = max(powers, key=lambda d: powers[d])
        linear = [d.label for d, power in powers.items() if power >= 1]
        shrinking = [d.label for d, power in powers.items() if power < 0]
        verdict = f"not all definitions agree: {', '.join(linear)} do not" if linear else "all definitions agree"
        said.append(
            f"Fitted as a power of the number of tasks, ranks grow most by {steepest.label}, with the exponent "
            f"{powers[steepest]:.2f} (1 is linear), and least with {min(powers.values()):.2f}: {verdict} with the "
            "paper that growth is sub-linear."
        )
        if shrinking:
            said.append(f"By {len(shrinking)} of {len(powers)} the rank does not grow at all: {', '.join(shrinking)}.")
        return said


class Curve(NamedTuple):
    """Over the number of tasks: the mean over the seeds that are known, and their range."""

    tasks: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def power(self) -> float:
        """p of the rank as a multiple of tasks^p, by least squares of logarithms."""
        known = np.isfinite(self.mean) & (self.mean > 0)
        if known.sum() < 2:
            return np.nan
        return float(np.polyfit(np.log(self.tasks[known]), np.log(self.mean[known]), 1)[0])


class Definition(NamedTuple):
    """What is counted: a kind of rank, and its threshold."""

    kind: str
    threshold: float | None

    @property
    def label(self) -> str:
        if self.kind in NAMES:
            return NAMES[self.kind]
        return f"|λ| > {self.threshold:g}" + (" of the largest" if self.kind == "relative" else "")

    def curve(self, rows: Sequence[Row]) -> Curve:
        own = where(rows, kind=self.kind, threshold=self.threshold)
        tasks = distinct(own, "tasks")
        points = []
        for count in tasks:
            ranks = column(where(own, tasks=count), "rank")
            known = ranks[np.isfinite(ranks)]
            points.append((known.mean(), known.min(), known.max()) if known.size else (np.nan,) * 3)
        return Curve(np.array(tasks), *np.array(points).reshape(-1, 3).T)


STUDIES = (HessianRank(),)


def _rows(found: Ranks) -> list[Row]:
    """A row for each number of tasks and each definition."""
    *parts, numerical = found.relative_thresholds
    definitions = [("absolute", x, found.absolute[:, i]) for i, x in enumerate(found.absolute_thresholds)]
    definitions += [("relative", x, found.relative[:, i]) for i, x in enumerate(parts)]
    definitions += [(NUMERICAL, numerical, found.relative[:, -1])]
    return [
        {
            "parameters": found.size,
            "tasks": tasks + 1,
            "kind": kind,
            "threshold": threshold,
            "rank": float(ranks[tasks]),
            "top": float(found.top[tasks]),
        }
        for kind, threshold, ranks in [
            *definitions,
            (EFFECTIVE, None, found.effective),
            (PARTICIPATION, None, found.participation),
        ]
        for tasks in range(len(found.top))
    ]


def _definitions(rows: Sequence[Row]) -> list[Definition]:
    return list(dict.fromkeys(Definition(str(row["kind"]), row["threshold"]) for row in rows))  # type: ignore[arg-type]


def _pens(rows: Sequence[Row]) -> dict[Definition, Pen]:
    """Cool for thresholds, warm for parts of the largest, dark for the others."""
    from glocal.report.style import COOL, FAINT, INK, MARKERS, WARM, Pen

    dark = INK, FAINT, WARM[4]
    made: dict[Definition, Pen] = {}
    for definition in _definitions(rows):
        hues, dashes = {"absolute": (COOL, "-"), "relative": (WARM, "--")}.get(definition.kind, (dark, "-."))
        before = sum(pen.dashes == dashes for pen in made.values())
        made[definition] = Pen(hues[before], dashes, MARKERS["local" if dashes == "--" else "global"][before])
    return made
