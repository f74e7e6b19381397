"""Published data: the cells of Table 1, and the rotation angles of its Rotated-MNIST column."""

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
    """One (challenge, algorithm, lr) of Table 1: mean and standard deviation over five seeds, in percent.

    Forgetting is averaged over the T−1 tasks before the last. The appendix states an average over all T, but then
    accuracy plus forgetting is the mean accuracy right after learning, and it would exceed 100 in twelve cells.
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
    """Return every cell of Table 1 that has a number."""
    texts = ("challenge", "algorithm", "locality")
    return tuple(Cell(**{k: v if k in texts else float(v) for k, v in row.items()}) for row in _rows("table1.csv"))  # type: ignore[arg-type]


@cache
def angles(method: str) -> dict[int, list[float]]:
    """Return the 20 angles of Rotated-MNIST in degrees for each seed, as the published runs of this method had them.

    The published code drew angles and replayed examples from one random stream per seed. So the methods without replay
    ('sgd', 'ewc', 'si', 'ogd') share their angles, and 'agem' and 'er' have their own.
    """
    sequences: dict[str, dict[int, dict[int, float]]] = {}
    for row in _rows("rotated-mnist-angles.csv"):
        for name in row["methods"].split(", "):
            by_task = sequences.setdefault(name, {}).setdefault(int(row["seed"]), {})
            by_task[int(row["task"])] = float(row["degrees"])
    if method not in sequences:
        raise unknown("method with published angles", method, sequences)
    return {seed: [degrees for _, degrees in sorted(tasks.items())] for seed, tasks in sequences[method].items()}


def _rows(name: str) -> Iterator[dict[str, str]]:
    yield from csv.DictReader((files("glocal.paper") / "data" / name).read_text(encoding="utf-8").splitlines())
