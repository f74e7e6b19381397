"""Table 1 of the paper, from runs to files: what `glocal paper table1` and `python -m glocal.paper.table1` both do.

It needs torch, numpy and safetensors, and takes rich, matplotlib and polars or pyarrow where they are installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glocal.errors import GlocalError, unknown
from glocal.metrics import Over
from glocal.paper import results
from glocal.paper.comparison import Comparison, angles_of, compare, relabel
from glocal.paper.selection import Selection, selected, train
from glocal.paper.table1 import ANGLES, COLUMNS, DEMO, Angles, chosen, column
from glocal.precision import PRECISIONS
from glocal.store.run import Run, Runs
from glocal.sweeps.training import NullProgress, ProgressReporter


@dataclass(frozen=True)
class Job:
    """Which part of the table, from which runs."""

    challenge: Sequence[str] = ()
    algorithms: Sequence[str] = ()
    lrs: Sequence[float] = ()
    seeds: Sequence[int] = ()
    tasks: int | None = None
    epochs: int | None = None
    angles: Angles | None = None
    precision: str | None = None
    further: bool = False
    demo: bool = False
    store: Path = Path("runs-paper")
    data: Path | None = None
    device: str = "auto"
    out: Path | None = None
    results: Sequence[Path] = ()

    def selections(self) -> list[Selection]:
        if self.demo and self.challenge:
            raise GlocalError("--demo has a challenge of its own, rotated-digits: leave --challenge out.")
        columns = [DEMO] if self.demo else [column(name) for name in self.challenge or ("rotated-mnist",)]
        return selected(
            columns,
            lambda column: chosen(column, self.algorithms, self.further),
            self.lrs,
            self.seeds,
            self.tasks,
            self.epochs,
            self.angles or "published",
            self.precision,
        )

    def runs(self) -> Runs:
        """The runs, trained where the store misses them, or read from files of results.

        What is finished is added to the results in `out` after every row: an interrupted job leaves a file of all it
        did, and of what was there before.
        """
        if self.results:
            return self._read()
        if self.out is not None:
            _folder(self.out)
            if _kept(self.out).exists():
                results.read(_kept(self.out))  # complains before hours of training
        runs: list[Runs] = []
        progress = bars()

        def note(more: Runs) -> None:
            if self.out is not None:
                results.add(more, _kept(self.out))

        for selection in self.selections():
            more = train(
                selection, store=self.store, data=self.data, device=self.device, progress=progress, finished=note
            )
            runs.append(more)
        return Runs([results.named(run) for part in runs for run in part])

    def _read(self) -> Runs:
        """Of results that are read those that are asked for, all of them where nothing is; none is a mistake."""
        runs = results.read(*self.results)
        own = (DEMO.challenge,) if self.demo else ()
        asked: dict[str, tuple[Sequence[object], Callable[[Run], object]]] = {
            "challenge": ((*self.challenge, *own), lambda run: run.challenge),
            "algorithm": (self.algorithms, lambda run: run.config["algorithm"]["name"]),
            "lr": (self.lrs, lambda run: run.lr),
            "seed": (self.seeds, lambda run: run.seed),
            "tasks": (_one(self.tasks), lambda run: run.tasks),
            "epochs": (_one(self.epochs), lambda run: run.config["epochs"]),
            "angles": (
                _one(self.angles),
                lambda run: angles_of(run) if run.challenge.startswith("rotated-") else self.angles,
            ),
            "precision": (_one(self.precision), lambda run: run.config["precision"]),
        }
        for kind, (wanted, of) in asked.items():
            held = {of(run) for run in runs}
            for name in wanted:
                if name not in held:
                    raise unknown(f"{kind} in these results:", name, map(str, held))
        found = runs.where(lambda run: all(not wanted or of(run) in wanted for wanted, of in asked.values()))
        if not found:
            named = (f"{kind} {' '.join(map(str, wanted))}" for kind, (wanted, _) in asked.items() if wanted)
            raise GlocalError(f"of the {len(runs)} runs in these results none has {', '.join(named)}.")
        return found


def _one(given: object) -> list[object]:
    return [] if given is None else [given]


def _kept(out: Path) -> Path:
    """The file of results in a folder."""
    return out / f"results{results.suffix()}"


def _folder(path: Path) -> None:
    """Complain before hours of training, not after."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GlocalError(f"cannot make the folder '{path}': {error.strerror or error}.") from error


def bars() -> ProgressReporter:
    """Bars on a terminal and lines elsewhere, where rich is installed."""
    try:
        from glocal.report.progress import Bars
    except ImportError:
        return NullProgress()
    return Bars()


def publish(runs: Runs, made: Comparison, out: Path) -> list[Path]:
    """The results, beside those that are there, the table in every format and the figures, as files; one task has
    nothing to forget."""
    from glocal.paper.comparison import write_tables

    paths = [results.add(runs, _kept(out)), *write_tables(made, out)]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return paths
    kinds = ("distance", "forgetting") if any(run.tasks > 1 for run in runs) else ("distance",)
    return [*paths, *(relabel(runs).plot(kind, out / f"{kind}.png") for kind in kinds)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without the command line's libraries."""
    parser = argparse.ArgumentParser(
        prog="python -m glocal.paper.table1",
        description="Table 1 of the paper beside its published numbers. Run it again to go on where it stopped.",
    )
    parser.add_argument("--challenge", nargs="+", default=(), help=f"any of {', '.join(COLUMNS)} (the first)")
    parser.add_argument("--algorithms", nargs="+", default=(), help="rows of the table (all standard ones)")
    parser.add_argument("--lrs", nargs="+", type=float, default=(), help="learning rates (the published ones)")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), help="seeds (11 13 33 21 55)")
    parser.add_argument("--tasks", type=int, help="stop after so many tasks")
    parser.add_argument("--epochs", type=int, help="passes over each task (as published)")
    parser.add_argument("--angles", choices=ANGLES, help="published, or from the seed alone (published)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="how exactly the network multiplies (fp32; on a GPU bf16 for ResNet-18)"
    )
    parser.add_argument("--further", action="store_true", help="with the rows that the paper does not have")
    parser.add_argument("--demo", action="store_true", help="a small table on the embedded digits")
    parser.add_argument("--forgetting", choices=("t-1", "t"), default="t-1", help="averaged over so many tasks")
    parser.add_argument("--store", type=Path, default=Path("runs-paper"), help="where runs are kept")
    parser.add_argument("--data", type=Path, help="a folder with data sets")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, help="a folder for results, tables and figures")
    parser.add_argument("--results", nargs="+", type=Path, default=(), help="files of results: nothing is trained")
    options = vars(parser.parse_args(arguments))
    forgetting: Over = options.pop("forgetting")
    try:
        job = Job(**options)
        runs = job.runs()
        made = compare(runs, forgetting)
        show(made)
        if job.out is not None:
            print("Wrote", ", ".join(map(str, publish(runs, made, job.out))))
    except GlocalError as error:
        print(f"glocal: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("glocal: stopped. Run the same command again to go on.", file=sys.stderr)
        return 130
    return 0


def show(made: Comparison, format: str = "rich") -> None:
    from glocal.paper.comparison import render

    if format == "rich":
        try:
            from rich.console import Console
        except ImportError:
            format = "markdown"
        else:
            Console().print(render(made, "rich"))
            return
    print(str(render(made, format)).rstrip())
