"""A run of a store, trained again by its configuration and watched on its way: a store keeps θ between tasks, and no
memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from glocal.engine.cohort import Cohort
from glocal.engine.loop import Progress
from glocal.errors import require
from glocal.lens.stored import trained
from glocal.lens.subject import CHUNK, some_examples
from glocal.lens.trajectory import Trajectory, apart, record
from glocal.store.run import Run

LARGEST = 4 << 30
"""Bytes of θ and M that are kept of all moments."""


@dataclass(frozen=True)
class Retraced:
    """The way of a run, and how far it is another one than the stored run went: the largest difference between their
    ‖θ_t − θ_0‖, as a share.

    Another machine, another number of threads, a GPU, and a run that was trained side by side with others round
    otherwise, and large learning rates make more of it. Else it is 0.
    """

    trajectory: Trajectory
    astray: float
    sizes: list[int]
    """Examples of every task; losses may be of fewer."""


def retrace(
    path: str | Path,
    steps: int | None = None,
    *,
    data: str | Path | None = None,
    challenge: str | None = None,
    network: str | None = None,
    algorithm: str | None = None,
    examples: int = CHUNK,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], Progress] | None = None,
) -> Retraced:
    """The run STORE/runs/HASH after every epoch and, on a CPU, after every so many steps. It need not have kept its
    parameters. What is one's own is given by its file, as to `of_stored_run`.

    `progress` is told the algorithm's name, the number of tasks and that of all steps, and then how far they are.
    """
    some_examples(examples)
    run, cohort = trained(path, data, challenge, network, algorithm, device)
    tasks = cohort.challenge.tasks
    require(tasks > 1, f"the run '{path}' has learnt one task: of a single one there is nothing to say.")
    sizes = [cohort.challenge.task(t, run.seed).train.y.shape[0] for t in range(tasks)]
    each = [math.ceil(size / cohort.batch_size) for size in sizes]  # steps of an epoch
    _fits(run, cohort, each, steps)
    told = None if progress is None else progress(run.algorithm, tasks, cohort.epochs * sum(each))
    (found,) = record(cohort, examples=examples, progress=told, steps=steps)
    start, *solutions = found.subject.solutions
    here = torch.stack([apart(point, start) for point in solutions]).cpu()
    there = torch.as_tensor(run.arrays["distance_from_init"]).double()
    known = here.isfinite() & there.isfinite()
    away = (here - there).abs()[known] / there[known].clamp(min=torch.finfo(torch.float64).tiny)
    same = bool((here.isfinite() == there.isfinite()).all())
    return Retraced(found, (float(away.max()) if len(away) else 0.0) if same else math.inf, sizes)


def _fits(run: Run, cohort: Cohort, each: list[int], steps: int | None) -> None:
    """Refuse to keep more moments than there is memory for; `each`, the steps of an epoch, task by task."""
    params, buffers = cohort.initial()
    bytes_of_one = sum(t.numel() * t.element_size() for t in (*params.values(), *buffers.values()))
    bytes_of_one += run.info["cost"]["memory_bytes"]
    ends = 1 + len(each) * (cohort.epochs + 1)  # of epochs and, once more, of tasks
    moments = ends + cohort.epochs * sum(n // max(1, steps) for n in each) if steps is not None else ends
    room = LARGEST // bytes_of_one - ends
    advice = "It is too large."
    if room >= 0:
        advice = f"Look every {math.ceil(cohort.epochs * sum(each) / room)} steps or more seldom." if room else ""
        advice = advice or "Look after epochs alone."
    require(
        moments <= LARGEST // bytes_of_one,
        f"{moments:,} moments of this run take {moments * bytes_of_one / 1e9:.2g} GB, θ and memory together; allowed: "
        f"{LARGEST / 1e9:.2g} GB. {advice}",
    )
