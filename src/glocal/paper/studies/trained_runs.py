"""Runs of which both is kept: the points θ_0 … θ_T, for the lens to look at, and the measurements that a run stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from glocal.challenges import make
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.lens.record import record
from glocal.lens.trace import TrainingTrace
from glocal.networks import mlp
from glocal.paper import published
from glocal.sweeps import resolve

if TYPE_CHECKING:
    from torch import Tensor

    from glocal.paper.study import Piece, Place, Row


class Watched(NamedTuple):
    """One run: who was trained, what the lens looks at, and the arrays of a stored `Run`."""

    member: Member
    trace: TrainingTrace
    arrays: Mapping[str, np.ndarray]


def after_tasks(
    piece: Piece, member: Member, columns: Mapping[str, Sequence[float] | np.ndarray | Tensor]
) -> list[Row]:
    """A row for every task of a run from the second on; the columns have a number for each task, the first too."""
    whose: Row = {"algorithm": piece["algorithm"], "locality": member.algorithm.locality}
    whose |= {"lr": float(member.lr), "seed": int(member.seed)}
    return [whose | {"t": t + 1} | {k: float(of[t]) for k, of in columns.items()} for t in range(1, piece["tasks"])]


def rotations(piece: Piece, place: Place) -> Challenge:
    """The piece's rotated challenge with the angles published for plain SGD, the same for every algorithm."""
    return make(piece["challenge"], piece["tasks"], place.data, angles=published.angles("sgd"))


def watched(piece: Piece, challenge: Challenge, device: torch.device) -> list[Watched]:
    """Train the piece's algorithm at all its rates with all its seeds as one cohort, in the order of the seeds.

    The lens has at most `examples` of every task's training examples. Every run looks at all its tasks anew: those of
    one seed are kept, and not made again for each learning rate.
    """
    challenge = replace(challenge, make_task=lru_cache(maxsize=challenge.tasks)(challenge.make_task))
    algorithm = resolve.algorithm(piece["algorithm"], piece["options"]).value
    members = tuple(Member(seed, lr, algorithm) for seed in piece["seeds"] for lr in piece["lrs"])
    network = partial(mlp, hidden=(piece["hidden"],) * 2)
    examples = piece["examples"]
    cohort = Cohort(challenge, network, members, piece["epochs"], piece["batch_size"], examples, device)
    return [
        Watched(member, run.trace, {k: v.numpy() for k, v in run.measurements.items()})
        for member, run in zip(members, record(cohort, 0, keep_memory=False, examples=examples), strict=True)
    ]
