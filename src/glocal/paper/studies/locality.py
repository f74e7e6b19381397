r"""Who is local and who is global, by experiment (Definition 1 and §5): whether an algorithm's \hat L_o depends on the
solution θ_o is tested, and what is found set beside the class that it declares: the paper's, where it names it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from glocal.algorithms import ALGORITHMS
from glocal.lens.locality import Verdict, locality
from glocal.paper.study import Piece, Place, Row
from glocal.sweeps import resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FULL: dict[str, Any] = {"solutions": 64, "draws": 5, "probes": 16, "examples": 2_000, "epochs": 3, "lr": 0.1, "seed": 0}
DEMO: dict[str, Any] = {"solutions": 10, "draws": 3, "probes": 4, "examples": 160, "epochs": 2, "lr": 0.1, "seed": 0}
WAYS = {"apart": "initialisation and order", "nats": "nearest neighbours"}
"""What solutions differ in, and how information is estimated: words for stores that hold it from before."""
SETTINGS = {"rotated": "domain", "split": "task"}
NOTHING = 5e-4
"""Nats that are told as 0."""
# §5.1: why the paper calls them global, and what their \hat L_o is seen from Definition 1.
CALLED_GLOBAL = {
    "quadratic": "the paper argues that its centre θ_{t−1} moves on with every task, but after one task that is θ_o",
    "partition": "the paper argues that the derivative is taken at the current θ, but what is kept of a finished task "
    "is as it was at θ_o",
}


class Locality:
    """Each algorithm's verdict, a row for each θ that its \\hat L_o was looked at from."""

    name = "locality"
    columns = (
        "challenge algorithm family declared found p_value explained involved information over_theta solutions draws "
        "lost distance probe place probe_explained probe_involved probe_information probe_p_value"
    )

    def pieces(self, demo: bool) -> list[Piece]:
        """A demo has each algorithm once: on turned digits, or on split ones where it needs new classes."""
        if demo:
            return [
                {
                    "challenge": "rotated-digits" if "domain" in a.settings else "split-digits",
                    "algorithm": name,
                    **DEMO,
                    **WAYS,
                }
                for name, a in ALGORITHMS.items()
            ]
        return [
            {"challenge": f"{kind}-mnist", "algorithm": name, **FULL, **WAYS}
            for kind, setting in SETTINGS.items()
            for name, a in ALGORITHMS.items()
            if setting in a.settings
        ]

    def cost(self, demo: bool) -> str:
        pieces, size = self.pieces(demo), DEMO if demo else FULL
        return f"{len(pieces)} tests of {size['solutions']} solutions, {size['draws']} memories each"

    def measure(self, piece: Piece, place: Place) -> list[Row]:
        size = {name: value for name, value in piece.items() if name not in WAYS}
        name = size.pop("challenge")
        challenge = resolve.challenge(name, data=place.data, setting=SETTINGS[name.partition("-")[0]]).value
        found = locality(size.pop("algorithm"), challenge, **size, device=place.device)
        return rows_of(found, name, ALGORITHMS[piece["algorithm"]].family)

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """The share of \\hat L_o's variance that θ_o explains: small points at each θ, large ones in the mean."""
        by_challenge = [[v for v in gathered(rows) if v.challenge == name] for name in _names(rows, "challenge")]
        sizes = [len(verdicts) for verdicts in by_challenge]
        beside = 2 * min(sizes) > max(sizes)  # a panel of few rows goes below the others, not into a column as high
        columns = len(sizes) if beside else 1
        heights = [0.21 * max(sizes) + 0.9] if beside else [0.21 * size + 0.9 for size in sizes]
        figure.set_size_inches(4.9 * columns + 0.4, sum(heights) + 0.4)
        panels = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flat
        for axes, verdicts in zip(panels, by_challenge, strict=True):
            _panel(axes, sorted(verdicts, key=_order))
        handles = _legend()
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * columns), handletextpad=0.4
        )

    def conclude(self, rows: Sequence[Row]) -> list[str]:
        verdicts = gathered(rows)
        names, disagree = _names(rows, "algorithm"), [v for v in verdicts if v.declared != v.found]
        apart = _distinct(v.algorithm for v in disagree)
        said = [
            "Definition 1 calls an approximation local if it depends on the solution θ_o. "
            f"Of {len(names)} algorithms on {_and(_names(rows, 'challenge'))}, {len(names) - len(apart)} are found as "
            "they are declared, which is the paper's class for those that it names."
        ]
        said += [_shares(kind, [v for v in verdicts if v.found == kind]) for kind in ("global", "local")]
        said += [_disagreement(alike) for alike in _alike(disagree)]
        said.append(_exemplars(verdicts))
        return [sentence for sentence in said if sentence] + ([] if disagree else ["No algorithm disagrees."])


