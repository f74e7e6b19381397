"""Conditions on the settings of runs, as text: 'algorithm=er,ewc', 'lr>=0.01', 'seed!=11'."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from glocal.errors import GlocalError, require_known, unknown
from glocal.store.run import Run

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
CONDITION = re.compile(r"\s*([\w-]+)\s*(<=|>=|!=|<|>|=)\s*(.*\S)\s*")


def parse_condition(text: str, runs: Sequence[Run]) -> Callable[[Run], bool]:
    """Return the function that says whether a run meets a condition; raise unless it makes sense for these runs.

    A condition is a name in `Run.settings`, an operator (=, !=, <, <=, >, >=) and a value. With = and != the value may
    be several, separated by commas: any of them, none of them. A run without the setting meets != alone.
    """
    match = CONDITION.fullmatch(text)
    if match is None:
        raise GlocalError(
            f"the condition '{text}' was given; it must be a name, one of = != < <= > >=, and a value, "
            "such as algorithm=er,ewc or 'lr>=0.01'."
        )
    name, sign, value = match.groups()
    require_known("name in a condition", name, {key for run in runs for key in run.settings})
    present = {json.dumps(run.settings[name]): run.settings[name] for run in runs if name in run.settings}.values()
    if sign in COMPARISONS:
        bound = _number(value)
        if bound is None or not any(map(is_number, present)):
            allowed = "only numbers can be compared" if bound is None else f"{name} is not a number: use = or !="
            raise GlocalError(f"the condition '{text}' was given, but {allowed}.")
        return lambda run: is_number(setting := run.settings.get(name)) and COMPARISONS[sign](setting, bound)
    parts = [value] if any(_equal(item, value) for item in present) else [part.strip() for part in value.split(",")]
    for part in parts:
        if not any(_equal(item, part) for item in present):
            raise unknown(f"{name} of these runs:", part, map(as_text, present))

    def is_any(run: Run) -> bool:
        return name in run.settings and any(_equal(run.settings[name], part) for part in parts)

    return is_any if sign == "=" else lambda run: not is_any(run)


def is_number(value: object) -> bool:
    """Return whether a setting is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def as_text(value: object) -> str:
    """Return a setting as conditions and tables write it: a text itself, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _equal(value: object, text: str) -> bool:
    """Return whether a setting is what a text says; numbers are compared as numbers: 0.10 is 0.1."""
    return value == _number(text) if is_number(value) else as_text(value) == text


def natural_order(value: object) -> tuple[Any, ...]:
    """Return a key that sorts numbers, also those within a text, by their value: 'penalty=2' before 'penalty=10'."""
    if isinstance(value, int | float):
        return (0, value)
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", str(value))
    return (1, *(float(part) if i % 2 else part for i, part in enumerate(parts)))
