"""What a benchmark leaves behind: all rounds as measured, and where; every shown number is computed from them."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

from benchmarks import setting
from benchmarks.floor import flops

BARE, PEER, ONE, MANY = "bare", "avalanche", "glocal 1", f"glocal {setting.RUNS}"
FILE = Path(__file__).parent / "results" / "step-cpu.json"

Times = dict[str, dict[str, float]]  # algorithm, contender: milliseconds per model-step


@dataclass(frozen=True)
class Round:
    """Every contender once, one after the other."""

    gemm_gflops: float
    milliseconds: Times


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)


@dataclass(frozen=True)
class Results:
    """A finished benchmark."""

    versions: dict[str, dict[str, str]]
    skipped: dict[str, str]
    examples: int
    rounds: list[Round]

    def time(self, algorithm: str, contender: str) -> Spread:
        return Spread.of([r.milliseconds[algorithm][contender] for r in self.rounds])

    def ratio(self, algorithm: str, slower: str, faster: str) -> Spread:
        """How many times faster: quotients within rounds, whose times share the machine's mood."""
        of = [r.milliseconds[algorithm] for r in self.rounds]
        return Spread.of([times[slower] / times[faster] for times in of])

    def gemm(self) -> Spread:
        return Spread.of([r.gemm_gflops for r in self.rounds])

    def floor(self, algorithm: str) -> Spread:
        """Milliseconds the matrix products alone would take."""
        return Spread.of([self._floor(algorithm, r) for r in self.rounds])

    def above_floor(self, algorithm: str, contender: str) -> Spread:
        """How many times the floor."""
        quotients = [r.milliseconds[algorithm][contender] / self._floor(algorithm, r) for r in self.rounds]
        return Spread.of(quotients)

    def _floor(self, algorithm: str, of: Round) -> float:
        return flops(algorithm, self.examples) / of.gemm_gflops / 1e6

    def write(self) -> None:
        contenders = [c for c in (BARE, PEER, ONE, MANY) if c not in self.skipped]
        summary = {
            a: {
                "flops": flops(a, self.examples),
                "floor": asdict(self.floor(a)),
                **{c: asdict(self.time(a, c)) for c in contenders},
                "bare / glocal 1": asdict(self.ratio(a, BARE, ONE)),
                f"bare / glocal {setting.RUNS}": asdict(self.ratio(a, BARE, MANY)),
            }
            | (
                {}
                if PEER in self.skipped
                else {f"avalanche / glocal {setting.RUNS}": asdict(self.ratio(a, PEER, MANY))}
            )
            for a in setting.ALGORITHMS
        }
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": self.versions,
            "skipped": self.skipped,
            "threads": setting.THREADS,
            "widths": setting.WIDTHS,
            "batch": setting.BATCH,
            "examples": self.examples,
            "gemm_gflops": asdict(self.gemm()),
            "summary_ms": summary,
            "rounds": [asdict(r) for r in self.rounds],
        }
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, str | int]:
    return {"processor": _processor(), "cores": os.cpu_count() or 0, "system": platform.system()}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
