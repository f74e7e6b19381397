"""Helpers of all benchmarks: medians with quartiles, timing, devices and result files."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import torch
from rich.console import Console

from glocal import __version__
from glocal.errors import GlocalError
from glocal.sweeps import resolve

RESULTS = Path(__file__).parent / "results"

T = TypeVar("T")


@dataclass(frozen=True)
class Quartiles:
    """The median of a sample with its lower and upper quartile."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        q1, _, q3 = quantiles(values, n=4, method="inclusive")
        return cls(q1, median(values), q3)

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Quartiles:
        """Take the ratio within each round, where both times were measured moments apart."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def choose_device(name: str) -> torch.device:
    """Return the device, or exit with one line if it is not available."""
    try:
        return resolve.choose_device(name)
    except GlocalError as error:
        raise SystemExit(str(error)) from None


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the seconds that `work` takes, kernels on the GPU included, and its result."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def machine(device: torch.device | None = None) -> dict[str, str | int]:
    """Describe the processor and, if the device is one, the GPU."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device is not None and device.type == "cuda" else {}
    return {"processor": _processor(), "cores": os.cpu_count() or 0, "system": platform.system(), **gpu}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def save(file: Path, content: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Write a result file: the content with the date, the machine and the versions before it."""
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": {"torch": str(torch.__version__), "glocal": __version__},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**header, **content}, indent=1) + "\n")
    Console().print(f"Wrote {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
