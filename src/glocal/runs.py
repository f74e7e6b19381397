"""Runs in hand: look at them as a table or as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from glocal.store.run import Run

if TYPE_CHECKING:
    import polars


class Runs(Sequence[Run]):
    """Finished runs, in the order they were asked for."""

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
        """The runs for which `keep(run)` holds."""
        return Runs([r for r in self if keep(r)])

    def table(self, **options: Any) -> polars.DataFrame:
        """Accuracy and forgetting by algorithm and learning rate, over seeds: see `glocal.report.summary.rows`."""
        from glocal.report.summary import frame

        return frame(self, **options)

    def plot(self, kind: str, path: str | Path) -> Path:
        """Draw a figure; `glocal plot --help` lists the kinds."""
        from glocal.report.figures import draw

        draw(self, kind, path)
        return Path(path)
