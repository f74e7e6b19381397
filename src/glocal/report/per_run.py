"""One row per run: its settings, statistics and cost, for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glocal.errors import GlocalError
from glocal.report.summary import DEFAULT_VIEW, STATISTICS, View, run_statistics
from glocal.report.table import finite, to_json
from glocal.store.conditions import as_text, is_number
from glocal.store.run import SETTINGS, Run, short_name

if TYPE_CHECKING:
    import polars


def frame(runs: Sequence[Run], view: View = DEFAULT_VIEW) -> polars.DataFrame:
    """Return a data frame with one row per run, in their order.

    Columns: `SETTINGS`; the options of their algorithms and optimisers, and what of `Run.other_settings` differs (null
    where a run does not have it; text if not all are numbers); `STATISTICS` after the last task, accuracies in percent,
    null where undefined and if the run diverged; 'seconds' and 'memory_bytes'; 'diverged'; 'hash', the run's name in
    its store.
    """
    import polars as pl

    columns: dict[str, list[Any]] = {name: [run.settings[name] for run in runs] for name in SETTINGS}
    for name in dict.fromkeys(name for run in runs for name in run.options if name not in SETTINGS):
        columns[name] = _column([run.options.get(name) for run in runs])
    others = [run.other_settings for run in runs]
    for name in differing(others, runs):
        short = short_name(name)
        taken = short in columns or short in STATISTICS
        columns[name if taken else short] = _column([values.get(name) for values in others])
    statistics = [run_statistics([run], view)[0] for run in runs]
    columns |= {name: [finite(row.get(name)) for row in statistics] for name in STATISTICS}
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


def differing(settings: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> list[str]:
    """Return the names in the runs' `settings` that differ, or that some do not have, among runs of one challenge,
    algorithm and optimiser.
    """
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for run, values in zip(runs, settings, strict=True):
        kind = tuple(run.settings[name] for name in ("challenge", "algorithm", "optimizer"))
        kinds.setdefault(kind, []).append(values)
    names = dict.fromkeys(name for values in settings for name in values)
    return [
        name
        for name in names
        if any(len({as_text(values.get(name, "absent")) for values in kind}) > 1 for kind in kinds.values())
    ]


def _column(values: Sequence[Any]) -> list[Any]:
    """Return the values of a setting, None where a run does not have it: as text unless all are numbers or booleans."""
    present = [value for value in values if value is not None]
    if all(map(is_number, present)) or all(isinstance(value, bool) for value in present):
        return list(values)
    return [None if value is None else as_text(value) for value in values]
