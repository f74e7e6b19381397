"""The index of a store: the content of its runs in one file, STORE/index.safetensors, which is quick to read.

An entry counts only while the sizes and times of its run's files are those that it was made from. All other runs are
read from their directories, so the index never changes a result and may be deleted at any time. It is written when
many runs had to be read; one that is damaged, of another version, or cannot be written is ignored. Like all files of
tensors it has checksums, and it holds numbers and JSON alone.

Runs of one kind have the same arrays, of the same shapes, and the same keys in config.json and info.json. Their arrays
are stacked. Values of the keys are numbered, because many runs share them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from glocal import __version__, files
from glocal.store.run import Run

FILE = "index.safetensors"
FILES = ("config.json", "info.json", "arrays.safetensors")
STAMPS, VALUES = ".stamps", ".values"
"""Beside the arrays of runs, which have other names."""
MIN_RUNS = 200
"""The index is read for so many runs, and written after so many were read from their directories."""
MAX_BYTES = 1 << 30
"""Runs with more bytes of arrays are not indexed."""
SETTLED_SECONDS = 2.0
"""More recently modified files are not indexed: a second change within the clock's resolution would not change their
time."""


class Entry(NamedTuple):
    """A run, and the sizes and times of the files that it was read from."""

    stamp: list[int]
    run: Run


def stamp(path: str) -> list[int] | None:
    """Return the sizes and times of a run's files, or None if one is missing."""
    try:
        stats = [os.stat(f"{path}/{name}") for name in FILES]
    except OSError:
        return None
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)]


def read(store: Path) -> dict[str, Entry]:
    """Return the entries by the names of their runs; none if there is no index that can be used."""
    with suppress(Exception):  # whatever is wrong with it, the runs' own files are there
        if files.has_checksums(store / FILE):
            arrays, metadata = files.read_arrays(store / FILE)
            if metadata["version"] == __version__:
                return dict(_entries(store / "runs", arrays))
    return {}


def _entries(folder: Path, arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, Entry]]:
    text = json.loads(arrays.pop("text").tobytes())
    values = [files.parse_json(value) for value in text["values"]]
    for number, (names, config, info) in enumerate(text["kinds"]):
        stamps, numbers = (arrays.pop(f"{number}/{name}").tolist() for name in (STAMPS, VALUES))
        columns = {key.partition("/")[2]: stacked for key, stacked in arrays.items() if key.startswith(f"{number}/")}
        for name, run_stamp, row, *rows in zip(names, stamps, numbers, *columns.values(), strict=True):
            fields = [values[i] for i in row]
            parts = zip(config, fields[: len(config)], strict=True), zip(info, fields[len(config) :], strict=True)
            run = Run(dict(parts[0]), dict(zip(columns, rows, strict=True)), dict(parts[1]), folder / name)
            yield name, Entry(run_stamp, run)


def write(store: Path, entries: Mapping[str, Entry]) -> None:
    """Write those of the entries whose runs have been unchanged for some time, if the folder can be written to."""
    if sum(array.nbytes for entry in entries.values() for array in entry.run.arrays.values()) > MAX_BYTES:
        return
    settled = time.time_ns() - SETTLED_SECONDS * 1e9
    kinds: dict[tuple[object, ...], dict[str, Entry]] = {}
    for name, entry in entries.items():
        if max(entry.stamp) < settled:
            run, shapes = entry.run, tuple((k, array.dtype, array.shape) for k, array in entry.run.arrays.items())
            kinds.setdefault((shapes, *run.config, None, *run.info), {})[name] = entry
    values: dict[str, int] = {}
    arrays: dict[str, np.ndarray] = {}
    described = []
    for number, group in enumerate(kinds.values()):
        runs = [entry.run for entry in group.values()]
        contents = [[*run.config.values(), *run.info.values()] for run in runs]
        numbers = [[values.setdefault(json.dumps(value), len(values)) for value in content] for content in contents]
        arrays |= {f"{number}/{STAMPS}": np.array([entry.stamp for entry in group.values()])}
        arrays |= {f"{number}/{VALUES}": np.array(numbers)}
        arrays |= {f"{number}/{key}": np.stack([run.arrays[key] for run in runs]) for key in runs[0].arrays}
        described.append((list(group), list(runs[0].config), list(runs[0].info)))
    text = json.dumps({"values": list(values), "kinds": described}).encode()
    arrays["text"] = np.frombuffer(text, np.uint8)
    with suppress(OSError):
        files.write_arrays(store / FILE, arrays, {"version": __version__})
