"""`glocal run` and `glocal sweep`: train one run, or many at a time."""

from __future__ import annotations

import gc
import itertools
import math
import tomllib
from collections.abc import Iterable
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from glocal.cli.common import TrainingOptions, command, print_rendered
from glocal.errors import GlocalError, require, require_known
from glocal.sweeps.options import convert, parse_range, require_count, require_option

if TYPE_CHECKING:
    from glocal.store.run import Runs

Rates = Annotated[tuple[float | str, ...], tyro.conf.arg(metavar="FLOAT|LOW..HIGH ...")]
Options = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...")]
OptionValues = dict[str, list[Any]]


SAMPLER_OPTIONS = ("trials", "parallel", "protocol")


@command
class Run:
    """Train one run and show its accuracy, or its loss without classes, on every task after every task.

    For example: glocal run rotated-digits ewc --lr 0.1 --seed 11 --options penalty=10 fisher=exact
    """

    challenge: Positional[str]
    """Name from `glocal list challenges`, or path.py:function for your own."""
    algorithm: Positional[str]
    """Name from `glocal list algorithms`, or path.py:Name for your own."""
    lr: float = 0.1
    """Learning rate."""
    seed: int = 11
    """Seed of the initialisation, the order of the data and all other random draws."""
    options: Options = ()
    """Options of the algorithm as NAME=VALUE."""
    optimizer: str = "sgd"
    """sgd, adam or adamw, or path.py:Name for your own."""
    optimizer_options: Options = ()
    """Options of the optimizer as NAME=VALUE; `glocal list optimizers` describes them."""
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __call__(self) -> None:
        from glocal.report.summary import matrix_table

        one: dict[str, Any] = {"algorithms": (self.algorithm,), "lrs": (self.lr,), "seeds": (self.seed,)}
        one |= {"optimizer": (self.optimizer,), "optimizer_options": self.optimizer_options}
        for run in Sweep(challenge=self.challenge, **one, options=self.options, training=self.training).train():
            print_rendered(matrix_table(run))
            for note in run.info["notes"]:
                print(f"Note: {note}")
            print(f"Stored in {run.path}")


@command
class SweepFile:
    """Where a sweep is described."""

    file: Path | None = None
    """TOML file with challenge, algorithms, optimizer, lrs, seeds and the training options below as fields.

    Options of an algorithm stand in its table, {name = "ewc", penalty = 10}. Flags override the file.
    """


