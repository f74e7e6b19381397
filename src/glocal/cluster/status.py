"""The status of a store: what is finished, in training, waiting, failed and diverged, and how long it will take."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean

from glocal.store.run import Run
from glocal.store.store import Store, StoredCohort
from glocal.sweeps.plan import read_plans, verify_plans

MAX_TIMED_RUNS = 200
"""The time of a run is estimated from this many runs, those that finished last."""


@dataclass(frozen=True)
class Status:
    """How many runs of a store are finished, in training, waiting and failed.

    Waiting runs are planned or were interrupted. `cohorts` are those in training, and `failures` those that failed.
    `diverged` counts those of the finished runs that diverged (`Run.diverged`).
    """

    finished: int
    diverged: int
    running: int
    waiting: int
    failed: int
    seconds_left: float | None
    cohorts: list[StoredCohort]
    failures: list[StoredCohort]
    damaged_plans: list[str]


def read_status(store: Store) -> Status:
    """Return the status of a store.

    It only reads files, so it works on any machine that sees the store, such as a login node.
    """
    cohorts = store.cohorts()
    finished = set(store.names())
    hashes = {hash for plan in read_plans(store) for hash in plan.runs}
    hashes |= {hash for cohort in cohorts for hash in cohort.hashes}
    training = [cohort for cohort in cohorts if cohort.last.held]
    failures = [cohort for cohort in cohorts if cohort.failed is not None]
    running = {hash for cohort in training for hash in cohort.hashes} - finished
    failed = {hash for cohort in failures for hash in cohort.hashes} - finished - running
    waiting = hashes - finished - running - failed
    runs = [run for run in store.read(finished).values() if isinstance(run, Run)]  # `glocal verify` tells of the others
    ends = sorted((str(run.info.get("finished")), float(run.info["cost"]["seconds"])) for run in runs)
    return Status(
        finished=len(runs),
        diverged=sum(run.diverged is not None for run in runs),
        running=len(running),
        waiting=len(waiting),
        failed=len(failed),
        seconds_left=_seconds_left(training, len(waiting), [seconds for _, seconds in ends[-MAX_TIMED_RUNS:]]),
        cohorts=training,
        failures=failures,
        damaged_plans=[plan.error for plan in verify_plans(store) if plan.error is not None],
    )


def retry_advice(path: object) -> str:
    """Return advice on how to train the failed runs of a store again."""
    return f"Repeat the sweep's command to train them again; runs of a plan: `glocal work {path} --retry-failed`."


def elapsed(cohort: StoredCohort) -> float:
    """Return for how many seconds a cohort has been training; exact only if the machines' clocks agree."""
    try:
        start = datetime.fromisoformat(cohort.last.about["since"])
        return max(0.0, (datetime.now(UTC) - start).total_seconds())
    except (KeyError, TypeError, ValueError):
        return 0.0


def count(cohort: StoredCohort, name: str) -> int:
    """Return an integer field of the cohort's lease, such as 'tasks', or 0."""
    value = cohort.last.about.get(name)
    return value if isinstance(value, int) else 0


def _seconds_left(training: list[StoredCohort], waiting: int, seconds: list[float]) -> float | None:
    """Estimate the time left: the rest of each worker's cohort, plus an equal share of the waiting runs.

    Return None if no worker is training, or if there is nothing yet to estimate from.
    """
    mean_seconds = fmean(seconds) if seconds else None
    estimates: list[float] = []
    for cohort in training:
        tasks, done, begun = (count(cohort, name) for name in ("tasks", "finished", "begun"))
        if done > begun:
            estimates.append(elapsed(cohort) * (tasks - done) / (done - begun))
        elif mean_seconds is not None:
            estimates.append(max(0.0, mean_seconds * len(cohort.hashes) - elapsed(cohort)))
    if not estimates or (waiting and mean_seconds is None):
        return None
    return max(max(estimates), (sum(estimates) + waiting * (mean_seconds or 0.0)) / len(training))
