r"""The perturbation score around every task's solution (Eq. score-ptb; §6.3, fig. perturbation, and the appendix, fig.
perturbationRM): how far from a solution the Hessian's eigenvectors are steeper than random directions.

Plain SGD learns the tasks one after the other, at the learning rate whose task losses are lowest at the solutions. It
is trained once, whichever piece is measured first: the store keeps the network's states, and every task is a piece.

What a network with BatchNorm does far from its solution depends on whose mean and variance it takes: those that
training left behind ("running"), as at test time, or those of the examples that pass together ("batch"). The first
are measured at all tasks, the others beside them at a few.

A score is a mean of ratios, and a random direction along which the loss hardly changes makes it very large. Figures and
sentences take medians of scores, over tasks and directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from torch import nn
from torch.nn.functional import avg_pool2d

from glocal import challenges
from glocal.challenges.challenge import Data
from glocal.engine.cohort import seeded_network
from glocal.engine.loader import evenly_spaced
from glocal.errors import require
from glocal.lens.batch_statistics import by_batch
from glocal.lens.perturbation import RADII, Kind, Perturbation, Split, perturbation
from glocal.lens.trace import TrainingTrace, trace_checkpoints
from glocal.networks import ResNet18
from glocal.networks.model import MakeNetwork
from glocal.networks.preprocess import InputTransform
from glocal.paper import table1
from glocal.paper.studies.row_filters import column, distinct, where
from glocal.store.run import Run
from glocal.sweeps import resolve
from glocal.sweeps.sweep import sweep
from glocal.sweeps.training import NullProgress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from glocal.paper.study import Piece, Place, Row

SPLITS: tuple[Split, ...] = ("train", "test")
KINDS: tuple[Kind, ...] = ("eigen", "random")
STATISTICS = {
    "running": "BatchNorm by running statistics",
    "batch": "BatchNorm by the batch's statistics",
    "none": "no BatchNorm",
}
CONVENTIONS = (
    "Behind the published figures the Hessian is of a task's first 2,000 examples, and the test loss is its sum over "
    "batches divided by the number of training batches; here examples are spread over all of it, both losses are means "
    "over their own examples, and all losses are in double precision."
)
ALIKE = 3.0
"""A score between 1/3 and 3 is about 1: half a decade either way, where curves span many."""


class SmallResNet18(nn.Module):
    """ResNet-18 with 4 channels in place of 64, on images of half the size: for a demonstration on any machine."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.network = ResNet18(shape[0], outputs, width=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(avg_pool2d(x, 2))


