"""`glocal demo`, `table`, `choose`, `plot` and `report`: tables, figures and pages of runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from glocal.cli.common import (
    OUTPUT,
    AccuracyScope,
    DataFolder,
    Device,
    OwnChallenge,
    OwnNetwork,
    StoreToRead,
    TableFormat,
    command,
    print_rendered,
    progress_bar,
)
from glocal.errors import GlocalError, first_line, require, require_known

if TYPE_CHECKING:
    from glocal.store.run import Runs

WHERE_HELP = (
    "Show only runs that meet all of these, such as algorithm=er,ewc 'lr>=0.01' seed!=11. Operators: = != < <= > >=. "
    "Names: challenge, algorithm, label, locality, setting, network, optimizer, lr, seed, tasks, epochs, batch_size, "
    "precision, options of algorithms and optimizers, such as slots, and what else runs differ in, such as validation."
)
Where = Annotated[tuple[tuple[str, ...], ...], UseAppendAction, arg(metavar="CONDITION ...", help=WHERE_HELP)]
PROTOCOL_HELP = (
    "One or several of first-task, first-k=K, per-task, all-validation, oracle-test. By default first-task, "
    "all-validation and oracle-test."
)
Protocol = Annotated[tuple[tuple[str, ...], ...], UseAppendAction, arg(metavar="NAME ...", help=PROTOCOL_HELP)]


def load_where(store: Path, where: tuple[tuple[str, ...], ...]) -> Runs:
    """Return the runs of a store that meet the conditions of all --where; raise if it has runs, but none of these."""
    from glocal.store.store import load

    runs, conditions = load(store), [condition for group in where for condition in group]
    matches = runs.where(*conditions)
    message = f"none of the {len(runs)} runs in '{store}' meets {' and '.join(map(repr, conditions))}; change --where."
    require(bool(matches) or not runs, message)
    return matches


@command
class Demo:
    """Compare global algorithms (sgd, er) with local ones (ewc, laplace, ogd-gtl): about 90 seconds on two cores.

    Trains 60 networks on the embedded digits, at four learning rates with three seeds, prints a table like the paper's
    Table 1 and the paper's test of each algorithm, and plots forgetting at equal learning accuracy and against the
    learning rate, and the distance of the parameters.
    """

    out: Path = Path("demo")
    """Folder for figures and runs."""
    device: Device = "auto"

    def __call__(self) -> None:
        from glocal.report.progress import Bars
        from glocal.report.summary import render
        from glocal.sweeps.sweep import sweep

        started, store = time.perf_counter(), self.out / "runs"
        algorithms, lrs, seeds = ("sgd", "er", "ewc", "laplace", "ogd-gtl"), (0.02, 0.04, 0.08, 0.16), (11, 13, 33)
        options: dict[str, Any] = {"tasks": 3, "epochs": 3, "train_eval": 100, "store": store, "device": self.device}
        runs = sweep("rotated-digits", algorithms, lrs, seeds, **options, progress=Bars())
        print_rendered(render(runs, "rich"))
        figures = [runs.plot(kind, self.out / f"{kind}.png") for kind in ("plasticity", "forgetting", "distance")]
        print(f"\nFigures: {', '.join(map(str, figures))}. Runs: {store}.")
        print(f"{len(runs)} runs in {time.perf_counter() - started:.0f} s.")


@command
class Table:
    """Show a store's runs as the paper's Table 1, accuracy and forgetting over seeds, and the paper's test."""

    store: StoreToRead = Path("runs")
    where: Where = ()
    format: TableFormat = "rich"
    per_run: bool = False
    """One row per run, with all its settings, for other programs (--format csv or json)."""
    forgetting: Literal["t-1", "t"] = "t-1"
    """Average forgetting over all tasks but the last, as the published table does, or over all tasks."""
    measure: Literal["accuracy", "loss"] = "accuracy"
    """Measure forgetting by test accuracy, in points, or by test loss. Regression is measured by its loss."""
    scope: AccuracyScope = None

    def __call__(self) -> None:
        from glocal.report import per_run
        from glocal.report.summary import View, render

        runs, view = load_where(self.store, self.where), View(self.forgetting, self.scope, self.measure)
        if self.per_run:
            print_rendered(per_run.render(runs, self.format, view))
            return
        require(bool(runs) or self.format != "rich", f"the store '{self.store}' has no finished run yet.")
        print_rendered(render(runs, self.format, view))