@command
class Sweep(SweepFile):
    """Train every algorithm at every learning rate with every seed, and show the table.

    Runs that differ in seed, learning rate and scalar options train together. Run the command again to resume an
    interrupted sweep: finished runs are not repeated.

    For example: glocal sweep rotated-digits --algorithms er ewc --lrs 0.01 0.1 --seeds 11 13 --options ewc.penalty=1,10
    """

    challenge: Positional[str | None] = None
    """Name from `glocal list challenges`, or path.py:function for your own."""
    algorithms: tuple[str, ...] = ()
    """Names from `glocal list algorithms`, or path.py:Name for your own."""
    lrs: Rates = (0.001, 0.01, 0.1)
    """Learning rates; with a sampler also one range, such as 1e-4..1."""
    seeds: tuple[int, ...] = (11, 13, 33)
    """Seeds."""
    options: Options = ()
    """Options as ALGORITHM.NAME=VALUE, or VALUE,VALUE to train all. A sampler also takes ranges, such as 0.1..1000."""
    optimizer: tuple[str, ...] = ()
    """sgd (default), adam, adamw, or path.py:Name for your own; several are all trained."""
    optimizer_options: Options = ()
    """Options of the optimizer, as NAME=VALUE or OPTIMIZER.NAME=VALUE, with one or several values."""
    sampler: Literal["tpe", "random"] | None = None
    """Instead of the full grid, train what Optuna samples from the values and ranges of --lrs and --options."""
    trials: int | None = None
    """Configurations of each algorithm that a sampler proposes."""
    parallel: int | None = None
    """Configurations that a sampler proposes at a time, and that train together (8 if not given)."""
    protocol: str | None = None
    """What a sampler maximises: first-task, first-k=K, per-task, all-validation (if not given) or oracle-test."""
    plan: bool = False
    """Train nothing: write the sweep into the store, for `glocal work` on this and other machines."""
    training: TrainingOptions = field(default_factory=TrainingOptions)

    @classmethod
    def from_file(cls, path: Path) -> Sweep:
        """Return the sweep that a TOML file describes; its algorithms and optimizer are read when the sweep starts."""
        content = _read(path)
        for name in ("algorithms", "optimizer"):
            content.pop(name, None)
        arguments: dict[str, Any] = {}
        try:
            if "challenge" in content:
                arguments["challenge"] = convert("challenge", str, content.pop("challenge"))
            for name, kind in (("lrs", float), ("seeds", int)):
                if name in content:
                    values = content.pop(name)
                    arguments[name] = tuple(v if parse_range(v) else convert(name, kind, v) for v in values)
            return cls(file=path, training=TrainingOptions(**content), **arguments)
        except GlocalError as error:
            raise GlocalError(f"the sweep file '{path}': {error}") from error

    def __call__(self) -> None:
        from glocal.report.summary import format_range, render

        if self.sampler is not None:
            self.sample()
            return
        for name in SAMPLER_OPTIONS:
            given = getattr(self, name) is not None
            require(not given, f"--{name} needs a sampler: add --sampler tpe or --sampler random.")
        if not self.plan:
            runs = self.train()
            if self.training.on != "slurm":
                print_rendered(render(runs, "rich"))
            return
        from glocal.sweeps.plan import write_plan

        message = f"--on {self.training.on} trains now, and --plan only writes the sweep: leave one of them out."
        require(self.training.on == "here", message)

        plan, _ = write_plan(**self.arguments() | {"device": "cpu"})  # workers choose their own
        flags = ["--code", *plan.code] if plan.code else []
        flags += ["--device", self.training.device] if self.training.device != "auto" else []
        flags += ["--track", self.training.track] if self.training.track is not None else []
        count = format_range([len(plan.runs)], "run")
        work = " ".join(["glocal work", str(self.training.store), *flags])
        print(f"Planned {count}: `{work}` trains what is missing.")

    def train(self) -> Runs:
        """Train every algorithm with every combination of its options' values."""
        from glocal.report.progress import Bars
        from glocal.sweeps.sweep import sweep

        gc.freeze()  # so that garbage collection does not search the imported modules
        runs = sweep(**self.arguments(), progress=Bars())
        count = sum(not any("monitored" in note for note in run.info["notes"]) for run in runs)
        if self.training.monitor is not None and count:
            print(f"Note: {count} runs were in the store already and were not monitored; use another --store")
        return runs

    def sample(self) -> None:
        """Train the configurations that a sampler proposes, and show which of them are chosen."""
        from glocal.report import choices
        from glocal.report.progress import Bars
        from glocal.selection import ORACLE
        from glocal.sweeps.sample import PROTOCOL, sample

        missing = "a sampler needs --trials, the number of configurations of each algorithm, and no --plan."
        if self.trials is None or self.plan or self.sampler is None:
            raise GlocalError(missing)
        settings = {name: getattr(self, name) for name in SAMPLER_OPTIONS}
        settings = {name: value for name, value in settings.items() if value is not None}
        runs = sample(**self.arguments(), **settings, sampler=self.sampler, progress=Bars())
        print_rendered(choices.render(runs, "rich", (self.protocol or PROTOCOL, ORACLE)))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `glocal.sweep`. With a sampler, every option has a list of its values."""
        if self.challenge is None:
            raise GlocalError("a sweep needs a challenge: `glocal sweep rotated-digits ...`, or one in its --file.")
        content = {} if self.file is None else _read(self.file)
        entries = list(self.algorithms) or content.get("algorithms", [])
        require(bool(entries), "a sweep needs algorithms: --algorithms er ewc ..., or some in its --file.")
        specs = list(self.optimizer) or content.get("optimizer", "sgd")
        algorithms = _spaces("algorithm", entries, self.options)
        optimizers = _spaces("optimizer", specs if isinstance(specs, list) else [specs], self.optimizer_options)
        if self.sampler is None:
            for value in (
                *self.lrs,
                *(v for _, options in algorithms + optimizers for values in options.values() for v in values),
            ):
                hint = "add --sampler tpe --trials N, or give values"
                require(parse_range(value) is None, f"'{value}' is a range, from which a sampler draws: {hint}.")
            algorithms, optimizers = _combinations(algorithms), _combinations(optimizers)
        arguments = {"challenge": self.challenge, "algorithms": algorithms, "optimizer": optimizers}
        return {**arguments, "lrs": self.lrs, "seeds": self.seeds, **vars(self.training)}


def _spaces(kind: str, entries: Iterable[Any], texts: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return algorithms or optimisers with a list of values for each of their options."""
    pairs = [_name_and_options(kind, entry) for entry in entries]
    options = parse_options(texts, [name for name, _ in pairs], kind)
    return [(name, {**values, **options.get(_short_name(name), {})}) for name, values in pairs]