def _exemplars(verdicts: Sequence[Tested]) -> str:
    """What the paper says of iCaRL, and what is left of it without herding."""
    found = {v.algorithm: v for v in verdicts if v.algorithm in ("icarl", "icarl-random")}
    if len(found) < 2:
        return ""
    herding, random = found["icarl"], found["icarl-random"]
    left = (
        "which makes it local still, by the targets that its network generates"
        if random.found == "local"
        else ("which makes it global, as the paper says")
    )
    counted = " It is declared local, and counted so above." if random.declared == random.found == "local" else ""
    return (
        "The paper calls iCaRL local because of its herding. Where that chooses the exemplars, nothing is left to "
        f"chance, and θ_o explains {100 * herding.explained:.0f} % of the variance, however small; where chance does, "
        f"{100 * random.explained:.0f} %, {left}.{counted}"
    )


class Tested(NamedTuple):
    """One algorithm on one challenge, gathered from its rows."""

    challenge: str
    algorithm: str
    family: str
    declared: str
    found: str
    explained: float
    involved: float
    information: float
    p_value: float
    over_theta: float
    each: list[float]  # explained, at every probe

    @property
    def constant(self) -> bool:
        """Whether \\hat L_o is one number for all θ."""
        return self.over_theta < 1e-9


def rows_of(found: Verdict, challenge: str, family: str) -> list[Row]:
    """A verdict as rows of the table."""
    common: Row = {
        "challenge": challenge,
        "algorithm": found.algorithm,
        "family": family,
        "declared": found.declared,
        "found": found.found,
        "p_value": found.p_value,
        "explained": found.variance_explained,
        "involved": found.variance_involved,
        "information": found.information,
        "over_theta": over_theta(found.values),
        "solutions": len(found.values),
        "draws": found.values.shape[1],
        "lost": found.lost,
        "distance": found.distance,
    }
    each = zip(found.places, *(part.tolist() for part in found.by_probe[:4]), strict=True)
    return [
        {
            **common,
            "probe": probe,
            "place": place,
            "probe_explained": explained,
            "probe_involved": involved,
            "probe_information": information,
            "probe_p_value": p_value,
        }
        for probe, (place, explained, involved, information, p_value) in enumerate(each)
    ]


def over_theta(values: Tensor) -> float:
    """Of all variance of \\hat L_o(θ), (solutions, draws, repetitions, probes), the share over θ at one solution and
    draw. 0: it is a constant."""
    values = values.double()
    whole = values.var(correction=0)
    return float(values.var(-1, correction=0).mean() / whole) if whole > 0 else 0.0


def gathered(rows: Sequence[Row]) -> list[Tested]:
    """The algorithms of a table, in its order."""
    groups: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["challenge"], row["algorithm"]), []).append(row)
    shared = [name for name in Tested._fields if name != "each"]
    return [
        Tested(*(own[0][name] for name in shared), each=[_number(row["probe_explained"]) for row in own])  # type: ignore[misc,arg-type]
        for own in groups.values()
    ]


def _shares(kind: str, verdicts: Sequence[Tested]) -> str:
    """Whom the test found so, and by how much."""
    if not verdicts:
        return f"None is found {kind}."
    known = [v for v in verdicts if math.isfinite(v.explained)]
    names = ", ".join(_distinct(v.algorithm for v in verdicts))
    if not known:
        return f"Found {kind}: {names}; how much θ_o explains is not known."
    low, high = min(known, key=lambda v: v.explained), max(known, key=lambda v: v.explained)
    share = _percent(high.explained)
    if _percent(low.explained) != share:
        share = f"from {_percent(low.explained)} ({low.algorithm}) to {share}"
    p_values = [v.p_value for v in verdicts if math.isfinite(v.p_value)]
    bound = "unknown" if not p_values else f"≥ {min(p_values):.3g}" if kind == "global" else f"≤ {max(p_values):.3g}"
    told = f"Found {kind}: {names}. θ_o explains {share} of the variance of their \\hat L_o, p {bound}."
    silent = [v for v in known if kind == "local" and v.information < NOTHING]
    if silent:
        involved = sorted(v.involved for v in silent)
        share = " to ".join(_distinct(_percent(end) for end in (involved[0], involved[-1])))
        where = _and([f"{v.algorithm} on {v.challenge}" for v in silent])
        told += (
            f" Of {where} θ_o decides together with the memory's draws: alone and with them it makes {share} of the "
            "variance. The estimate of information does not know the draws and is 0 there: the verdict is the "
            "permutation test's."
        )
    return told


