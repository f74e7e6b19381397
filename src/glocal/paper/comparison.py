r"""Our Table 1 beside the published one, and the paper's own test of it (§6.1), computed.

The difference of two means is told in units of its standard error √(s²/(n−1) + s'²/(n'−1)), s and s' being the
deviations over seeds as the table prints them (ddof = 0), n and n' the numbers of seeds: s²/(n−1) is the unbiased
variance over n. One seed has no deviation, and the published variance stands in for its own. The test: "take the
difference in average forgetting between the lowest two learning rates and the highest two learning rates, for each
challenge. For local algorithms, the difference is always negative, whereas for global algorithms the difference can be
both positive and negative." It is taken seed by seed, and given with a t-interval over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from glocal.errors import GlocalError, unknown
from glocal.metrics import OVER, Over, Scope, confidence_interval, over_seeds, scope_of, summary
from glocal.paper.published import SEEDS, Cell
from glocal.paper.table1 import COLUMNS, cell, row_of
from glocal.runs import Runs
from glocal.store.run import Run

FAR = 2.0
"""Differences beyond so many standard errors are marked."""
LEVEL = 0.95
ENDS = 2
"""So many learning rates make an end of their range."""


@dataclass(frozen=True)
class Number:
    """A mean, its deviation (ddof = 0; NaN of one seed) and the number of seeds behind both."""

    mean: float
    std: float
    seeds: int

    @property
    def variance(self) -> float:
        """The unbiased variance over seeds; NaN of one."""
        # The paper does not say which deviation it prints. Taken as ddof = 0, the larger variance of the two: were it
        # ddof = 1, its part of the standard error would be √(5/4) too large, and Δ too small, never too large.
        return self.std**2 * self.seeds / (self.seeds - 1) if self.seeds > 1 else math.nan


@dataclass(frozen=True)
class Compared:
    """A number of ours and its published counterpart, where there is one."""

    ours: Number | None
    published: Number | None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.published is None else self.ours.mean - self.published.mean

    @property
    def error(self) -> float | None:
        if self.ours is None or self.published is None:
            return None
        own = self.ours.variance if self.ours.seeds > 1 else self.published.variance
        return math.sqrt(own / self.ours.seeds + self.published.variance / self.published.seeds)

    @property
    def units(self) -> float | None:
        """The difference in standard errors."""
        return None if not self.error or self.difference is None else self.difference / self.error

    @property
    def far(self) -> bool:
        return self.units is not None and abs(self.units) > FAR


@dataclass(frozen=True)
class Line:
    """One (challenge, algorithm, lr): accuracy, and forgetting over T−1 tasks and over T, in percent."""

    challenge: str
    algorithm: str
    locality: str
    lr: float
    tasks: int
    seeds: int
    diverged: int
    acc: Compared
    forgetting: Mapping[Over, Compared]
    by_seed: Mapping[int, Mapping[Over, float]]
    """The forgetting of every run that did not diverge."""


@dataclass(frozen=True)
class Trend:
    """How much less an algorithm forgets at the two lowest learning rates than at the two highest, in points."""

    challenge: str
    algorithm: str
    locality: str
    seeds: int
    difference: float
    low: float
    high: float
    published: float | None

    @property
    def sign(self) -> str:
        """What the interval says of the sign; of one seed, which has no interval, nothing."""
        if math.isnan(self.low):
            return "unknown"
        return "negative" if self.high < 0 else "positive" if self.low > 0 else "either"

    @property
    def verdict(self) -> str:
        """The paper's claim about it, and whether it holds here."""
        if self.locality == "global":
            return "global: no sign claimed"
        return {
            "negative": "local: negative, as claimed",
            "positive": "local: positive, against the claim",
            "either": "local: sign not settled",
            "unknown": "local: one seed has no interval",
        }[self.sign]


