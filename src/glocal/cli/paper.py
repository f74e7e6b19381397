"""`glocal paper`: the paper's tables and figures, one command each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from glocal.cli.common import DataFolder, Device, FigureFile, command, print_rendered, progress_bar, rich_table
from glocal.errors import GlocalError, require_known, unknown
from glocal.paper import STUDIES, get_study

if TYPE_CHECKING:
    from glocal.paper.table1 import Column
    from glocal.store.run import Run, Runs

RESULTS = "results.parquet"


@command
class ExperimentOptions:
    """Options of all experiments."""

    demo: bool = False
    """A small version on the embedded digits that takes less than a minute."""
    store: Path = Path("runs-paper")
    """Folder of finished work: run the command again to continue where it stopped."""
    data: DataFolder = None
    device: Device = "auto"
    results: tuple[Path, ...] = ()
    """Result files to read instead of training and measuring."""


@command
class RunStudy(ExperimentOptions):
    """Options of all studies."""

    study: ClassVar[str]

    out: Path = Path(".")
    """Folder for the table (Parquet) and the figure (PNG and PDF)."""

    def __call__(self) -> None:
        import polars

        from glocal.paper.study import Context, format_cell, read_cost, read_table, run, total_cost, write_table
        from glocal.report.figure import save_figure
        from glocal.sweeps.resolve import choose_device

        study = get_study(self.study)
        if self.results:
            columns, kind = study.columns.split(), f"a table of {study.name}"
            rows = polars.concat([read_table(path, columns, kind) for path in self.results], how="diagonal_relaxed")
            cost = total_cost(read_cost(path) for path in self.results)
        else:
            context = Context(choose_device(self.device), self.data, self.store)
            with progress_bar(study.name) as report:
                rows, cost = run(study, context, self.demo, report)
        summary = study.summarize(rows)
        if summary.table:
            cells = [{name: format_cell(value) for name, value in row.items()} for row in summary.table]
            print_rendered(rich_table(f"{study.name}: {STUDIES[study.name].title}", cells))
        print(summary.verdict)
        paths = [write_table(rows, self.out / f"{study.name}.parquet", cost)]
        draw = partial(study.draw, rows)
        paths += [save_figure(draw, self.out / f"{study.name}{suffix}") for suffix in (".png", ".pdf")]
        print(f"Wrote {', '.join(map(str, paths))}")


@command
class RunOptions(ExperimentOptions):
    """Options that select runs of a table; missing runs are trained unless --results is given."""

    challenge: tuple[str, ...] = ()
    """rotated-mnist, split-cifar10, split-tinyimagenet (default: the first that the experiment has)."""
    lrs: tuple[float, ...] = ()
    """Learning rates (default: the published ones)."""
    seeds: tuple[int, ...] = ()
    """Seeds (default: 11 13 33 21 55)."""
    tasks: int | None = None
    """Stop after this many tasks."""
    epochs: int | None = None
    """Epochs per task (default: as published)."""
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """Precision of matrix products (default: fp32; bf16 for ResNet-18 on a GPU)."""

    def _runs(
        self,
        columns: Mapping[str, Column],
        demo: Column,
        *,
        algorithms: Sequence[str] = (),
        extra: bool = False,
        angles: Literal["published", "seed"] | None = None,
        out: Path | None = None,
    ) -> Runs:
        """Read the selected runs from --results, or train them; with `out`, its result file grows after every row."""
        from glocal.paper import results
        from glocal.paper.table1 import train
        from glocal.report.progress import Bars
        from glocal.store.run import Runs

        if self.results:
            return self._read(demo, algorithms, angles)
        if self.demo and self.challenge:
            raise GlocalError(f"--demo has its own challenge, {demo.challenge}: leave --challenge out.")
        for name in self.challenge:
            require_known("challenge of this experiment:", name, columns)
        selection = [demo] if self.demo else [columns[name] for name in self.challenge or (next(iter(columns)),)]
        sizes: dict[str, Any] = {name: getattr(self, name) for name in ("lrs", "seeds", "tasks", "epochs")}
        parts = [column.select(algorithms, extra, **sizes) for column in selection]
        on_row = None if out is None else partial(results.add, path=out / RESULTS)
        if on_row is not None:
            on_row([])  # fail before training, not after
        options: dict[str, Any] = {name: getattr(self, name) for name in ("store", "data", "device", "precision")}
        runs = train(parts, angles=angles or "published", **options, progress=Bars(), on_row=on_row)
        return Runs([results.with_named_angles(run) for run in runs])

    def _read(self, demo: Column, algorithms: Sequence[str], angles: str | None) -> Runs:
        """Read result files and keep the runs that match the given options; raise an error if there are none."""
        from glocal.paper import results
        from glocal.paper.comparison import angles_of

        def settings(run: Run) -> dict[str, object]:
            config = {name: run.config[name] for name in ("lr", "seed", "epochs", "precision")}
            kind = angles_of(run) if run.challenge.startswith("rotated-") else angles
            name = run.config["algorithm"]["name"]
            return config | {"challenge": run.challenge, "tasks": run.tasks, "algorithm": name, "angles": kind}

        single = {"tasks": self.tasks, "epochs": self.epochs, "precision": self.precision, "angles": angles}
        filters: dict[str, Sequence[object]] = {
            "challenge": (*self.challenge, *([demo.challenge] if self.demo else [])),
            "lr": self.lrs,
            "seed": self.seeds,
            "algorithm": algorithms,
            **{name: () if value is None else (value,) for name, value in single.items()},
        }
        runs = results.read(*self.results)
        for name, values in filters.items():
            present = {settings(run)[name] for run in runs}
            for value in values:
                if value not in present:
                    raise unknown(f"{name} in these results:", value, map(str, present))
        matches = runs.where(lambda run: all(settings(run)[n] in values for n, values in filters.items() if values))
        if not matches:
            conditions = (f"{name} {' '.join(map(str, values))}" for name, values in filters.items() if values)
            raise GlocalError(f"none of the {len(runs)} runs in these results has {', '.join(conditions)}.")
        return matches


@command
class TableOptions(RunOptions):
    """Options of the experiments that use the rows of Table 1."""

    algorithms: tuple[str, ...] = ()
    """Rows of the table (default: all standard ones)."""
    angles: Literal["published", "seed"] | None = None
    """Published angles of each method and seed (default), or angles drawn from the seed, equal for all algorithms."""
    extra: bool = False
    """Add rows that the paper lacks: gem, derpp, laplace, optimal-soft, pnn, packnet, hat; if split, icarl-random."""

    def runs(self, out: Path | None = None) -> Runs:
        from glocal.paper.table1 import COLUMNS, DEMO

        rows: dict[str, Any] = {name: getattr(self, name) for name in ("algorithms", "extra", "angles")}
        return self._runs(COLUMNS, DEMO, **rows, out=out)


@command
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
    out: Path | None = None
    """Folder to write to: results (added to those already there), the table in every format, and figures."""

    def __call__(self) -> None:
        from glocal.paper import results
        from glocal.paper.comparison import compare, relabel, render, write_tables

        runs = self.runs(self.out)
        comparison = compare(runs, self.forgetting)
        print_rendered(render(comparison, self.format))
        if self.out is not None:
            paths = [results.add(runs, self.out / RESULTS), *write_tables(comparison, self.out)]
            several = any(run.tasks > 1 for run in runs)  # forgetting is undefined for one task
            for kind in ("distance", "forgetting") if several else ("distance",):
                paths.append(relabel(runs).plot(kind, self.out / f"{kind}.png"))
            if self.format == "rich":
                print(f"Wrote {', '.join(map(str, paths))}")


@command
class Distance(TableOptions):
    """Figure: distance ‖θ_T − θ_0‖ of all algorithms against the learning rate, and divided by that of plain SGD.

    Uses the runs of table1 and trains those that the store does not hold.
    For example: glocal paper distance --demo -o distance.png
    """

    output: FigureFile = Path("distance.png")

    def __call__(self) -> None:
        from glocal.paper.comparison import relabel
        from glocal.report.style import require_figure

        path = require_figure(self.output)
        print(f"Wrote {relabel(self.runs()).plot('distance', path)}")


@command
class IcarlBuffer(RunOptions):
    """Figure: forgetting of iCaRL with herding and with random exemplars against the learning rate, and its test.

    For example: glocal paper icarl-buffer --demo -o icarl.png
    """

    scope: Literal["task", "class"] = "task"
    """Accuracy among the task's classes, as published, or among all classes; both are measured in the same runs."""
    output: FigureFile = Path("icarl-buffer.png")

    def __call__(self) -> None:
        from glocal.paper.comparison import compare, relabel, render
        from glocal.paper.table1 import ICARL_ALGORITHMS, ICARL_COLUMNS, ICARL_DEMO
        from glocal.report.figure import save_figure
        from glocal.report.plots import drawing
        from glocal.report.style import require_figure
        from glocal.report.summary import View

        path = require_figure(self.output)
        runs = self._runs(ICARL_COLUMNS, ICARL_DEMO).where(
            lambda run: run.config["algorithm"]["name"] in ICARL_ALGORITHMS
        )
        if not runs:
            raise GlocalError(
                f"{', '.join(map(str, self.results))} has no matching run of {' or '.join(ICARL_ALGORITHMS)}. `glocal "
                "paper table1 --challenge split-cifar10 --algorithms icarl icarl-random --out FOLDER` trains them."
            )
        print_rendered(render(compare(runs, scope=self.scope), "rich"))
        draw = drawing(relabel(runs), "forgetting-by-seed", View(scope=self.scope))
        print(f"Wrote {save_figure(draw, path)}")


def _study_command(name: str) -> Any:
    """Return the subcommand of a study."""
    doc = f"{STUDIES[name].reference}: {STUDIES[name].title}.\n\nFor example: glocal paper {name} --demo --out {name}"
    return command(type(name.title().replace("-", ""), (RunStudy,), {"study": name, "__doc__": doc}))


@command
class Paper:
    """The paper's tables and figures, each by name: `glocal list experiments` says what they show and cost."""

    commands: ClassVar[dict[str, Any]] = {
        "table1": Table1,
        "distance": Distance,
        "icarl-buffer": IcarlBuffer,
        **{name: _study_command(name) for name in STUDIES},
    }
