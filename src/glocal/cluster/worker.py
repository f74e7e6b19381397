"""Workers: processes that train the runs planned in a store, on any machines that see its folder.

No process coordinates the workers. A worker takes the lease of one cohort after the other. It stays until all cohorts
are finished, because it takes over those whose worker stops.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from glocal.errors import GlocalError, require
from glocal.rng import GLOBAL_STATE
from glocal.store.store import Store
from glocal.sweeps.context import ProgressReporter
from glocal.sweeps.plan import read_plans, verify_plans
from glocal.sweeps.resume import POLL_SECONDS, Job, failure

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
GRACE_SECONDS = 20.0
"""After a signal, the task in progress may be finished within this time. Slurm kills 30 s after SIGTERM."""
MAX_WORKERS = 256


class Stop:
    """When a worker stops: after a signal, or before its time is up, if possible at the end of a task.

    Call it at every task boundary; it is true if the next task would not end in time. A second signal, or the end of
    the time, raises KeyboardInterrupt: the task in progress is lost.
    """

    def __init__(self, seconds: float | None = None, grace: float = GRACE_SECONDS) -> None:
        self.asked, self._boundary, self._grace = False, time.monotonic(), grace
        self._end = math.inf if seconds is None else self._boundary + seconds

    def __call__(self) -> bool:
        now = time.monotonic()
        duration, self._boundary = now - self._boundary, now
        self.asked |= now + duration > self._end
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to signals inside the block, in the main thread."""
        previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, signal.default_int_handler)
        if self._end < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, self._end - time.monotonic()))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        grace = min(self._grace, GRACE_SECONDS) if number == signal.SIGTERM else self._grace
        signal.setitimer(signal.ITIMER_REAL, min(grace, max(0.001, self._end - time.monotonic())))


def work(
    store: Store,
    device: str = "auto",
    seconds: float | None = None,
    code: Sequence[Path] = (),
    retry_failed: bool = False,
    progress: ProgressReporter | None = None,
    grace: float = GRACE_SECONDS,
    track: str | None = None,
) -> tuple[int, list[str]]:
    """Train the runs planned in a store until none is left, the time is up or a signal comes.

    Args:
        store: the store.
        device: auto, cpu, cuda or cuda:N.
        seconds: the time to work for; None: no limit.
        code: files that plans may load code from.
        retry_failed: train cohorts again that have failed.
        progress: receives the progress.
        grace: seconds to finish the task in progress after a signal; after SIGTERM at most 20.
        track: log the runs that this worker trains, as in `SweepOptions`.

    Returns:
        How many runs are left to train, and why others cannot be trained.
    """
    from glocal.track.tracking import tracking

    stop, progress = Stop(seconds, grace), progress or ProgressReporter()
    jobs: dict[Path, Job] = {}
    refused: dict[Path, str] = {}
    progress.start(*_count(store))
    try:
        with GLOBAL_STATE, tracking(track, store.path) as tracked, suppress(KeyboardInterrupt), stop.listening():
            while not stop():
                for plan in read_plans(store):
                    if plan.finished(store):
                        plan.remove(store)
                    elif plan.path not in jobs and plan.path not in refused:
                        try:
                            jobs[plan.path] = job = plan.prepare(store, device, code)
                            job.retry, job.context.progress, job.context.stop = retry_failed, progress, stop
                            job.context.track = tracked
                        except GlocalError as error:
                            refused[plan.path] = str(error)
                missing = {path: runs for path, job in jobs.items() if (runs := job.missing())}
                if not missing:
                    break
                if not any(jobs[path].train_next(runs) for path, runs in missing.items()):
                    progress.waiting(sum(map(len, missing.values())))
                    time.sleep(POLL_SECONDS)
    finally:
        progress.stop()
    errors = [failure(error) for job in jobs.values() for error in job.errors.values()]
    damaged = [plan.error for plan in verify_plans(store) if plan.error is not None]
    runs_left = sum(len(job.missing()) for job in jobs.values())
    return runs_left, list(dict.fromkeys([*damaged, *refused.values(), *errors]))


def _count(store: Store) -> tuple[int, int]:
    """Return the number of planned runs, and how many of them are finished."""
    runs = {hash for plan in read_plans(store) for hash in plan.runs}
    return len(runs), sum(store.finished(hash) for hash in runs)


def worker_devices(device: str, workers: int | None = None) -> list[str]:
    """Return the devices of workers on this machine; 'all' are all its GPUs, which several workers may share."""
    require((workers or 1) <= MAX_WORKERS, f"workers = {workers} was given; a machine starts at most {MAX_WORKERS}.")
    gpus = torch.cuda.device_count() if device == "all" else 0
    if gpus == 0:
        return ["auto" if device == "all" else device] * (workers or 1)
    return [f"cuda:{worker % gpus}" for worker in range(workers or gpus)]


def start_workers(store: Path, devices: Sequence[str], arguments: Sequence[str]) -> int:
    """Start a worker process for every device, wait for all, and return the exit status of one that failed, or 0.

    Their output is printed with the device's name. An interrupt is passed on to them, and raised when they have ended.
    """
    interrupted = False
    command = [sys.executable, "-m", "glocal", "work", str(store), *arguments, "--device"]
    pipe, stdout = subprocess.PIPE, subprocess.STDOUT
    workers = [
        # In a session of its own, or Ctrl-C would reach it twice.
        subprocess.Popen([*command, device], stdout=pipe, stderr=stdout, errors="replace", start_new_session=True)
        for device in devices
    ]
    printers = [
        threading.Thread(target=_print_lines, args=(f"{i + 1}, {device}", worker))
        for i, (device, worker) in enumerate(zip(devices, workers, strict=True))
    ]
    for printer in printers:
        printer.start()
    while any(worker.poll() is None for worker in workers):
        try:
            for worker in workers:
                worker.wait()
        except KeyboardInterrupt:
            interrupted = True
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
    for printer in printers:
        printer.join()
    if interrupted:
        raise KeyboardInterrupt
    return max((worker.returncode for worker in workers), key=abs)  # a signal's is negative


def _print_lines(name: str, worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            with suppress(OSError, ValueError):  # else the worker could not write, and its runs would fail
                print(f"[worker {name}] {line.rstrip()}", file=sys.stderr, flush=True)
