r"""Theorem 1 on trained networks: E(t) beside ½ Δ_tᵀ \bar H_{<t} Δ_t, over learning rates (Eq. forgetting-lowerbound).

The theorem equates the two where every θ_o is a minimum, the solutions are near each other, and nothing was forgotten
before. The last always holds after the second task, t = 2; the others grow worse with the learning rate or, where it is
so low that no minimum is reached, with its inverse. Beside the theorem's quadratic stands the whole expansion to second
order (Eq. forgetting-quadratic), which asks of these only that the solutions are near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.challenges import make
from glocal.lens.forgetting import forgetting, recursion
from glocal.lens.theorem1 import theorem1
from glocal.networks.mlp import mlp
from glocal.paper import published
from glocal.paper.lines import distinct, lost, numbers, order, over_lr, pens, rates, title, where
from glocal.paper.study import Piece, Place, Row
from glocal.paper.table1 import COLUMNS
from glocal.paper.watched import watched

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = COLUMNS["rotated-mnist"]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "ewc": dict(COLUMN.named("ewc").options),
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
    "batch_size": 64,
    "hidden": 22,
    "lrs": (0.02, 0.05, 0.2, 0.5),
    "seeds": COLUMN.seeds[:2],
    "examples": 1_000,
    "steps": 10,
}
SMALLER = {"optimal-hard": {"rank": 10, "samples": 500}, "optimal-soft": {"samples": 500}}
"""Options of the demonstration, where they differ."""
FACTOR = 2.0
"""A prediction counts as one if it is off by no more than this factor."""


@dataclass(frozen=True)
class Prediction:
    """Both sides of the theorem and its premises after every task from the second on; losses on training examples."""

    name: str = "theorem1"

    def pieces(self, demo: bool) -> list[Piece]:
        smaller: dict[str, dict[str, Any]] = SMALLER if demo else {}
        size = DEMO if demo else FULL
        return [{"algorithm": a, "options": o | smaller.get(a, {}), **size} for a, o in ALGORITHMS.items()]

    def cost(self, demo: bool) -> str:
        size = DEMO if demo else FULL
        runs = len(ALGORITHMS) * len(size["lrs"]) * len(size["seeds"])
        products = size["tasks"] * (size["tasks"] - 1 + size["steps"])
        return f"{size['challenge']}: {runs} runs of {size['tasks']} tasks, {products} Hessian products for each"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        challenge = make(piece["challenge"], piece["tasks"], place.data, angles=published.angles("sgd"))
        runs = watched(
            challenge,
            (piece["algorithm"], piece["options"]),
            piece["lrs"],
            piece["seeds"],
            network=partial(mlp, hidden=(piece["hidden"],) * 2),
            epochs=piece["epochs"],
            batch_size=piece["batch_size"],
            examples=piece["examples"],
            device=place.device,
        )
        rows: list[Row] = []
        for member, subject, _ in runs:
            both = theorem1(subject, steps=piece["steps"])
            expansion = recursion(forgetting(subject))
            for t in range(1, piece["tasks"]):
                rows.append(
                    {
                        "algorithm": piece["algorithm"],
                        "locality": member.algorithm.locality,
                        "lr": float(member.lr),
                        "seed": int(member.seed),
                        "t": t + 1,
                        "measured": float(both.measured[t]),
                        "quadratic": float(both.quadratic[t]),
                        "second_order": float(expansion.predicted[t]),
                        "condition": float(both.condition[t]),
                        "relative": float(both.relative[t]),
                        "forgotten": float(both.premises.forgotten[t]),
                        "slope": float(both.premises.slope[t]),
                        "lowest": float(both.premises.lowest[t]),
                        "reach": float(both.premises.reach[t]),
                    }
                )
        return rows

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """A panel for each algorithm: E(t) over its quadratic, coloured by learning rate; then how often they agree."""
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, LogNorm

        import matplotlib

        algorithms = distinct(rows, "algorithm")
        columns = -(-(len(algorithms) + 1) // 2)
        figure.set_size_inches(2.55 * columns + 1.2, 5.4)
        cells = list(figure.subplots(2, columns, squeeze=False).flat)
        lrs = rates(rows)
        # The brightest end of the map would vanish on white paper.
        colours = ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.0, 0.9, 256)))
        scale = ScalarMappable(LogNorm(lrs[0], lrs[-1] if len(lrs) > 1 else 2 * lrs[0]), colours)
        for axes, algorithm in zip(cells, algorithms, strict=False):
            _scatter(axes, where(rows, algorithm=algorithm), scale, _limits(rows))
        agreement, *empty = cells[len(algorithms) :]
        for axes in empty:
            axes.set_visible(False)
        _agreement(agreement, rows)
        bar = figure.colorbar(scale, ax=cells, label="learning rate", aspect=34, pad=0.02)
        bar.outline.set_visible(False)

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        return ["TODO"]


STUDIES = (Prediction(),)
