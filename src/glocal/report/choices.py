"""Which configuration of each algorithm a protocol chooses, its test result, and the oracle's optimism."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
from rich.console import RenderableType

from glocal import selection
from glocal.errors import GlocalWarning, require
from glocal.metrics import CONFIDENCE, confidence_interval
from glocal.report import table
from glocal.report.labels import is_rounded
from glocal.report.summary import DEFAULT_VIEW, Group, Row, View, format_range, group_runs
from glocal.report.table import Cell, Column, Section, Table, finite, mean_std, signed
from glocal.selection import ORACLE, PROTOCOLS
from glocal.store.run import Run

DEFAULT_PROTOCOLS = ("first-task", "all-validation", ORACLE)
NOTES = (
    "A protocol chooses the configuration with the best mean of its criterion over seeds; one with diverged runs is "
    "chosen only if all have some.",
    "Optimism: test result of the oracle's choice minus that of the protocol's choice (of losses the reverse), with "
    f"its {CONFIDENCE:.0%} t-interval over paired seeds, both choices given.",
)


def rows(runs: Iterable[Run], protocols: Sequence[str] = DEFAULT_PROTOCOLS, view: View = DEFAULT_VIEW) -> list[Row]:
    """Choose one configuration of every algorithm by every protocol; return a row for each choice.

    Args:
        runs: a sweep over configurations: learning rates, options, optimisers.
        protocols: names from `glocal.selection.PROTOCOLS`, such as 'first-k=3'.
        view: options of the statistics.

    Returns:
        `choice`: the settings in which the chosen configuration differs from the others; `configurations`: their
        number; `criterion`: its mean over seeds; `acc_mean` and `acc_std`, or `loss_mean` and `loss_std`: the test
        result of the choice; `optimism`, `low`, `high`: of the oracle over the choice; `agree`: how many seeds alone
        choose the same; `rank`: of the algorithm on its challenge, by the test result; `kendall_tau`: between this
        ranking and the oracle's. Accuracies are in percent. Undefined values are None.
    """
    require(bool(protocols), f"no protocol was given; allowed: {', '.join(PROTOCOLS)}.")
    challenges: dict[str, dict[tuple[str, str], list[Group]]] = {}
    groups = group_runs(runs)
    sources: dict[str, set[str]] = {}
    for group in groups:
        config = group.runs[0].config["algorithm"]
        sources.setdefault(config["name"], set()).add(config.get("source", ""))
    for group in groups:  # versions of the code of an algorithm are algorithms of their own
        config = group.runs[0].config["algorithm"]
        version = f" source={config.get('source')}" if len(sources[config["name"]]) > 1 else ""
        challenges.setdefault(group.challenge, {}).setdefault((group.locality, config["name"] + version), []).append(
            group
        )
    records = []
    for challenge, algorithms in challenges.items():
        _warn_unequal(challenge, algorithms)
        test = {key: _scores(members, ORACLE, view) for key, members in algorithms.items()}
        oracle = [_mean(group_scores[selection.choose(group_scores)].values()) for group_scores in test.values()]
        for protocol in dict.fromkeys(protocols):
            scores = {key: _scores(members, protocol, view) for key, members in algorithms.items()}
            choices = {key: selection.choose(group_scores) for key, group_scores in scores.items()}
            results = [_mean(test[key][group].values()) for key, group in choices.items()]
            tau = selection.kendall_tau(results, oracle)
            for (key, group), result in zip(choices.items(), results, strict=True):
                identity = {"challenge": challenge, "algorithm": key[1], "locality": key[0], "protocol": protocol}
                rank = None if math.isnan(result) else 1 + sum(other > result for other in results)
                ranking = {"rank": rank, "kendall_tau": finite(tau, 9)}
                records.append({**identity, **_row(group, scores[key], test[key], view), **ranking})
    return sorted(records, key=itemgetter("challenge", "locality", "algorithm"))


def _scores(groups: Iterable[Group], protocol: str, view: View) -> dict[Group, dict[int, float]]:
    return {g: {run.seed: selection.criterion(run, protocol, view.scope) for run in g.runs} for g in groups}


def _mean(values: Iterable[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return float(np.mean(numbers)) if numbers else math.nan


def _row(
    choice: Group, scores: Mapping[Group, Mapping[int, float]], test: Mapping[Group, Mapping[int, float]], view: View
) -> Row:
    seeds = sorted({seed for by_seed in scores.values() for seed in by_seed})
    seed_choices = [
        selection.choose({g: {s: by_seed[s]} for g, by_seed in scores.items() if s in by_seed}) for s in seeds
    ]
    differences = selection.optimism(test, choice).values()
    mean, std = choice.statistics(view)[choice.metric]
    low, high = confidence_interval(list(differences))
    num_finished = sum(not math.isnan(value) for value in test[choice].values())
    numbers = {f"{choice.metric}_mean": mean, f"{choice.metric}_std": std if num_finished > 1 else math.nan}
    numbers |= {"optimism": _mean(differences), "low": low, "high": high}
    return {
        "choice": _label(choice, scores),
        "lr": choice.lr,
        "configurations": len(scores),
        "seeds": len(seeds),
        "agree": seed_choices.count(choice),
        "criterion": finite(abs(_mean(scores[choice].values())), 9),
        **{name: finite(value, 9) for name, value in numbers.items()},
    }


def _label(choice: Group, groups: Iterable[Group]) -> str:
    """Return the learning rate, and the settings in which the configurations differ: 'lr=0.1 penalty=10'."""

    def settings(group: Group) -> dict[str, Any]:
        run = group.runs[0]
        return {"lr": run.lr, "optimizer": run.settings["optimizer"], **run.options}

    choice_settings, other_settings = settings(choice), [settings(group) for group in groups]
    differences = {
        k: v for k, v in choice_settings.items() if k == "lr" or any(other.get(k) != v for other in other_settings)
    }
    return " ".join(
        f"{k}={v if is_rounded(v) or not isinstance(v, float) else f'{v:g}'}" for k, v in differences.items()
    )


def _warn_unequal(challenge: str, algorithms: Mapping[tuple[str, str], Sequence[Group]]) -> None:
    """Warn if algorithms have unequal numbers of configurations, or configurations other seeds."""
    counts = {name: len(groups) for (_, name), groups in algorithms.items()}
    if len({*counts.values()}) > 1:
        counts_text = ", ".join(f"{name} {count}" for name, count in counts.items())
        message = f"unequal numbers of configurations on {challenge} favour algorithms with more: {counts_text}."
        warnings.warn(message, GlocalWarning, stacklevel=3)
    seeds = [tuple(run.seed for run in group.runs) for groups in algorithms.values() for group in groups]
    if len({*seeds}) > 1:
        message = f"configurations on {challenge} have different seeds ({format_range(map(len, seeds), 'seed')})"
        warnings.warn(f"{message}: their means are not over the same. Finish the sweep.", GlocalWarning, stacklevel=3)


def render(
    runs: Iterable[Run], format: str, protocols: Sequence[str] = DEFAULT_PROTOCOLS, view: View = DEFAULT_VIEW
) -> RenderableType:
    """Render the choices of every protocol and the rankings that follow; 'json' and 'csv' hold `rows`."""
    return table.render(tables(rows(runs, protocols, view)), format)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Lay out rows as two tables per challenge: the choices by algorithm, and the ranking under each protocol."""
    parts: list[Table] = []
    for challenge in dict.fromkeys(row["challenge"] for row in rows):
        challenge_rows = [row for row in rows if row["challenge"] == challenge]
        parts += [
            _choice_table(challenge, challenge_rows, () if parts else tuple(rows)),
            _ranking_table(challenge_rows),
        ]
    if not parts:
        return [Table((), (), notes=("No runs.",))]
    protocols = dict.fromkeys(row["protocol"] for row in rows)
    meanings = (f"{name}: {PROTOCOLS[name if name in PROTOCOLS else 'first-k=K']}." for name in protocols)
    losses = ["Without classes, losses stand for accuracies."] if any("loss_mean" in row for row in rows) else []
    return [*parts[:-1], replace(parts[-1], notes=(*meanings, *losses, *NOTES))]


