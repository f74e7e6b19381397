"""Time of one gradient step per model on a CPU: a plain PyTorch loop, Avalanche, and glocal with 1 and 25 runs.

    python -m benchmarks.step        about five minutes; writes results/step-cpu.json

Contenders alternate: every round measures each of them once, and ratios are taken within rounds, because the speed of a
machine drifts. Only one process works at a time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import setting
from benchmarks.common import RESULTS, Quartiles, save
from benchmarks.worker import ROOT, Worker, WorkerError, run_command

BARE, AVALANCHE, ONE, COHORT = "bare", "avalanche", "glocal 1", f"glocal {setting.NUM_RUNS}"
CONTENDERS = (BARE, AVALANCHE, ONE, COHORT)
GOALS: dict[tuple[str, str], dict[str, float]] = {
    (BARE, ONE): dict.fromkeys(setting.ALGORITHMS, 1.0),
    (BARE, COHORT): dict.fromkeys(setting.ALGORITHMS, 2.0),
    (AVALANCHE, COHORT): {"sgd": 10.0, "er": 7.0, "ewc": 7.0},
}
"""For (slower, faster) and an algorithm: the ratio of their times that glocal aims at."""
AVALANCHE_ENV = ROOT / ".venv-avalanche"
AVALANCHE_TORCH, AVALANCHE_LIB = "torch==2.13.0", "avalanche-lib==0.6.0"

MeasureAlgorithm = Callable[[str], float]


@dataclass(frozen=True)
class Round:
    """One measurement of every contender."""

    gemm_gflops: float
    milliseconds: dict[str, dict[str, float]]
    """By algorithm and contender, per model-step."""


@dataclass(frozen=True)
class Results:
    """All rounds; every number shown is computed from them."""

    versions: dict[str, dict[str, str]]
    skipped: dict[str, str]
    examples: int
    rounds: list[Round]

    def times(self, algorithm: str, contender: str) -> list[float]:
        return [r.milliseconds[algorithm][contender] for r in self.rounds]

    def ratio(self, algorithm: str, slower: str, faster: str) -> Quartiles:
        return Quartiles.of_ratios(self.times(algorithm, slower), self.times(algorithm, faster))

    def gemm_gflops(self) -> Quartiles:
        return Quartiles.of([r.gemm_gflops for r in self.rounds])

    def floors(self, algorithm: str) -> list[float]:
        """Return the milliseconds that the matrix products alone would take, one per round."""
        return [setting.flops(algorithm, self.examples) / r.gemm_gflops / 1e6 for r in self.rounds]

    def summary(self, algorithm: str) -> dict[str, object]:
        pairs = [(slower, faster) for slower, faster in GOALS if slower not in self.skipped]
        return {
            "flops": setting.flops(algorithm, self.examples),
            "floor": asdict(Quartiles.of(self.floors(algorithm))),
            **{c: asdict(Quartiles.of(self.times(algorithm, c))) for c in CONTENDERS if c not in self.skipped},
            **{f"{slower} / {faster}": asdict(self.ratio(algorithm, slower, faster)) for slower, faster in pairs},
        }

    def write(self) -> None:
        content = {
            "versions": self.versions,
            "skipped": self.skipped,
            "threads": setting.THREADS,
            "widths": setting.WIDTHS,
            "batch": setting.BATCH_SIZE,
            "examples": self.examples,
            "gemm_gflops": asdict(self.gemm_gflops()),
            "summary_ms": {algorithm: self.summary(algorithm) for algorithm in setting.ALGORITHMS},
            "rounds": [asdict(r) for r in self.rounds],
        }
        save(RESULTS / "step-cpu.json", content)


def benchmark(console: Console) -> Results:
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tasks.npz"
        examples = setting.write_tasks(data)
        python = Path(sys.executable)
        bare = stack.enter_context(Worker(python, "step_bare", str(data)))
        glocal = stack.enter_context(Worker(python, "step_glocal"))
        versions = {BARE: bare.versions, "glocal": glocal.versions}
        contenders: list[tuple[str, MeasureAlgorithm]] = [
            (BARE, bare.measure),
            (ONE, lambda algorithm: glocal.measure(f"{algorithm}/1")),
            (COHORT, lambda algorithm: glocal.measure(f"{algorithm}/{setting.NUM_RUNS}")),
        ]
        skipped = {}
        try:
            with console.status("Preparing Avalanche's environment"):
                avalanche = stack.enter_context(Worker(avalanche_python(), "step_avalanche", str(data)))
                for algorithm in setting.ALGORITHMS:
                    avalanche.measure(algorithm)
            versions[AVALANCHE] = avalanche.versions
            contenders.insert(1, (AVALANCHE, avalanche.measure))
        except WorkerError as error:
            skipped[AVALANCHE] = str(error)
            console.print(f"Avalanche is skipped: {error}")
        return Results(versions, skipped, examples, run_rounds(contenders, lambda: bare.measure("gemm"), console))


def run_rounds(
    contenders: list[tuple[str, MeasureAlgorithm]], gemm: Callable[[], float], console: Console
) -> list[Round]:
    """Run all rounds in rotating order and drop the first, which warms up."""
    rounds = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        total = (setting.NUM_ROUNDS + 1) * len(setting.ALGORITHMS) * len(contenders)
        bar = progress.add_task("warm-up", total=total)
        for number in range(setting.NUM_ROUNDS + 1):
            rate = gemm()
            times: dict[str, dict[str, float]] = {}
            for algorithm in setting.ALGORITHMS:
                times[algorithm] = {}
                for contender, measure in contenders:
                    progress.update(bar, description=f"round {number}: {algorithm}, {contender}")
                    times[algorithm][contender] = measure(algorithm)
                    progress.advance(bar)
                contenders = [*contenders[1:], contenders[0]]
            rounds.append(Round(rate, times))
    return rounds[1:]


def avalanche_python() -> Path:
    """Return the Python of Avalanche's environment, which is created first if it does not exist.

    Avalanche pins other library versions than glocal.
    """
    python, installed = AVALANCHE_ENV / "bin" / "python", AVALANCHE_ENV / ".installed"
    if not installed.exists() and not _has_avalanche(python):
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        run_command([sys.executable, "-m", "venv", str(AVALANCHE_ENV)])
        run_command([*pip, AVALANCHE_TORCH])  # first and alone, so that Avalanche does not pull another build
        run_command([*pip, AVALANCHE_TORCH, AVALANCHE_LIB])
    installed.touch()
    return python


def _has_avalanche(python: Path) -> bool:
    if not python.exists():
        return False
    check = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('avalanche')))"
    return subprocess.run([str(python), "-c", check]).returncode == 0


def show(results: Results, console: Console) -> None:
    console.print(time_table(results))
    console.print(ratio_table(results))
    for contender, reason in results.skipped.items():
        console.print(f"Skipped {contender}: {reason}")
    gemm = results.gemm_gflops()
    console.print(
        f"Floor: the time of the matrix products at {gemm.median:.0f} GFLOP/s ({gemm.q1:.0f}–{gemm.q3:.0f}), the rate "
        f"measured on the widest layer in every round. Medians over {len(results.rounds)} rounds; dim: quartiles."
    )


def time_table(results: Results) -> Table:
    title = f"ms per model-step, batch size {setting.BATCH_SIZE}, {setting.THREADS} threads"
    table = Table(title=title, show_lines=True)
    table.add_column("", no_wrap=True)
    for column in ("floor", *CONTENDERS):
        table.add_column(column, justify="right", no_wrap=True)
    for algorithm in setting.ALGORITHMS:
        floors = results.floors(algorithm)
        cells = [format_ms(Quartiles.of(floors))]
        for contender in CONTENDERS:
            if contender in results.skipped:
                cells.append("skipped")
                continue
            times = results.times(algorithm, contender)
            above = Quartiles.of_ratios(times, floors).median
            cells.append(f"{format_ms(Quartiles.of(times))}\n[dim]{above:.1f} × floor[/]")
        table.add_row(algorithm, *cells)
    return table


def ratio_table(results: Results) -> Table:
    table = Table("", title="Speed-up per model-step (goal)", show_lines=True)
    for slower, faster in GOALS:
        table.add_column(f"{slower}\n/ {faster}", justify="right", no_wrap=True)
    for algorithm in setting.ALGORITHMS:
        cells = []
        for (slower, faster), goals in GOALS.items():
            if slower in results.skipped:
                cells.append("skipped")
            else:
                cells.append(format_ratio(results.ratio(algorithm, slower, faster), goals.get(algorithm)))
        table.add_row(algorithm, *cells)
    return table


def format_ms(times: Quartiles) -> str:
    return f"{times.median:.3f}\n[dim]{times.q1:.3f}–{times.q3:.3f}[/]"


def format_ratio(ratio: Quartiles, goal: float | None) -> str:
    """Format a ratio and its goal, green where the median reaches it."""
    number, quartiles = f"{ratio.median:.2f} ×", f"[dim]{ratio.q1:.2f}–{ratio.q3:.2f}[/]"
    if goal is None:
        return f"{number}\n{quartiles}"
    color = "green" if ratio.median >= goal else "red"
    return f"[{color}]{number} (≥ {goal:g})[/]\n{quartiles}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    console = Console()
    results = benchmark(console)
    show(results, console)
    results.write()


if __name__ == "__main__":
    main()
