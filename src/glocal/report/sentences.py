"""What a set of runs shows, in three sentences for each challenge, written from the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from glocal.metrics import Over, Scope
from glocal.report.groups import Group, View, by_algorithm, by_challenge, grouped, plain
from glocal.store.run import Run

Verdict = Literal["more", "less", "about the same"]
NEGLIGIBLE = 0.005
"""Points of forgetting that two decimals do not show."""


@dataclass(frozen=True)
class Change:
    """Mean forgetting at an algorithm's high learning rates minus that at its low ones, in points.

    error: its standard error over seeds, None if it cannot be told (one seed).
    """

    algorithm: str
    locality: str
    low: tuple[float, ...]
    high: tuple[float, ...]
    points: float
    error: float | None

    @property
    def verdict(self) -> Verdict:
        if abs(self.points) < max(self.error or 0.0, NEGLIGIBLE):
            return "about the same"
        return "more" if self.points > 0 else "less"

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.algorithm} ({self.locality}, {self.points:+.2f}{error} points)"


def what_it_shows(runs: Iterable[Run], forgetting: Over = "t-1", scope: Scope | None = None) -> list[str]:
    """Three sentences for each challenge: how far training travels, the paper's test of locality, who does best."""
    view = View(forgetting, scope)
    told = []
    parts = by_challenge(grouped(runs))
    for groups in parts:
        prefix = f"{groups[0].challenge}: " if len(parts) > 1 else ""
        told += [prefix + sentence(groups, view) for sentence in (travelled, tested, best)]
    return told or ["There are no runs to tell of."]


def travelled(groups: Sequence[Group], view: View) -> str:
    """‖θ_T − θ_0‖ from the lowest learning rate to the highest, over the algorithms that have both."""
    finished = [g for g in groups if np.isfinite(g.statistics(view)["distance"][0])]
    if not finished:
        return f"{_all(groups)} diverged, so no distance travelled can be told."
    widest = max(by_algorithm(finished), key=lambda own: own[-1].lr / own[0].lr)
    low, high = widest[0].lr, widest[-1].lr
    if low == high:
        there = [group for group in finished if group.lr == low]
        return (
            f"At the learning rate {plain(low)} the distance travelled ‖θ_T − θ_0‖ is "
            f"{_mean_distance(there, view):.3g} (mean over {_algorithms(len(there))}{_left_out(groups)}); "
            "one learning rate does not tell how it changes."
        )
    pairs = [(a, b) for own in by_algorithm(finished) for a in own for b in own if (a.lr, b.lr) == (low, high)]
    start, end = _mean_distance([a for a, _ in pairs], view), _mean_distance([b for _, b in pairs], view)
    factor = end / start if start > 0 else np.inf
    if not np.isfinite(factor):
        change = "grows from nothing"
    elif f"{factor:.2f}" == "1.00":
        change = "stays the same"
    else:
        change = f"grows {factor:.3g}-fold" if factor > 1 else f"shrinks to {factor:.3g} of it"
    return (
        f"From the learning rate {plain(low)} to {plain(high)} the distance travelled ‖θ_T − θ_0‖ {change}, from "
        f"{start:.3g} to {end:.3g} (mean over {_algorithms(len(pairs))}{_left_out(groups)})."
    )


def tested(groups: Sequence[Group], view: View) -> str:
    """The paper's test: does forgetting rise with the learning rate, as it says of local algorithms?"""
    if not any(group.finished for group in groups):
        return f"{_all(groups)} diverged, so forgetting cannot be compared over learning rates."
    found = [change for own in by_algorithm(groups) if (change := _change(own, view)) is not None]
    if not found:
        return "Forgetting cannot be compared over learning rates: that takes two of them, and more than one task."
    verdicts: tuple[Verdict, ...] = ("more", "less", "about the same")
    parts = [
        f"{_listed(members)} forget{'s' if len(members) == 1 else ''} {verdict}"
        for verdict in verdicts
        if (members := [str(change) for change in found if change.verdict == verdict])
    ]
    known = any(change.error is not None for change in found)
    noise = " (± one standard error over seeds)" if known else " (one seed: no standard error)"
    return f"{_compared(found)}, {'; '.join(parts)}{noise}; {_claim(found)}."


def best(groups: Sequence[Group], view: View) -> str:
    """Who forgets least and who is most accurate, at which learning rate, and by how much against plain SGD."""
    finished = [group for group in groups if group.finished]
    if not finished:
        return f"{_all(groups)} diverged, so none forgets least and none is most accurate."
    # Joint training keeps all data: a bound, not a rival.
    rivals = [group for group in finished if group.name != "joint"] or finished
    aside = " (joint training left aside)" if len(rivals) < len(finished) else ""
    least = _winner(rivals, view, "forgetting", "forgets least", "points")
    most = _winner(rivals, view, "acc", "is most accurate", "%")
    if least is None and most is None:
        return "Neither forgetting nor accuracy is defined for these runs."
    if least is None:
        return f"Forgetting is undefined for these runs; {most}{aside}."
    return f"{least}; {most or 'accuracy is undefined for these runs'}{aside}."


