"""What a run is and what is measured: the configuration that names it, and the names of its arrays.

This module does not import torch, so that stored runs are read quickly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glocal.files import short_hash


def _measures(*splits: str) -> tuple[str, ...]:
    return tuple(f"{s}_{scope}_{kind}" for s in splits for scope in ("class", "task") for kind in ("accuracy", "loss"))


MEASURES = _measures("train", "test")
"""'class': among all classes, or those seen so far (`Challenge.evaluate`). 'task': among the task's own.

The two are the same where tasks share their classes.
"""

VALIDATION_MEASURES = _measures("validation")
"""The same on validation data, of challenges that have them."""

ARRAYS = (*MEASURES, "distance_from_init", "update_norm", "epoch_loss", "memory_bytes")

PROTOCOL = 3
"""Increment when the same configuration gives different results (beyond rounding) than before.

2: the random numbers inside a step come from its key. They have the distributions of protocol 1.
3: a step's batch is augmented once, and apart from replayed images; dropout in a network draws from the step's key.
"""


CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class RunConfig:
    """One run: all that its result depends on. Runs of the same configuration are the same; its hash is their name."""

    challenge: Mapping[str, Any]
    network: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    lr: float
    seed: int
    epochs: int
    batch_size: int
    train_eval: int
    """At most so many training examples of each task, evenly spaced, measure its training loss and accuracy."""
    precision: str = "fp32"
    protocol: int = PROTOCOL
    optimizer: Mapping[str, Any] | None = None
    """None: plain SGD."""
    horizon: int | None = None
    """Tasks that are planned in all; None: those of the challenge."""
    patience: int | None = None
    """Epochs without a lower validation loss after which a task ends; None: all epochs are trained."""
    parent: Mapping[str, Any] | None = None
    """'run', the hash of the run that this one goes on from, and 'after', how many tasks it has."""

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as it is stored and hashed: without what is None."""
        return {k: v for k, v in vars(self).items() if v is not None}

    @property
    def hash(self) -> str:
        return short_hash(CANONICAL.encode(self.as_dict()).encode())
