"""Slurm: an array of jobs, each of which is a worker; they requeue themselves until all runs are trained (submitit)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glocal.cluster.worker import work
from glocal.errors import GlocalError, first_line, require
from glocal.store.store import Store
from glocal.sweeps.options import SweepOptions, parse_time

SIGNAL_SECONDS = 120
"""Slurm signals a job this many seconds before its time limit, or after 5/6 of it if that is later."""
MAX_TIMEOUTS = 1_000
SET_BY = {"array": "--workers", "time": "--time", "gpus-per-node": "--gpus", "partition": "--partition"}
"""Options of sbatch that glocal sets by an option of its own."""


@dataclass(frozen=True)
class Worker:
    """What a job runs: a worker that stops before the job's time is up, and then has the job requeued."""

    store: str
    code: tuple[str, ...]
    seconds: float
    grace: float
    track: str | None = None
    device: str = "auto"

    def __call__(self, index: int) -> int:
        from glocal.report.progress import Bars

        store = Store.open(self.store)
        code = tuple(map(Path, self.code))
        runs_left, problems = work(
            store, self.device, self.seconds, code, progress=Bars(), grace=self.grace, track=self.track
        )
        for problem in problems:
            print(problem, file=sys.stderr, flush=True)
        if runs_left and callable(signal.getsignal(signal.SIGUSR2)) and not _is_ending():
            os.kill(os.getpid(), signal.SIGUSR2)  # submitit's handler requeues the job and exits
        return runs_left

    def checkpoint(self, index: int) -> Any:
        """Return what the requeued job runs: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, index)


def _is_ending() -> bool:
    """Return whether Slurm is ending this job: it was cancelled, or Slurm requeues it itself."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    # A job's own number would not do: the last job of an array has that of the array.
    command = ["squeue", "--noheader", "--format=%T", "--jobs", job.job_id]
    return job.cluster == "slurm" and b"COMPLETING" in subprocess.run(command, capture_output=True).stdout


def submit(store: Path, code: Sequence[str], options: SweepOptions, cluster: str = "slurm") -> list[Any]:
    """Submit an array of workers for the plans of a store, and return its jobs.

    Args:
        store: the store, on a file system that all machines see.
        code: files that the plans may load code from.
        options: of the sweep: workers, device, time, gpus, partition, slurm and track.
        cluster: 'slurm', or submitit's 'local' and 'debug' for tests.
    """
    try:
        import submitit
    except ImportError as error:
        raise GlocalError("on = 'slurm' needs submitit: pip install 'glocal[slurm]'.") from error
    require(options.time is not None, "on = 'slurm' needs the time of a job: --time 4h.")
    seconds = parse_time(str(options.time))
    require(seconds >= 60, f"time = '{options.time}' was given; a job needs a minute or more.")
    warning = int(min(SIGNAL_SECONDS, seconds / 6))
    seconds -= seconds % 60  # Slurm counts minutes
    parameters = sbatch_options(options.slurm or "")
    device = options.device.replace("all", "auto")
    worker = Worker(str(store.absolute()), tuple(code), seconds - 1.5 * warning, 0.8 * warning, options.track, device)
    try:
        executor = submitit.AutoExecutor(store / "slurm", cluster, slurm_max_num_timeout=MAX_TIMEOUTS)
        executor.update_parameters(name="glocal", timeout_min=int(seconds // 60), gpus_per_node=options.gpus)
        slurm = {"signal_delay_s": warning, "additional_parameters": {"requeue": True} | parameters}
        slurm |= {"partition": options.partition} if options.partition else {}
        executor.update_parameters(**{f"slurm_{name}": value for name, value in slurm.items()})
        return list(executor.map_array(worker, range(options.workers or 1)))
    except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
        advice = f"Submit from a machine that has sbatch and srun; `glocal work {store}` trains the planned runs here."
        raise GlocalError(f"Slurm did not accept the jobs ({first_line(error)}). {advice}") from error


def sbatch_options(text: str) -> dict[str, str | bool]:
    """Read NAME=VALUE,NAME=VALUE; NAME=true means --NAME.

    A part without = continues a value, as in exclude=n1,n2; so does one in capitals, as in export=ALL,SEED=1.
    """
    values: dict[str, str] = {}
    name = ""
    for part in filter(None, text.split(",")):
        before, equals, value = part.partition("=")
        is_option = equals and not before.isupper()
        name = before.strip().replace("_", "-") if is_option else name
        valid = bool(name) and name == name.lower()
        require(valid, f"slurm = '{text}' was given; write NAME=VALUE,NAME=VALUE, and NAME=true for a flag.")
        values[name] = value if is_option else f"{values[name]},{part}"
    for name in values.keys() & SET_BY.keys():
        raise GlocalError(f"slurm = '{text}' was given; {name} is set by {SET_BY[name]}.")
    return {name: value == "true" or value for name, value in values.items()}
