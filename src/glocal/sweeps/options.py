"""The options of a sweep, in one place: keywords of `glocal.sweep`, flags of the command line, fields of a sweep file.

This module imports neither torch nor a command-line library, so that `glocal --help` is quick.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from glocal.errors import GlocalError, require, require_known, unknown

OPTIMIZER_OPTIONS = (
    "momentum",
    "nesterov",
    "beta1",
    "beta2",
    "betas",
    "eps",
    "weight_decay",
    "clip",
    "schedule",
    "warmup",
)
"""Options of the optimizer that users may give to the sweep by mistake."""
MAX_RUNS = 100_000


KEPT = ("parameters", "state")
"""What a run may keep: there is an option keep_NAME for each."""


TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")


REQUIRED_ON = {"time": "slurm", "partition": "slurm", "slurm": "slurm", "address": "ray"}
"""Options that are valid for one value of `on` only."""


UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How the runs are trained, measured and stored."""

    network: str | Callable[..., Any] = "mlp"
    """Name from `glocal list networks`, or path.py:function for your own: (input_shape, outputs) -> nn.Module."""
    init: str | Path | None = None
    """Safetensors file with the parameters and buffers that networks start from: all of them, or some."""
    setting: Literal["task", "class", "domain"] | None = None
    """Setting in which a split challenge is reported: task or class. The challenge sets the default."""
    tasks: int | None = None
    """Train on the first N tasks only."""
    validation: float | None = None
    """Share of each task's training data, such as 0.1, that is held out: the best learning rate is chosen on it."""
    evaluate: Literal["all", "seen"] = "all"
    """Measure class-incremental accuracy among all classes, or among those seen so far, as with a head that grows."""
    epochs: int | None = None
    """Passes over each task. The challenge sets the default."""
    patience: int | None = None
    """Early stopping: end a task after N epochs without a lower validation loss, and return to the best epoch."""
    batch_size: int | None = None
    """Examples per batch. The challenge sets the default."""
    train_eval: int = 2_000
    """Measure training loss and accuracy on at most N examples of each task."""
    store: str | Path = "runs"
    """Folder in which runs are stored."""
    data: str | Path | None = None
    """Folder to search first for data sets."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; all: a process for every GPU."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of matrix products and convolutions. bf16 is fast on GPUs and slow on CPUs."""
    keep_parameters: bool = False
    """Store the parameters after every task, as `glocal lens` needs them."""
    keep_state: bool = False
    """Store all that a run needs to go on with more tasks later (--after): parameters, memory, optimizer state."""
    after: str | Path | None = None
    """Store of runs trained on the first tasks with --keep-state: train the other tasks from their last state."""
    horizon: int | None = None
    """Number of all tasks, if runs will be continued with --after: it divides memories and extends schedules."""
    execution: Literal["auto", "vectorised", "sequential"] = "auto"
    """How a cohort of runs is executed. auto takes the fastest way that works."""
    memory_budget: int | None = None
    """Bytes of memory that a cohort may use. The default is most of what is free on the device or in the cgroup."""
    cohort_size: int | None = None
    """Train at most N runs together."""
    workers: int | None = None
    """Train in N processes, here or by `glocal work`: cohorts are cut so that each has something to train."""
    on: Literal["here", "slurm", "ray"] = "here"
    """Train on this machine, submit the workers as an array job to Slurm and return at once, or train on Ray."""
    time: str | None = None
    """Time limit of a Slurm job, such as 4h. Jobs are requeued until all runs are trained."""
    gpus: int = 1
    """GPUs of a Slurm job: 0 or 1. Give more workers for more GPUs."""
    partition: str | None = None
    """Partition of Slurm."""
    slurm: str | None = None
    """More options of sbatch, such as account=mine,mem=32G."""
    address: str | None = None
    """Ray cluster, as host:port; auto is the one that runs on this machine. By default that one, or else a new one."""
    monitor: float | None = None
    """An ε: report when training leaves the ε-region of an old task, where local approximations hold."""
    monitor_by: Literal["diagonal", "kronecker", "own"] | None = None
    """Approximation to monitor: diagonal (default) or kronecker Taylor expansions, or own, the algorithm's own."""
    monitor_every: int | None = None
    """Monitor after every N-th epoch. By default rarely enough to add less than 5 % to training time."""
    track: str | None = None
    """Log runs after every task: tensorboard[:FOLDER], mlflow[:URI], wandb[:PROJECT] or trackio[:PROJECT]."""

    def __post_init__(self) -> None:
        hints = get_type_hints(SweepOptions)
        for field in fields(SweepOptions):
            if field.name == "network":  # checked where it is resolved
                continue
            value = convert(field.name, hints[field.name], getattr(self, field.name))
            if field.name == "gpus":
                require(
                    value in (0, 1), f"gpus = {value} was given; a job has 0 or 1. Give more workers for more GPUs."
                )
            elif type(value) in (int, float):
                require(value > 0, f"{field.name} = {value} was given; it must be positive.")
            object.__setattr__(self, field.name, value)
        for name in ("monitor_by", "monitor_every"):
            value = getattr(self, name)
            require(value is None or self.monitor is not None, f"{name}={value!r} needs an ε: set monitor too.")
        message = "monitor and patience were given: the monitor needs every epoch of a task. Leave one of them out."
        require(self.monitor is None or self.patience is None, message)
        for name, on in REQUIRED_ON.items():
            value = getattr(self, name)
            require(value is None or self.on == on, f"{name} = '{value}' was given; it needs on = '{on}'.")
        if self.track is not None:
            check_tracker(self.track)
        message = f"device = '{self.device}' was given; Ray chooses GPUs itself: give auto or cpu."
        require(self.on != "ray" or self.device in ("auto", "all", "cpu"), message)

    @property
    def kept(self) -> frozenset[str]:
        """The files that a finished run must have, besides those that all have."""
        return frozenset(name for name in KEPT if getattr(self, f"keep_{name}"))


