"""One row per run: its settings, statistics and cost, for other programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from glocal.errors import GlocalError
from glocal.report.summary import DEFAULT_VIEW, STATISTICS, View, run_statistics
from glocal.report.table import to_json
from glocal.store.conditions import as_text, is_number
from glocal.store.run import SETTINGS, Run

if TYPE_CHECKING:
    import polars


def frame(runs: Sequence[Run], view: View = DEFAULT_VIEW) -> polars.DataFrame:
    """Return a data frame with one row per run, in their order.

    Columns: `SETTINGS`; the options of their algorithms and optimisers, and what else of `Run.settings` differs (null
    where a run does not have it; text if not all are numbers); `STATISTICS` after the last task, accuracies in percent,
    null where undefined and if the run diverged; 'seconds' and 'memory_bytes'; 'diverged'; 'hash', the run's name in
    its store.
    """
    import polars as pl

    columns: dict[str, list[Any]] = {name: [run.settings[name] for run in runs] for name in SETTINGS}
    more = dict.fromkeys([*(name for run in runs for name in run.options), *differing_settings(runs)])
    columns |= {name: _column(runs, name) for name in more if name not in SETTINGS}
    statistics = [run_statistics([run], view)[0] for run in runs]
    columns |= {name: [_finite(row.get(name)) for row in statistics] for name in STATISTICS}
    columns |= {name: [run.info["cost"][name] for run in runs] for name in ("seconds", "memory_bytes")}
    columns["diverged"] = [run.diverged is not None for run in runs]
    columns["hash"] = [run.hash for run in runs]
    numbers = dict.fromkeys(("lr", "seconds", *STATISTICS), pl.Float64())
    counts = dict.fromkeys(("seed", "tasks", "epochs", "batch_size", "memory_bytes"), pl.Int64())
    texts = {name: pl.String() for name in (*SETTINGS, "hash") if name not in numbers | counts}
    types: dict[str, Any] = {**numbers, **counts, **texts, "diverged": pl.Boolean()}
    return pl.DataFrame([pl.Series(name, values, types.get(name), strict=False) for name, values in columns.items()])


def render(runs: Sequence[Run], format: str, view: View = DEFAULT_VIEW) -> str:
    """Return `frame` as 'csv' or 'json'."""
    if format not in ("csv", "json"):
        raise GlocalError(f"one row per run is written as csv or json; format {format} was given. Add --format csv.")
    table = frame(runs, view)
    return table.write_csv() if format == "csv" else to_json(table.to_dicts())


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings, but for `SETTINGS`, that differ, or that some do not have, among runs of one challenge,
    algorithm and optimiser.
    """
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        kind = tuple(run.settings[name] for name in ("challenge", "algorithm", "optimizer"))
        kinds.setdefault(kind, []).append(run.settings)
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in SETTINGS)
    return [
        name
        for name in names
        if any(len({as_text(settings.get(name, "absent")) for settings in kind}) > 1 for kind in kinds.values())
    ]


def _column(runs: Sequence[Run], name: str) -> list[Any]:
    """Return a setting of each run: as it is if all are numbers or all are true or false, otherwise as text."""
    values = [run.settings.get(name) for run in runs]
    present = [value for value in values if value is not None]
    if all(map(is_number, present)) or all(isinstance(value, bool) for value in present):
        return values
    return [None if value is None else as_text(value) for value in values]


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
