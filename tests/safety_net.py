"""Record what every algorithm and every instrument computes, and compare later code with that recording.

    python tests/safety_net.py record      write tests/safety_net.json.gz
    python tests/safety_net.py check       compare the code as it is now with the recording

Every algorithm runs on `rotated-digits` and on `split-digits` in each setting that it allows, with two seeds and two
learning rates; every instrument of the lens measures one stored run. On the kind of processor that recorded them,
parameters must be equal bit by bit; elsewhere the parameters after the first task must agree to 1e-5.
`--only NAME ...` limits the comparison to some algorithms or to `lens`; `--tolerance` replaces bit equality where an
acceleration was removed on purpose.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars
import torch

import glocal
from glocal.algorithms import ALGORITHMS
from glocal.cli.main import main as command_line

RECORDING = Path(__file__).with_suffix(".json.gz")
SEEDS, RATES, TASKS = (11, 13), (0.01, 0.1), 3
MATRICES = ("test_class_accuracy", "test_task_accuracy", "train_class_loss")
PROJECTIONS = 8
DIGITS = 8  # significant digits that are kept of a number
EXAMPLES = "200"
LENS: dict[str, Any] = {"algorithm": "ewc", "lr": 0.05, "seed": 11}
Entry = dict[str, Any]


def entries(only: set[str]) -> Iterator[tuple[str, Entry]]:
    """Yield the name and the numbers of everything that is recorded."""
    for name, algorithm in sorted(ALGORITHMS.items()):
        if only and name not in only:
            continue
        for challenge, setting in (("rotated-digits", None), ("split-digits", "task"), ("split-digits", "class")):
            if (setting or "domain") in algorithm.settings:
                yield from runs(name, challenge, setting)
    if not only or "lens" in only:
        yield from lens()


def runs(algorithm: str, challenge: str, setting: str | None) -> Iterator[tuple[str, Entry]]:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"tasks": TASKS, "epochs": 1 if setting is None else 3, "train_eval": 200}
        made = glocal.sweep(
            challenge, [algorithm], RATES, SEEDS, setting=setting, store=folder, keep_parameters=True, **options
        )
        for run in made:
            yield f"{algorithm} {challenge} {setting} lr={run.lr:g} seed={run.seed}", of_run(run)


def of_run(run: Any) -> Entry:
    final = run.state(run.tasks)
    content = b"".join(k.encode() + final[k].contiguous().numpy().tobytes() for k in sorted(final))
    distances = {k: run.arrays[k].tolist() for k in run.arrays if k.startswith(("from_", "distance", "update"))}
    return {
        **{name: run.arrays[name].tolist() for name in MATRICES},
        "distances": sorted(distances.values()),
        "memory_bytes": run.arrays["memory_bytes"].tolist(),
        "first_task": projections(run.state(1)),
        "hash": hashlib.sha256(content).hexdigest()[:16],
    }


def projections(params: dict[str, torch.Tensor]) -> list[float]:
    """Return ‖θ‖ and θ's inner products with a few random directions of unit length."""
    theta = torch.cat([params[k].double().flatten() for k in sorted(params)])
    directions = torch.randn(PROJECTIONS, len(theta), generator=torch.Generator().manual_seed(0), dtype=torch.double)
    directions /= directions.norm(dim=1, keepdim=True)
    return [float(theta.norm()), *(directions @ theta).tolist()]


def lens() -> Iterator[tuple[str, Entry]]:
    """Yield the tables that `glocal lens` writes of one stored run: every instrument, and the run retraced."""
    with tempfile.TemporaryDirectory() as folder:
        store, out = Path(folder) / "store", Path(folder) / "out.png"
        [run] = glocal.sweep(
            "rotated-digits",
            [LENS["algorithm"]],
            [LENS["lr"]],
            [LENS["seed"]],
            tasks=TASKS,
            epochs=1,
            train_eval=200,
            store=store,
            keep_parameters=True,
        )
        for arguments in (["--show", "all"], ["--retrace", "16"]):
            target = ["lens", str(run.path), "--examples", EXAMPLES, "-o", str(out), *arguments]
            assert command_line(target) in (0, None), target
            for path in sorted(Path(folder).glob("*.parquet")):
                table = polars.read_parquet(path)
                yield f"lens {arguments[0]} {path.stem}", {"columns": [column.to_list() for column in table]}
                path.unlink()


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def differences(now: Any, then: Any, close: Callable[[float, float], bool], path: str = "") -> Iterator[str]:
    if isinstance(now, dict) and isinstance(then, dict) and now.keys() == then.keys():
        for key in now:
            yield from differences(now[key], then[key], close, f"{path}/{key}")
    elif isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        for i, (a, b) in enumerate(zip(now, then, strict=True)):
            yield from differences(a, b, close, f"{path}/{i}")
    elif isinstance(now, int | float) and isinstance(then, int | float):
        if not close(float(now), float(then)):
            yield f"{path}: {now!r}, recorded {then!r}"
    elif now != then:
        yield f"{path}: {str(now)[:60]}, recorded {str(then)[:60]}"


def check_run(now: Entry, then: Entry, same_machine: bool, tolerance: float | None) -> Iterator[str]:
    """Compare bit by bit, or by parameters after the first task where rounding may differ."""
    if same_machine and tolerance is None:
        yield from differences(now, then, lambda a, b: a == b)
        return
    allowed = tolerance or 1e-5
    if now["memory_bytes"] != then["memory_bytes"]:
        yield f"memory_bytes: {now['memory_bytes']}, recorded {then['memory_bytes']}"
    length = then["first_task"][0]
    worst = max(abs(a - b) for a, b in zip(now["first_task"], then["first_task"], strict=True))
    if not worst <= allowed * length:
        yield f"parameters after the first task differ by {worst / length:.1e} of their norm"


def check_lens(now: Entry, then: Entry, same_machine: bool, tolerance: float | None) -> Iterator[str]:
    """Compare tables column by column, whatever the columns are called."""
    allowed = tolerance or (0.0 if same_machine else 1e-3)
    scale = max((abs(x) for column in then["columns"] for x in column if isinstance(x, float)), default=1.0)
    yield from differences(now, then, lambda a, b: abs(a - b) <= allowed * max(abs(a), abs(b), 1e-3 * scale))


def machine() -> str:
    return f"{platform.machine()} torch-{torch.__version__.split('+')[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("--only", nargs="+", default=[], help="names of algorithms, or 'lens'")
    parser.add_argument("--tolerance", type=float, help="relative difference that is allowed")
    parser.add_argument("--file", type=Path, default=RECORDING, help="the recording")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "record":
        old = json.loads(gzip.decompress(given.file.read_bytes()))["entries"] if given.only else {}
        new = dict(entries(set(given.only)))
        content = {"machine": machine(), "entries": old | rounded(new)}
        given.file.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
        print(f"recorded {len(new)} entries in {given.file}")
        return 0
    recording = json.loads(gzip.decompress(given.file.read_bytes()))
    failures, count = 0, 0
    for name, entry in entries(set(given.only)):
        count += 1
        check = check_lens if name.startswith("lens") else check_run
        then = recording["entries"].get(name)
        found = ["is not in the recording"]
        if then is not None:
            found = list(check(rounded(entry), then, recording["machine"] == machine(), given.tolerance))
        if found:
            failures += 1
            print(f"{name}: {len(found)} differences, first {found[0]}", flush=True)
    print(f"{count} entries compared, {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
