"""Rows of a study, picked and put in numbers, for its figure and its sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from glocal.paper.study import Row, Scalar


def where(rows: Iterable[Row], **values: Scalar) -> list[Row]:
    """The rows with these values under these names."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def column(rows: Iterable[Row], name: str) -> np.ndarray:
    """The numbers under a name; NaN where there is none."""
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=float)


def distinct(rows: Iterable[Row], name: str) -> list[float]:
    """The finite numbers that occur under a name, from the smallest on."""
    found = column(rows, name)
    return sorted(set(found[np.isfinite(found)].tolist()))


def median(values: Sequence[float] | np.ndarray) -> float:
    """A number that is none, as of a run that diverged, counts as larger than all others; NaN of nothing at all."""
    numbers = np.sort(np.nan_to_num(np.asarray(values, dtype=float), nan=np.inf, posinf=np.inf))
    count = len(numbers)
    return float(numbers[(count - 1) // 2 : count // 2 + 1].mean()) if count else np.nan


def against(rows: Sequence[Row], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Medians of y over the rows with the same x, for every x."""
    at = distinct(rows, x)
    return np.array(at), np.array([median(column(where(rows, **{x: value}), y)) for value in at])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """The correlation of ranks, ties sharing the mean of theirs, over pairs of finite numbers; NaN of fewer than three
    or where one of the two is constant."""
    finite = np.isfinite(x) & np.isfinite(y)
    a, b = _ranks(x[finite]), _ranks(y[finite])
    if len(a) < 3 or not a.std() or not b.std():
        return np.nan
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[place]


def told(number: float) -> str:
    """A number in a sentence."""
    if np.isnan(number):
        return "unknown"
    return f"{number:.2g}" if np.isfinite(number) else "beyond numbers"