def _combinations(spaces: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return algorithms or optimisers with every combination of their options' values."""
    choices: list[tuple[str, dict[str, Any]]] = []
    for name, values in spaces:
        require_count(len(choices) + math.prod(map(len, values.values())))
        combinations = itertools.product(*values.values())
        choices += [(name, dict(zip(values, choice, strict=True))) for choice in combinations]
    return choices


def parse_options(texts: Iterable[str], owners: Iterable[str], kind: str = "algorithm") -> dict[str, OptionValues]:
    """Parse 'ewc.penalty=1,10', or 'penalty=10' for a single owner of options, to {owner: {option: values}}."""
    owners = list(owners)
    names = [_short_name(owner) for owner in owners]
    options: dict[str, OptionValues] = {}
    for text in texts:
        target, _, values = text.partition("=")
        owner, dot, option = target.rpartition(".")
        if not option or not values:
            raise GlocalError(f"an option is written NAME=VALUE or {kind.upper()}.NAME=VALUE; '{text}' was given.")
        if not dot:
            require(len(names) == 1, f"with several {kind}s name the one of the option: {kind.upper()}.{text}.")
            owner = names[0]
        if owner not in names:
            owner = next((_short_name(other) for other in owners if owner in _class_names(other)), owner)
        require_known(f"{kind} with options:", owner, names)
        options.setdefault(owner, {})[option] = values.split(",")
    return options


def _short_name(algorithm: str) -> str:
    """Return 'ewc' for ewc, 'Mine' for path/to/file.py:Mine."""
    return algorithm.rpartition(":")[2]


def _class_names(algorithm: str) -> tuple[str, ...]:
    """Return the name of the class of path.py:Name and the `name` that it declares."""
    from glocal.sweeps import resolve, user_code

    if not user_code.is_file_spec(algorithm):
        return ()
    kind, _ = user_code.load_object(algorithm, "algorithm")
    return (kind.__name__, resolve.name_of(kind)) if isinstance(kind, type) else ()


def _name_and_options(kind: str, entry: str | dict[str, Any]) -> tuple[str, OptionValues]:
    """Return name and options of an entry of a sweep file: a name, or a table whose values may be lists."""
    if isinstance(entry, str):
        return entry, {}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise GlocalError(f"an {kind} in a sweep file needs a name; {entry!r} has none.")
    options = {k: v if isinstance(v, list) else [v] for k, v in entry.items() if k != "name"}
    for option, values in options.items():
        require(bool(values), f"{entry['name']}.{option} in the sweep file has no values to try.")
    return entry["name"], options


def _read(path: Path) -> dict[str, Any]:
    """Read a sweep file and check which fields it has."""
    from glocal.files import read_text, user_path

    try:
        content = tomllib.loads(read_text(user_path(path)))
    except OSError as error:
        raise GlocalError(f"the sweep file '{path}' cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise GlocalError(f"the sweep file '{path}' is not TOML: {error}.") from error
    allowed = [
        "challenge",
        "algorithms",
        "optimizer",
        "lrs",
        "seeds",
        *(option.name for option in fields(TrainingOptions)),
    ]
    for name in content:
        require_option(f"field of the sweep file '{path}':", name, allowed)
    for name in ("algorithms", "lrs", "seeds"):
        value = content.get(name, [])
        require(isinstance(value, list), f"the sweep file '{path}': {name} must be a list; {value!r} was given.")
    return content