class Line(NamedTuple):
    """Medians over tasks and directions for every radius, and what four fifths of them lie between."""

    radii: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class PerturbationScore:
    name: str
    full: Piece
    small: Piece
    statistics: str
    by_batch: int
    """How many tasks are measured by the batch's statistics as well; one in a demonstration."""
    returns: bool
    """Whether the paper finds that far from the solution the score falls to 1."""
    claim: str
    columns: ClassVar = (
        "challenge network statistics seed task parameters lr split kind direction base eigenvalue residual radius "
        "loss score known"
    )

    def pieces(self, demo: bool) -> list[Piece]:
        base = self.small if demo else self.full
        tasks = {self.statistics: base["tasks"], "batch": min(self.by_batch, 1 if demo else base["tasks"])}
        return [base | {"statistics": s, "task": t} for s, count in tasks.items() for t in range(count)]

    def cost(self, demo: bool) -> str:
        piece, times = self.small if demo else self.full, len(self.pieces(demo))
        learnt = f"{piece['tasks']} tasks of {piece['challenge']}, {piece['epochs']} epochs each"
        losses = 2 * len(RADII) * (piece["eigenvectors"] + piece["directions"])
        runs = "1 run" if len(piece["lrs"]) == 1 else f"{len(piece['lrs'])} runs"
        return (
            f"{runs} of {learnt}; {times} times 60 Hessian products on {piece['samples']:,} examples "
            f"and {losses} losses on {piece['examples']:,}"
        )

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        run = _trained(piece, place)
        subject, test = _around(run, piece, place)
        numbers = {k: piece[k] for k in ("eigenvectors", "directions", "samples", "examples")}
        found = perturbation(subject, 0, test, **numbers, seed=piece["seed"] + piece["task"])
        about: Row = {k: piece[k] for k in ("challenge", "network", "statistics", "seed", "task")}
        size = sum(p.numel() for p in subject.checkpoints[0].params.values())
        return [about | {"parameters": size, "lr": run.lr} | row for row in _rows(found)]

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Above scores, below the losses they are made of, on training and on test data; a section for each kind of
        statistics."""
        first = rows[0]
        kinds = [s for s in STATISTICS if where(rows, statistics=s)]
        figure.set_size_inches(1.2 + 6.2 * len(kinds), 6.2)
        network = f"{first['network']}, {first['parameters']:,} parameters"
        about = f"{first['challenge']} · {network} · plain SGD, learning rate {first['lr']:g}"
        figure.suptitle(about, x=0.012, ha="left", fontweight="bold")
        for kind, section in zip(kinds, figure.subfigures(1, len(kinds), squeeze=False)[0], strict=True):
            own = where(rows, statistics=kind)
            tasks = f"{len(distinct(own, 'task'))} tasks"
            section.suptitle(tasks if kind == "none" else f"{STATISTICS[kind]}, {tasks}")
            _panels(section.subplots(2, 2, sharex=True, sharey="row"), own)
        handles, labels = figure.axes[2].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(kinds)))

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        said = [f"The paper: {self.claim}.", CONVENTIONS]
        for kind in STATISTICS:
            if own := where(rows, statistics=kind):
                said += _said(own, "" if kind == "none" else f"{STATISTICS[kind]}. ", self.returns)
        return said


def line(rows: Sequence[Row], name: str) -> Line:
    radii = distinct(rows, "radius")
    found = [quantiles(column(where(rows, radius=r), name)) for r in radii]
    low, middle, high = np.array(found, dtype=float).reshape(-1, 3).T
    return Line(np.array(radii), middle, low, high)


def quantiles(values: np.ndarray) -> list[float]:
    """A tenth, half and nine tenths of what is known lie below these, which are among it: between a number and one
    beyond all numbers there is no middle."""
    known = values[~np.isnan(values)]
    return np.quantile(known, [0.1, 0.5, 0.9], method="nearest").tolist() if known.size else [np.nan] * 3


def _trained(piece: Piece, place: Place) -> Run:
    """The run with the lowest mean loss on the tasks' training data, each at its own solution."""
    runs = sweep(
        piece["challenge"],
        ["sgd"],
        piece["lrs"],
        [piece["seed"]],
        network=_network(piece),
        tasks=piece["tasks"],
        epochs=piece["epochs"],
        batch_size=piece["batch_size"],
        precision=piece["precision"],
        store=place.store,
        data=place.data,
        device=str(place.device),
        keep_parameters=True,
        progress=NullProgress(),
    )
    finished = [run for run in runs if run.diverged is None]
    require(bool(finished), f"plain SGD diverged on {piece['challenge']} at every learning rate of {piece['lrs']}.")
    return min(finished, key=lambda run: run.arrays["train_class_loss"].diagonal(-1).mean())


def _network(piece: Piece) -> str | MakeNetwork:
    name: str = piece["network"]
    return SmallResNet18 if name == "small-resnet18" else name


def _around(run: Run, piece: Piece, place: Place) -> tuple[TrainingTrace, Data]:
    """The piece's task at its solution, and its test data."""
    challenge = challenges.make(piece["challenge"], piece["tasks"], place.data)
    task, transform = (
        challenge.task(piece["task"], piece["seed"]),
        InputTransform(challenge.normalise, device=place.device),
    )

    def ready(data: Data) -> Data:
        some = evenly_spaced(data, max(piece["samples"], piece["examples"]))
        return Data(transform.normalize(some.x.to(place.device)), some.y.to(place.device))

    module = seeded_network(resolve.network(_network(piece), challenge).value, challenge, piece["seed"])
    states = [run.state(piece["task"]), run.state(piece["task"] + 1)]
    subject = trace_checkpoints(module.to(place.device), challenge.loss, [ready(task.train)], states)
    if piece["statistics"] == "batch":
        subject = replace(subject, module=by_batch(module))
    return subject, ready(task.test)


