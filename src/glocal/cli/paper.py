"""`glocal paper`: the paper's tables and figures, one name each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import tyro

from glocal.cli.common import Count, Flag, Integers, Names, Numbers, PathName
from glocal.errors import GlocalError
from glocal.paper.studies import TITLES

if TYPE_CHECKING:
    from glocal.cli.table1 import Job
    from glocal.store.run import Runs

Output = Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")]
Paths = Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")]


@dataclass(frozen=True)
class PaperList:
    """Say what every experiment is and what it costs."""

    def __call__(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from glocal.paper.experiments import EXPERIMENTS
        from glocal.paper.studies import get

        table = Table(title="Experiments", title_justify="left")
        for column in ("command", "what it shows", "runs and steps (the last is --demo)"):
            table.add_column(column)
        for experiment in EXPERIMENTS.values():
            table.add_row(experiment.command, experiment.description, "\n".join(experiment.costs()))
            table.add_section()
        for name, (_, title) in TITLES.items():
            table.add_row(f"glocal paper {name}", title, "\n".join(get(name).cost(demo) for demo in (False, True)))
            table.add_section()
        Console().print(table)


@dataclass(frozen=True)
class FromRuns:
    """What table1 and the figures of its runs take."""

    challenge: Names = ()
    """rotated-mnist, split-cifar10, split-tinyimagenet (the first unless given)."""
    algorithms: Names = ()
    """Rows of the table (all standard ones unless given)."""
    lrs: Numbers = ()
    """Learning rates (the published ones unless given)."""
    seeds: Integers = ()
    """Seeds (11 13 33 21 55 unless given)."""
    tasks: Count = None
    """Stop after so many tasks."""
    epochs: Count = None
    """Passes over each task (as published unless given)."""
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """How exactly the network multiplies (fp32, but on a GPU bf16 for ResNet-18, unless given)."""
    angles: Literal["published", "seed"] | None = None
    """The published angles of each method and seed, as it is unless given, or angles from the seed alone, the same for
    all algorithms."""
    further: Flag = False
    """With rows that the paper's table does not have: gem and derpp; on rotated-mnist laplace and optimal-soft, on the
    others icarl-random."""
    demo: Flag = False
    """A small table on the embedded digits, in less than a minute."""
    store: Path = Path("runs-paper")
    """Where runs are kept."""
    data: PathName = None
    """A folder with data sets, looked at first."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    results: Paths = ()
    """Files of results to read instead of training."""

    def _job(self, **more: Any) -> Job:
        from dataclasses import fields

        from glocal.cli.table1 import Job

        return Job(**{f.name: getattr(self, f.name) for f in fields(FromRuns)}, **more)


@dataclass(frozen=True)
class Table1(FromRuns):
    """Table 1: every cell ours, published, and their difference in standard errors; then the paper's test, computed.

    Run it again to go on where it stopped. With --out the results are written as one small file, from which
    --results makes the table again.
    For example: glocal paper table1 --demo; glocal paper table1 --device cuda --out table1
    """

    forgetting: Literal["t-1", "t"] = "t-1"
    """Average forgetting over all tasks but the last, as the published numbers do, or over all, as the paper states."""
    format: Literal["rich", "markdown", "latex", "csv", "json"] = "rich"
    """How to print the table."""
    out: PathName = None
    """A folder for the results, which are added to those that are there, the table in every format, and figures."""

    def __call__(self) -> None:
        from glocal.cli.table1 import publish, show
        from glocal.paper.comparison import compare

        runs = self._job(out=self.out).runs()
        made = compare(runs, self.forgetting)
        show(made, self.format)
        if self.out is not None:
            written = publish(runs, made, self.out)
            if self.format == "rich":
                print(f"Wrote {', '.join(map(str, written))}")


@dataclass(frozen=True)
class Distance(FromRuns):
    """Figure: how far training travels, ‖θ_t − θ_0‖ against the learning rate, coloured by task, a panel an algorithm.

    It takes the runs of table1, and trains those that the store misses.
    For example: glocal paper distance --demo -o distance.png
    """

    output: Output = None
    """The file to write: .png, .pdf or .svg (distance.png unless given)."""

    def __call__(self) -> None:
        from glocal.paper.comparison import relabel

        path = _writable(self.output or Path("distance.png"))
        print(f"Wrote {relabel(self._job().runs()).plot('distance', path)}")


