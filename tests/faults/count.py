"""Count the faults that a sweep survives: `python tests/faults/count.py [--cases N] [--write docs/reliability.md]`.

Every group of cases disturbs small sweeps in one way. A case is survived if what is disturbed ends with a result or
with one sentence, what is damaged is noticed or harmless, and the same command then gives the bits of a sweep that
was never disturbed. To add a group, write a function of the number of cases that returns an `Outcome`, and list it in
GROUPS.
"""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz
import torch
import workers
from outcome import Outcome
from safetensors import SafetensorError
from small_sweep import interrupt, sweep

import glocal
from glocal.errors import GlocalWarning
from glocal.store.store import Store

LRS = [0.3, 0.4]
OPTIONS: dict[str, Any] = {"keep_parameters": True, "execution": "sequential"}
ERRORS = ("ENOSPC", "EIO", "EROFS", "EMFILE")
CALLS = ("write", "fsync", "rename", "mkdir", "open")


def bits(runs: glocal.Runs) -> dict[str, bytes]:
    """Return everything that a sweep's result consists of, by name."""
    found: dict[str, bytes] = {}
    for run in runs:
        found |= {f"{run.lr} {name}": array.tobytes() for name, array in run.arrays.items()}
        for task in range(run.tasks + 1):
            found |= {f"{run.lr} {task} {k}": t.numpy().tobytes() for k, t in run.state(task).items()}
    return found


def undisturbed() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return bits(sweep(Path(folder) / "store", LRS, **OPTIONS))