def _rows(found: Perturbation) -> list[Row]:
    rows: list[Row] = []
    for split in SPLITS:
        for kind in KINDS:
            losses, scores, known = found.losses[split][kind], found.score(split, kind), found.known(split, kind)
            for i in range(len(losses)):
                eigen = kind == "eigen"
                direction: Row = {"split": split, "kind": kind, "direction": i, "base": found.base[split]}
                direction |= {"eigenvalue": float(found.eigenvalues[i]) if eigen else None}
                direction |= {"residual": float(found.residuals[i]) if eigen else None}
                for j, r in enumerate(found.radii):
                    numbers: Row = {
                        "loss": float(losses[i, j]),
                        "score": float(scores[i, j]),
                        "known": int(known[i, j]),
                    }
                    rows.append(direction | {"radius": r} | numbers)
    return rows


def _panels(panels: np.ndarray, rows: Sequence[Row]) -> None:
    from glocal.report.style import FAINT

    for split, (above, below) in zip(SPLITS, panels.T, strict=True):
        own = where(rows, split=split)
        _curves(above, own, "score")
        _curves(below, own, "loss")
        above.axhline(1, color=FAINT, linewidth=0.9)
        base = float(np.median(column(own, "base")))
        below.axhline(base, color=FAINT, linewidth=0.9, linestyle=":", label=r"$L_t(\theta_t)$, median of tasks")
        above.set_title("training data" if split == "train" else "test data", loc="left")
        below.set_xlabel("radius  $r$")
    panels[0, 0].set_ylabel(r"perturbation score  $\mathfrak{s}(r)$")
    panels[1, 0].set_ylabel(r"loss  $L_t(\theta_t + r\,v)$")


