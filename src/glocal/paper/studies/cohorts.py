"""From a piece of a study to the runs it is about: its challenge, network, learning rates and seeds as one cohort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from glocal import challenges
from glocal.algorithms import ALGORITHMS
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.networks import mlp

if TYPE_CHECKING:
    from glocal.paper.study import Piece, Place

FULL: Piece = {"challenge": "rotated-mnist", "tasks": 20, "epochs": 5, "hidden": [100, 100]}
DEMO: Piece = {"challenge": "rotated-digits", "tasks": 4, "epochs": 2, "hidden": [32, 32]}
"""What is trained, and how; a study's pieces add learning rates and seeds, and what else they need."""


def challenge_of(piece: Piece, place: Place) -> Challenge:
    """The piece's challenge. Every run of a cohort looks at all tasks anew: those of one seed are kept, and not made
    again for each learning rate."""
    made = challenges.make(piece["challenge"], piece["tasks"], place.data)
    return replace(made, make_task=lru_cache(maxsize=made.tasks)(made.make_task))


def cohort_of(piece: Piece, place: Place, challenge: Challenge) -> Cohort:
    """A run for each of the piece's seeds and lrs, of a network with its hidden layers; its algorithm with its options,
    or plain SGD."""
    algorithm = ALGORITHMS[piece.get("algorithm", "sgd")](**piece.get("options", {}))
    members = tuple(Member(seed, lr, algorithm) for seed in piece["seeds"] for lr in piece["lrs"])
    make = partial(mlp, hidden=tuple(piece["hidden"]))
    return Cohort(challenge, make, members, piece["epochs"], challenge.batch_size, train_eval=1, device=place.device)


def by_seed(pieces: Sequence[Piece]) -> list[Piece]:
    """A piece for every seed of each: their runs know nothing of each other, and who stops loses one seed's alone.

    Demos have all in one: they are short, and a larger cohort takes less time.
    """
    return [piece | {"seeds": [seed]} for piece in pieces for seed in piece["seeds"]]


def cost_of(piece: Piece, pieces: int) -> str:
    """What it takes to train a study's pieces, in words."""
    runs = pieces * len(piece["lrs"]) * len(piece["seeds"])
    return f"{runs} runs of {piece['tasks']} tasks of {piece['challenge']}, {piece['epochs']} epochs each"
