"""Every figure by name. matplotlib is imported when one is drawn, not before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from glocal.errors import unknown
from glocal.metrics import OVER, SCOPES, Over, Scope
from glocal.report.curves import accuracy, forgetting, tradeoff
from glocal.report.distance import distance
from glocal.report.groups import Group, View, require_groups
from glocal.report.matrix import matrix
from glocal.report.objective import loss
from glocal.report.style import drawn
from glocal.store.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = Callable[["Figure", Sequence[Group], View], None]

KINDS: dict[str, tuple[Draw, str]] = {
    "forgetting": (forgetting, "average forgetting E(T) against the learning rate, a line for each algorithm"),
    "accuracy": (accuracy, "average accuracy ACC(T) against the learning rate, a line for each algorithm"),
    "distance": (distance, "distance ‖θ_t − θ_0‖ against the learning rate, by task, a panel for each algorithm"),
    "matrix": (matrix, "accuracy R[t, o] on every task after every task, at each algorithm's best learning rate"),
    "loss": (loss, "the objective, epoch by epoch, at each algorithm's best learning rate"),
    "tradeoff": (tradeoff, "average accuracy against forgetting, a path over the learning rates for each algorithm"),
}
SUFFIXES = (".pdf", ".png", ".svg")


def draw(
    runs: Iterable[Run], kind: str, path: str | Path, forgetting: Over = "t-1", scope: Scope | None = None
) -> Path:
    """Draw the runs into `path` (PNG, PDF or SVG, by its suffix) and return it. Missing folders are made.

    forgetting: averaged over 't-1' or 't' tasks. scope: which accuracy; the challenge's own setting unless given.
    """
    path = Path(path)
    if kind not in KINDS:
        raise unknown("kind of figure", kind, KINDS)
    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    if forgetting not in OVER:
        raise unknown("forgetting", forgetting, OVER)
    if scope is not None and scope not in SCOPES:
        raise unknown("scope", scope, SCOPES)
    groups = require_groups(runs)
    return drawn(lambda figure: KINDS[kind][0](figure, groups, View(forgetting, scope)), path)
