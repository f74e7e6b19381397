"""A run's resolved configuration: everything its result depends on, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PROTOCOL = 1
"""Increment when the same configuration gives different results (beyond rounding) than before."""


@dataclass(frozen=True)
class RunConfig:
    """One run. Two runs with the same configuration are the same run; its hash is its name."""

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
    protocol: int = field(default=PROTOCOL)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def hash(self) -> str:
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
