"""Many runs as one small file: a row a run, from which tables and figures are made again without the store.

Parquet where polars or pyarrow is installed, a compressed .npz elsewhere. A row has what identifies the run, every
number of `glocal.metrics.summary` in percent, what it cost, and, as lists, the test accuracies R[t, o] row by row
(those among the task's own classes only where they differ), ‖θ_t − θ_0‖ and ‖θ_t − θ_{t−1}‖ for every task.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from glocal.errors import GlocalError
from glocal.metrics import summary
from glocal.paper import published
from glocal.store.files import Lock, report_os_errors
from glocal.store.run import Run, Runs

SUFFIXES = (".parquet", ".npz")
MATRICES = ("test_class_accuracy", "test_task_accuracy")
VECTORS = ("distance_from_init", "update_norm")
LISTS = (*MATRICES, *VECTORS)
PERCENT = ("acc", "forgetting", "backward_transfer", "forward_transfer", "learning_accuracy")


def suffix() -> str:
    """The suffix of the file that can be written here."""
    return ".parquet" if _installed("polars") or _installed("pyarrow") else ".npz"


def _installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def write(runs: Iterable[Run], path: str | Path) -> Path:
    """Write the runs, in place of what was there."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise GlocalError(f"results are written to .parquet or .npz; '{path.name}' was given.")
    columns = _columns([named(run) for run in runs])
    part = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (_write_parquet if path.suffix == ".parquet" else _write_npz)(columns, part)
        os.replace(part, path)
    except OSError as error:
        raise GlocalError(f"cannot write the results to '{path}': {error.strerror or error}.") from error
    return path


def read(*paths: str | Path) -> Runs:
    """The runs of one file or of several. A run that is in two of them counts once, as the later one has it."""
    found: list[Run] = []
    for path in map(Path, paths):
        columns = _load(path)
        for i in range(len(columns["config"])):
            try:
                run = _run({k: values[i] for k, values in columns.items()})
            except (KeyError, ValueError, TypeError) as error:
                raise GlocalError(f"'{path}' holds no results of glocal: row {i + 1} cannot be read.") from error
            found.append(run)
    return merged(found)


def merged(runs: Iterable[Run]) -> Runs:
    """Keep one run per configuration: the last."""
    return Runs(list({json.dumps(run.config, sort_keys=True): run for run in runs}.values()))


def add(runs: Iterable[Run], path: str | Path) -> Path:
    """Write the runs beside those that are there. Who adds to the same file at the same time waits."""
    path = Path(path)
    with report_os_errors("write the results to", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with Lock(path.with_name(f".{path.stem}.lock")):
            return write(merged([*(read(path) if path.exists() else ()), *map(named, runs)]), path)


def named(run: Run) -> Run:
    """The run with published angles called by that name, for they differ between the methods of one column."""
    challenge = run.config["challenge"]
    given = challenge.get("options", {}).get("angles")
    if not isinstance(given, Mapping):
        return run
    known = [published.angles(method) for method in ("sgd", "agem", "er")]
    same = any({int(seed): list(of) for seed, of in given.items()} == angles for angles in known)
    options = {**challenge["options"], "angles": "published"}
    return replace(run, config={**run.config, "challenge": {**challenge, "options": options}}) if same else run


def _columns(runs: Sequence[Run]) -> dict[str, list[Any]]:
    rows = [_row(run) for run in runs]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else _row_names())}


def _row_names() -> list[str]:
    return ["config", "info", *LISTS]


