"""Workers that get signals at random moments, and a plan that four workers train while two of them are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from outcome import Outcome

from glocal.cluster.worker import work
from glocal.store.store import Store
from glocal.sweeps.plan import write_plan

HERE = Path(__file__).parent
CODE = [HERE / "small_challenge.py", HERE / "linear.py"]
FORK = multiprocessing.get_context("fork")
LEASE_SECONDS = 0.5
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")


def plan(store: Path, lrs: int, seeds: int, epochs: int, cohort_size: int) -> Path:
    challenge, network = f"{CODE[0]}:make", f"{CODE[1]}:make"
    rates = [0.01 * (i + 1) for i in range(lrs)]
    sizes = {"tasks": 4, "epochs": epochs, "batch_size": 40, "cohort_size": cohort_size}
    write_plan(challenge, ["er"], rates, list(range(1, seeds + 1)), network=network, store=store, **sizes)
    return store


def start(store: Path, workers: int) -> list[BaseProcess]:
    processes: list[BaseProcess] = [FORK.Process(target=_work, args=(store,)) for _ in range(workers)]
    for process in processes:
        process.start()
    return processes


def _work(store: Path) -> None:
    opened = Store.open(store)
    opened.lease_seconds = LEASE_SECONDS
    left, problems = work(opened, "cpu", code=CODE)
    os._exit(1 if problems else 3 if left else 0)


def finish(store: Path, expected: Store, processes: Sequence[BaseProcess]) -> str | None:
    """Wait for workers, let another one train what they left, and return what is wrong with the runs, or None."""
    for process in [*processes, *start(store, 1)]:
        process.join(120)
        if process.exitcode not in (0, 3, -signal.SIGKILL):
            return f"a worker ended with status {process.exitcode}"
    return difference(expected, Store.open(store))


def difference(expected: Store, store: Store) -> str | None:
    """Return how a store of finished runs differs from what is expected, or None."""
    if store.names() != expected.names():
        return f"{len(store.names())} of {len(expected.names())} runs"
    if store.cohorts():
        return "a cohort was left behind"
    for run in expected.runs():
        assert run.path is not None
        other = store.run(run.path.name)
        if not all(np.array_equal(array, other.arrays[k], True) for k, array in run.arrays.items()):
            return f"other bits in {run.path.name}"
    return None


def send(process: BaseProcess, name: str) -> None:
    """Send a signal. SIGSTOP is followed by SIGCONT, after the worker's lease has expired."""
    with suppress(ProcessLookupError):
        os.kill(process.pid or 0, getattr(signal, name))
        if name == "SIGSTOP":
            time.sleep(2 * LEASE_SECONDS)
            os.kill(process.pid or 0, signal.SIGCONT)


def signalled(cases: int) -> Outcome:
    """Send SIGKILL, SIGTERM, or SIGSTOP and later SIGCONT, to one of 1, 2 or 4 workers at a random moment."""
    outcome, chance = Outcome("one of 1, 2 or 4 workers is killed, ended, or stopped past its lease"), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        expected, seconds = _undisturbed(plan(Path(folder) / "expected", 4, 2, 1, 2))
        for case in range(cases):
            workers, name = (1, 2, 4)[case % 3], SIGNALS[case // 3 % 3]
            store = plan(Path(folder) / str(case), 4, 2, 1, 2)
            processes = start(store, workers)
            time.sleep(chance.uniform(0, seconds))
            send(processes[0], name)
            outcome.count(f"{case} {name} {workers}", finish(store, expected, processes))
    return outcome


def killed_pair(cases: int) -> Outcome:
    """Kill two of four workers that train 64 runs."""
    outcome, chance = Outcome("two of four workers that train 64 runs are killed"), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        expected, seconds = _undisturbed(plan(Path(folder) / "expected", 16, 4, 2, 8))
        for case in range(cases):
            store = plan(Path(folder) / str(case), 16, 4, 2, 8)
            processes = start(store, 4)
            for process in processes[:2]:
                time.sleep(chance.uniform(0, seconds / 4))
                send(process, "SIGKILL")
            outcome.count(str(case), finish(store, expected, processes))
    return outcome


def _undisturbed(store: Path) -> tuple[Store, float]:
    """Let one worker train a plan; return the store and the seconds."""
    started = time.perf_counter()
    (process,) = start(store, 1)
    process.join()
    assert process.exitcode == 0
    return Store.open(store), time.perf_counter() - started


GROUPS: dict[Callable[[int], Outcome], int] = {signalled: 180, killed_pair: 10}
"""Groups of cases, and how many of them are tried."""