def check_tracker(to: str) -> tuple[str, str]:
    """Return the name of a tracker and where it logs to, '' by default, from NAME or NAME:WHERE."""
    name, _, destination = to.partition(":")
    require_known("tracker", name, TRACKERS)
    return name, destination


def parse_time(text: str) -> float:
    """Return the seconds of a time such as 3h50m."""
    parts = re.findall(r"(\d+)([dhms])", text)
    valid = "".join(number + unit for number, unit in parts) == text and 0 < len(text) < 20
    require(valid, f"time = '{text}' was given; write days, hours, minutes and seconds as in 1d, 3h50m or 90s.")
    return float(sum(int(number) * UNITS[unit] for number, unit in parts))


def format_time(seconds: float) -> str:
    """Return a time as people write it: 0.3 s, 45 s, 12 min, 3 h 50 min, 2 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 1:
        return f"{seconds:.1g} s"
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def parse_range(value: object) -> tuple[str, str] | None:
    """Return the ends of a range such as '1e-4..1', or None if the value is no range."""
    low, dots, high = str(value).partition("..")
    try:
        finite = bool(dots) and math.isfinite(float(low)) and math.isfinite(float(high))
    except ValueError:
        return None
    return (low, high) if finite else None


def require_option(kind: str, name: str, allowed: list[str]) -> None:
    """Raise unless an option is allowed."""
    advice = (
        f'{name} is an option of the optimizer: optimizer=("sgd", {{"{name}": ...}}), --optimizer-options {name}=..., '
        f'or in a file optimizer = {{name = "sgd", {name} = ...}}.'
    )
    require(name not in OPTIMIZER_OPTIONS, advice)
    require_known(kind, name, allowed)


def require_count(runs: int) -> None:
    """Raise if a sweep has too many runs to be held in memory."""
    require(runs <= MAX_RUNS, f"a sweep of {runs:,} runs was asked for; at most {MAX_RUNS:,} are allowed: divide it.")


def convert(name: str, hint: Any, value: Any) -> Any:
    """Convert the value of an option, or its text from the command line, to the option's type.

    Args:
        name: the option's name, for error messages.
        hint: bool, int, float, str, a Literal, an optional one of these, or a class to call with the value.
        value: the value to convert.
    """
    if hint is Any:
        return value
    allowed = get_args(hint)
    if get_origin(hint) is Literal:
        if not isinstance(value, str | int) or value not in allowed:
            raise unknown(name, value, [str(a) for a in allowed])
        return value
    if get_origin(hint) in (Union, types.UnionType):
        optional = types.NoneType in allowed and (value is None or (isinstance(value, str) and value.lower() == "none"))
        return None if optional else convert(name, allowed[0], value)
    try:
        if hint is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if hint is int:
            number = int(str(value))
            require(
                abs(number) < 2**63, f"{name} was given a number of {len(str(value))} digits; it must be below 2^63."
            )
            return number
        if hint is float and (isinstance(value, bool) or not math.isfinite(float(value))):
            raise ValueError
        if hint is str and not isinstance(value, str | Path):
            raise TypeError
        return hint(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        kinds = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}
        several = ""
        if hint in (int, float) and isinstance(value, str) and "," in value:
            several = " Give several as a list." if "." in name else " Separate several with spaces."
        raise GlocalError(f"{name} = {value!r} was given; it must be {kinds.get(hint, hint)}.{several}") from None
