"""`glocal sweep`: many runs at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from glocal.cli.common import (
    Count,
    Flag,
    Integers,
    Name,
    Names,
    Number,
    Numbers,
    PathName,
    Texts,
    combinations,
    parse_options,
    short_name,
    with_options,
)
from glocal.errors import GlocalError

DEFAULTS: dict[str, Any] = {
    "lrs": (0.001, 0.01, 0.1),
    "seeds": (11, 13, 33),
    "network": "mlp",
    "store": Path("runs"),
    "device": "auto",
    "precision": "fp32",
}
SWEEP_FIELDS = (
    *("challenge", "lrs", "seeds", "network", "setting", "tasks", "epochs", "batch_size", "train_eval"),
    *("store", "data", "device", "precision", "keep_parameters", "monitor", "monitor_by", "monitor_every"),
)


@dataclass(frozen=True)
class Sweep:
    """Train every algorithm at every learning rate with every seed, and show the table.

    Runs that differ in seed, learning rate and scalar options train together. Run the command again to go on where it
    stopped: finished runs are not repeated.
    For example: glocal sweep rotated-digits --algorithms er ewc --lrs 0.01 0.1 --seeds 11 13 --options ewc.penalty=1,10
    """

    challenge: Annotated[Name, tyro.conf.arg(metavar="CHALLENGE"), tyro.conf.Positional] = None
    """A name from `glocal list challenges`, or path.py:function for your own."""
    file: PathName = None
    """A TOML file with the fields below (and algorithms as a list of names or of tables); flags given here win."""
    algorithms: Names = ()
    """Names from `glocal list algorithms`, or path.py:Name for your own."""
    lrs: Numbers = ()
    """Learning rates (0.001 0.01 0.1 unless given)."""
    seeds: Integers = ()
    """Seeds (11 13 33 unless given)."""
    options: Texts = ()
    """Options as ALGORITHM.NAME=VALUE; several values, separated by commas, are all tried."""
    network: Name = None
    """A name from `glocal list networks`, or path.py:function for your own (mlp unless given)."""
    setting: Name = None
    """task or class: which accuracy of a split challenge is reported; the challenge's own unless given."""
    tasks: Count = None
    """Stop after so many tasks."""
    epochs: Count = None
    """Passes over each task; the challenge's own number unless given."""
    batch_size: Count = None
    """Examples in a batch; the challenge's own number unless given."""
    train_eval: Count = None
    """Measure training loss and accuracy on at most so many examples of each task (2000 unless given)."""
    store: PathName = None
    """Where runs are kept (runs unless given)."""
    data: PathName = None
    """A folder with data sets, looked at first."""
    device: Name = None
    """auto, cpu, cuda or cuda:N (auto unless given)."""
    precision: Name = None
    """fp32, tf32 or bf16: how exactly the network multiplies (fp32 unless given)."""
    keep_parameters: Flag = False
    """Keep the parameters after every task."""
    monitor: Number = None
    """An ε: watch for where training leaves an old task's ε-region; runs keep what was seen."""
    monitor_by: Name = None
    """Whose region: diagonal or kronecker expansions, or own, the algorithm's own approximation."""
    monitor_every: Count = None
    """Look after every N-th epoch (so seldom that it costs little, unless given)."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.report.progress import Bars
        from glocal.report.table import render, rows
        from glocal.sweeps.sweep import sweep

        wanted = self._resolved()
        algorithms = wanted.pop("algorithms")
        if wanted.get("challenge") is None:
            raise GlocalError("a sweep needs a challenge: `glocal sweep rotated-digits ...`, or one in its --file.")
        if not algorithms:
            raise GlocalError("a sweep needs algorithms: --algorithms er ewc ..., or some in its --file.")
        challenge, lrs, seeds = (wanted.pop(k) for k in ("challenge", "lrs", "seeds"))
        runs = sweep(challenge, algorithms, lrs, seeds, progress=Bars(), **wanted)
        Console().print(render(rows(runs), "rich"))
        before = [run for run in runs if not any("monitored" in note for note in run.info["notes"])]
        if wanted.get("monitor") is not None and before:
            Console().print(
                f"Note: {len(before)} runs were in the store already, and not monitored; give another --store"
            )

    def _resolved(self) -> dict[str, Any]:
        """The file's fields, overridden by the flags, then the defaults."""
        from_file = _read(self.file) if self.file else {}
        given = {name: getattr(self, name) for name in SWEEP_FIELDS}
        flags = {k: v for k, v in given.items() if v is not None and v is not False and v != ()}
        wanted = {**DEFAULTS, **from_file, **flags}
        if self.algorithms:
            wanted["algorithms"] = with_options(self.algorithms, parse_options(self.options, self.algorithms))
        else:
            listed = [_table(a) for a in from_file.get("algorithms", [])]
            options = parse_options(self.options, [name for name, _ in listed]) if self.options else {}
            merged = [(name, {**own, **options.get(short_name(name), {})}) for name, own in listed]
            wanted["algorithms"] = [(name, choice) for name, own in merged for choice in combinations(own)]
        return wanted


def _table(entry: str | dict[str, Any]) -> tuple[str, dict[str, list[Any]]]:
    """An algorithm in a TOML file: its name, or a table with its name and its options, each one value or a list."""
    if isinstance(entry, str):
        return entry, {}
    if not isinstance(entry.get("name"), str):
        raise GlocalError(f"an algorithm in a sweep file needs a name; {entry} has none.")
    options = {k: v if isinstance(v, list) else [v] for k, v in entry.items() if k != "name"}
    for option, values in options.items():
        if not values:
            raise GlocalError(f"{entry['name']}.{option} in the sweep file has no values to try.")
    return entry["name"], options


def _read(path: Path) -> dict[str, Any]:
    import msgspec

    class SweepFile(msgspec.Struct, forbid_unknown_fields=True):
        challenge: str | None = None
        algorithms: list[str | dict[str, Any]] = []
        lrs: list[float] | None = None
        seeds: list[int] | None = None
        network: Name = None
        setting: Name = None
        tasks: Count = None
        epochs: Count = None
        batch_size: int | None = None
        train_eval: int | None = None
        store: str | None = None
        data: str | None = None
        device: Name = None
        precision: Name = None
        keep_parameters: bool | None = None
        monitor: float | None = None
        monitor_by: Name = None
        monitor_every: Count = None

    try:
        text = path.read_bytes()
    except OSError as error:
        raise GlocalError(f"the sweep file '{path}' cannot be read: {error.strerror}.") from error
    try:
        decoded = msgspec.toml.decode(text, type=SweepFile)
    except msgspec.ValidationError as error:
        allowed = ", ".join(SweepFile.__struct_fields__)
        raise GlocalError(f"the sweep file '{path}': {error}. Fields it may have: {allowed}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GlocalError(f"the sweep file '{path}' is not TOML: {error}.") from error
    return {k: v for k, v in msgspec.to_builtins(decoded).items() if v is not None}
