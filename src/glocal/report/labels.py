"""The labels of runs in tables and figures: names, and the settings in which runs differ."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from glocal import tree
from glocal.errors import GlocalError, unknown
from glocal.store.conditions import as_text, is_number
from glocal.store.run import Run

MAX_SETTING_LENGTH = 16
HASHES = {"made", "source"}
"""Settings of a user's network or algorithm that labels have only if nothing else tells runs apart."""


def label_runs(runs: Iterable[Run], over: str = "lr") -> list[tuple[str, str, Run]]:
    """Return distinct runs with the labels of their challenge and algorithm, to compare them by the option `over`.

    If runs of one challenge differ in more than algorithm, learning rate and seed (tasks, epochs, network…), or runs
    of one algorithm in an option of it or of the optimiser, the labels are extended by the settings that differ, so
    that runs that are not comparable never share a label.
    """
    encode, parts = json.JSONEncoder(sort_keys=True).encode, ("algorithm", "optimizer")
    entries: dict[tuple[Any, ...], Run] = {}
    runs = list(runs)
    for run in runs:
        config = run.config if over == "lr" else _config_without(run, over, runs)
        shared = {k: v for k, v in config.items() if k not in {"seed", "lr", "parent", *parts}}
        shared |= {"after": run.after} if run.after else {}
        options = {k: config[k] for k in ("lr" if over != "lr" else "", *parts) if k in config}
        key = encode(shared), encode(options), option_value(run, over), run.seed, encode(run.config.get("parent"))
        entries[key] = run
    distinct, texts = list(entries.values()), list(entries)
    bases = [run.challenge for run in distinct]
    challenges = _labels(bases, bases, [shared for shared, *_ in texts], " · ", _format_setting)
    # Options of an algorithm may differ between challenges; only differences within a challenge extend its label.
    part_names = [tuple(run.config.get(part, {}).get("name") for part in parts) for run in distinct]
    names = list(zip(challenges, part_names, strict=True))
    bases = [_without(run.algorithm, over, run) for run in distinct]
    algorithms = _labels(bases, names, [options for _, options, *_ in texts], " ", _format_option)
    return list(zip(challenges, algorithms, distinct, strict=True))


def option_value(run: Run, over: str) -> Any:
    """Return the value of the option by which runs are compared: a number or a text."""
    if over == "optimizer":
        return _split_optimizer(run)[1]
    value = run.lr if over == "lr" else run.settings[over]
    return value if is_number(value) else as_text(value)


def _split_optimizer(run: Run) -> tuple[str, str]:
    """Return the labels of a run's algorithm and of its optimiser, with all digits of what labels round."""
    if "optimizer" not in run.config:
        return run.algorithm, "sgd"
    algorithm, _, optimizer = run.algorithm.rpartition(" · ")
    options = run.config["optimizer"]["options"].items()
    return algorithm, " ".join([optimizer, *(f"{k}={v}" for k, v in options if is_rounded(v))])


def is_rounded(value: object) -> bool:
    """Return whether a label, which shows six digits, does not show all of a number's."""
    return isinstance(value, float) and float(f"{value:g}") != value


def _without(label: str, option: str, run: Run) -> str:
    """Return a run's label without an option."""
    if option == "optimizer":
        return _split_optimizer(run)[0]
    value = run.settings.get(option)
    text = re.escape(value) if isinstance(value, str) else r"\([^)]*\)|\[[^]]*\]|\S+"
    return re.sub(rf" {re.escape(option)}=({text})(?= |$)", "", label)


