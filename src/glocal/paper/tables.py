"""A study's table as a Parquet file: its rows, and as the file's metadata what it took to measure them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glocal.errors import GlocalError

if TYPE_CHECKING:
    from glocal.paper.study import Row, Study

COST = "glocal.cost"
"""The metadata's key."""


@dataclass(frozen=True)
class Cost:
    """Seconds of measuring, where (several places have commas between them), and when it ended (ISO 8601, UTC)."""

    seconds: float
    device: str
    finished: str

    @staticmethod
    def of(kept: Any) -> Cost | None:
        """From what JSON holds; None where it holds none."""
        try:
            return Cost(float(kept["seconds"]), str(kept["device"]), str(kept["finished"]))
        except (KeyError, TypeError, ValueError):
            return None


def total(costs: Iterable[Cost | None]) -> Cost | None:
    """All of them together; None where one is not known."""
    known = list(costs)
    if not known or None in known:
        return None
    parts = [cost for cost in known if cost is not None]
    devices = sorted({device for cost in parts for device in cost.device.split(", ")})
    return Cost(sum(cost.seconds for cost in parts), ", ".join(devices), max(cost.finished for cost in parts))


def write_table(rows: Sequence[Row], path: Path, cost: Cost | None = None) -> Path:
    """The rows as Parquet, by whichever library is there."""
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    about = {} if cost is None else {COST: json.dumps(asdict(cost))}
    try:
        import polars

        polars.DataFrame(columns).write_parquet(path, metadata=about)
    except ImportError:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns).replace_schema_metadata(about), path)
    return path


def read_table(path: Path, study: Study | None = None) -> list[Row]:
    """The rows of a Parquet file, which have to have a study's columns if one is named."""
    rows, _ = _read(path)
    if not rows:
        raise GlocalError(f"'{path}' is no table of a study: it has no rows.")
    if study is not None and (missing := [name for name in study.columns.split() if name not in rows[0]]):
        raise GlocalError(f"'{path}' is no table of {study.name}: it has no {', '.join(missing)}.")
    return rows


def read_cost(path: Path) -> Cost | None:
    """What it took to measure a table's rows, where the file says so."""
    _, about = _read(path)
    try:
        return Cost.of(json.loads(about[COST]))
    except (KeyError, ValueError):
        return None


def _read(path: Path) -> tuple[list[Row], Mapping[str, str]]:
    """Rows and metadata."""
    if not path.exists():
        raise GlocalError(f"there is no table at '{path}'.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GlocalError(f"the table '{path}' cannot be read: {error.strerror or error}.") from error
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1":
        raise GlocalError(f"'{path}' is no table of a study: it is not Parquet, or not the whole file.")
    try:
        return _parquet(content)
    except ImportError as error:
        raise GlocalError(f"to read '{path}' polars or pyarrow must be installed.") from error
    except Exception as error:  # every library has its own
        raise GlocalError(f"'{path}' is no table of a study: {str(error).partition(chr(10))[0]}.") from error


def _parquet(content: bytes) -> tuple[list[Row], Mapping[str, str]]:
    try:
        import io

        import polars

        return polars.read_parquet(content).to_dicts(), polars.read_parquet_metadata(io.BytesIO(content))
    except ImportError:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
        return table.to_pylist(), {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
