"""A finished run, as the store holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glocal.errors import GlocalError, require
from glocal.store.files import DAMAGE, read_tensors
from glocal.tree import Params


@dataclass(frozen=True)
class Run:
    """One run's configuration, its measurements, and what is worth knowing about how they came about.

    arrays: the eight matrices R[t, o] of shape (T + 1, T), named as in `measurements.MEASURES` (t = 0 is the
        initialisation; NaN where the run had diverged), 'distance_from_init' and 'update_norm' (T,), 'epoch_loss'
        (T, epochs), 'memory_bytes' (T,).
    info: 'label' (the algorithm's name and the options that are not its defaults), 'locality', 'setting', 'diverged'
        (the step, or None), 'steps', 'cost', 'versions', 'notes', 'finished' (when).
    """

    config: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    info: Mapping[str, Any]
    path: Path | None = None

    @property
    def challenge(self) -> str:
        return self.config["challenge"]["name"]

    @property
    def algorithm(self) -> str:
        return self.info["label"]

    @property
    def locality(self) -> str:
        return self.info["locality"]

    @property
    def setting(self) -> str:
        return self.info["setting"]

    @property
    def lr(self) -> float:
        return self.config["lr"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def tasks(self) -> int:
        return self.config["challenge"]["tasks"]

    @property
    def diverged(self) -> int | None:
        return self.info["diverged"]

    @property
    def finished(self) -> str:
        """Time at which the run finished, in UTC (ISO 8601)."""
        return self.info["finished"]

    def state(self, task: int) -> Params:
        """θ_t after `task` tasks and the network's other tensors, by name; 0 is the initialisation. Who wants it asks
        for the run with `keep_parameters`."""
        path = None if self.path is None else self.path / "parameters.safetensors"
        if path is None or not path.exists():
            raise GlocalError("this run has not kept its parameters: ask for it again with keep_parameters.")
        require(0 <= task <= self.tasks, f"a run has states 0 to {self.tasks}; {task} was asked for.")
        try:
            kept, _ = read_tensors(path, f"{task}/")
        except DAMAGE as error:
            raise GlocalError(f"'{path}' is damaged. Delete the run's folder and run its command again.") from error
        return {name.partition("/")[2]: tensor for name, tensor in kept.items()}