def _config_without(run: Run, option: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a run's configuration without one option of its algorithm, its optimiser or its training.

    If it does not have the option, the error says which of `runs` do.
    """
    config = dict(run.config)
    for part in ("algorithm", "optimizer"):
        options = config.get(part, {}).get("options", {})
        if option in options:
            return config | {part: config[part] | {"options": {k: v for k, v in options.items() if k != option}}}
    if option in ("optimizer", "epochs", "batch_size", "precision"):
        return {k: v for k, v in config.items() if k != option}
    part, key = {"tasks": ("challenge", "tasks"), "source": ("algorithm", "source")}.get(option, (option, "name"))
    if option in ("network", "tasks") or (option == "source" and option in run.options):
        return config | {part: {k: v for k, v in config.get(part, {}).items() if k != key}}
    runs_without = [other for other in runs if option not in other.options]
    for part in ("algorithm", "optimizer"):
        names = {str(other.settings[part]) for other in runs if option in other.options}
        if names and runs_without and names.isdisjoint(other.settings[part] for other in runs_without):
            condition = f"{part}={','.join(sorted(names))}"
            raise GlocalError(
                f"{run.algorithm} has no option '{option}' to compare its runs by. Select the runs that have it: "
                f"--where {condition}, in Python runs.where('{condition}')."
            )
    allowed_names = ("lr", "epochs", "batch_size", "precision", "network", "optimizer", "tasks", *run.options)
    raise unknown(f"option of {run.algorithm} to compare its runs by:", option, allowed_names)


def _labels(
    bases: Sequence[str], kinds: Sequence[object], texts: Sequence[str], join: str, form: Callable[[str, Any], str]
) -> list[str]:
    """Return each base, extended by the settings (JSON) in which entries of its kind differ and that it does not name.

    `form` formats a setting.
    """
    settings = {text: tree.flatten(json.loads(text)) for text in set(texts)}  # most are equal, and compared once
    entries_by_kind: dict[object, dict[str, dict[str, Any]]] = {}
    for kind, text in zip(kinds, texts, strict=True):
        entries_by_kind.setdefault(kind, {})[text] = settings[text]
    differing_keys = {}
    for kind, entries in entries_by_kind.items():
        keys = sorted({key for values in entries.values() for key in values})
        differing = [k for k in keys if _count_distinct(entries, [k]) > 1]
        readable = [k for k in differing if _last(k) not in HASHES]
        enough = _count_distinct(entries, readable) == _count_distinct(entries, differing)
        differing_keys[kind] = readable if enough else differing
    labels = {}
    for base, kind, text in set(zip(bases, kinds, texts, strict=True)):
        values = settings[text]
        parts = [
            form(key, values[key]) for key in differing_keys[kind] if key in values and f" {_last(key)}=" not in base
        ]
        labels[base, kind, text] = join.join([base, *dict.fromkeys(filter(None, parts))])
    equal: dict[object, list[str]] = {}
    for (_, kind, text), label in labels.items():
        equal.setdefault((kind, label), []).append(text)
    for (base, kind, text), label in labels.items():
        if len(equal[kind, label]) == 1:
            continue
        # Numbers agree in the digits that are shown: show all of them.
        others = [settings[other] for other in equal[kind, label]]
        keys = [k for k, value in settings[text].items() if any(other.get(k) != value for other in others)]
        labels[base, kind, text] = join.join([label, *(f"{_last(k)}={settings[text][k]}" for k in keys)])
    return [labels[entry] for entry in zip(bases, kinds, texts, strict=True)]


def _count_distinct(entries: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> int:
    return len({json.dumps([values.get(k, "absent") for k in keys]) for values in entries.values()})


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def _format_option(key: str, value: object) -> str:
    """Format an option of an algorithm or optimiser for a label: 'penalty=100'. The label has the optimiser's name."""
    return "" if _last(key) == "name" else f"{_last(key)}={_format_value(value)}"


def _format_value(value: object) -> str:
    """Format the value of a setting: numbers as briefly as they can be, a hash if it is long."""
    if isinstance(value, float):
        return f"{value:g}"
    text = "-".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= MAX_SETTING_LENGTH else f"#{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _format_setting(key: str, value: object) -> str:
    """Format a setting for a label: '3 tasks', 'batch 64', 'hidden 100-100'."""
    last = _last(key) if key != "network/source" else "network_source"
    if last in ("tasks", "epochs"):
        return f"{value} {last[:-1] if value == 1 else last}"
    return str(value) if last == "name" else f"{last.removesuffix('_size').replace('_', ' ')} {_format_value(value)}"
