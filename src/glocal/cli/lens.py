"""`glocal lens`: how local was a training?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glocal.cli.common import Name, Number, PathName
from glocal.errors import GlocalError, unknown

if TYPE_CHECKING:
    from glocal.lens.examination import Examination

Target = Annotated[str, tyro.conf.arg(metavar="TARGET"), tyro.conf.Positional]


@dataclass(frozen=True)
class Lens:
    """Look at a training: how far it went, how far old losses are told by their expansions, what it forgot and why.

    TARGET is path.py:function, your function that returns (module, loss, tasks, checkpoints): the network, its loss (a
    name or a function), for every task its (x, y) or DataLoader, and state dicts θ_0, θ_1, …; or STORE/runs/HASH, a run
    that was trained with --keep-parameters. It ends with a recommendation: a family of algorithms, and the reason.
    For example: glocal lens examples/checkpoints.py:make_subject -o lens.png
    """

    target: Target
    """path.py:function or STORE/runs/HASH."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("lens.png")
    """The figure to write: .png, .pdf or .svg."""
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

        from glocal.report.examination import SUFFIXES

        if self.output.suffix.lower() not in SUFFIXES:
            raise unknown("suffix of a figure", self.output.suffix or self.output.name, SUFFIXES)
        with Console(stderr=True).status("Looking …"):
            found = self._found()
        written = found.plot(self.output)
        console = Console()
        console.print(table(found))
        console.print(str(found.advice), highlight=False)
        console.print(f"Wrote {written}")

    def _found(self) -> Examination:
        from glocal import plugins
        from glocal.laboratory import choose_device
        from glocal.lens.examination import examine, of_subject
        from glocal.lens.stored import of_stored_run

        device = choose_device(self.device)
        if not plugins.is_file_spec(self.target):
            own = {"challenge": self.challenge, "network": self.network, "algorithm": self.algorithm}
            run = of_stored_run(self.target, data=self.data, examples=self.examples, device=device, **own)
            return of_subject(run, self.epsilon, self.eigenvalues, self.seed)
        make, _ = plugins.load(self.target, "function")
        if not callable(make):
            raise GlocalError(f"'{self.target}' is no function. Give one that returns {_RETURNED}.")
        made = plugins.call(make, self.target)
        if not isinstance(made, tuple) or len(made) != 4:
            raise GlocalError(f"'{self.target}' must return {_RETURNED}; it returned a {type(made).__name__}.")
        module, loss, tasks, checkpoints = made
        _check(self.target, module)
        how: dict[str, Any] = {"examples": self.examples, "eigenvalues": self.eigenvalues, "seed": self.seed}
        return examine(module.to(device), loss, tasks, checkpoints, self.epsilon, **how)


_RETURNED = "(module, loss, tasks, checkpoints)"


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
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("forgetting\n(predicted)", justify="right", no_wrap=True)
    made.add_column("inside", no_wrap=True)
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