def _row(run: Run) -> dict[str, Any]:
    cost, versions = run.info.get("cost", {}), run.info.get("versions", {})
    numbers = summary(run) | {"forgetting_over_t": summary(run, over="t")["forgetting"]}
    arrays = {name: np.asarray(run.arrays[name], dtype=np.float32).ravel() for name in LISTS}
    if np.array_equal(arrays["test_class_accuracy"], arrays["test_task_accuracy"], equal_nan=True):
        arrays["test_task_accuracy"] = arrays["test_task_accuracy"][:0]
    percent = (*PERCENT, "forgetting_over_t")
    kept = {k: v for k, v in run.info.items() if k not in ("versions", "cost", "notes", "monitored")}
    return {
        "challenge": run.challenge,
        "algorithm": run.config["algorithm"]["name"],
        "label": run.algorithm,
        "locality": run.locality,
        "lr": float(run.lr),
        "seed": int(run.seed),
        "tasks": int(run.tasks),
        **{name: 100 * x if name in percent else x for name, x in numbers.items()},
        "diverged": run.diverged is not None,
        "seconds": float(cost.get("seconds", np.nan)),
        "memory_bytes": int(cost.get("memory_bytes", 0)),
        "device": str(versions.get("device", "")),
        "torch": str(versions.get("torch", "")),
        "config": json.dumps(run.config, sort_keys=True),
        "info": json.dumps({**kept, "cost": cost, "versions": versions}, sort_keys=True),
        **arrays,
    }


def _run(row: Mapping[str, Any]) -> Run:
    config, info = json.loads(row["config"]), json.loads(row["info"])
    tasks = config["challenge"]["tasks"]
    arrays = {name: np.asarray(row[name], dtype=np.float64) for name in LISTS}
    for name in MATRICES:
        whole = arrays[name] if arrays[name].size else arrays["test_class_accuracy"]
        arrays[name] = whole.reshape(tasks + 1, tasks)
    return Run(config, arrays, {"notes": [], **info})


def _write_parquet(columns: Mapping[str, list[Any]], path: Path) -> None:
    if _installed("polars"):
        import polars as pl

        series = [pl.Series(k, v, dtype=pl.List(pl.Float32) if k in LISTS else None) for k, v in columns.items()]
        pl.DataFrame(series).write_parquet(path, compression="zstd", compression_level=19)
    else:
        import pyarrow as pa
        from pyarrow import parquet

        floats = pa.list_(pa.float32())
        arrays = {k: pa.array(v, type=floats if k in LISTS else None) for k, v in columns.items()}
        parquet.write_table(pa.table(arrays), path, compression="zstd", compression_level=19)


def _write_npz(columns: Mapping[str, list[Any]], path: Path) -> None:
    """Lists of unequal length as one array and their lengths."""
    arrays: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        if name in LISTS:
            arrays[name] = np.concatenate([np.empty(0, np.float32), *values])
            arrays[f"{name}.lengths"] = np.array([len(v) for v in values], dtype=np.int64)
        else:
            arrays[name] = np.array(values) if values else np.empty(0, dtype="U1")
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _load(path: Path) -> Mapping[str, Sequence[Any]]:
    needed = set(_row_names())
    try:
        columns = _load_parquet(path) if path.suffix == ".parquet" else _load_npz(path)
    except OSError as error:
        raise GlocalError(f"the results '{path}' cannot be read: {error.strerror or error}.") from error
    except GlocalError:
        raise
    except Exception as error:  # every library has its own
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise GlocalError(f"'{path}' is no file of results, or not the whole file: {said.rstrip('.')}.") from error
    if missing := sorted(needed - set(columns)):
        raise GlocalError(f"'{path}' is no file of results: it has no {', '.join(missing)}.")
    return columns


def _load_parquet(path: Path) -> Mapping[str, Sequence[Any]]:
    with path.open("rb") as file:  # readers differ in what they say of a file that is not there
        if file.read(4) != b"PAR1":
            raise ValueError("it is not Parquet")
    if _installed("polars"):
        import polars as pl

        return pl.read_parquet(path).to_dict(as_series=False)
    if _installed("pyarrow"):
        from pyarrow import parquet

        return parquet.read_table(path).to_pydict()
    raise GlocalError(f"to read '{path}' polars or pyarrow must be installed.")


def _load_npz(path: Path) -> Mapping[str, Sequence[Any]]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
        columns: dict[str, Sequence[Any]] = {}
        for name in held.files:
            if name in LISTS:
                columns[name] = np.split(held[name], np.cumsum(held[f"{name}.lengths"])[:-1])
            elif not name.endswith(".lengths"):
                columns[name] = held[name].tolist()
        return columns
