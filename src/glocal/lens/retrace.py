"""A run of a store, trained again by its configuration and watched on its way: a store keeps θ between tasks, and no
memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from glocal.engine.cohort import Cohort
from glocal.engine.train import Progress
from glocal.errors import require
from glocal.lens.approximation import Trajectory, apart, record
from glocal.lens.stored import trained
from glocal.lens.subject import CHUNK
from glocal.store.run import Run

LARGEST = 4 << 30
"""Bytes of θ and M that are kept of all moments."""


@dataclass(frozen=True)
class Retraced:
    """The way of a run, and how far it is another one than the stored run went: the largest difference between their
    ‖θ_t − θ_0‖, as a share. On a CPU like the first it is 0 or rounding; a GPU adds in another order every time."""

    trajectory: Trajectory
    astray: float
    examples: int  # of a task, of which losses may be taken on fewer


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
    run, cohort = trained(path, data, challenge, network, algorithm, device)
    whole = cohort.challenge.task(0, run.seed).train.y.shape[0]
    in_all = cohort.challenge.tasks * cohort.epochs * math.ceil(whole / cohort.batch_size)
    _fits(run, cohort, steps, in_all)
    told = None if progress is None else progress(run.algorithm, cohort.challenge.tasks, in_all)
    (found,) = record(cohort, examples=examples, progress=told, steps=steps)
    start, *solutions = found.subject.solutions
    here = torch.stack([apart(point, start) for point in solutions]).cpu()
    there = torch.as_tensor(run.arrays["from_start"]).double()
    known = here.isfinite() & there.isfinite()
    away = (here - there).abs()[known] / there[known].clamp(min=torch.finfo(torch.float64).tiny)
    same = bool((here.isfinite() == there.isfinite()).all())
    return Retraced(found, (float(away.max()) if len(away) else 0.0) if same else math.inf, whole)


def _fits(run: Run, cohort: Cohort, steps: int | None, in_all: int) -> None:
    """Refuse to keep more moments than there is memory for."""
    params, buffers = cohort.initial()
    bytes_of_one = sum(t.numel() * t.element_size() for t in (*params.values(), *buffers.values()))
    bytes_of_one += run.info["cost"]["memory_bytes"]
    moments = cohort.challenge.tasks * cohort.epochs if steps is None else math.ceil(in_all / max(1, steps))
    seldom = math.ceil((steps or 1) * moments * bytes_of_one / LARGEST)
    require(
        moments * bytes_of_one <= LARGEST,
        f"{moments:,} moments of this run take {moments * bytes_of_one / 1e9:.1f} GB, θ and memory together; allowed: "
        f"{LARGEST / 1e9:.1f} GB. " + (f"Look every {seldom} steps or more seldom." if steps else "It is too large."),
    )
