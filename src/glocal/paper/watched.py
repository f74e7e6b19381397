"""Runs of which both is kept: the points θ_0 … θ_T, for the lens to look at, and the measurements that a run stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from glocal import resolve, tree
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.engine.train import train
from glocal.lens.subject import CHUNK, Point, Subject, of_run
from glocal.networks.model import MakeNetwork


class Watched(NamedTuple):
    """One run: who was trained, what the lens looks at, and the arrays of a stored `Run`."""

    member: Member
    subject: Subject
    arrays: Mapping[str, np.ndarray]


def watched(
    challenge: Challenge,
    algorithm: tuple[str, Mapping[str, Any]],
    lrs: Sequence[float],
    seeds: Sequence[int],
    *,
    network: str | MakeNetwork = "mlp",
    epochs: int,
    batch_size: int,
    examples: int = CHUNK,
    device: torch.device,
) -> list[Watched]:
    """Train one algorithm at all rates with all seeds as one cohort; the lens has `examples` of every task at most."""
    chosen = resolve.algorithm(*algorithm).thing
    resolve.suited(chosen, challenge)
    members = tuple(Member(seed, lr, chosen) for seed in seeds for lr in lrs)
    make = resolve.network(network, challenge).thing
    cohort = Cohort(challenge, make, members, epochs, batch_size, examples, device)
    points: list[list[Point]] = [[] for _ in members]
    for snapshot in train(cohort):
        last = snapshot
        for run, seen in enumerate(points):
            own = tree.map_tree(torch.clone, snapshot.state.select(run).as_tree())
            seen.append(Point(own["params"], own.get("buffers", {})))
    arrays = last.record.arrays()
    return [
        Watched(member, of_run(cohort, run, seen, examples), {k: v[run].numpy() for k, v in arrays.items()})
        for run, (member, seen) in enumerate(zip(members, points, strict=True))
    ]
