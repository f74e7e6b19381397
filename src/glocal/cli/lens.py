"""`glocal lens` and `glocal locality`: how local a training run was, and whether an algorithm is local or global."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from glocal.cli.common import (
    DataFolder,
    Device,
    FigureFile,
    OwnChallenge,
    OwnNetwork,
    command,
    print_rendered,
    progress_bar,
    rich_table,
)
from glocal.errors import GlocalError, first_line, require, require_known

if TYPE_CHECKING:
    from glocal.algorithms import Algorithm
    from glocal.challenges import Challenge
    from glocal.lens.record import Retraced, StoredRun
    from glocal.lens.training_trace import TrainingTrace

DEFAULT_CHALLENGES = ("rotated-digits", "split-digits")
"""`glocal locality` uses the first one whose setting an algorithm supports."""
UNUSED = {"show": ("retrace", "epsilon", "eigenvalues", "seed"), "retrace": ("eigenvalues", "seed"), "": ()}
"""Options of `glocal lens` that do not apply to a mode."""
ROUNDING = "Rounding differs between machines, thread counts and cohort sizes; large learning rates amplify this."
SUBSET = "the error of the algorithm's own approximation, which may use all, includes this difference."
EXPLANATION = """explained: share of Var[L̂_o(θ)] due to θ_o alone (first-order Sobol index)
involved: the same with its interaction with the memory's random draws (total index)
nats: I(L̂_o(θ); θ_o), estimated by nearest neighbours: at most the logarithm of the number of solutions
p: permutation-test p-value, local if p ≤ 0.01"""


@command
class Lens:
    """Measure how far from its solution an approximation of an old loss holds, and whether training left that region.

    The approximation is the second-order Taylor expansion of a task's loss at the parameters that training ended with
    on that task, its solution. It holds where it differs from the loss by less than epsilon. The command prints a table
    and draws a figure: how far later training moved from every solution, the radius up to which the expansion holds in
    that direction, forgetting as measured and as the expansion predicts it, and the curvature of the losses.

    TARGET is your own training or a stored run. Your training is path.py:function, a function that returns (module,
    loss, tasks, checkpoints): the network, its loss (a name or a function), (x, y) or a DataLoader for every task, and
    the state dicts before the first task and after every task. A stored run is the folder STORE/runs/HASH, where STORE
    is the folder that `glocal run` or `glocal sweep` wrote to; it must have been trained with --keep-parameters.

    With --show other instruments measure it instead: error, assumption, forgetting, recursion, theorem1, theorem2,
    ground-truth, perturbation, flatness, rank, spectrum; each writes a table, a figure and a Parquet file.
    With --retrace a stored run is trained again and measured along the way, also by its algorithm's own approximation;
    the first step at which an error reaches epsilon is printed. The run need not have kept its parameters.

    For example: glocal lens examples/checkpoints.py:make_training -o lens.png

    No algorithm is recommended: of 48 settings of an MLP on Rotated-MNIST, laplace with implicit=true was more accurate
    than replay (er) of 500 examples in 48, and than replay with as much memory as its own in 6.
    """

    target: Positional[tuple[str, ...]]
    """path.py:function of your own training, or the folder of a stored run, such as runs/runs/*: one of them."""
    output: FigureFile = Path("lens.png")
    show: tuple[str, ...] = ()
    """Instruments, or all. Each writes a figure and a table whose names begin with FILE's."""
    retrace: Annotated[str | None, tyro.conf.arg(metavar="STEPS|epochs")] = None
    """Train a stored run again, and measure after every STEPS steps and epoch (CPU only), or after epochs alone."""
    epsilon: float | None = None
    """Error below which an approximation holds (default: 0.1 × the mean over tasks of L_o(θ_0) − L_o(θ_o))."""
    examples: int = 2_000
    """The largest number of examples per task. With fewer it is quicker, and errors and radii are less exact."""
    eigenvalues: int = 10
    """How many eigenvalues of each Hessian."""
    seed: int = 0
    """Seed of the random directions."""
    challenge: OwnChallenge = None
    network: OwnNetwork = None
    algorithm: str | None = None
    """path.py:Name of the run's algorithm, if it is your own, for --retrace or if it changes the network."""
    optimizer: str | None = None
    """path.py:Name of the run's optimizer, if it is your own, for --retrace."""
    init: Path | None = None
    """File that the run started from, for --retrace."""
    data: DataFolder = None
    device: Device = "auto"

    def __call__(self) -> None:
        from glocal.lens.instruments import INSTRUMENTS
        from glocal.report.style import require_figure

        require_figure(self.output)
        several = (
            f"{len(self.target)} were given: {', '.join(self.target[:2])}, …" if self.target else "TARGET is missing"
        )
        require(len(self.target) == 1, f"the lens measures one training or stored run at a time; {several}.")
        for name in self.show:
            require_known("instrument", name, (*INSTRUMENTS, "all"))
        mode = "show" if self.show else "retrace" if self.retrace else ""
        for name in UNUSED[mode]:
            if (value := getattr(self, name)) != getattr(Lens, name):
                raise GlocalError(f"--{name} {value} does not apply to --{mode}: leave one of them out.")
        try:
            if self.retrace is not None:
                self._retrace(self.retrace)
            elif self.show:
                self._show(list(INSTRUMENTS) if "all" in self.show else list(dict.fromkeys(self.show)))
            else:
                self._examine()
        except RuntimeError as error:  # such as a missing second derivative
            raise GlocalError(f"'{self.subject}' cannot be measured: {first_line(error)}") from error

    @property
    def subject(self) -> str:
        """The only target."""
        return self.target[0]

    def _examine(self) -> None:
        from glocal.lens.examination import examine_trace
        from glocal.report.lens_figures import examination_table

        trace = self._trace()
        with progress_bar("lens") as report:
            result = examine_trace(trace, self.epsilon, self.eigenvalues, self.seed, report)
        path = result.plot(self.output)
        print_rendered(examination_table(result))
        print(*result.closing, f"Wrote {path}", sep="\n")

    def _retrace(self, every: str) -> None:
        from glocal.lens.locality_assumption import require_epsilon, training_errors
        from glocal.paper.study import write_table
        from glocal.report.lens_figures import errors_table
        from glocal.report.progress import Bars
        from glocal.sweeps import user_code

        valid = every == "epochs" or (every.isdecimal() and int(every) > 0)
        require(valid, f"--retrace {every} was given; it takes a number of steps from 1 on, or epochs.")
        if user_code.is_file_spec(self.subject):
            raise GlocalError(f"'{self.subject}' is not a run of a store: --retrace needs STORE/runs/HASH.")
        if self.epsilon is not None:
            require_epsilon(self.epsilon)
        steps = None if every == "epochs" else int(every)
        run = self._open_run("cpu" if steps and self.device == "auto" else self.device)
        bars = Bars()
        bars.start(1, 0)
        try:
            bar = lambda name, tasks, steps: bars.start_cohort(name, 1, tasks, steps, 0)  # noqa: E731
            retraced = run.retrace(steps, self.examples, bar)
        finally:
            bars.stop()
        with progress_bar("lens") as report:
            errors = training_errors(retraced.run, self.epsilon, report)
        path = errors.plot(self.output)
        print_rendered(errors_table(errors))
        rows = write_table(errors.rows(), path.with_suffix(".parquet"))
        print(*_notes(retraced), f"Wrote {path}, {rows}", sep="\n")

    def _show(self, names: list[str]) -> None:
        from rich.console import Console

        from glocal.lens.instruments import measure
        from glocal.paper.study import write_table
        from glocal.report.lens_figures import measurement_table

        trace, failures = self._trace(), []
        for name in names:
            try:
                with Console(stderr=True).status(f"Measuring {name} …"):
                    result = measure(trace, name)
            except (GlocalError, RuntimeError) as error:
                failures.append(f"{name}: {first_line(error)}")
                continue
            if not result.rows:
                print(f"{name}: needs more than one task.")
                continue
            print_rendered(measurement_table(result))
            path = result.plot(self.output.with_stem(f"{self.output.stem}-{name}"))
            print(f"Wrote {path}, {write_table(result.rows, path.with_suffix('.parquet'))}")
        require(not failures, f"{len(failures)} of {len(names)} instruments failed. {' '.join(failures)}")

    def _open_run(self, device: str) -> StoredRun:
        from glocal.lens.record import open_run
        from glocal.sweeps.resolve import choose_device

        parts = {name: getattr(self, name) for name in ("challenge", "network", "algorithm", "optimizer")}
        return open_run(self.subject, data=self.data, init=self.init, device=choose_device(device), **parts)

    def _trace(self) -> TrainingTrace:
        from torch import nn

        from glocal.lens.checkpoints import trace_checkpoints
        from glocal.sweeps import resolve, user_code

        if not user_code.is_file_spec(self.subject):
            return self._open_run(self.device).trace(self.examples)
        for name in ("challenge", "network", "algorithm", "optimizer", "init", "data"):
            message = f"--{name} is for a stored run; '{self.subject}' returns all that is measured."
            require(getattr(self, name) is None, message)
        device = resolve.choose_device(self.device)
        function, _ = user_code.load_object(self.subject, "function", with_neighbours=True)
        returned = "(module, loss, tasks, checkpoints)"
        require(callable(function), f"'{self.subject}' is not a function. Give one that returns {returned}.")
        parts = user_code.call_user_code(function, self.subject)
        if not isinstance(parts, tuple) or len(parts) != 4:
            raise GlocalError(f"'{self.subject}' must return {returned}; it returned a {type(parts).__name__}.")
        module, loss, tasks, checkpoints = parts
        if isinstance(module, nn.Module):
            module = module.to(device)
        return trace_checkpoints(module, loss, tasks, checkpoints, self.examples, complete=True)


def _notes(retraced: Retraced) -> Iterator[str]:
    """Yield one line each on the deviation from the stored run, the examples and the BatchNorm statistics."""
    if retraced.deviation < 1e-5:
        yield "The retraced run equals the stored one."
    else:
        share = f"by {100 * retraced.deviation:.2g} %" if retraced.deviation < 1 else "completely"
        yield f"The retraced run differs from the stored one: ‖θ_t − θ_0‖ {share}. {ROUNDING}"
    sizes = [len(data.y) for data in retraced.run.trace.tasks]
    if sizes != retraced.task_sizes:
        yield f"Losses use up to {max(sizes):,} of {max(retraced.task_sizes):,} examples per task; {SUBSET}"
    if retraced.run.model.has_batchnorm:
        yield "BatchNorm statistics: the algorithm's own approximation uses those of the snapshot, expansions θ_o's."


@command
class Locality:
    """Test whether algorithms are local or global (Definition 3.1).

    Many solutions θ_o of a task are trained from different initialisations and in different orders; everything else is
    the same. If the algorithm's approximation of the task's loss differs between solutions, it is local, otherwise
    global. All algorithms together take one to two minutes on two cores.
    For example: glocal locality; glocal locality er ewc path.py:Mine
    """

    algorithms: Positional[tuple[str, ...]] = ()
    """Names from `glocal list algorithms`, or path.py:Name for your own (default: all built-in algorithms)."""
    challenge: str | None = None
    """Challenge, or path.py:function, whose first task is trained (default: rotated-digits; split-digits if needed)."""
    setting: str | None = None
    """Setting of a split challenge: task or class (default: the challenge's)."""
    network: str = "mlp"
    """A name from `glocal list networks`, or path.py:function for your own."""
    lr: float = 0.1
    """Learning rate."""
    epochs: int = 3
    """Epochs. If more than one, each solution shuffles its first epoch differently."""
    solutions: int = 24
    """Number of solutions to compare."""
    examples: int = 500
    """Maximum number of training examples."""
    seed: int = 0
    """Base seed. Solution i uses seed + 1 + i for its initialisation and first epoch."""
    data: DataFolder = None
    device: Device = "auto"

    def __call__(self) -> None:
        from rich.text import Text

        from glocal.lens.local_or_global import locality
        from glocal.report.summary import format_range
        from glocal.sweeps import resolve

        device, pairs = resolve.choose_device(self.device), self._pairs()
        for _, challenge in pairs:
            resolve.network(self.network, challenge)
        options = {name: getattr(self, name) for name in ("network", "lr", "epochs", "solutions", "examples", "seed")}
        verdicts, names, failures = [], [], []
        with progress_bar("locality") as report:
            for number, (algorithm, challenge) in enumerate(pairs):
                name = resolve.name_of(algorithm)
                report(number, len(pairs), name)
                try:
                    verdicts.append(locality(algorithm, challenge, **options, device=device))
                    names.append(challenge.name)
                except GlocalError as error:
                    failures.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
        if verdicts:
            rows = [
                {
                    "algorithm": v.algorithm,
                    "declared": v.declared,
                    "found": Text(v.found, "green") if v.agrees else Text(f"{v.found} ≠", "bold red"),
                    "explained": f"{100 * v.first_order_index:.1f} %",
                    "involved": f"{100 * v.total_index:.1f} %",
                    "nats": f"{v.information:.2f}",
                    "p": f"{v.p_value:.3f}",
                }
                for v in verdicts
            ]
            print_rendered(rich_table("Does L̂_o depend on θ_o?", rows, right=list(rows[0])[3:]))
            others = [f" ({v.algorithm} on {n})" for v, n in zip(verdicts, names, strict=True) if n != names[0]]
            print(
                f"The test agrees with the declared locality for {sum(v.agrees for v in verdicts)} of {len(verdicts)} "
                f"algorithms; {format_range([len(v.values) for v in verdicts], 'solution')} each of the first task of "
                f"{names[0]}{''.join(others)}. {sum(v.num_diverged for v in verdicts)} runs diverged and were left out."
            )
            print(EXPLANATION)
        if failures:
            count = f"{len(failures)} of {len(pairs)} failed. " if len(pairs) > 1 else ""
            raise GlocalError(count + " ".join(failures))

    def _pairs(self) -> list[tuple[Algorithm, Challenge]]:
        """Return every algorithm with its challenge; raise before training if one is invalid."""
        from glocal.algorithms import ALGORITHMS
        from glocal.sweeps import resolve

        if self.challenge is None and self.setting is not None:
            raise GlocalError("--setting requires --challenge with a split challenge, e.g. --challenge split-digits.")
        names = (self.challenge,) if self.challenge else DEFAULT_CHALLENGES
        challenges = [resolve.challenge(name, data=self.data, setting=self.setting).value for name in names]
        pairs = []
        for name in self.algorithms or ALGORITHMS:
            algorithm = resolve.algorithm(name).value
            challenge = next((c for c in challenges if c.setting in algorithm.settings), challenges[0])
            if self.algorithms:
                resolve.check_setting(algorithm, challenge)
            elif challenge.setting not in algorithm.settings:
                continue
            pairs.append((algorithm, challenge))
        return pairs
