"""The status of a store: what is finished, in training, waiting, failed and diverged, and how long it will take."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean

from glocal.store.run import Run
from glocal.store.store import Store, StoredCohort
from glocal.sweeps.plan import read_plans, verify_plans

SAMPLE = 200
"""The last finished runs, from which the time of a run is estimated."""


@dataclass(frozen=True)
class Status:
    """How many runs of a store are finished, in training, waiting and failed.

    Runs wait that a plan asks for or that were interrupted; `cohorts` are those in training and `failures` those that
    failed. `diverged` runs are among the finished ones (`Run.diverged`).
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
    """Return the status of a store, from its files alone: call it where you like, for example on a login node."""
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
        seconds_left=_seconds_left(training, len(waiting), [seconds for _, seconds in ends[-SAMPLE:]]),
        cohorts=training,
        failures=failures,
        damaged_plans=[plan.error for plan in verify_plans(store) if plan.error is not None],
    )


def retry_advice(path: object) -> str:
    """Say how the runs of a store that failed are trained again."""
    return f"Repeat the sweep's command to train them again; runs of a plan: `glocal work {path} --retry-failed`."


def elapsed(cohort: StoredCohort) -> float:
    """Return for how many seconds a cohort is in training, as far as the clocks of two machines agree."""
    try:
        start = datetime.fromisoformat(cohort.last.about["since"])
        return max(0.0, (datetime.now(UTC) - start).total_seconds())
    except (KeyError, TypeError, ValueError):
        return 0.0


def count(cohort: StoredCohort, name: str) -> int:
    """Return a number that the holder of a cohort tells, such as its 'tasks', or 0."""
    value = cohort.last.about.get(name)
    return value if isinstance(value, int) else 0


def _seconds_left(training: list[StoredCohort], waiting: int, seconds: list[float]) -> float | None:
    """Estimate the time left: of each worker what its cohort still needs, and its share of the waiting runs.

    None: no worker trains, or nothing is known of the time of a run yet.
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
