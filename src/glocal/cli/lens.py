"""`glocal lens`: how local was a training?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glocal.cli.common import Name, Names, Number, PathName
from glocal.errors import GlocalError, unknown

if TYPE_CHECKING:
    from glocal.lens.examination import Examination
    from glocal.lens.record import Retraced
    from glocal.lens.trace import TrainingTrace

Target = Annotated[str, tyro.conf.arg(metavar="TARGET"), tyro.conf.Positional]


@dataclass(frozen=True)
class Lens:
    """Look at a training: how far it went, how far old losses are told by their expansions, what it forgot and why.

    TARGET is path.py:function, your function that returns (module, loss, tasks, checkpoints): the network, its loss (a
    name or a function), for every task its (x, y) or DataLoader, and state dicts θ_0, θ_1, …; or STORE/runs/HASH, a run
    that was trained with --keep-parameters. It ends with a recommendation: a family of algorithms, and the reason.
    With --show it is looked at by other instruments instead: error, assumption, forgetting, recursion, theorem1,
    theorem2, ground-truth, perturbation, flatness, rank, spectrum, each a table, a figure and a Parquet file.
    With --retrace a run of a store is trained again and looked at on its way, by its algorithm's own approximation too.
    For example: glocal lens examples/checkpoints.py:make_subject -o lens.png
    """

    target: Target
    """path.py:function or STORE/runs/HASH."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("lens.png")
    """The figure to write: .png, .pdf or .svg."""
    show: Names = ()
    """Instruments, or all: each writes a figure and a table beside FILE, named after both. They take neither --epsilon
    nor --eigenvalues nor --seed: with other numbers than their own they are for Python."""
    retrace: Annotated[str | None, tyro.conf.arg(metavar="STEPS|epochs", help_behavior_hint="")] = None
    """Train the run of a store again, which need not have kept its parameters, and look at it after every so many
    steps, or after epochs: ξ_o of every finished task, by the algorithm's own approximation and by expansions, and
    where the locality assumption first breaks. Steps are seen on a CPU alone."""
    epsilon: Number = None
    """ε of the ε-regions, in units of the loss (a tenth of what learning a task gains unless given)."""
    examples: int = 2_000
    """At most so many examples of every task."""
    eigenvalues: int = 10
    """How many of each Hessian."""
    seed: int = 0
    """Seed of the random directions."""
    challenge: Name = None
    """path.py:function of the run's challenge, where it is one of your own."""
    network: Name = None
    """path.py:function of the run's network, where it is one of your own."""
    algorithm: Name = None
    """path.py:Name of the run's algorithm, where it is one of your own."""
    data: PathName = None
    """A folder with data sets, looked at first."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.cli.common import progress_bar
        from glocal.lens.examination import examine_trace
        from glocal.lens.instruments import INSTRUMENTS
        from glocal.report.examination import require_figure

        require_figure(self.output)
        for name in self.show:
            if name not in (*INSTRUMENTS, "all"):
                raise unknown("instrument", name, (*INSTRUMENTS, "all"))
        for option, others in (
            ("show", ("retrace", "epsilon", "eigenvalues", "seed")),
            ("retrace", ("eigenvalues", "seed")),
        ):
            for field in fields(self) if getattr(self, option) else ():
                given = getattr(self, field.name)
                if field.name in others and given != field.default:
                    raise GlocalError(f"--{field.name} {given} is not for --{option}: leave one of them out.")
        if self.retrace is not None:
            self._retrace(self.retrace)
            return
        console, waiting = Console(), Console(stderr=True)
        with waiting.status("Reading …"):
            subject = self._subject()
        if self.show:
            self._show(subject, list(INSTRUMENTS) if "all" in self.show else list(dict.fromkeys(self.show)))
            return
        with progress_bar("lens") as on_progress:
            try:
                found = examine_trace(subject, self.epsilon, self.eigenvalues, self.seed, on_progress)
            except RuntimeError as error:  # of torch, where a layer or a loss has no second derivative, say
                raise GlocalError(f"'{self.target}' cannot be looked at: {_told(error)}") from error
        written = found.plot(self.output)
        console.print(table(found))
        console.print(str(found.advice), highlight=False)
        console.print(f"Wrote {written}")

    def _retrace(self, every: str) -> None:
        from rich.console import Console

        from glocal.cli.common import progress_bar
        from glocal.lens.error_curves import along
        from glocal.lens.record import open_run
        from glocal.lens.region import positive
        from glocal.paper.tables import write_table
        from glocal.report.error_curves import table as rows_of
        from glocal.report.progress import Bars
        from glocal.sweeps import user_code
        from glocal.sweeps.resolve import choose_device

        steps = None if every == "epochs" else _steps(every)
        if user_code.is_file_spec(self.target):
            raise GlocalError(f"'{self.target}' is no run of a store: --retrace is for STORE/runs/HASH.")
        console = Console()
        own: dict[str, Any] = {"challenge": self.challenge, "network": self.network, "algorithm": self.algorithm}
        device = "cpu" if steps is not None and self.device == "auto" else self.device
        own |= {"data": self.data, "device": choose_device(device)}
        if self.epsilon is not None:
            positive(self.epsilon)
        bars = Bars()
        bars.start(1, 0)
        bar = lambda name, tasks, steps: bars.start_cohort(name, 1, tasks, steps, 0)  # noqa: E731
        try:
            seen = open_run(self.target, **own).retrace(steps, self.examples, bar)
        finally:
            bars.stop()
        try:
            with progress_bar("lens") as on_progress:
                found = along(seen.run, self.epsilon, on_progress)
        except RuntimeError as error:
            raise GlocalError(f"'{self.target}' cannot be looked at: {_told(error)}") from error
        console.print(rows_of(found))
        console.print(f"{_astray(seen.deviation)} {_seen(seen)}", highlight=False)
        written = [found.plot(self.output)]
        written.append(write_table(found.rows(), written[0].with_suffix(".parquet")))
        console.print(f"Wrote {', '.join(map(str, written))}")

    def _show(self, subject: TrainingTrace, names: list[str]) -> None:
        from rich.console import Console

        from glocal.lens.instruments import look
        from glocal.paper.tables import write_table
        from glocal.report.instruments import tables

        console, failures = Console(), []
        for name in names:
            try:
                with Console(stderr=True).status(f"Looking: {name} …"):
                    found = look(subject, name)
            except (GlocalError, RuntimeError) as error:
                failures.append(f"{name}: {_told(error)}")
                continue
            if not found.rows:
                console.print(f"{name}: of a single task there is nothing to say.")
                continue
            console.print(*tables(found, console.width), sep="\n")
            written = [found.plot(self.output.with_stem(f"{self.output.stem}-{name}"))]
            written.append(write_table(found.rows, written[0].with_suffix(".parquet")))
            console.print(f"Wrote {', '.join(map(str, written))}")
        if failures:
            raise GlocalError(f"{len(failures)} of {len(names)} instruments cannot be used here. {' '.join(failures)}")

    def _subject(self) -> TrainingTrace:
        from glocal.lens.record import open_run
        from glocal.lens.trace import trace_checkpoints
        from glocal.sweeps import user_code
        from glocal.sweeps.resolve import choose_device

        device = choose_device(self.device)
        if not user_code.is_file_spec(self.target):
            own = {"challenge": self.challenge, "network": self.network, "algorithm": self.algorithm}
            return open_run(self.target, data=self.data, device=device, **own).trace(self.examples)
        make, _ = user_code.load(self.target, "function", with_neighbours=True)
        if not callable(make):
            raise GlocalError(f"'{self.target}' is no function. Give one that returns {_RETURNED}.")
        made = user_code.call(make, self.target)
        if not isinstance(made, tuple) or len(made) != 4:
            raise GlocalError(f"'{self.target}' must return {_RETURNED}; it returned a {type(made).__name__}.")
        module, loss, tasks, checkpoints = made
        _check(self.target, module)
        return trace_checkpoints(module.to(device), loss, tasks, checkpoints, self.examples, complete=True)


_RETURNED = "(module, loss, tasks, checkpoints)"


def _steps(given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise GlocalError(f"--retrace takes a number of steps from 1 on, or epochs; '{given}' was given.")
    return int(given)


def _astray(share: float) -> str:
    """Whether it is the stored run that was seen."""
    if share < 1e-5:
        return "The retraced run equals the stored one."
    much = f"by {100 * share:.2g} %" if share < 1 else "altogether"
    return (
        f"The retraced run differs from the stored one: ‖θ_t − θ_0‖ {much}. Results differ slightly between machines, "
        "thread counts and cohort sizes because of rounding; large learning rates amplify this."
    )


def _seen(retraced: Retraced) -> str:
    """What the losses are of."""
    trace = retraced.run.trace
    looked_at = [len(data.y) for data in trace.tasks]
    said = "Losses are of all examples of every task."
    if looked_at != retraced.task_sizes:
        said = (
            f"Losses use up to {max(looked_at):,} of {max(retraced.task_sizes):,} examples per task; the algorithm's "
            "own approximation may use all, so its error includes the difference between the two samples."
        )
    if retraced.run.model.has_batchnorm:
        said += (
            " The algorithm's own approximation is evaluated with the BatchNorm statistics of the same snapshot, "
            "expansions with those of θ_o."
        )
    return said


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check(target: str, module: Any) -> None:
    from torch import nn

    if not isinstance(module, nn.Module):
        raise GlocalError(f"the first that '{target}' returns must be an nn.Module; it is a {type(module).__name__}.")


def table(found: Examination) -> Any:
    """Every task after the last one."""
    from rich import box
    from rich.table import Table

    made = Table(title="After the last task", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("task", "loss", "λ_max", "trace", "distance", "radius", "steepest\n– random"):
        made.add_column(name, justify="right", overflow="fold")
    made.add_column("forgetting\n(predicted)", justify="right", overflow="fold")
    made.add_column("inside", overflow="fold")
    for row in found.rows():
        numbers = [f"{row[k]:.3g}" for k in ("loss", "largest_eigenvalue", "trace")]
        around = f"{row['steepest_radius']:.2g} – {row['random_radius']:.2g}"
        way = [f"{row[k]:.3g}" for k in ("distance", "radius")]
        forgot = f"{row['measured']:.2g} ({row['predicted']:.2g})"
        inside = "[green]yes[/]" if row["inside"] else "[red]no[/]"
        last = row["inside"] is None  # nothing was learnt after it
        way, forgot, inside = (["", ""], "", "") if last else (way, forgot, inside)
        made.add_row(str(row["task"]), *numbers, *way, around, forgot, inside)
    return made