def _alike(verdicts: Sequence[Tested]) -> list[list[Tested]]:
    """Those of whom the same is to be said."""
    groups: dict[tuple[str, str, bool], list[Tested]] = {}
    for v in verdicts:
        groups.setdefault((v.family, v.found, v.constant), []).append(v)
    return list(groups.values())


def _disagreement(verdicts: Sequence[Tested]) -> str:
    """Why algorithms are found otherwise than they are declared."""
    first, each = verdicts[0], [e for v in verdicts for e in v.each if math.isfinite(e)]
    names, where = (_and(_distinct(getattr(v, part) for v in verdicts)) for part in ("algorithm", "challenge"))
    be, its = ("are", "their") if len(_distinct(v.algorithm for v in verdicts)) > 1 else ("is", "its")
    begin = f"{names} {be} called {first.declared} and found {first.found} on {where}: "
    if first.found == "global":
        most = _percent(max(each, default=math.nan))
        return f"{begin}of {its} \\hat L_o, θ_o explains no more than {most} at any θ that was tried, as chance would."
    least = min(each, default=math.nan)
    share = "all" if least > 0.9995 else f"{_percent(least)} or more"
    what = f"θ_o explains {share} of {its} \\hat L_o at every θ that was tried"
    if first.constant:
        what += ", where it is one number for all θ, as is L_o(θ_o), the paper's own example of a local approximation"
    why = CALLED_GLOBAL.get(first.family)
    return begin + what + (f"; {why}." if why else ".")


def _panel(axes: Axes, verdicts: Sequence[Tested]) -> None:
    from glocal.report.style import FAINT, INK, TITLE_COLOURS

    heights = list(range(len(verdicts)))[::-1]
    for y, verdict in zip(heights, verdicts, strict=True):
        colour, disagrees = TITLE_COLOURS[verdict.declared], verdict.declared != verdict.found
        axes.plot([0, 100 * verdict.explained], [y, y], color=colour, linewidth=1.2, alpha=0.5)
        axes.plot([100 * e for e in verdict.each], [y] * len(verdict.each), "|", color=colour, markersize=7, alpha=0.6)
        face = "white" if disagrees else colour
        axes.plot(100 * verdict.explained, y, "o", color=colour, markerfacecolor=face, markeredgewidth=1.4, zorder=3)
        for x, text in ((1.05, _nats(verdict.information)), (1.24, _p(verdict.p_value))):
            axes.text(x, y, text, transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=8, color=INK)
    for x, text in ((1.05, "nats"), (1.24, "p")):
        axes.text(x, 1, text, transform=axes.transAxes, va="bottom", fontsize=8, color=FAINT)
    axes.set_yticks(heights, [v.algorithm for v in verdicts])
    for label, verdict in zip(axes.get_yticklabels(), verdicts, strict=True):
        label.set_color(TITLE_COLOURS[verdict.declared])
    axes.set_xlim(-4, 104)
    axes.set_ylim(-0.7, len(verdicts) - 0.3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(r"share of $\hat L_o$'s variance that $\theta_o$ explains (%)")
    if verdicts:
        axes.set_title(verdicts[0].challenge, loc="left", fontweight="bold", pad=10)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    from glocal.report.style import FAINT, TITLE_COLOURS

    def mark(label: str, colour: str, **more: Any) -> Line2D:
        return Line2D([], [], color=colour, linestyle="none", label=label, **{"marker": "o", **more})

    return [
        *(mark(f"declared {kind}", colour) for kind, colour in TITLE_COLOURS.items()),
        mark("found to be the other", FAINT, markerfacecolor="white", markeredgewidth=1.4),
        mark("at a single θ", FAINT, marker="|", markersize=7),
    ]


def _order(verdict: Tested) -> tuple[bool, float, str]:
    known = verdict.explained if math.isfinite(verdict.explained) else -1.0
    return verdict.declared == "local", known, verdict.algorithm


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _names(rows: Sequence[Row], column: str) -> list[str]:
    return _distinct(str(row[column]) for row in rows)


def _distinct(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _percent(share: float) -> str:
    return (
        f"{100 * share:.0f} %" if not share or share >= 0.0995 or not math.isfinite(share) else f"{100 * share:.1f} %"
    )


def _nats(information: float) -> str:
    return f"{information:.2f}"


def _p(p_value: float) -> str:
    return f"{p_value:.3f}" if p_value < 0.0995 else f"{p_value:.2g}"


STUDIES = (Locality(),)
