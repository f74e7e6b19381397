"""Result files: many runs in one small Parquet file, enough to make every table and figure without the store.

One row per run: what identifies it, the statistics of `glocal.metrics.summary` in percent, its cost, and as lists the
test accuracies R[t, o] (those among the task's classes only if they differ), ‖θ_t − θ_0‖ and ‖θ_t − θ_{t−1}‖.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from glocal.errors import GlocalWarning, require
from glocal.files import DamagedError, lock_file, parse_json, report_damage, report_os_errors
from glocal.paper import table1
from glocal.paper.study import read_table, write_table
from glocal.report.summary import View, run_statistics
from glocal.store.run import Run, Runs, check_run

MATRICES = ("test_class_accuracy", "test_task_accuracy")
LISTS = (*MATRICES, "distance_from_init", "update_norm")
REQUIRED = ("config", "info", *LISTS)


def write(runs: Iterable[Run], path: str | Path) -> Path:
    """Write runs to a .parquet file, replacing it."""
    path = Path(path)
    require(path.suffix == ".parquet", f"results are written to .parquet files; '{path.name}' was given.")
    rows = [_row(with_named_angles(run)) for run in runs]
    names = list(rows[0]) if rows else REQUIRED
    types = dict.fromkeys(LISTS, pl.List(pl.Float32))
    frame = pl.DataFrame([pl.Series(name, [row[name] for row in rows], dtype=types.get(name)) for name in names])
    return write_table(frame, path, compression="zstd", compression_level=19)


def read(*paths: str | Path, strict: bool = False) -> Runs:
    """Read the runs of result files; of equal runs the last one is kept.

    Rows that cannot be read are left out, with a warning, or raise an error if it is `strict`.
    """
    runs: list[Run] = []
    errors: list[str] = []
    for path in map(Path, paths):
        table = read_table(path, REQUIRED, "a result file", empty=True)
        for number, row in enumerate(table.iter_rows(named=True), 1):
            try:
                with report_damage(path, f"It is row {number} of {len(table)}."):
                    runs.append(_run(row))
            except DamagedError as error:
                errors.append(str(error))
    if errors:
        message = f"{len(errors)} rows of result files cannot be read; the first: {errors[0]}"
        require(not strict, f"{message} Write to another file.")
        warnings.warn(f"{message} They are left out.", GlocalWarning, stacklevel=2)
    return merge(runs)


def merge(runs: Iterable[Run]) -> Runs:
    """Keep one run per configuration: the last."""
    return Runs(list({json.dumps(run.config, sort_keys=True): run for run in runs}.values()))


def add(runs: Iterable[Run], path: str | Path) -> Path:
    """Add runs to a result file; concurrent writers wait for each other."""
    path = Path(path)
    with report_os_errors("write the results to", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(path.with_name(f".{path.stem}.lock")):
            old_runs = read(path, strict=True) if path.exists() else ()
            return write(merge([*old_runs, *map(with_named_angles, runs)]), path)


def with_named_angles(run: Run) -> Run:
    """Replace published angles in the configuration by the word 'published', since they differ between methods."""
    challenge = run.config["challenge"]
    angles = challenge.get("options", {}).get("angles")
    if not isinstance(angles, Mapping):
        return run
    by_seed = {int(seed): list(sequence) for seed, sequence in angles.items()}
    if by_seed not in [table1.published_angles(method) for method in ("sgd", "agem", "er")]:
        return run
    options = {**challenge["options"], "angles": "published"}
    return replace(run, config={**run.config, "challenge": {**challenge, "options": options}})


def _row(run: Run) -> dict[str, Any]:
    cost, versions = run.info.get("cost", {}), run.info.get("versions", {})
    statistics, over_t = (run_statistics([run], View(over))[0] for over in ("t-1", "t"))
    arrays = {name: np.asarray(run.arrays[name], dtype=np.float32).ravel() for name in LISTS}
    if np.array_equal(arrays["test_class_accuracy"], arrays["test_task_accuracy"], equal_nan=True):
        arrays["test_task_accuracy"] = arrays["test_task_accuracy"][:0]
    info = {k: v for k, v in run.info.items() if k not in ("notes", "monitored")}
    return {
        "challenge": run.challenge,
        "algorithm": run.config["algorithm"]["name"],
        "label": run.algorithm,
        "locality": run.locality,
        "lr": float(run.lr),
        "seed": int(run.seed),
        "tasks": int(run.tasks),
        **statistics,
        "forgetting_over_t": over_t["forgetting"],
        "diverged": run.diverged is not None,
        "seconds": float(cost.get("seconds", np.nan)),
        "memory_bytes": int(cost.get("memory_bytes", 0)),
        "device": str(versions.get("device", "")),
        "torch": str(versions.get("torch", "")),
        "config": json.dumps(run.config, sort_keys=True),
        "info": json.dumps(info, sort_keys=True),
        **arrays,
    }


def _run(row: Mapping[str, Any]) -> Run:
    config, info = parse_json(row["config"]), parse_json(row["info"])
    tasks = config["challenge"]["tasks"]
    arrays = {name: np.asarray(row[name], dtype=np.float64) for name in LISTS}
    for name in MATRICES:
        values = arrays[name] if arrays[name].size else arrays["test_class_accuracy"]
        arrays[name] = values.reshape(tasks + 1, tasks)
    run = Run(config, arrays, {"notes": [], **info})
    check_run(run)
    return run