@dataclass(frozen=True)
class Comparison:
    lines: tuple[Line, ...]
    trends: tuple[Trend, ...]
    angles: str | None
    """'published', 'seed' or both, of the rotated challenges in it."""
    unlike: tuple[str, ...] = field(default=())
    """Challenges with published numbers whose runs are not of the published size, so that nothing is compared."""
    unmasked: tuple[str, ...] = field(default=())
    """Challenges with published numbers among the task's own classes, where ours are among all of them."""
    over: Over = "t-1"
    beside: bool = True
    """Whether the published numbers have columns in the table."""

    @property
    def challenges(self) -> list[str]:
        return list(dict.fromkeys(line.challenge for line in self.lines))

    def on(self, challenge: str) -> Comparison:
        """What of it is about one challenge."""
        return replace(
            self,
            lines=tuple(line for line in self.lines if line.challenge == challenge),
            trends=tuple(trend for trend in self.trends if trend.challenge == challenge),
            angles=self.angles if challenge.startswith("rotated-") else None,
            unlike=tuple(name for name in self.unlike if name == challenge),
            unmasked=tuple(name for name in self.unmasked if name == challenge),
        )


def compare(runs: Iterable[Run], over: Over = "t-1", scope: Scope | None = None, published: bool = True) -> Comparison:
    """Ours and the published numbers, by challenge, global before local, algorithm, learning rate.

    over: forgetting over 't-1' tasks, as the published numbers have it, or over 't', as the paper states it; these
    follow from the published ones exactly, by the factor (T−1)/T. scope: which accuracy; the run's own unless given.
    published: without it ours stand alone.
    """
    if over not in OVER:
        raise unknown("forgetting", over, OVER)
    groups = _grouped(runs)
    lines = tuple(_line(group, scope, published) for group in groups)
    seen = [run for group in groups for run in group]
    kinds = sorted({angles_of(run) for run in seen if run.challenge.startswith("rotated-")})
    known = [run for run in seen if published and run.challenge in COLUMNS]
    unlike = {run.challenge for run in known if not _published_size(run)}
    unmasked = {run.challenge for run in known if not _published_scope(run, scope)}
    return Comparison(
        lines,
        _trends(lines, over),
        angles=" and ".join(kinds) or None,
        unlike=tuple(sorted(unlike)),
        unmasked=tuple(sorted(unmasked)),
        over=over,
        beside=published,
    )


