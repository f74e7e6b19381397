"""`glocal lens`: measure how local a training run was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from glocal.cli.common import Name, Names, Number, PathName
from glocal.errors import GlocalError, unknown

if TYPE_CHECKING:
    from glocal.lens.record import Retraced, StoredRun
    from glocal.lens.trace import TrainingTrace

Target = Annotated[str, tyro.conf.arg(metavar="TARGET"), tyro.conf.Positional]


@dataclass(frozen=True)
class Lens:
    """Measure how local a training run was: distance moved, where Taylor expansions of old losses are accurate, and
    forgetting.

    TARGET is path.py:function, your function that returns (module, loss, tasks, checkpoints): the network, its loss (a
    name or a function), (x, y) or a DataLoader for every task, and state dicts θ_0, θ_1, …; or STORE/runs/HASH, a run
    that was trained with --keep-parameters. The result is a table, a figure and a recommended family of algorithms.
    With --show other instruments measure it instead: error, assumption, forgetting, recursion, theorem1, theorem2,
    ground-truth, perturbation, flatness, rank, spectrum; each writes a table, a figure and a Parquet file.
    With --retrace a stored run is trained again and measured along the way, also by its algorithm's own approximation.
    For example: glocal lens examples/checkpoints.py:make_training -o lens.png
    """

    target: Target
    """path.py:function or STORE/runs/HASH."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("lens.png")
    """The figure to write: .png, .pdf or .svg."""
    show: Names = ()
    """Instruments, or all. Each writes a figure and a table whose names begin with FILE's. --epsilon, --eigenvalues and
    --seed do not apply; in Python the instruments have further options."""
    retrace: Annotated[str | None, tyro.conf.arg(metavar="STEPS|epochs", help_behavior_hint="")] = None
    """Train a stored run again and measure ξ_o of every finished task after every STEPS steps (CPU only) or after
    epochs, by the algorithm's own approximation and by expansions, and find the first violation of the locality
    assumption. The run need not have kept its parameters."""
    epsilon: Number = None
    """ε of the ε-regions, in units of the loss (default: 0.1 × the mean decrease of a task's loss during its
    training)."""
    examples: int = 2_000
    """The largest number of examples per task."""
    eigenvalues: int = 10
    """How many eigenvalues of each Hessian."""
    seed: int = 0
    """Seed of the random directions."""
    challenge: Name = None
    """path.py:function of the run's challenge, if it is your own."""
    network: Name = None
    """path.py:function of the run's network, if it is your own."""
    algorithm: Name = None
    """path.py:Name of the run's algorithm, if it is your own."""
    data: PathName = None
    """A folder with data sets."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.cli.common import progress_bar
        from glocal.lens.examination import examine_trace
        from glocal.lens.instruments import INSTRUMENTS
        from glocal.report.examination import require_figure, table

        require_figure(self.output)
        for name in self.show:
            if name not in (*INSTRUMENTS, "all"):
                raise unknown("instrument", name, (*INSTRUMENTS, "all"))
        self._check_options()
        if self.retrace is not None:
            self._retrace(self.retrace)
            return
        with Console(stderr=True).status("Reading …"):
            trace = self._trace()
        if self.show:
            self._show(trace, list(INSTRUMENTS) if "all" in self.show else list(dict.fromkeys(self.show)))
            return
        with progress_bar("lens") as report, self._explain_errors():
            result = examine_trace(trace, self.epsilon, self.eigenvalues, self.seed, report)
        console, path = Console(), result.plot(self.output)
        console.print(table(result))
        for line in (str(result.advice), result.warning):
            if line is not None:
                console.print(line, highlight=False)
        console.print(f"Wrote {path}")

    def _check_options(self) -> None:
        """Raise if an option is given that --show or --retrace does not use."""
        for option, unused in (
            ("show", ("retrace", "epsilon", "eigenvalues", "seed")),
            ("retrace", ("eigenvalues", "seed")),
        ):
            for field in fields(self) if getattr(self, option) else ():
                value = getattr(self, field.name)
                if field.name in unused and value != field.default:
                    raise GlocalError(f"--{field.name} {value} does not apply to --{option}: leave one of them out.")

    def _retrace(self, every: str) -> None:
        from rich.console import Console

        from glocal.cli.common import progress_bar
        from glocal.lens.locality_assumption import require_epsilon, training_errors
        from glocal.paper.study import write_table
        from glocal.report.error_curves import table
        from glocal.report.progress import Bars
        from glocal.sweeps import resolve

        steps = None if every == "epochs" else _parse_steps(every)
        if resolve.is_file_spec(self.target):
            raise GlocalError(f"'{self.target}' is not a run of a store: --retrace needs STORE/runs/HASH.")
        if self.epsilon is not None:
            require_epsilon(self.epsilon)
        run = self._open_run("cpu" if steps is not None and self.device == "auto" else self.device)
        bars = Bars()
        bars.start(1, 0)
        bar = lambda name, tasks, steps: bars.start_cohort(name, 1, tasks, steps, 0)  # noqa: E731
        try:
            retraced = run.retrace(steps, self.examples, bar)
        finally:
            bars.stop()
        with progress_bar("lens") as report, self._explain_errors():
            errors = training_errors(retraced.run, self.epsilon, report)
        console, path = Console(), errors.plot(self.output)
        console.print(table(errors))
        for line in _notes(retraced):
            console.print(line, highlight=False)
        console.print(f"Wrote {path}, {write_table(errors.rows(), path.with_suffix('.parquet'))}")

    def _show(self, trace: TrainingTrace, names: list[str]) -> None:
        from rich.console import Console

        from glocal.lens.instruments import measure
        from glocal.paper.study import write_table
        from glocal.report.instruments import tables

        console, failures = Console(), []
        for name in names:
            try:
                with Console(stderr=True).status(f"Measuring {name} …"):
                    result = measure(trace, name)
            except (GlocalError, RuntimeError) as error:
                failures.append(f"{name}: {_one_line(error)}")
                continue
            if not result.rows:
                console.print(f"{name}: needs more than one task.")
                continue
            console.print(*tables(result, console.width), sep="\n")
            path = result.plot(self.output.with_stem(f"{self.output.stem}-{name}"))
            console.print(f"Wrote {path}, {write_table(result.rows, path.with_suffix('.parquet'))}")
        if failures:
            raise GlocalError(f"{len(failures)} of {len(names)} instruments failed. {' '.join(failures)}")

    def _open_run(self, device: str) -> StoredRun:
        from glocal.lens.record import open_run
        from glocal.sweeps.resolve import choose_device

        own = {"challenge": self.challenge, "network": self.network, "algorithm": self.algorithm}
        return open_run(self.target, data=self.data, device=choose_device(device), **own)

    def _trace(self) -> TrainingTrace:
        from torch import nn

        from glocal.lens.trace import trace_checkpoints
        from glocal.sweeps import resolve
        from glocal.sweeps.resolve import choose_device

        if not resolve.is_file_spec(self.target):
            return self._open_run(self.device).trace(self.examples)
        device = choose_device(self.device)
        function, _ = resolve.load_object(self.target, "function", with_neighbours=True)
        returned = "(module, loss, tasks, checkpoints)"
        if not callable(function):
            raise GlocalError(f"'{self.target}' is not a function. Give one that returns {returned}.")
        parts = resolve.call_user_code(function, self.target)
        if not isinstance(parts, tuple) or len(parts) != 4:
            raise GlocalError(f"'{self.target}' must return {returned}; it returned a {type(parts).__name__}.")
        module, loss, tasks, checkpoints = parts
        if not isinstance(module, nn.Module):
            raise GlocalError(f"'{self.target}' must return an nn.Module first; it is a {type(module).__name__}.")
        return trace_checkpoints(module.to(device), loss, tasks, checkpoints, self.examples, complete=True)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn an error of torch, such as a missing second derivative, into one line."""
        try:
            yield
        except RuntimeError as error:
            raise GlocalError(f"'{self.target}' cannot be measured: {_one_line(error)}") from error


def _parse_steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise GlocalError(f"--retrace {text} was given; it takes a number of steps from 1 on, or epochs.")
    return int(text)


def _notes(retraced: Retraced) -> Iterator[str]:
    """Yield one line each on the deviation from the stored run, the examples and the BatchNorm statistics."""
    if retraced.deviation < 1e-5:
        yield "The retraced run equals the stored one."
    else:
        share = f"by {100 * retraced.deviation:.2g} %" if retraced.deviation < 1 else "completely"
        yield (
            f"The retraced run differs from the stored one: ‖θ_t − θ_0‖ {share}. Results differ slightly between "
            "machines, thread counts and cohort sizes because of rounding; large learning rates amplify this."
        )
    sizes = [len(data.y) for data in retraced.run.trace.tasks]
    if sizes != retraced.task_sizes:
        yield (
            f"Losses use up to {max(sizes):,} of {max(retraced.task_sizes):,} examples per task; the error of the "
            "algorithm's own approximation, which may use all, includes this difference."
        )
    if retraced.run.model.has_batchnorm:
        yield "BatchNorm statistics: the algorithm's own approximation uses those of the snapshot, expansions θ_o's."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
