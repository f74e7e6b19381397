"""Finished runs, as a store returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from glocal.errors import GlocalError, require
from glocal.store.files import READ_ERRORS, read_tensors
from glocal.tree import Params

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True)
class Run:
    """A run's configuration, measurements and information about its training.

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
        """Return the network's state dict after `task` tasks; 0 is the initialisation. Needs `keep_parameters`."""
        path = None if self.path is None else self.path / "parameters.safetensors"
        if path is None or not path.exists():
            raise GlocalError("this run has not kept its parameters: repeat its command with keep_parameters.")
        require(0 <= task <= self.tasks, f"a run has states 0 to {self.tasks}; {task} was given.")
        try:
            tensors, _ = read_tensors(path, f"{task}/")
        except READ_ERRORS as error:
            raise GlocalError(f"'{path}' is damaged. Delete the run's folder and run its command again.") from error
        return {name.partition("/")[2]: tensor for name, tensor in tensors.items()}


class Runs(Sequence[Run]):
    """Finished runs, in the order of their requests; `table` and `plot` show them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> Runs: ...

    def __getitem__(self, index: int | slice) -> Run | Runs:
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return f"<{len(self)} runs: {', '.join(sorted({r.algorithm for r in self}))}>"

    def where(self, keep: Callable[[Run], bool]) -> Runs:
        """Return the runs for which `keep(run)` is true."""
        return Runs([r for r in self if keep(r)])

    def table(self, **options: Any) -> polars.DataFrame:
        """Return accuracy and forgetting by algorithm and learning rate: see `glocal.report.summary.rows`."""
        from glocal.report.summary import frame

        return frame(self, **options)

    def plot(self, kind: str, path: str | Path) -> Path:
        """Draw a figure and return its path; `glocal plot --help` lists the kinds."""
        from glocal.report.plots import draw

        draw(self, kind, path)
        return Path(path)
