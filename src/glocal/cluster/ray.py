"""Ray: one Ray task per cohort. Ray schedules the tasks; the store records which runs are trained."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glocal.cluster.worker import GRACE_SECONDS
from glocal.engine.memory_budget import FREE_MEMORY_FRACTION
from glocal.errors import GlocalError, first_line
from glocal.rng import GLOBAL_STATE
from glocal.store.run import Runs
from glocal.store.store import Store
from glocal.sweeps.context import ProgressReporter
from glocal.sweeps.plan import Plan
from glocal.sweeps.resume import POLL_SECONDS, Group, Job, train_missing

MAX_CRASHES = 20
"""A cohort is given up after this many of its processes died. Lost nodes are not counted."""
MAX_TASKS_PER_GPU = 4
"""More would not be faster: the kernels of different processes run one after the other."""
CONNECT_SECONDS = 5.0


def train(plan: Plan, job: Job, progress: ProgressReporter) -> Runs:
    """Train the runs of a plan in tasks of Ray, wait for them and return them.

    Args:
        plan: the plan, whose store and files of code all nodes must see.
        job: its runs.
        progress: receives the progress.
    """
    context, options = job.context, job.context.options
    with _connection(options.address) as ray:
        gpus = 0 if options.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        try:
            gpu_bytes = ray.get(ray.remote(num_gpus=0.01)(_gpu_bytes).remote()) if gpus else 0
        except ray.exceptions.RayError as error:
            reason = first_line(getattr(error, "cause", None) or error).rstrip(".")
            raise GlocalError(f"a GPU of the Ray cluster cannot be used ({reason}). Try --device cpu.") from error
        _run_tasks(ray, plan, job, divide(job, gpus, gpu_bytes), progress)
    if plan.finished(context.store):
        plan.path.unlink(missing_ok=True)
    job.retry = False  # cohorts that failed raise their errors
    return train_missing(job)


def divide(job: Job, gpus: int, gpu_bytes: int) -> list[tuple[list[str], float]]:
    """Return the cohorts with missing runs, and the fraction of a GPU for each: 1/n if n of them share one.

    Args:
        job: the runs, whose memory is estimated as for any sweep.
        gpus: GPUs of the cluster; 0: cohorts are cut to the free memory of this machine, as in a sweep without Ray.
        gpu_bytes: memory of a GPU.
    """
    usable, memory_budget = int(FREE_MEMORY_FRACTION * gpu_bytes), job.context.options.memory_budget
    budget = memory_budget or usable or None
    job.context.options = replace(job.context.options, memory_budget=budget)
    cohorts: list[tuple[list[str], int]] = []
    for group in job.groups:
        with suppress(Exception):  # in the trial step: `train_missing` raises it again, and marks the cohort as failed
            group_cohorts, fitting = [hashes for hashes in group.cohorts if job.missing(hashes)], 0
            with suppress(Exception):
                fitting = group.max_cohort_size * usable // budget if budget and usable and group_cohorts else 0
            cohorts += [(hashes, fitting // len(hashes)) for hashes in group_cohorts]
    if not gpus:
        return [(hashes, 0.0) for hashes, _ in cohorts]
    waiting = math.ceil(len(cohorts) / gpus)
    return [(hashes, 1 / max(1, min(many, waiting, MAX_TASKS_PER_GPU))) for hashes, many in cohorts]


def train_cohort(store: str, plan: Plan, hashes: list[str], device: str, threads: int) -> None:
    """Train one cohort of a plan, with code from its own files alone; wait for what another process is training."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray cancels by it; started by nohup, it is ignored
    torch.set_num_threads(threads)
    job = plan.prepare(Store.open(store), device, map(Path, plan.code))
    group = Group(job.context, [job.requests[hash] for hash in hashes], 1)
    group.cohorts, job.groups = [hashes], [group]  # do not measure again: this machine might cut it otherwise
    with GLOBAL_STATE:
        while missing := job.missing(hashes):
            if not job.train_next(missing):
                time.sleep(POLL_SECONDS)


def _run_tasks(
    ray: Any, plan: Plan, job: Job, cohorts: list[tuple[list[str], float]], progress: ProgressReporter
) -> None:
    """Run a task for every cohort, resubmit it if its node or process dies, and raise if some runs are not trained."""
    store, threads = job.context.store, torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1
    crashes: Counter[str] = Counter()
    problems: list[str] = []
    pending: dict[Any, tuple[list[str], float]] = {}
    plan_ref = ray.put(plan)

    def submit(hashes: list[str], gpu: float) -> None:
        task = ray.remote(num_cpus=threads, num_gpus=gpu, max_retries=0)(train_cohort)
        arguments = str(store.path.absolute()), plan_ref, hashes, "cuda" if gpu else "cpu", threads
        pending[task.remote(*arguments)] = hashes, gpu

    missing = job.missing()
    progress.start(len(job.requests), len(job.requests) - len(missing))
    for note in job.context.notes:
        progress.message(note)
    try:
        for cohort in cohorts:
            submit(*cohort)
        while pending:
            (task,), _ = ray.wait(list(pending))
            hashes, gpu = pending.pop(task)
            try:
                ray.get(task)
            except ray.exceptions.RayTaskError as error:
                problems.append(first_line(error.cause or error))
            except ray.exceptions.RayError as error:
                lost = isinstance(error, ray.exceptions.NodeDiedError)
                crashes[hashes[0]] += not lost
                if crashes[hashes[0]] >= MAX_CRASHES:
                    problems.append(f"a process died {MAX_CRASHES} times: {first_line(error)}")
                    continue
                event = "A node was lost" if lost else "A process died"
                progress.message(f"{event}; runs that go on from their last task: {len(hashes)}.")
                submit(hashes, gpu)
            else:
                progress.finish_cohort(len(missing.intersection(hashes) - job.missing(hashes)))
    finally:
        for task in pending:  # after Ctrl-C: they release their leases, and their checkpoints stay
            ray.cancel(task)
        if pending:
            ray.wait(list(pending), num_returns=len(pending), timeout=GRACE_SECONDS)
        progress.stop()
    if problems:
        message = f"{len(job.missing())} of {len(job.requests)} runs are not trained"
        raise GlocalError(f"{message}: {problems[0].rstrip('.')}. Run the command again to train them.")


@contextmanager
def _connection(address: str | None) -> Iterator[Any]:
    """Yield the module ray, connected to a cluster, which is left at the end if it was not connected before."""
    try:
        import ray
    except ImportError as error:
        raise GlocalError("on = 'ray' needs ray: pip install 'glocal[ray]'.") from error
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in host:  # Ray would wait for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address, include_dashboard=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        place = f"at '{address}'" if address else "on this machine"
        raise GlocalError(
            f"no Ray cluster answers {place} ({first_line(error).rstrip('.')}). Start one: ray start --head."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _gpu_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory
