"""`glocal run` and `glocal sweep`: train one run, or many at a time."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glocal.cli.common import (
    AlgorithmName,
    ChallengeName,
    Names,
    PathName,
    Texts,
    TrainingOptions,
    combinations,
    parse_options,
    short_name,
)
from glocal.errors import GlocalError, require, require_known

if TYPE_CHECKING:
    from glocal.store.run import Run as StoredRun

Rates = Annotated[tuple[float, ...], tyro.conf.arg(metavar="LR ...")]
Seeds = Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED ...")]


@dataclass(frozen=True)
class Run:
    """Train one run and show its accuracy on every task after every task.

    For example: glocal run rotated-digits ewc --lr 0.1 --seed 11 --options penalty=10 fisher=exact
    """

    challenge: ChallengeName
    """Name from `glocal list challenges`, or path.py:function for your own."""
    algorithm: AlgorithmName
    """Name from `glocal list algorithms`, or path.py:Name for your own."""
    lr: float = 0.1
    """Learning rate."""
    seed: int = 11
    """Seed of the initialisation, the order of the data and all other random draws."""
    options: Texts = ()
    """Options of the algorithm as NAME=VALUE."""
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.report.progress import Bars
        from glocal.report.summary import matrix_table
        from glocal.sweeps.sweep import sweep

        options = parse_options(self.options, [self.algorithm]).get(short_name(self.algorithm), {})
        algorithms = [(self.algorithm, choice) for choice in combinations(options)]
        runs = sweep(self.challenge, algorithms, [self.lr], [self.seed], progress=Bars(), **self.training.as_dict())
        console = Console()
        for run in runs:
            console.print(matrix_table(run))
            for note in run.info["notes"]:
                console.print(f"Note: {note}")
            if self.training.monitor is not None and not _monitored(run):
                console.print("Note: the run was in the store already and was not monitored; use another --store")
            console.print(f"Stored in {run.path}")


@dataclass(frozen=True)
class Sweep:
    """Train every algorithm at every learning rate with every seed, and show the table.

    Runs that differ in seed, learning rate and scalar options train together. Run the command again to resume an
    interrupted sweep: finished runs are not repeated.

    For example: glocal sweep rotated-digits --algorithms er ewc --lrs 0.01 0.1 --seeds 11 13 --options ewc.penalty=1,10
    """

    challenge: Annotated[
        str | None, tyro.conf.arg(metavar="CHALLENGE", help_behavior_hint=""), tyro.conf.Positional
    ] = None
    """Name from `glocal list challenges`, or path.py:function for your own."""
    file: PathName = None
    """TOML file with the flags below as fields, and algorithms as a list of names or of tables. Flags override it."""
    algorithms: Names = ()
    """Names from `glocal list algorithms`, or path.py:Name for your own."""
    lrs: Rates = (0.001, 0.01, 0.1)
    """Learning rates."""
    seeds: Seeds = (11, 13, 33)
    """Seeds."""
    options: Texts = ()
    """Options as ALGORITHM.NAME=VALUE. Several values, separated by commas, are all trained."""
    training: TrainingOptions = field(default_factory=TrainingOptions)

    @classmethod
    def from_file(cls, path: Path) -> Sweep:
        """Return the sweep that a TOML file describes; its algorithms are read when the sweep starts."""
        content = _read(path)
        own = {name: content[name] for name in ("challenge", "lrs", "seeds") if name in content}
        options = {name: value for name, value in content.items() if name not in ("algorithms", *own)}
        try:
            training = TrainingOptions(**options)
        except GlocalError as error:
            raise GlocalError(f"the sweep file '{path}': {error}") from error
        return cls(file=path, training=training, **own)

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.report.progress import Bars
        from glocal.report.summary import render
        from glocal.sweeps.sweep import sweep

        if self.challenge is None:
            raise GlocalError("a sweep needs a challenge: `glocal sweep rotated-digits ...`, or one in its --file.")
        algorithms = self._algorithms()
        if not algorithms:
            raise GlocalError("a sweep needs algorithms: --algorithms er ewc ..., or some in its --file.")
        runs = sweep(self.challenge, algorithms, self.lrs, self.seeds, progress=Bars(), **self.training.as_dict())
        Console().print(render(runs, "rich"))
        unmonitored = [run for run in runs if not _monitored(run)]
        if self.training.monitor is not None and unmonitored:
            Console().print(
                f"Note: {len(unmonitored)} runs were in the store already and were not monitored; use another --store"
            )

    def _algorithms(self) -> list[tuple[str, dict[str, Any]]]:
        """Return every algorithm with every combination of its options' values."""
        entries: list[Any] = list(self.algorithms)
        if not entries and self.file is not None:
            entries = _read(self.file).get("algorithms", [])
        tables = [_algorithm_table(entry) for entry in entries]
        flags = parse_options(self.options, [name for name, _ in tables])
        return [
            (name, choice)
            for name, options in tables
            for choice in combinations({**options, **flags.get(short_name(name), {})})
        ]


def _monitored(run: StoredRun) -> bool:
    return any("monitored" in note for note in run.info["notes"])


def _algorithm_table(entry: str | dict[str, Any]) -> tuple[str, dict[str, list[Any]]]:
    """Return name and options of an algorithm in a sweep file: a name, or a table whose values may be lists."""
    if isinstance(entry, str):
        return entry, {}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise GlocalError(f"an algorithm in a sweep file needs a name; {entry} has none.")
    options = {k: v if isinstance(v, list) else [v] for k, v in entry.items() if k != "name"}
    for option, values in options.items():
        require(bool(values), f"{entry['name']}.{option} in the sweep file has no values to try.")
    return entry["name"], options


def _read(path: Path) -> dict[str, Any]:
    """Read a sweep file and check its fields; the training options check themselves."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GlocalError(f"the sweep file '{path}' cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GlocalError(f"the sweep file '{path}' is not TOML: {error}.") from error
    allowed = ["challenge", "algorithms", "lrs", "seeds", *(option.name for option in fields(TrainingOptions))]
    for name in content:
        require_known(f"field of the sweep file '{path}':", name, allowed)
    types: dict[str, tuple[str, type[Any], Any]] = {
        "challenge": ("a name", str, str),
        "algorithms": ("a list of names or tables", list, str | dict),
        "lrs": ("a list of numbers", list, int | float),
        "seeds": ("a list of whole numbers", list, int),
    }
    for name, (description, kind, item) in types.items():
        value: Any = content.get(name, kind())
        valid = isinstance(value, kind) and all(isinstance(v, item) and not isinstance(v, bool) for v in value)
        require(valid, f"the sweep file '{path}': {name} must be {description}; {value!r} was given.")
    return {k: tuple(v) if k in ("lrs", "seeds") else v for k, v in content.items()}
