"""What several commands take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from glocal.errors import GlocalError, unknown

_unless_given = {"help_behavior_hint": ""}
Count = Annotated[int | None, tyro.conf.arg(metavar="N", **_unless_given)]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", **_unless_given)]
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", **_unless_given)]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", **_unless_given)]
Numbers = Annotated[tuple[float, ...], tyro.conf.arg(metavar="LR ...", **_unless_given)]
Integers = Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED ...", **_unless_given)]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", **_unless_given)]
PathName = Annotated[Path | None, tyro.conf.arg(metavar="PATH", **_unless_given)]
Flag = Annotated[bool, tyro.conf.arg(**_unless_given)]
ChallengeName = Annotated[str, tyro.conf.arg(metavar="CHALLENGE"), tyro.conf.Positional]
AlgorithmName = Annotated[str, tyro.conf.arg(metavar="ALGORITHM"), tyro.conf.Positional]
StorePath = Annotated[Path, tyro.conf.arg(metavar="STORE"), tyro.conf.Positional]

Options = dict[str, dict[str, list[Any]]]  # algorithm -> option -> the values it takes


def short_name(algorithm: str) -> str:
    """'ewc' for ewc, 'Mine' for path/to/file.py:Mine."""
    return algorithm.rpartition(":")[2]


def parse_options(texts: Iterable[str], algorithms: Iterable[str]) -> Options:
    """'ewc.penalty=1,10' or, with one algorithm, 'penalty=10'."""
    names = [short_name(a) for a in algorithms]
    options: Options = {}
    for text in texts:
        target, equals, values = text.partition("=")
        algorithm, dot, option = target.rpartition(".")
        if not equals or not option or not values:
            raise GlocalError(f"an option is written NAME=VALUE or ALGORITHM.NAME=VALUE; '{text}' was given.")
        if not dot:
            if len(names) != 1:
                raise GlocalError(f"with several algorithms say whose option it is: ALGORITHM.{text}.")
            algorithm = names[0]
        if algorithm not in names:
            raise unknown("algorithm in --options:", algorithm, names)
        options.setdefault(algorithm, {})[option] = values.split(",")
    return options


def with_options(algorithms: Iterable[str], options: Options) -> list[tuple[str, dict[str, Any]]]:
    """Every algorithm with every combination of its options' values."""
    return [(name, choice) for name in algorithms for choice in combinations(options.get(short_name(name), {}))]


def combinations(options: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