@command
class Choose:
    """Choose one configuration of each algorithm by one or several protocols, and show what the choice costs.

    A configuration is a learning rate with options. Protocols: first-task, first-k=K, per-task, all-validation and
    oracle-test. All but the last need validation data (`glocal sweep … --validation 0.1`). Optimism is the test
    result of the oracle's choice minus that of the protocol's choice.
    For example: glocal choose runs --protocol first-k=3 all-validation oracle-test
    """

    store: StoreToRead = Path("runs")
    protocol: Protocol = ()
    where: Where = ()
    format: TableFormat = "rich"
    scope: AccuracyScope = None

    def __call__(self) -> None:
        from glocal.report.choices import DEFAULT_PROTOCOLS, render
        from glocal.report.summary import View

        protocols = [name for names in self.protocol for name in names] or DEFAULT_PROTOCOLS
        runs = load_where(self.store, self.where)
        require(bool(runs) or self.format != "rich", f"the store '{self.store}' has no finished run yet.")
        print_rendered(render(runs, self.format, protocols, View(scope=self.scope)))


@command
class Plot:
    """Draw a figure from the runs of a store.

    Kinds: forgetting, accuracy and distance against the learning rate or another option (--over); accuracy-over-tasks
    (average accuracy after every task); matrix (accuracy on every task after every task); loss (the objective over
    epochs); tradeoff (accuracy against forgetting); plasticity (forgetting against the accuracy right after learning);
    forgetting-by-seed (a line for every seed). matrix and loss show the learning rate that is best on validation data,
    or on test data where runs have none. Where there are no classes, the test loss takes the place of accuracy.
    For example: glocal plot runs --kind forgetting -o forgetting.png
    """

    store: StoreToRead = Path("runs")
    where: Where = ()
    kind: str = "forgetting"
    """Name of the figure."""
    output: Annotated[Path | None, OUTPUT] = None
    """File to write: .png, .pdf, .svg or .pgf (default: KIND.png)."""
    over: str = "lr"
    """The option to compare by: lr, epochs, batch_size, precision, or one of the algorithm or optimizer (penalty)."""
    width: float | None = None
    """Width in inches, such as that of a paper's column; by default the panels' preferred width."""
    style: Literal["screen", "paper", "talk"] = "screen"
    """Size of texts, lines and points."""
    dpi: int = 150
    """Pixels per inch of a .png file."""

    def __call__(self) -> None:
        runs, path = load_where(self.store, self.where), self.output or Path(f"{self.kind}.png")
        print(f"Wrote {runs.plot(self.kind, path, self.over, dpi=self.dpi, width=self.width, style=self.style)}")


