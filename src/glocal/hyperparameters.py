"""Hyperparameters of algorithms and optimisers: the fields of their frozen dataclasses."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from numbers import Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from glocal.errors import require, require_known


def scalars(options: Any) -> dict[str, float]:
    """Return the float fields; inside a step they are tensors."""
    return {f.name: getattr(options, f.name) for f in fields(options) if f.type in ("float", float)}


def differing_in_cohorts(algorithm: Any) -> set[str]:
    """Return the names of an algorithm's fields in which runs of one cohort may differ: the float fields.

    There are none if more than the fields would have to differ, for a cohort has one object, whose fields are replaced:
    attributes that are computed from them, or the network that a user's algorithm makes.
    """
    kind = type(algorithm)
    computed = vars(algorithm).keys() - {f.name for f in fields(algorithm)}
    cached = any(isinstance(part, cached_property) for base in kind.mro() for part in vars(base).values())
    own_network = not kind.network.__module__.startswith("glocal.")
    return set() if computed or cached or own_network else set(scalars(algorithm))


def check(options: Any) -> None:
    """Check fields with a Literal type against its values, and numbers against the class's `at_least`."""
    try:
        hints = get_type_hints(type(options))
    except NameError:  # a user's annotation that only a type checker can resolve
        hints = {}
    for field in fields(options):
        value, hint, bound = getattr(options, field.name), hints.get(field.name), options.at_least.get(field.name)
        name = f"{options.name}.{field.name}"
        if get_origin(hint) is Literal:
            require_known(name, value, get_args(hint))
        if hint in (int, float):
            require(isinstance(value, Real), f"{name} = {value!r} was given; it must be a number.")
        if bound is not None:
            require(value >= bound, f"{name} = {value} was given; it must be at least {bound}.")
