"""`glocal paper table1`, `distance` and `icarl-buffer`: tables and figures made from the runs of Table 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glocal.cli.common import Count, Flag, Integers, Names, Numbers, PathName
from glocal.errors import GlocalError, require_known, unknown

if TYPE_CHECKING:
    from glocal.paper.comparison import Comparison
    from glocal.paper.selection import Selection
    from glocal.paper.table1 import Column
    from glocal.store.run import Run, Runs

Output = Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")]
Paths = Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")]


@dataclass(frozen=True)
class RunOptions:
    """Options that select runs of a table; missing runs are trained unless --results is given."""

    challenge: Names = ()
    """rotated-mnist, split-cifar10, split-tinyimagenet (default: the first that the experiment has)."""
    lrs: Numbers = ()
    """Learning rates (default: the published ones)."""
    seeds: Integers = ()
    """Seeds (default: 11 13 33 21 55)."""
    tasks: Count = None
    """Stop after this many tasks."""
    epochs: Count = None
    """Epochs per task (default: as published)."""
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """Precision of matrix products (default: fp32; bf16 for ResNet-18 on a GPU)."""
    demo: Flag = False
    """A small version on the embedded digits that takes less than a minute."""
    store: Path = Path("runs-paper")
    """Folder that keeps finished runs."""
    data: PathName = None
    """Folder with data sets, searched first."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    results: Paths = ()
    """Result files to read instead of training."""

    def _columns(self, columns: Mapping[str, Column], demo: Column, experiment: str) -> list[Column]:
        if self.demo and self.challenge:
            raise GlocalError(f"--demo has its own challenge, {demo.challenge}: leave --challenge out.")
        for name in self.challenge:
            require_known(f"challenge of {experiment}:", name, columns)
        return [demo] if self.demo else [columns[name] for name in self.challenge or (next(iter(columns)),)]

    def _train(self, selections: Sequence[Selection], on_row: Callable[[Runs], object] | None = None) -> Runs:
        from glocal.paper.results import with_named_angles
        from glocal.paper.selection import train
        from glocal.report.progress import Bars
        from glocal.store.run import Runs

        progress = Bars()
        runs: list[Run] = []
        for selection in selections:
            options: dict[str, Any] = {"store": self.store, "data": self.data, "device": self.device}
            runs += train(selection, **options, progress=progress, on_row=on_row)
        return Runs([with_named_angles(run) for run in runs])

    def _read(self, demo: Column, **more: tuple[Sequence[object], Callable[[Run], object]]) -> Runs:
        """Read result files and keep the runs that match the given options; raise an error if there are none."""
        from glocal.paper import results

        def single(value: object) -> list[object]:
            return [] if value is None else [value]

        runs = results.read(*self.results)
        filters: dict[str, tuple[Sequence[object], Callable[[Run], object]]] = {
            "challenge": ((*self.challenge, *([demo.challenge] if self.demo else [])), lambda run: run.challenge),
            "lr": (self.lrs, lambda run: run.lr),
            "seed": (self.seeds, lambda run: run.seed),
            "tasks": (single(self.tasks), lambda run: run.tasks),
            "epochs": (single(self.epochs), lambda run: run.config["epochs"]),
            "precision": (single(self.precision), lambda run: run.config["precision"]),
            **more,
        }
        for kind, (values, value_of) in filters.items():
            present = {value_of(run) for run in runs}
            for value in values:
                if value not in present:
                    raise unknown(f"{kind} in these results:", value, map(str, present))
        selected = runs.where(lambda run: all(not values or of(run) in values for values, of in filters.values()))
        if not selected:
            given = (f"{kind} {' '.join(map(str, values))}" for kind, (values, _) in filters.items() if values)
            raise GlocalError(f"none of the {len(runs)} runs in these results has {', '.join(given)}.")
        return selected


@dataclass(frozen=True)
class TableOptions(RunOptions):
    """Options of the experiments that use the rows of Table 1."""

    algorithms: Names = ()
    """Rows of the table (default: all standard ones)."""
    angles: Literal["published", "seed"] | None = None
    """Published angles of each method and seed (default), or angles drawn from the seed, equal for all algorithms."""
    extra: Flag = False
    """Add rows that the paper's table does not have: gem and derpp; on rotated-mnist laplace and optimal-soft, on the
    others icarl-random."""

    def runs(self, out: Path | None = None) -> Runs:
        """Return the selected runs; with `out`, add them to its result file after every row that is trained."""
        from glocal.paper import results
        from glocal.paper.comparison import angles_of
        from glocal.paper.selection import Selection
        from glocal.paper.table1 import COLUMNS, DEMO

        if self.results:

            def angles(run: Run) -> str | None:
                return angles_of(run) if run.challenge.startswith("rotated-") else self.angles

            names = self.algorithms, lambda run: run.config["algorithm"]["name"]
            return self._read(DEMO, algorithm=names, angles=([self.angles] if self.angles else [], angles))
        selections = [
            Selection(
                column,
                column.select_rows(self.algorithms, self.extra),
                lrs=self.lrs,
                seeds=self.seeds,
                tasks=self.tasks,
                epochs=self.epochs,
                angles=self.angles or "published",
                precision=self.precision,
            )
            for column in self._columns(COLUMNS, DEMO, "table 1")
        ]
        if out is None:
            return self._train(selections)
        _require_folder(out)
        if _result_file(out).exists():
            results.read(_result_file(out))  # fail before training, not after
        return self._train(selections, on_row=lambda runs: results.add(runs, _result_file(out)))


