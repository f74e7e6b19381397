"""What a model-step costs on a CPU: a bare PyTorch loop, Avalanche, and glocal with one run and with a cohort.

Timings drift with the machine, so contenders take turns: in every round each is measured once, right after the other,
and ratios are taken within rounds. One worker works at a time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import avalanche_env, setting, tensors
from benchmarks.process import Worker, WorkerError
from benchmarks.results import BARE, FILE, MANY, ONE, PEER, Results, Round, Times
from benchmarks.show import show

Turn = tuple[str, Callable[[str], float]]  # a contender, and how it is measured on an algorithm


def benchmark(console: Console) -> Results:
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tasks.npz"
        examples = tensors.write(data)
        here = Path(sys.executable)
        bare = stack.enter_context(Worker(here, "bare", str(data)))
        ours = stack.enter_context(Worker(here, "ours"))
        versions = {"bare": bare.versions, "glocal": ours.versions}
        turns: list[Turn] = [
            (BARE, bare.measure),
            (ONE, lambda name: ours.measure(f"{name}/1")),
            (MANY, lambda name: ours.measure(f"{name}/{setting.RUNS}")),
        ]
        skipped = {}
        try:
            with console.status("Avalanche's environment"):
                peer = stack.enter_context(Worker(avalanche_env.python(), "avalanche_peer", str(data)))
                for name in setting.ALGORITHMS:
                    peer.measure(name)
            versions[PEER] = peer.versions
            turns.insert(1, (PEER, peer.measure))
        except (avalanche_env.NoEnvironment, WorkerError) as error:
            skipped[PEER] = str(error)
            console.print(f"without Avalanche: {error}")
        return Results(versions, skipped, examples, rounds(turns, lambda: bare.measure("gemm"), console))


def rounds(turns: list[Turn], gemm: Callable[[], float], console: Console) -> list[Round]:
    """All rounds but the first, which warms up."""
    made = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("warming up", total=(setting.ROUNDS + 1) * len(setting.ALGORITHMS) * len(turns))
        for number in range(setting.ROUNDS + 1):
            rate, times = gemm(), Times()
            for algorithm in setting.ALGORITHMS:
                times[algorithm] = {}
                for contender, measure in turns:
                    progress.update(bar, description=f"round {number}: {algorithm}, {contender}")
                    times[algorithm][contender] = measure(algorithm)
                    progress.advance(bar)
                turns = [*turns[1:], turns[0]]  # nobody is always the first
            made.append(Round(rate, times))
    return made[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = f"It takes about five minutes, and writes {FILE.name}."
    parser.parse_args()
    console = Console()
    results = benchmark(console)
    results.write()
    show(results, console)
    console.print(f"All rounds: {FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE}")


if __name__ == "__main__":
    main()