def finish(store: Path, expected: dict[str, bytes]) -> str | None:
    """Repeat the command; return what is wrong with its result, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GlocalWarning)
        try:
            found = bits(sweep(store, LRS, **OPTIONS))
        except Exception as error:
            return f"the store cannot be used again: {type(error).__name__}: {error}"
    return None if found == expected else "other bits"


@contextmanager
def failing(call: str, number: int, code: int, store: Path) -> Iterator[list[int]]:
    """Let the call of this number fail, of those that concern the store; yield a list with the count of calls."""
    calls = [0]

    def disturb(function: Callable[..., Any]) -> Callable[..., Any]:
        def disturbed(first: Any, *rest: Any, **options: Any) -> Any:
            if not isinstance(first, str | os.PathLike) or str(first).startswith(str(store)):
                calls[0] += 1
                if calls[0] == number:
                    raise OSError(code, os.strerror(code), str(first))
            return function(first, *rest, **options)

        return disturbed

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            path.write_bytes(b"half of it")
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")
        saved(tensors, path, metadata=metadata)

    import safetensors.torch

    saved = safetensors.torch.save_file
    targets: dict[str, list[tuple[Any, str]]] = {
        "write": [(Path, "write_bytes")],
        "fsync": [(os, "fsync")],
        "rename": [(os, "rename"), (os, "replace")],
        "mkdir": [(os, "mkdir")],
        "open": [(os, "open"), (Path, "open")],
    }
    with mock.patch.object(safetensors.torch, "save_file", save_file) if call == "write" else nullcontext():
        patches = [mock.patch.object(where, name, disturb(getattr(where, name))) for where, name in targets[call]]
        for patch in patches:
            patch.start()
        try:
            yield calls
        finally:
            for patch in patches:
                patch.stop()


def failing_calls(cases: int) -> Outcome:
    """Let every write, fsync, rename, mkdir and open fail, in a new store and in one with an interrupted cohort."""
    outcome, expected = Outcome("the k-th write, fsync, rename, mkdir or open fails"), undisturbed()
    with tempfile.TemporaryDirectory() as folder:
        interrupted = Path(folder) / "interrupted"
        interrupt(interrupted, LRS, **OPTIONS)
        plan = []
        for call in CALLS:
            for begun in (False, True):
                store = Path(folder) / "counted"
                if begun:
                    shutil.copytree(interrupted, store)
                with failing(call, 0, 0, store) as calls:
                    sweep(store, LRS, **OPTIONS)
                plan += [(call, k, name, begun) for k in range(1, calls[0] + 1) for name in ERRORS]
                shutil.rmtree(store)
        random.Random(0).shuffle(plan)
        for call, number, name, begun in plan[:cases]:
            store = Path(folder) / "store"
            if begun:
                shutil.copytree(interrupted, store)
            problem = None
            try:
                with failing(call, number, getattr(errno, name), store), warnings.catch_warnings():
                    warnings.simplefilter("ignore", GlocalWarning)
                    sweep(store, LRS, **OPTIONS)
            except glocal.GlocalError as error:
                problem = None if len(str(error).splitlines()) == 1 else f"a message of several lines: {error}"
            except Exception as error:
                problem = f"a traceback: {type(error).__name__}: {error}"
            outcome.count(f"{call} {number} {name} {begun}", problem or finish(store, expected))
            shutil.rmtree(store, ignore_errors=True)
    return outcome


def damages(content: bytes, chance: random.Random, flips: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield a file's content in many damaged forms; None: removed."""
    yield "removed", None
    yield "zeroed", bytes(len(content))
    for length in sorted({0, 1, len(content) // 2, len(content) - 1}):
        yield f"cut to {length}", content[:length]
    for bit in chance.sample(range(8 * len(content)), min(flips, 8 * len(content))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)


def damaged_files(cases: int) -> Outcome:
    """Damage every file of a store: what is read afterwards is what was written, or the damage is noticed."""
    outcome, chance = Outcome("a file of a finished run is cut, zeroed, flipped or removed"), random.Random(0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", GlocalWarning)
        store = Path(folder) / "store"
        expected = bits(sweep(store, LRS, **OPTIONS))
        paths = sorted(p for p in store.rglob("*") if p.is_file())
        for path in paths:
            content = path.read_bytes()
            for kind, damaged in damages(content, chance, max(1, cases // len(paths) - 6)):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                problem = None
                try:
                    found = bits(glocal.load(store))
                    wrong = [name for name, value in found.items() if value != expected[name]]
                    problem = f"other bits in {wrong[0]}" if wrong else None
                    noticed = found.keys() != expected.keys() or any(v.error for v in Store.open(store).verify())
                    if damaged is not None and not noticed and not wrong and path.parent != store:
                        problem = "unseen by verify"
                except glocal.GlocalError:
                    pass
                except Exception as error:
                    problem = f"a traceback: {type(error).__name__}: {error}"
                outcome.count(f"{path.name} {kind}", problem)
                path.write_bytes(content)
    return outcome


def damaged_checkpoints(cases: int) -> Outcome:
    """Damage every file of an interrupted cohort: the same command then gives the undisturbed sweep's bits."""
    outcome, chance = Outcome("a file of an interrupted cohort is cut, zeroed, flipped or removed"), random.Random(0)
    expected = undisturbed()
    with tempfile.TemporaryDirectory() as folder:
        interrupted, store = Path(folder) / "interrupted", Path(folder) / "store"
        interrupt(interrupted, LRS, **OPTIONS)
        names = [p.relative_to(interrupted) for p in sorted((interrupted / "cohorts").rglob("*.*"))]
        names = [name for name in names if name.name != "lease.json"]  # a damaged lease is waited for
        for name in names:
            content = (interrupted / name).read_bytes()
            for kind, damaged in damages(content, chance, max(1, cases // len(names) - 6)):
                shutil.copytree(interrupted, store)
                (store / name).unlink() if damaged is None else (store / name).write_bytes(damaged)
                outcome.count(f"{name.name} {kind}", finish(store, expected))
                shutil.rmtree(store)
    return outcome


def killed(cases: int) -> Outcome:
    """Send SIGKILL or SIGTERM to a sweep at random moments, several times in the same store."""
    outcome, chance, expected = Outcome("SIGKILL or SIGTERM at a random moment"), random.Random(0), undisturbed()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store, started = Path(folder) / "store", time.perf_counter()
        sweep(Path(folder) / "timed", LRS, **OPTIONS)
        length = time.perf_counter() - started
        for case in range(cases):
            process = fork.Process(target=_sweep_until_a_signal, args=(store,))
            process.start()
            time.sleep(chance.uniform(0, 1.2 * length))
            name = chance.choice(("SIGKILL", "SIGTERM"))
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, getattr(signal, name))
            process.join(60)
            expected_ends = (0, 2, 130, -signal.SIGKILL, -signal.SIGTERM)  # the last: before it listened
            problem = None if process.exitcode in expected_ends else f"status {process.exitcode}"
            if problem or chance.random() < 0.5:  # otherwise the next process finds what this one left
                problem = problem or finish(store, expected)
                shutil.rmtree(store, ignore_errors=True)
            outcome.count(f"{case} {name}", problem)
    return outcome


def _sweep_until_a_signal(store: Path) -> None:
    try:  # leave at once: a signal that comes later would meet Python's own end of a process
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sweep(store, LRS, **OPTIONS)
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(130)
    except glocal.GlocalError as error:
        print(error)
        os._exit(2)


def create_together(cases: int) -> Outcome:
    """Create the same store in eight processes at the same time."""
    outcome, fork = Outcome("eight processes create the same store"), multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for case in range(cases // 8):
            store, barrier = Path(folder) / str(case), fork.Barrier(8)
            processes = [fork.Process(target=_create, args=(store, barrier)) for _ in range(8)]
            for process in processes:
                process.start()
            for process in processes:
                process.join(60)
                outcome.count(str(case), None if process.exitcode == 0 else f"status {process.exitcode}")
    return outcome


def _create(store: Path, barrier: Any) -> None:
    barrier.wait()
    Store.open(Store.create(store).path)


GROUPS: dict[Callable[[int], Outcome], int] = {
    failing_calls: 10_000,
    damaged_files: 20_000,
    damaged_checkpoints: 1_000,
    killed: 200,
    create_together: 1_200,
    **workers.GROUPS,
    **fuzz.GROUPS,
}
"""Groups of cases, and how many cases are tried at most by default."""


def count(group: Callable[[int], Outcome], cases: int) -> Outcome:
    """Try the cases of a group without waiting for the disk, which only a loss of power needs."""
    with mock.patch.object(os, "fsync", lambda _: None):
        return group(cases)


PAGE = """# Faults that sweeps survive

`python tests/faults/count.py --write docs/reliability.md` disturbs small sweeps on a CPU, and writes this page. A case
is survived if what is disturbed ends with a result or with one clear sentence, if damage is noticed or harmless, and if
the same command afterwards gives, bit for bit, the results of a sweep that nothing disturbed. Bad input is survived if
it gives one clear sentence, within bounds of time and memory.

{table}
`make test` tries some of these cases, `make test-all` more. It also loses nodes of a Ray cluster without grace, and
`.ci/slurm` runs array jobs on a real Slurm through time limits, `scancel`, requeues and preemption; their results are
compared in the same way. Not covered: the loss of power, file systems that lie about what they have written, and
several machines with clocks and network file systems of their own.
"""


def report(outcomes: list[Outcome]) -> str:
    """Return the table of `docs/reliability.md`."""
    lines = ["| what happens | cases | survived | lost |", "|---|---:|---:|---:|"]
    lines += [f"| {o.name} | {o.tried:,} | {o.tried - len(o.lost):,} | {len(o.lost):,} |" for o in outcomes]
    total, lost = sum(o.tried for o in outcomes), sum(len(o.lost) for o in outcomes)
    return "\n".join([*lines, f"| together | {total:,} | {total - lost:,} | {lost:,} |"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[group.__name__ for group in GROUPS])
    parser.add_argument("--cases", type=int, help="try at most so many cases in each group")
    parser.add_argument("--write", type=Path, help="write the report to this file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for group, most in GROUPS.items():
        if group.__name__ in chosen.only:
            started = time.perf_counter()
            outcomes.append(count(group, min(most, chosen.cases or most)))
            print(f"{outcomes[-1].tried} cases of {group.__name__} in {time.perf_counter() - started:.0f} s")
            for case in outcomes[-1].lost[:20]:
                print(f"  lost: {case}")
    print(report(outcomes))
    if chosen.write:
        chosen.write.write_text(PAGE.format(table=report(outcomes)))
    sys.exit(any(outcome.lost for outcome in outcomes))


if __name__ == "__main__":
    main()
