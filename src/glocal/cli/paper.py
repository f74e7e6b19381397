"""`glocal paper`: the paper's tables and figures, one command each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union

import tyro

from glocal.cli.common import Flag, PathName
from glocal.cli.table1 import Distance, IcarlBuffer, Paths, Table1
from glocal.paper.experiments import EXPERIMENTS, STUDIES


@dataclass(frozen=True)
class PaperList:
    """List the experiments: where the paper has them, what they show, and what they cost."""

    def __call__(self) -> None:
        from rich.console import Console
        from rich.table import Table

        columns = ("command", "in the paper", "what it shows", "runs and steps (the last is --demo)")
        table = Table(*columns, title="Experiments", title_justify="left", show_lines=True)
        for experiment in EXPERIMENTS.values():
            costs = "\n".join(experiment.costs())
            table.add_row(experiment.command, experiment.reference, experiment.title, costs)
        Console().print(table)


@dataclass(frozen=True)
class RunStudy:
    """Options of all studies."""

    study: ClassVar[str]

    demo: Flag = False
    """A small version on the embedded digits that takes less than a minute."""
    store: Path = Path("runs-paper")
    """Folder of finished work items: run the command again to continue where it stopped."""
    data: PathName = None
    """Folder with data sets."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    results: Paths = ()
    """Read these tables instead of measuring."""
    out: Path = Path(".")
    """Folder for the table (Parquet) and the figure (PNG and PDF)."""

    def __call__(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from glocal.cli.common import progress_bar
        from glocal.paper.experiments import get_study
        from glocal.paper.study import Context, format_cell, publish, read_cost, read_table, run, total_cost
        from glocal.sweeps.resolve import choose_device

        study = get_study(self.study)
        if self.results:
            rows = [row for path in self.results for row in read_table(path, study.columns.split(), study.name)]
            cost = total_cost(read_cost(path) for path in self.results)
        else:
            context = Context(choose_device(self.device), self.data, self.store)
            with progress_bar(study.name) as on_progress:
                rows, cost = run(study, context, self.demo, on_progress)
        summary, console = study.summarize(rows), Console()
        if summary.table:
            table = Table(*summary.table[0], title=f"{study.name}: {STUDIES[study.name].title}", title_justify="left")
            for row in summary.table:
                table.add_row(*map(format_cell, row.values()))
            console.print(table)
        console.print(summary.verdict, highlight=False, soft_wrap=True)
        print(f"Wrote {', '.join(map(str, publish(study, rows, self.out, cost)))}")


def _study_command(name: str) -> Any:
    """Return the subcommand of a study."""
    title = STUDIES[name].title
    doc = f"{STUDIES[name].reference}: {title}.\n\nFor example: glocal paper {name} --demo --out {name}"
    command = type(name.title().replace("-", ""), (RunStudy,), {"study": name, "__doc__": doc})
    return Annotated[dataclass(frozen=True)(command), tyro.conf.subcommand(name, prefix_name=False)]


if TYPE_CHECKING:
    Experiment = Any
else:
    Experiment = Union[
        (
            Annotated[PaperList, tyro.conf.subcommand("list", prefix_name=False)],
            Annotated[Table1, tyro.conf.subcommand("table1", prefix_name=False)],
            Annotated[Distance, tyro.conf.subcommand("distance", prefix_name=False)],
            Annotated[IcarlBuffer, tyro.conf.subcommand("icarl-buffer", prefix_name=False)],
            *(_study_command(name) for name in STUDIES),
        )
    ]


@dataclass(frozen=True)
class Paper:
    """The paper's tables and figures, each by name: `glocal paper list` says what they show and cost."""

    experiment: Experiment

    def __call__(self) -> None:
        self.experiment()
