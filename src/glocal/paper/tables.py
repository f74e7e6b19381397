"""Read and write the table of a study as Parquet, with the cost of measuring it as file metadata."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from glocal.errors import GlocalError

Scalar: TypeAlias = str | int | float | bool | None
Row: TypeAlias = dict[str, Scalar]
COST_KEY = "glocal.cost"
"""Key of the cost in the Parquet metadata."""


@dataclass(frozen=True)
class Cost:
    """Seconds of measuring, the devices used (comma-separated), and when it finished (ISO 8601, UTC)."""

    seconds: float
    device: str
    finished: str

    @staticmethod
    def from_json(content: Any) -> Cost | None:
        """Parse a stored cost; return None if it is missing or malformed."""
        try:
            return Cost(float(content["seconds"]), str(content["device"]), str(content["finished"]))
        except (KeyError, TypeError, ValueError):
            return None


def total_cost(costs: Iterable[Cost | None]) -> Cost | None:
    """Add up costs; return None if one of them is unknown or there are none."""
    parts = list(costs)
    known = [cost for cost in parts if cost is not None]
    if not known or len(known) < len(parts):
        return None
    devices = sorted({device for cost in known for device in cost.device.split(", ")})
    return Cost(sum(cost.seconds for cost in known), ", ".join(devices), max(cost.finished for cost in known))


def write_table(rows: Sequence[Row], path: Path, cost: Cost | None = None) -> Path:
    """Write rows as Parquet; the first row names the columns."""
    import polars

    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    metadata = {} if cost is None else {COST_KEY: json.dumps(asdict(cost))}
    polars.DataFrame(columns).write_parquet(path, metadata=metadata)
    return path


def read_table(path: Path, columns: Sequence[str] = (), name: str = "a study") -> list[Row]:
    """Read the rows of a Parquet file.

    Args:
        path: The file.
        columns: Columns that the table must have; others are allowed.
        name: The study that the columns belong to, for the error message.
    """
    import polars

    try:
        rows = polars.read_parquet(_parquet_bytes(path)).to_dicts()
    except polars.exceptions.PolarsError as error:
        raise GlocalError(f"'{path}' is not a table of {name}: {str(error).partition(chr(10))[0]}.") from error
    if not rows:
        raise GlocalError(f"'{path}' is not a table of {name}: it has no rows.")
    if missing := [column for column in columns if column not in rows[0]]:
        raise GlocalError(f"'{path}' is not a table of {name}: it has no column {', '.join(missing)}.")
    return rows


def read_cost(path: Path) -> Cost | None:
    """Read the cost from a table's metadata; None if the file has none."""
    import polars

    metadata = polars.read_parquet_metadata(io.BytesIO(_parquet_bytes(path)))
    return Cost.from_json(json.loads(metadata[COST_KEY])) if COST_KEY in metadata else None


def _parquet_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise GlocalError(f"there is no table at '{path}'.") from error
    except OSError as error:
        raise GlocalError(f"the table '{path}' cannot be read: {error.strerror or error}.") from error
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1":
        raise GlocalError(f"'{path}' is not a complete Parquet file.")
    return content