@dataclass(frozen=True)
class Table1(TableOptions):
    """Table 1: every cell ours, published, and their difference in standard errors; then the paper's test.

    Run it again to continue where it stopped. --out writes the results to one small file, from which --results makes
    the table without training.
    For example: glocal paper table1 --demo; glocal paper table1 --device cuda --out table1
    """

    forgetting: Literal["t-1", "t"] = "t-1"
    """Average forgetting over all tasks but the last, as the published numbers do, or over all, as the paper states."""
    format: Literal["rich", "markdown", "latex", "csv", "json"] = "rich"
    """Output format."""
    out: PathName = None
    """Folder to write to: results (added to those already there), the table in every format, and figures."""

    def __call__(self) -> None:
        from glocal.paper import results
        from glocal.paper.comparison import compare, relabel, write_tables

        runs = self.runs(self.out)
        comparison = compare(runs, self.forgetting)
        _print(comparison, self.format)
        if self.out is not None:
            paths = [results.add(runs, _result_file(self.out)), *write_tables(comparison, self.out)]
            several = any(run.tasks > 1 for run in runs)  # forgetting is undefined for one task
            for kind in ("distance", "forgetting") if several else ("distance",):
                paths.append(relabel(runs).plot(kind, self.out / f"{kind}.png"))
            if self.format == "rich":
                print(f"Wrote {', '.join(map(str, paths))}")


@dataclass(frozen=True)
class Distance(TableOptions):
    """Figure: distance ‖θ_t − θ_0‖ against the learning rate, coloured by task, one panel per algorithm.

    Uses the runs of table1 and trains those that the store does not hold.
    For example: glocal paper distance --demo -o distance.png
    """

    output: Output = None
    """File to write: .png, .pdf or .svg (default: distance.png)."""

    def __call__(self) -> None:
        from glocal.paper.comparison import relabel

        path = _figure_path(self.output or Path("distance.png"))
        print(f"Wrote {relabel(self.runs()).plot('distance', path)}")


@dataclass(frozen=True)
class IcarlBuffer(RunOptions):
    """Figure: forgetting of iCaRL with herding and with random exemplars against the learning rate, and its test.

    For example: glocal paper icarl-buffer --demo -o icarl.png
    """

    scope: Literal["task", "class"] = "task"
    """Accuracy among the task's classes, as published, or among all classes; both are measured in the same runs."""
    output: Output = None
    """File to write: .png, .pdf or .svg (default: icarl-buffer.png)."""

    def __call__(self) -> None:
        from glocal.paper.comparison import compare, relabel
        from glocal.report.plots import draw

        path = _figure_path(self.output or Path("icarl-buffer.png"))
        runs = self.runs()
        _print(compare(runs, scope=self.scope))
        print(f"Wrote {draw(relabel(runs), 'forgetting', path, scope=self.scope)}")

    def runs(self) -> Runs:
        from glocal.paper.selection import Selection
        from glocal.paper.table1 import ICARL_ALGORITHMS, ICARL_COLUMNS, ICARL_DEMO

        if self.results:
            read = self._read(ICARL_DEMO)
            runs = read.where(lambda run: run.config["algorithm"]["name"] in ICARL_ALGORITHMS)
            if not runs:
                raise GlocalError(
                    f"{', '.join(map(str, self.results))} has no matching run of {' or '.join(ICARL_ALGORITHMS)}; "
                    "`glocal paper table1 --challenge split-cifar10 --extra --out FOLDER` writes results with both."
                )
            return runs
        return self._train(
            [
                Selection(
                    column,
                    column.rows,
                    lrs=self.lrs,
                    seeds=self.seeds,
                    tasks=self.tasks,
                    epochs=self.epochs,
                    precision=self.precision,
                )
                for column in self._columns(ICARL_COLUMNS, ICARL_DEMO, "icarl-buffer")
            ]
        )


def _print(comparison: Comparison, format: str = "rich") -> None:
    from rich.console import Console

    from glocal.paper.comparison import render

    output = render(comparison, format)
    if isinstance(output, str):
        print(output.rstrip())
    else:
        Console().print(output)


def _result_file(folder: Path) -> Path:
    return folder / "results.parquet"


def _require_folder(path: Path) -> None:
    """Create the output folder before training, so that an error costs no time."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GlocalError(f"cannot create the folder '{path}': {error.strerror or error}.") from error


def _figure_path(path: Path) -> Path:
    """Check the suffix of a figure before training."""
    from glocal.report.plots import SUFFIXES

    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    return path