@command
class Report:
    """Write the runs of a store as one HTML page, which needs no network: tables, figures and the commands of all runs.

    With two stores the page compares them, paired by seed. It needs the extra `report`.
    For example: glocal report runs -o report.html; glocal report before after -o changes.html
    """

    stores: Positional[tuple[Path, ...]] = (Path("runs"),)
    """The store to read, or two to compare."""
    where: Where = ()
    output: Annotated[Path, OUTPUT] = Path("report.html")
    """File to write."""
    lens: tuple[str, ...] = ()
    """Names of runs (HASH of STORE/runs/HASH, trained with --keep-parameters) to examine as `glocal lens` does."""
    challenge: OwnChallenge = None
    network: OwnNetwork = None
    algorithm: tuple[str, ...] = ()
    """path.py:Name of the runs' algorithms that are your own and change the network."""
    data: DataFolder = None

    def __call__(self) -> None:
        from rich.console import Console
        from rich.text import Text

        from glocal.cluster.status import read_status
        from glocal.report.html.content import Examined, StoreContent
        from glocal.report.html.page import write_report
        from glocal.store.store import Store

        count = len(set(self.stores))
        require(count in (1, 2), f"{count} stores were given; a report shows one, or compares two.")
        stores = []
        for path in dict.fromkeys(self.stores):
            runs = load_where(path, self.where)
            require(bool(runs), f"the store '{path}' has no finished run yet.")
            stores.append(StoreContent(str(path), runs, read_status(Store.open(path))))
        runs_by_name = {run.path.name: run for store in reversed(stores) for run in store.runs if run.path is not None}
        for name in self.lens:
            require_known("run of these stores:", name, runs_by_name)
        parts: dict[str, Any] = {"challenge": self.challenge, "network": self.network, "algorithm": self.algorithm}
        flags = [name for name, spec in parts.items() if spec]
        require(
            bool(self.lens) or not flags,
            f"--{flags[0] if flags else ''} is for runs to examine: name them with --lens.",
        )
        examined = []
        if self.lens:
            from glocal.lens.examination import examine_trace
            from glocal.lens.record import is_built_in, open_run

            with progress_bar("lens") as report:
                for name in dict.fromkeys(self.lens):
                    try:
                        config = runs_by_name[name].config
                        parts["algorithm"] = _find_algorithm(self.algorithm, config["algorithm"])
                        needed: dict[str, Any] = {w: None if is_built_in(w, config) else x for w, x in parts.items()}
                        trace = open_run(str(runs_by_name[name].path), data=self.data, **needed).trace()
                        examined.append(Examined(runs_by_name[name], examine_trace(trace, on_progress=report)))
                    except (GlocalError, RuntimeError) as error:
                        raise GlocalError(f"the run '{name}' cannot be examined: {first_line(error)}") from error
        with Console(stderr=True).status(Text(f"Writing {self.output} …")):
            path = write_report(stores, self.output, examined)
        print(f"Wrote {path}")


def _find_algorithm(specs: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """Return the path.py:Name of a run's algorithm, by its name; of several, the one whose file has the run's hash."""
    from glocal.sweeps.resolve import name_of
    from glocal.sweeps.user_code import load_object

    hashes = {}
    for spec in specs:
        kind, digest = load_object(spec, "algorithm")
        if name_of(kind) == config["name"]:
            hashes[spec] = digest
    return max(hashes, key=lambda spec: hashes[spec] == config.get("source"), default=None)


@command
class Track:
    """Log the runs of a store to TensorBoard, MLflow, Weights & Biases or Trackio, as --track does during training.

    A tracker names a run by its hash, so logging again adds only what is missing.
    For example: glocal track runs --to tensorboard:logs
    """

    store: StoreToRead = Path("runs")
    where: Where = ()
    to: Annotated[str, arg(metavar="NAME[:WHERE]")] = "tensorboard"
    """tensorboard[:FOLDER], mlflow[:URI], wandb[:PROJECT] or trackio[:PROJECT]."""

    def __call__(self) -> None:
        runs = load_where(self.store, self.where)
        require(bool(runs), f"the store '{self.store}' has no finished run yet.")
        runs.track(self.to)
        print(f"Logged {len(runs)} run{'s' if len(runs) > 1 else ''} to {self.to}.")


@command
class Verify:
    """Check every file of a store against its checksum, and list what is damaged.

    Nothing is changed. The command of a damaged run or checkpoint trains it again, and moves the damaged files to
    STORE/damaged. Damaged parameters (`--keep-parameters`) are written again once their file is deleted.
    """

    store: Positional[Path] = Path("runs")
    """The store to check."""

    def __call__(self) -> None:
        from glocal.store.store import Store
        from glocal.sweeps.plan import verify_plans

        store = Store.open(self.store)
        results = [*store.verify(), *verify_plans(store)]
        for path, error, unchecked in results:
            if error is not None:
                print(error)
            elif unchecked:
                print(f"'{path}' can be read; of an earlier version, without checksums: {', '.join(unchecked)}.")
        damaged = sum(error is not None for _, error, _ in results)
        message = (
            f"{damaged} of {len(results)} runs, cohorts and plans in '{self.store}' are damaged or cannot be read."
        )
        require(damaged == 0, message)
        print(
            f"All {len(results)} runs, cohorts and plans in '{self.store}' can be read and agree with their checksums."
        )
