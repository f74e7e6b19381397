"""The published numbers: the cells of Table 1, and the angles its Rotated-MNIST column was measured with."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from glocal.errors import unknown

SEEDS = (11, 13, 33, 21, 55)


@dataclass(frozen=True)
class Cell:
    """One (challenge, algorithm, lr) of Table 1: mean and deviation over the five seeds, in percent.

    Forgetting is averaged over the T−1 tasks before the last: over all T, as the appendix states it, accuracy plus
    forgetting is the mean accuracy right after learning, and twelve published cells would pass 100.
    """

    challenge: str
    algorithm: str
    locality: str
    lr: float
    acc_mean: float
    acc_std: float
    forgetting_mean: float
    forgetting_std: float


@cache
def cells() -> tuple[Cell, ...]:
    """Every cell of Table 1 that has a number."""
    named = ("challenge", "algorithm", "locality")
    return tuple(Cell(**{k: v if k in named else float(v) for k, v in row.items()}) for row in _rows("table1.csv"))  # type: ignore[arg-type]


@cache
def angles(method: str) -> dict[int, list[float]]:
    """Rotated-MNIST's angles in degrees, a list of 20 for each seed, as this method met them.

    They were drawn from one stream a seed that replay consumes too. So the methods that draw nothing from it ('sgd',
    'ewc', 'si', 'ogd') share a sequence, and 'agem' and 'er' have their own.
    """
    found: dict[str, dict[int, dict[int, float]]] = {}
    for row in _rows("rotated-mnist-angles.csv"):
        for name in row["methods"].split(", "):
            by_task = found.setdefault(name, {}).setdefault(int(row["seed"]), {})
            by_task[int(row["task"])] = float(row["degrees"])
    if method not in found:
        raise unknown("method with published angles", method, found)
    return {seed: [degrees for _, degrees in sorted(tasks.items())] for seed, tasks in found[method].items()}


def _rows(name: str) -> Iterator[dict[str, str]]:
    yield from csv.DictReader((files("glocal.paper") / "data" / name).read_text(encoding="utf-8").splitlines())
