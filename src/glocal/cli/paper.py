"""`glocal paper`: the paper's tables and figures, one name each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union

import tyro

from glocal.cli.common import Flag, PathName
from glocal.cli.table1 import Distance, IcarlBuffer, Paths, Table1
from glocal.paper.studies import TITLES


@dataclass(frozen=True)
class PaperList:
    """Say what every experiment is and what it costs."""

    def __call__(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from glocal.paper.studies import get
        from glocal.paper.table1 import EXPERIMENTS

        table = Table(title="Experiments", title_justify="left")
        for column in ("command", "what it shows", "runs and steps (the last is --demo)"):
            table.add_column(column)
        for experiment in EXPERIMENTS.values():
            table.add_row(experiment.command, experiment.description, "\n".join(experiment.describe_costs()))
            table.add_section()
        for name, (_, title) in TITLES.items():
            table.add_row(f"glocal paper {name}", title, "\n".join(get(name).cost(demo) for demo in (False, True)))
            table.add_section()
        Console().print(table)


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
