"""The protocol of a study, how it is run, and its tables.

A study is an experiment that consists of work items. Each item is measured once and its rows are kept in the store, so
that an interrupted study continues where it stopped. The summary and the figure are computed from rows alone, which its
Parquet file holds, with the cost of measuring as metadata.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import polars as pl
import torch

from glocal.errors import GlocalError, first_line, require
from glocal.files import DamagedError, replacing, report_damage, report_os_errors, short_hash
from glocal.precision import full_precision
from glocal.store.store import Store
from glocal.sweeps.resolve import device_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row: TypeAlias = dict[str, Any]  # strings and numbers by column; None or NaN where there is none
WorkItem: TypeAlias = dict[str, Any]  # what to measure, as JSON values
OnProgress: TypeAlias = Callable[[int, int, str], None]  # items done, items in total, the next item
VERSION = 2
"""Increment when the same item would give different rows."""
COST_KEY = "glocal.cost"  # in the Parquet metadata


@dataclass(frozen=True)
class Cost:
    """Seconds of measuring, the devices used (comma-separated), and when it finished (ISO 8601, UTC)."""

    seconds: float
    device: str
    finished: str


def total_cost(costs: Iterable[Cost | None]) -> Cost | None:
    """Add up costs; return None if one of them is unknown or there are none."""
    parts = list(costs)
    known_costs = [cost for cost in parts if cost is not None]
    if not known_costs or len(known_costs) < len(parts):
        return None
    devices = sorted({device for cost in known_costs for device in cost.device.split(", ")})
    return Cost(
        sum(cost.seconds for cost in known_costs), ", ".join(devices), max(cost.finished for cost in known_costs)
    )


@dataclass(frozen=True)
class Context:
    """The device, data folder and store that an item is measured with."""

    device: torch.device
    data: Path | None
    store: Path


class Summary(NamedTuple):
    """A short table and one sentence that compares it with the paper."""

    table: list[Row]
    verdict: str


class Study(Protocol):
    """An experiment of the paper."""

    name: str
    columns: str
    """Columns of the table, separated by spaces; a table may have more."""

    def work_items(self, demo: bool) -> Sequence[WorkItem]:
        """Return all items, or those of a demo on embedded data that takes under a minute on two cores."""
        ...

    def measure(self, item: WorkItem, context: Context) -> list[Row]: ...

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None: ...

    def summarize(self, rows: pl.DataFrame) -> Summary: ...


def run(
    study: Study, context: Context, demo: bool = False, on_progress: OnProgress | None = None
) -> tuple[pl.DataFrame, Cost | None]:
    """Return all rows of a study and what they cost, measuring the items that the store does not have."""
    items = study.work_items(demo)
    Store.create(context.store)
    paths = []
    for number, item in enumerate(items):
        if on_progress is not None:
            printed_item = item | ({"task": item["task"] + 1} if "task" in item else {})  # people count tasks from 1
            values = (f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in printed_item.items())
            on_progress(number, len(items), " ".join(values))
        path = context.store / "studies" / study.name / f"{item_hash(study, item)}.parquet"
        if not path.exists():
            start = time.perf_counter()
            with full_precision():
                rows = study.measure(item, context)
            finished = datetime.now(UTC).isoformat(timespec="seconds")
            write_table(rows, path, Cost(time.perf_counter() - start, device_name(context.device), finished))
        paths.append(path)
    if on_progress is not None:
        on_progress(len(items), len(items), "")
    return pl.concat(map(read_table, paths), how="diagonal_relaxed"), total_cost(map(read_cost, paths))


def item_hash(study: Study, item: WorkItem) -> str:
    """Return the name of an item in the store."""
    canonical = json.dumps([VERSION, study.name, item], sort_keys=True, separators=(",", ":"))
    return short_hash(canonical.encode())


def format_cell(value: str | float | None) -> str:
    """Format a value of a summary table: three significant digits, "–" if it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_table(rows: Sequence[Row] | pl.DataFrame, path: Path, cost: Cost | None = None, **options: Any) -> Path:
    """Write a Parquet file atomically, with the cost as metadata, creating its folder."""
    metadata = None if cost is None else {COST_KEY: json.dumps(asdict(cost))}
    with report_os_errors("write to", path), replacing(path, make_folder=True) as part:
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(part, metadata=metadata, **options)
    return path


def read_table(
    path: Path, columns: Sequence[str] = (), kind: str = "a table of a study", empty: bool = False
) -> pl.DataFrame:
    """Read a Parquet file that must have these columns and, unless it may be `empty`, rows; `kind` is for errors."""
    require(path.is_file() or not path.exists(), f"'{path}' is not {kind}: it is not a file.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GlocalError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1":
        raise GlocalError(f"'{path}' is not {kind}: it is not a complete Parquet file.")
    with _parquet_errors(path, kind):
        frame = pl.read_parquet(content)
    if missing_columns := [column for column in columns if column not in frame.columns]:
        raise GlocalError(f"'{path}' is not {kind}: it has no column {', '.join(missing_columns)}.")
    require(empty or not frame.is_empty(), f"'{path}' is not {kind}: it has no rows.")
    return frame


@contextmanager
def _parquet_errors(path: Path, kind: str = "a table of a study") -> Iterator[None]:
    """Turn errors of the Parquet reader, a panic in its Rust code among them, into a DamagedError."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DamagedError(f"'{path}' is not {kind}: {first_line(error).rstrip('.')}.") from error


def read_cost(path: Path) -> Cost | None:
    """Read the cost from a table's metadata; None if the file has none."""
    with _parquet_errors(path), report_damage(path, "Measure it again."):
        metadata = pl.read_parquet_metadata(path)
        return Cost(**json.loads(metadata[COST_KEY])) if COST_KEY in metadata else None