def _change(own: Sequence[Group], view: View) -> Change | None:
    """Two highest minus two lowest rates; highest minus lowest where there are fewer than four."""
    finite = [group for group in own if np.isfinite(group.statistics(view)["forgetting"][0])]
    if len(finite) < 2:
        return None
    take = 2 if len(finite) >= 4 else 1
    low, high = finite[:take], finite[-take:]
    weights = [-1 / take] * take + [1 / take] * take
    by_seed = [{s: v["forgetting"] for s, v in group.by_seed(view).items()} for group in (*low, *high)]
    points = sum(w * float(np.mean(list(values.values()))) for w, values in zip(weights, by_seed, strict=True))
    seeds = set.intersection(*(set(values) for values in by_seed))
    error = None
    if all(set(values) == seeds for values in by_seed):
        # The same seeds everywhere: what they share cancels.
        paired = [sum(w * values[s] for w, values in zip(weights, by_seed, strict=True)) for s in sorted(seeds)]
        if len(paired) > 1:
            error = float(np.std(paired, ddof=1)) / len(paired) ** 0.5
    elif all(len(values) > 1 for values in by_seed):
        variances = [w**2 * np.var(list(v.values()), ddof=1) / len(v) for w, v in zip(weights, by_seed, strict=True)]
        error = float(np.sqrt(sum(variances)))
    rates = [tuple(group.lr for group in side) for side in (low, high)]
    return Change(own[0].algorithm, own[0].locality, rates[0], rates[1], points, error)


def _compared(found: Sequence[Change]) -> str:
    rates = {(change.low, change.high) for change in found}
    if len(rates) > 1:
        return "At the highest learning rates of each against its lowest (two and two; of fewer than four, one and one)"
    low, high = next(iter(rates))
    if len(low) == 2:
        return (
            f"At the two highest learning rates ({plain(high[0])} and {plain(high[1])}) against the two lowest "
            f"({plain(low[0])} and {plain(low[1])})"
        )
    return f"At the learning rate {plain(high[0])} against {plain(low[0])}"


def _claim(found: Sequence[Change]) -> str:
    """Whether the local algorithms do what the paper says of them; of the global ones it claims nothing."""
    local = [change for change in found if change.locality == "local"]
    if not local:
        return "none of them is local, and of global ones the paper claims nothing"
    agree = [change.algorithm for change in local if change.verdict == "more"]
    against = [change.algorithm for change in local if change.verdict != "more"]
    agreeing = f"{_listed(agree)} {'agrees' if len(agree) == 1 else 'agree'}"
    opposing = f"{_listed(against)} {'does' if len(against) == 1 else 'do'} not"
    mixed = f"{agreeing}, and {opposing}," if agree else f"{opposing} agree"
    said = mixed if against else agreeing
    others = " and claims nothing of global ones" if len(local) < len(found) else ""
    return f"{said} with the paper, which says that local ones forget more at higher rates{others}"


def _winner(groups: Sequence[Group], view: View, name: str, does: str, unit: str) -> str | None:
    sign = 1 if name == "acc" else -1
    means = {group: group.statistics(view)[name][0] for group in groups}
    means = {group: mean for group, mean in means.items() if np.isfinite(mean)}
    if not means:
        return None
    top = max(means.values(), key=lambda mean: sign * mean)
    first = [group for group, mean in means.items() if abs(mean - top) < 1e-9]
    who = _listed([f"{group.title} at {plain(group.lr)}" for group in first])
    said = f"{who} {does if len(first) == 1 else _plural(does)} ({top:.2f} {unit})"
    plain_sgd = {group: mean for group, mean in means.items() if group.name == "sgd"}
    if not plain_sgd or any(group.name == "sgd" for group in first):
        return said
    reference = max(plain_sgd, key=lambda group: sign * plain_sgd[group])
    ahead, comparison = abs(top - plain_sgd[reference]), "above" if name == "acc" else "below"
    return f"{said}, {ahead:.2f} points {comparison} plain sgd at its best rate for this, {plain(reference.lr)}"


def _mean_distance(groups: Sequence[Group], view: View) -> float:
    return float(np.mean([group.statistics(view)["distance"][0] for group in groups]))


def _plural(does: str) -> str:
    return {"forgets least": "forget least, equally", "is most accurate": "are most accurate, equally"}[does]


def _algorithms(count: int) -> str:
    return f"{count} algorithm{'s' if count != 1 else ''}"


def _all(groups: Sequence[Group]) -> str:
    runs = sum(len(group.runs) for group in groups)
    return f"All {runs} runs" if runs != 1 else "The only run"


def _left_out(groups: Sequence[Group]) -> str:
    diverged = sum(len(group.runs) - len(group.finished) for group in groups)
    return f"; {diverged} diverged run{'s' if diverged != 1 else ''} left out" if diverged else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
