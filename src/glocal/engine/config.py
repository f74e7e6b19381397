"""A run's resolved configuration: everything its result depends on, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PROTOCOL = 6
"""Raised when the same configuration would give other numbers than before."""
ROUNDING = {2: 6, 3: 6, 4: 6, 5: 6}
"""Protocols and later ones that give the same numbers but for rounding; in 5 OGD's memory of convolutions is larger."""


def but_for_rounding(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the latest protocol that gives the same numbers."""
    protocol = config.get("protocol", PROTOCOL)
    return {**config, "protocol": ROUNDING.get(protocol, protocol)}


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
        """The default precision is not written down: runs that had no other to choose keep their names."""
        whole = asdict(self)
        if self.precision == "fp32":
            del whole["precision"]
        return whole

    @property
    def hash(self) -> str:
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
