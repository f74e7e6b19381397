"""The options of a sweep, in one place: keywords of `glocal.sweep`, flags of the command line, fields of a sweep file.

This module imports neither torch nor a command-line library, so that `glocal --help` is quick.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from glocal.errors import GlocalError, require, unknown


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How the runs are trained, measured and stored."""

    network: str | Callable[..., Any] = "mlp"
    """Name from `glocal list networks`, or path.py:function for your own: (input_shape, outputs) -> nn.Module."""
    setting: Literal["task", "class", "domain"] | None = None
    """Setting in which a split challenge is reported: task or class. The challenge sets the default."""
    tasks: int | None = None
    """Train on the first N tasks only."""
    epochs: int | None = None
    """Passes over each task. The challenge sets the default."""
    batch_size: int | None = None
    """Examples per batch. The challenge sets the default."""
    train_eval: int = 2_000
    """Measure training loss and accuracy on at most N examples of each task."""
    store: str | Path = "runs"
    """Folder in which runs are stored."""
    data: str | Path | None = None
    """Folder to search first for data sets."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of matrix products and convolutions. bf16 is fast on GPUs and slow on CPUs."""
    keep_parameters: bool = False
    """Store the parameters after every task, as `glocal lens` needs them."""
    execution: Literal["auto", "vectorised", "sequential"] = "auto"
    """How a cohort of runs is executed. auto takes the fastest way that works."""
    memory_budget: int | None = None
    """Bytes of memory that a cohort may use. The default is most of what is free on the device."""
    cohort_size: int | None = None
    """Train at most N runs together."""
    monitor: float | None = None
    """An ε: report when training leaves the ε-region of an old task, where local approximations hold."""
    monitor_by: Literal["diagonal", "kronecker", "own"] | None = None
    """Approximation to monitor: diagonal (default) or kronecker Taylor expansions, or own, the algorithm's own."""
    monitor_every: int | None = None
    """Monitor after every N-th epoch. By default rarely enough to add less than 5 % to training time."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], kind: str = "option of a sweep") -> SweepOptions:
        """Return the options with these values; an unknown name is an error that suggests the nearest one."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise unknown(kind, name, names)
        return cls(**values)

    def __post_init__(self) -> None:
        hints = get_type_hints(SweepOptions)
        for field in fields(SweepOptions):
            _check(field.name, getattr(self, field.name), hints[field.name])
        for name in ("monitor_by", "monitor_every"):
            value = getattr(self, name)
            require(value is None or self.monitor is not None, f"{name}={value!r} needs an ε: set monitor too.")

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(SweepOptions)}


def _check(name: str, value: Any, hint: Any) -> None:
    """Check one value against its field's type: integers are at least 1, floats are positive."""
    union = get_origin(hint) in (Union, types.UnionType)
    kinds = [kind for kind in (get_args(hint) if union else (hint,)) if kind is not type(None)]
    if value is None and union and type(None) in get_args(hint):
        return
    if get_origin(kinds[0]) is Literal:
        if value not in get_args(kinds[0]):
            raise unknown(name, value, get_args(kinds[0]))
    elif kinds[0] is int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise GlocalError(f"{name} must be a whole number of at least 1; {value!r} was given.")
    elif kinds[0] is float:
        positive_number(name, value)
    elif kinds[0] is bool:
        require(isinstance(value, bool), f"{name} must be true or false; {value!r} was given.")
    elif Path in kinds or kinds == [str]:
        require(isinstance(value, str | Path), f"{name} must be a string; {value!r} was given.")


def positive_number(name: str, value: Any) -> float:
    """Return a finite number above 0 as a float; anything else is an error."""
    number = math.nan if isinstance(value, bool) or not hasattr(value, "__float__") else float(value)
    require(math.isfinite(number) and number > 0, f"{name} must be a positive number; {value} was given.")
    return number