def _curves(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """The median and its band for either kind of direction; a thin line for each eigenvector, over tasks."""
    from glocal.report.style import COOL, WARM, Pen

    looks = {"eigen": (WARM[1], "-", "eigenvectors"), "random": (COOL[0], "--", "random directions")}
    band = "median and 80 % of tasks and directions"
    for kind in KINDS:
        own, (colour, dashes, label) = where(rows, kind=kind), looks[kind]
        found = line(own, name)
        shown = np.isfinite(found.middle)
        high = np.where(np.isfinite(found.high), found.high, found.middle)
        axes.fill_between(found.radii[shown], found.low[shown], high[shown], color=colour, alpha=0.16, linewidth=0)
        for direction in distinct(own, "direction") if kind == "eigen" else ():
            one = line(where(own, direction=direction), name)
            each = "each eigenvector" if direction == 0 else None
            axes.plot(*_finite(one.radii, one.middle), color=colour, linewidth=0.6, alpha=0.6, label=each)
        pen = Pen(colour, dashes, "o" if kind == "eigen" else "s")
        x, y = _finite(found.radii, found.middle)
        axes.plot(x, y, **pen.line(), **pen.point(), markersize=4, label=f"{label}: {band}")
    if any(np.isfinite(part.get_ydata()).any() for part in axes.lines):  # there is no logarithmic axis of nothing
        axes.set_xscale("log")
        axes.set_yscale("log", nonpositive="mask")


def _finite(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[np.isfinite(y)], y[np.isfinite(y)]


def _said(rows: Sequence[Row], opening: str, returns: bool) -> list[str]:
    """Where the score begins, where it is highest and where it ends; whether that is what the paper found."""
    train, test = (line(where(rows, split=split, kind="eigen"), "score") for split in SPLITS)
    if np.isnan(train.middle).all():
        return [f"{opening}No score is known."]
    top = int(np.nanargmax(train.middle))
    random = line(where(rows, split="train", kind="random"), "score").middle
    begins, highest, ends = (" and ".join(_number(x.middle[i]) for x in (train, test)) for i in (0, top, -1))
    return [
        f"{opening}The eigenvectors' median scores on training and test data begin at {begins} (r = "
        f"{train.radii[0]:g}), are highest at r = {train.radii[top]:g} with {highest}, and end at {ends} (r = "
        f"{train.radii[-1]:g}); those of random directions among themselves are {_number(np.nanmin(random))} to "
        f"{_number(np.nanmax(random))} on training data.",
        f"{_verdict(train, returns)} {_likeness(where(rows, split='train', kind='eigen'))}".strip(),
        *_single(rows),
    ]


def _verdict(eigen: Line, expected: bool) -> str:
    """Whether the score comes down to 1, and from which radius on."""
    known = ~np.isnan(eigen.middle)
    radii, middle = eigen.radii[known], eigen.middle[known]
    about = (middle >= 1 / ALIKE) & (middle <= ALIKE)
    top = int(middle.argmax())
    steadily = "" if (np.diff(middle[: top + 1]) > 0).all() else ", though not at every step,"
    rises = f"rises{steadily}" if middle.max() > ALIKE * middle[0] else "does not rise"
    if about[-1]:
        since = radii[len(about) - int(about[::-1].cumprod().sum())]
        end = f"from r = {since:g} on is about 1 (within a factor of {ALIKE:g})"
    else:
        end = f"is not about 1 at r = {radii[-1]:g}"
    agrees = rises.startswith("rises") + (bool(about[-1]) == expected)
    verdict = {0: "neither agrees", 1: "one of these two agrees", 2: "both of these agree"}[agrees]
    return f"On training data it {rises} with small r, and {end}: {verdict} with the paper."


def _single(rows: Sequence[Row]) -> list[str]:
    """From which radii on single precision, torch's default, has no number for the losses."""
    since = {}
    for kind in KINDS:
        losses = line(where(rows, split="train", kind=kind), "loss")
        beyond = losses.middle > np.finfo(np.float32).max
        since[kind] = losses.radii[beyond].min(initial=np.inf)
    if not np.isfinite(since["eigen"]):
        return []
    random = f", along random directions from r = {since['random']:g} on" if np.isfinite(since["random"]) else ""
    return [
        f"Single precision has no number for these losses along eigenvectors from r = {since['eigen']:g} on{random}: a "
        "score that is computed in it says nothing there."
    ]


def _number(number: float) -> str:
    return "unknown" if np.isnan(number) else f"{number:.3g}"


def _likeness(rows: Sequence[Row]) -> str:
    """How much tasks differ: the ratio of the highest to the lowest of their median scores, at the worst radius."""
    tasks = distinct(rows, "task")
    curves = np.array([line(where(rows, task=task), "score").middle for task in tasks])
    usable = np.isfinite(curves).all(0) & (curves > 0).all(0)
    if len(tasks) < 2 or not usable.any():
        return ""
    ratios = curves[:, usable].max(0) / curves[:, usable].min(0)
    logs = np.log(curves[:, usable])
    alike = [np.corrcoef(a, b)[0, 1] for i, a in enumerate(logs) for b in logs[:i] if a.std() > 0 and b.std() > 0]
    shapes = f"; the correlation of two tasks' curves, in logarithms, is {np.median(alike):.2f}" if alike else ""
    return (
        f"Its {len(tasks)} tasks' median scores differ by a factor of {_number(np.median(ratios))} at the median "
        f"radius and of {_number(ratios.max())} at most{shapes}."
    )


def _piece(column: table1.Column, examples: int, samples: int = 2_000, directions: int = 10) -> Piece:
    names = ("challenge", "network", "tasks", "epochs", "batch_size", "precision")
    piece: Piece = {name: getattr(column, name) for name in names}
    numbers = {"eigenvectors": directions, "directions": directions, "samples": samples, "examples": examples}
    return piece | {"lrs": list(column.lrs), "seed": column.seeds[0]} | numbers


_MNIST, _CIFAR10 = table1.COLUMNS["rotated-mnist"], table1.COLUMNS["split-cifar10"]
_DIGITS = replace(table1.DEMO, lrs=(0.1, 0.5))
_IMAGES = replace(_DIGITS, challenge="split-digits", network="small-resnet18", tasks=2, lrs=(0.05,), batch_size=32)

STUDIES = (
    PerturbationScore(
        "perturbation-cifar10",
        _piece(replace(_CIFAR10, lrs=(0.01, 0.1)), examples=1_000),
        _piece(replace(_IMAGES, epochs=2), examples=50, samples=50, directions=4),
        "running",
        by_batch=3,
        returns=True,
        claim="on Split CIFAR-10 the score increases with the radius as long as that is small and drops to 1 after "
        "about 10³; the curve's shape is much the same for all tasks",
    ),
    PerturbationScore(
        "perturbation-mnist",
        _piece(_MNIST, examples=10_000),
        _piece(_DIGITS, examples=500, samples=500),
        "none",
        by_batch=0,
        returns=False,
        claim="on Rotated-MNIST the score does not converge to 1 as the radius grows, and is much lower than on Split "
        "CIFAR-10; the curve's shape is much the same for all tasks",
    ),
)