def _choice_table(challenge: str, rows: Sequence[Row], records: tuple[Row, ...]) -> Table:
    metric = "acc" if "acc_mean" in rows[0] else "loss"
    spec = ".2f" if metric == "acc" else ".3g"
    sections: dict[tuple[str, str], list[tuple[Cell, ...]]] = {}
    for row in rows:
        low, high = (signed(row[name], spec) for name in ("low", "high"))
        bounds = "" if row["low"] is None else f" [{low}, {high}]"
        is_zero = row["optimism"] == row["low"] == row["high"] == 0
        optimism = Cell("0" if is_zero else f"{signed(row['optimism'], spec)}{bounds}")
        result = mean_std(row[f"{metric}_mean"], row[f"{metric}_std"], spec=spec)
        cells = (Cell(row["protocol"]), Cell(row["choice"]), result, optimism)
        sections.setdefault((row["algorithm"], row["locality"]), []).append(cells)
    texts = (Column("protocol", align="left"), Column("choice", align="left"))
    numbers = (Column("test ACC" if metric == "acc" else "test loss"), Column("optimism"))
    counts = format_range((row["configurations"] for row in rows), "configuration")
    title = f"{challenge}: one of {counts}, {format_range((row['seeds'] for row in rows), 'seed')}"
    parts = tuple(Section(*key, tuple(section_rows)) for key, section_rows in sections.items())
    return Table((*texts, *numbers), parts, title, records=records)


def _ranking_table(rows: Sequence[Row]) -> Table:
    """Lay out the algorithms in the order of the test results of their choices, equal ones joined by '='."""
    sections = []
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        ranked_rows = sorted((r for r in rows if r["protocol"] == protocol), key=lambda r: r["rank"] or math.inf)
        text = ""
        for previous, row in zip([None, *ranked_rows], ranked_rows, strict=False):
            text += ("" if previous is None else " = " if previous["rank"] == row["rank"] else " > ") + row["algorithm"]
        cells = (Cell(text), Cell(signed(ranked_rows[0]["kendall_tau"])))
        sections.append(Section(protocol, "", (cells,)))
    columns = (Column("algorithms, the best first", align="left"), Column("Kendall's τ with the oracle's"))
    return Table(columns, tuple(sections), "Ranking", label="protocol")
