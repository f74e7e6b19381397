"""Groups of runs whose configurations are equal except for the seed, so that they can be averaged."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glocal.errors import GlocalError
from glocal.metrics import Measure, Over, Scope, over_seeds, scope_of, summary
from glocal.store.run import Run

Settings = dict[str, Any]
PERCENT = ("acc", "forgetting", "backward_transfer", "forward_transfer", "learning_accuracy")


@dataclass(frozen=True)
class View:
    """Options of the statistics: forgetting over 't' or 't-1' tasks, scope of accuracy, measure of forgetting."""

    over: Over = "t-1"
    scope: Scope | None = None
    measure: Measure = "accuracy"


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one (challenge, algorithm, lr), one per seed, and the labels to show them under."""

    challenge: str
    algorithm: str
    runs: tuple[Run, ...]

    @property
    def locality(self) -> str:
        return self.runs[0].locality

    @property
    def name(self) -> str:
        """The algorithm's name without options."""
        return str(self.runs[0].config["algorithm"].get("name", self.runs[0].algorithm))

    @property
    def lr(self) -> float:
        return self.runs[0].lr

    @property
    def tasks(self) -> int:
        return self.runs[0].tasks

    @property
    def finished(self) -> tuple[Run, ...]:
        """The runs that did not diverge. Statistics are computed over these."""
        return tuple(run for run in self.runs if run.diverged is None)

    @property
    def title(self) -> str:
        return f"{self.algorithm} ({self.locality})"

    def scope(self, view: View) -> Scope:
        return scope_of(self.runs[0], view.scope)

    def statistics(self, view: View) -> dict[str, tuple[float, float]]:
        """Compute (mean, standard deviation) over the finished runs, accuracies in percent; NaN if none finished."""
        return over_seeds(list(self.by_seed(view).values())) or dict.fromkeys((*PERCENT, "distance"), (np.nan, np.nan))

    def by_seed(self, view: View) -> dict[int, dict[str, float]]:
        """Compute the statistics of each finished run, accuracies in percent."""
        return {run.seed: _percent(summary(run, view.scope, view.measure, view.over), view) for run in self.finished}

    def values(self, name: str, view: View) -> dict[int, float]:
        """Return one statistic by seed."""
        return {seed: numbers[name] for seed, numbers in self.by_seed(view).items()}


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs by challenge, locality (global first), algorithm and learning rate.

    Equal runs count once. If runs of one challenge differ in more than algorithm, learning rate and seed (tasks,
    epochs, network…), or runs of one algorithm in an option that its label does not show, the labels are extended by
    the settings that differ, so that runs that are not comparable never share a label.
    """
    distinct = {_canonical(run.config): run for run in runs}
    by_settings: defaultdict[str, list[Run]] = defaultdict(list)
    for run in distinct.values():
        by_settings[_canonical({k: v for k, v in run.config.items() if k != "seed"})].append(run)
    firsts = [members[0] for members in by_settings.values()]
    challenges = _labels([(run.challenge, _common(run)) for run in firsts])
    # Options of an algorithm may differ between challenges; only differences within a challenge extend its label.
    named = [(f"{challenge}\n{run.algorithm}", run) for challenge, run in zip(challenges, firsts, strict=True)]
    algorithms = [x.partition("\n")[2] for x in _labels([(n, _flat(run.config["algorithm"])) for n, run in named])]
    groups = [
        Group(challenge, algorithm, tuple(sorted(members, key=lambda run: run.seed)))
        for challenge, algorithm, members in zip(challenges, algorithms, by_settings.values(), strict=True)
    ]
    return sorted(groups, key=lambda g: (g.challenge, g.locality, g.algorithm, g.lr))


def require_groups(runs: Iterable[Run]) -> list[Group]:
    """Group runs; raise an error if there are none or all of them diverged."""
    groups = group_runs(runs)
    if not groups:
        raise GlocalError("no runs were given; train some first (`glocal run`, `glocal sweep`).")
    if not any(group.finished for group in groups):
        count = sum(len(group.runs) for group in groups)
        raise GlocalError(f"all {count} runs diverged, so there is nothing to show. Try a lower learning rate.")
    return groups


def by_challenge(groups: Iterable[Group]) -> list[list[Group]]:
    return _split(groups, lambda group: group.challenge)


def by_algorithm(groups: Iterable[Group]) -> list[list[Group]]:
    return _split(groups, lambda group: (group.locality, group.algorithm))


def most_accurate(groups: Sequence[Group], view: View) -> Group:
    """Return the group with the highest mean ACC(T), or the first if accuracy is undefined."""
    return max(groups, key=lambda group: np.nan_to_num(group.statistics(view)["acc"][0], nan=-np.inf))


def format_lr(lr: float) -> str:
    """Format a learning rate without exponent: 0.001, 0.1, 1."""
    return np.format_float_positional(lr, trim="-")


def _split(groups: Iterable[Group], key: Callable[[Group], object]) -> list[list[Group]]:
    parts: dict[object, list[Group]] = {}
    for group in groups:
        parts.setdefault(key(group), []).append(group)
    return list(parts.values())


def _percent(numbers: Mapping[str, float], view: View) -> dict[str, float]:
    fractions = [name for name in PERCENT if name != "forgetting" or view.measure == "accuracy"]
    return {name: 100 * x if name in fractions else x for name, x in numbers.items()}


def _common(run: Run) -> Settings:
    """Return the settings that should be equal for all runs of a challenge."""
    return _flat({k: v for k, v in run.config.items() if k not in ("seed", "lr", "algorithm")})


def _labels(named: Sequence[tuple[str, Settings]]) -> list[str]:
    """Return each name, extended by the settings in which entries of the same name differ."""
    variants: defaultdict[str, dict[str, Settings]] = defaultdict(dict)
    for name, settings in named:
        variants[name][_canonical(settings)] = settings
    labels: dict[tuple[str, str], str] = {}
    for name, by_key in variants.items():
        keys = sorted({key for settings in by_key.values() for key in settings})
        differing = [k for k in keys if len({_canonical(s.get(k, "absent")) for s in by_key.values()}) > 1]
        shown = {
            v: " · ".join([name, *(_format_setting(k, s[k]) for k in differing if k in s)]) for v, s in by_key.items()
        }
        for variant, label in shown.items():
            ambiguous = list(shown.values()).count(label) > 1
            labels[name, variant] = f"{label} · #{_digest(variant)}" if ambiguous else label
    return [labels[name, _canonical(settings)] for name, settings in named]


def _format_setting(key: str, value: object) -> str:
    """Format a setting for a label: '3 tasks', 'batch 64', 'hidden 100-100'."""
    last = key.rpartition(".")[2]
    if last in ("tasks", "epochs"):
        return f"{value} {last[:-1] if value == 1 else last}"
    if last == "name":
        return str(value)
    text = "-".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = text if len(text) <= 16 else f"#{_digest(text)}"
    return f"{last.removesuffix('_size').replace('_', ' ')} {text}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Settings:
    flat: Settings = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:4]