@dataclass(frozen=True)
class IcarlBuffer:
    """Figure: forgetting of iCaRL with herding and with random exemplars against the learning rate; and the test of it.

    For example: glocal paper icarl-buffer --demo -o icarl.png
    """

    challenge: Names = ()
    """split-cifar10, split-tinyimagenet (the first unless given)."""
    lrs: Numbers = ()
    """Learning rates (the published ones unless given)."""
    seeds: Integers = ()
    """Seeds (11 13 33 21 55 unless given)."""
    tasks: Count = None
    """Stop after so many tasks."""
    epochs: Count = None
    """Passes over each task (as published unless given)."""
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """How exactly the network multiplies (on a GPU bf16 for ResNet-18 unless given)."""
    scope: Literal["task", "class"] = "task"
    """Accuracy among the task's own classes, as published, or among all; both are measured in the same runs."""
    demo: Flag = False
    """A small figure on the embedded digits, in less than a minute."""
    store: Path = Path("runs-paper")
    """Where runs are kept."""
    data: PathName = None
    """A folder with data sets, looked at first."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    results: Paths = ()
    """Files of results to read instead of training."""
    output: Output = None
    """The file to write: .png, .pdf or .svg (icarl-buffer.png unless given)."""

    def __call__(self) -> None:
        from glocal.cli.table1 import show
        from glocal.paper.comparison import compare, relabel
        from glocal.report.figures import draw

        path = _writable(self.output or Path("icarl-buffer.png"))
        runs = self._read() if self.results else self._trained()
        show(compare(runs, scope=self.scope))
        print(f"Wrote {draw(relabel(runs), 'forgetting', path, scope=self.scope)}")

    def _read(self) -> Runs:
        from glocal.cli.table1 import Job
        from glocal.paper import icarl_buffer

        challenge = (*self.challenge, icarl_buffer.DEMO.challenge) if self.demo else self.challenge
        job = Job(
            challenge=challenge,
            lrs=self.lrs,
            seeds=self.seeds,
            tasks=self.tasks,
            epochs=self.epochs,
            precision=self.precision,
            results=self.results,
        )
        found = icarl_buffer.only(job.runs())
        if not found:
            raise GlocalError(
                f"no such run of {' or '.join(icarl_buffer.ALGORITHMS)} is in {', '.join(map(str, self.results))}; "
                "`glocal paper table1 --challenge split-cifar10 --further --out FOLDER` writes results with both."
            )
        return found

    def _trained(self) -> Runs:
        from glocal.cli.table1 import bars
        from glocal.paper import icarl_buffer
        from glocal.paper.selection import selected, train
        from glocal.store.run import Runs

        if self.demo and self.challenge:
            raise GlocalError("--demo has a challenge of its own, split-digits: leave --challenge out.")
        names = self.challenge or ("split-cifar10",)
        columns = [icarl_buffer.DEMO] if self.demo else [icarl_buffer.column(name) for name in names]
        progress, runs = bars(), Runs([])
        choice = self.lrs, self.seeds, self.tasks, self.epochs
        for part in selected(columns, lambda column: column.rows, *choice, precision=self.precision):
            more = train(part, store=self.store, data=self.data, device=self.device, progress=progress)
            runs = Runs([*runs, *more])
        return runs


@dataclass(frozen=True)
class Conducted:
    """What all studies take."""

    study: ClassVar[str]

    demo: Flag = False
    """A small one on the embedded digits, in less than a minute."""
    store: Path = Path("runs-paper")
    """Where finished pieces are kept: run it again to go on where it stopped."""
    data: PathName = None
    """A folder with data sets, looked at first."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    results: Paths = ()
    """Tables to read instead of measuring."""
    out: Path = Path(".")
    """A folder for the table (Parquet) and the figure (PNG and PDF)."""

    def __call__(self) -> None:
        from glocal.paper.studies import get
        from glocal.paper.study import Place, conduct, progress, publish, took
        from glocal.paper.tables import read_cost, read_table, total
        from glocal.sweeps.resolve import choose_device

        study = get(self.study)
        if self.results:
            rows = [row for path in self.results for row in read_table(path, study)]
            cost = total(read_cost(path) for path in self.results)
        else:
            place = Place(choose_device(self.device), self.data, self.store)
            with progress(study.name) as tell:
                rows = conduct(study, place, self.demo, tell)
            cost = took(study, place, self.demo)
        print("\n".join(study.conclude(rows)))
        print(f"Wrote {', '.join(map(str, publish(study, rows, self.out, cost)))}")


def _command(name: str, title: str) -> Any:
    """A subcommand for a study."""
    about = f"{title}\n\nFor example: glocal paper {name} --demo --out {name}"
    made = type(name.title().replace("-", ""), (Conducted,), {"study": name, "__doc__": about})
    return Annotated[dataclass(frozen=True)(made), tyro.conf.subcommand(name, prefix_name=False)]


if TYPE_CHECKING:
    Experiment = Any
else:
    Experiment = Union[
        (
            Annotated[PaperList, tyro.conf.subcommand("list", prefix_name=False)],
            Annotated[Table1, tyro.conf.subcommand("table1", prefix_name=False)],
            Annotated[Distance, tyro.conf.subcommand("distance", prefix_name=False)],
            Annotated[IcarlBuffer, tyro.conf.subcommand("icarl-buffer", prefix_name=False)],
            *(_command(name, title) for name, (_, title) in TITLES.items()),
        )
    ]


@dataclass(frozen=True)
class Paper:
    """The paper's tables and figures, each by its name: `glocal paper list` says what they are and cost."""

    experiment: Experiment

    def __call__(self) -> None:
        self.experiment()


def _writable(path: Path) -> Path:
    """Complain of a suffix before hours of training, not after."""
    from glocal.errors import unknown
    from glocal.report.figures import SUFFIXES

    if path.suffix.lower() not in SUFFIXES:
        raise unknown("suffix of a figure", path.suffix or path.name, SUFFIXES)
    return path