def _grouped(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of one cell, one a seed, equal in all but that."""
    cells: dict[tuple[str, str, str, float], dict[int, Run]] = {}
    for run in runs:
        key = run.challenge, run.locality, _name(run), run.lr
        held = cells.setdefault(key, {})
        if _settings(held.setdefault(run.seed, run).config) != _settings(run.config):
            raise GlocalError(
                f"two runs of {key[2]} on {run.challenge} at lr {run.lr:g} with seed {run.seed} differ in their "
                "configuration; give the runs of one size and one kind of angles."
            )
    groups = [[by_seed[seed] for seed in sorted(by_seed)] for _, by_seed in sorted(cells.items())]
    for group in groups:
        _require_one_protocol(group)
    return groups


def _require_one_protocol(group: Sequence[Run]) -> None:
    first = group[0]
    here = _settings(first.config)
    for run in group[1:]:
        there = _settings(run.config)
        for name in sorted(here.keys() | there.keys()):
            one, other = here.get(name, "absent"), there.get(name, "absent")
            if one != other:
                raise GlocalError(
                    f"the runs of {_name(run)} on {run.challenge} at lr {run.lr:g} differ in {name}: {_short(one)} "
                    f"with seed {first.seed}, {_short(other)} with seed {run.seed}; runs of one cell may differ in "
                    "their seed alone."
                )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """All of a configuration but the seed, by dotted names."""
    return {name: value for name, value in _flat(config).items() if name != "seed"}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _name(run: Run) -> str:
    """The algorithm's own name; its label where the table has a row of that name with other options."""
    column, chosen = COLUMNS.get(run.challenge), run.config["algorithm"]
    known = column is not None and any(row.algorithm == chosen["name"] for row in (*column.rows, *column.further))
    other = column is not None and known and row_of(column, chosen["name"], chosen.get("options", {})) is None
    return run.algorithm if other else str(chosen["name"])


def titled(runs: Iterable[Run]) -> Runs:
    """The runs under the names of their rows, without the options that the table fixes: for figures."""
    return Runs([replace(run, info={**run.info, "label": _name(run)}) for run in runs])


def _published_size(run: Run) -> bool:
    column = COLUMNS[run.challenge]
    size = run.tasks, run.config["epochs"], run.config["batch_size"], run.config["network"]["name"]
    return size == (column.tasks, column.epochs, column.batch_size, column.network)


def angles_of(run: Run) -> str:
    """'published' or 'seed', of a rotated challenge."""
    return "seed" if run.config["challenge"].get("options", {}).get("angles") is None else "published"


def _published_scope(run: Run, scope: Scope | None) -> bool:
    """Whether the accuracy is the published one: on split challenges that among the task's own classes."""
    return COLUMNS[run.challenge].setting != "task" or scope_of(run, scope) == "task"


def _counterpart(run: Run, scope: Scope | None) -> Cell | None:
    column, chosen = COLUMNS.get(run.challenge), run.config["algorithm"]
    if column is None or not _published_size(run) or not _published_scope(run, scope):
        return None
    row = row_of(column, chosen["name"], chosen.get("options", {}))
    return None if row is None else cell(column, row, run.lr)


def _line(group: Sequence[Run], scope: Scope | None, beside: bool) -> Line:
    first, finished = group[0], [run for run in group if run.diverged is None]
    counterpart = _counterpart(first, scope) if beside else None

    def compared(name: str, over: Over, theirs: Number | None) -> Compared:
        found = over_seeds([{name: 100 * summary(run, scope, over=over)[name]} for run in finished])
        mean, std = found.get(name, (math.nan, math.nan))
        std = std if len(finished) > 1 else math.nan
        return Compared(Number(mean, std, len(finished)) if math.isfinite(mean) else None, theirs)

    def published(over: Over) -> Number | None:
        if counterpart is None:
            return None
        share = 1.0 if over == "t-1" else (first.tasks - 1) / first.tasks
        return Number(share * counterpart.forgetting_mean, share * counterpart.forgetting_std, len(SEEDS))

    acc = Number(counterpart.acc_mean, counterpart.acc_std, len(SEEDS)) if counterpart else None
    return Line(
        first.challenge,
        _name(first),
        first.locality,
        first.lr,
        first.tasks,
        len(group),
        len(group) - len(finished),
        compared("acc", "t-1", acc),
        {over: compared("forgetting", over, published(over)) for over in OVER},
        {run.seed: {over: 100 * summary(run, scope, over=over)["forgetting"] for over in OVER} for run in finished},
    )


def _trends(lines: Sequence[Line], over: Over) -> tuple[Trend, ...]:
    """One for every algorithm with four learning rates at least, over the seeds that have all of their ends."""
    made = []
    for challenge, locality, algorithm in dict.fromkeys((x.challenge, x.locality, x.algorithm) for x in lines):
        own = sorted(
            (x for x in lines if (x.challenge, x.locality, x.algorithm) == (challenge, locality, algorithm)),
            key=lambda line: line.lr,
        )
        if len(own) < 2 * ENDS:
            continue
        low, high = own[:ENDS], own[-ENDS:]
        ends = [*low, *high]
        seeds = [seed for seed in own[0].by_seed if all(seed in line.by_seed for line in ends)]
        each = [
            _mean(x.by_seed[seed][over] for x in low) - _mean(x.by_seed[seed][over] for x in high) for seed in seeds
        ]
        known = {line.lr: number.mean for line in ends if (number := line.forgetting[over].published)}
        whole = len(known) == len(ends)
        published = _mean(known[x.lr] for x in low) - _mean(known[x.lr] for x in high) if whole else None
        if each and math.isfinite(each[0]):
            bounds = confidence_interval(each, LEVEL)
            made.append(Trend(challenge, algorithm, locality, len(each), _mean(each), *bounds, published))
    return tuple(made)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
