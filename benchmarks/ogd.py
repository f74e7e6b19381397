"""What orthogonality costs: a step of ogd beside a step of sgd and beside a projection by a dense basis.

All three train the 784-100-100-10 MLP by the executor that the engine chooses, one run and a cohort, with 500 stored
gradients in memory. As in `step`, contenders take turns and ratios are taken within rounds. For a GPU see `gpu`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count, product
from pathlib import Path
from typing import ClassVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import setting
from benchmarks.ours import Ready, epoch, prepare
from benchmarks.results import Spread, machine
from benchmarks.worker import per_step
from glocal import __version__, challenges, tree
from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.algorithms.ogd import OGD, OGDGTL
from glocal.algorithms.sgd import SGD
from glocal.challenges import Challenge
from glocal.networks.model import Model
from glocal.tree import Params

STORED = 500
GOAL = 2.5
"""How many steps of sgd a step of ogd or ogd-gtl may take."""


@dataclass(frozen=True)
class Dense(Algorithm):
    """g − Bᵀ B g with a basis of one row of P numbers a gradient, as one would write it. Its time does not depend on
    what the numbers are, so they are random."""

    name: ClassVar[str] = "dense"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        numbers = sum(p.numel() for p in params.values())
        return {"basis": torch.randn(STORED, numbers, device=example.y.device) / numbers**0.5}

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        g = torch.cat([g.reshape(-1) for g in grads.values()])
        g = g - memory["basis"].mT @ (memory["basis"] @ g)
        parts = g.split([p.numel() for p in params.values()])
        return {k: part.view_as(params[k]) for k, part in zip(grads, parts, strict=True)}


ALGORITHMS: dict[str, Algorithm] = {
    "sgd": SGD(),
    "ogd-gtl": OGDGTL(slots=STORED * setting.TASKS),
    "ogd": OGD(slots=STORED * setting.TASKS),
    "dense": Dense(),
}


def measure(ready: Ready) -> float:
    """Milliseconds per model-step, always from the same parameters."""
    own = replace(ready.state, params=tree.map_tree(torch.clone, ready.state.params))
    numbers = count()
    return per_step(lambda: epoch(ready.executor, own, ready.loader, next(numbers)), setting.SECONDS)


def memory_bytes(ready: Ready) -> int:
    """Of one run."""
    return tree.nbytes(ready.state.memory) // len(ready.state.diverged)


def shorter(challenge: Challenge, examples: int) -> Challenge:
    """The challenge with the first few training examples of every task."""
    tasks = [challenge.task(t, setting.SEEDS[0]) for t in range(challenge.tasks)]
    parts = [((t.train.x[:examples], t.train.y[:examples]), (t.test.x, t.test.y)) for t in tasks]
    return challenges.from_tasks("shorter", parts, setting=challenge.setting)


def with_stored(algorithm: Algorithm, runs: list[tuple[int, float]]) -> Ready:
    """A cohort with the first task's gradients stored and the second task loaded."""
    challenge = challenges.make(setting.CHALLENGE, tasks=setting.TASKS)
    if isinstance(algorithm, Dense):
        challenge = shorter(challenge, setting.BATCH)  # a cohort's step takes seconds
    return prepare(algorithm, runs, challenge)


Times = Mapping[str, list[float]]  # contender -> milliseconds per model-step, a number a round


def benchmark(runs: list[tuple[int, float]], console: Console) -> tuple[Times, dict[str, int]]:
    with console.status(f"{len(runs)} runs: storing {STORED} gradients each"):
        ready = {name: with_stored(algorithm, runs) for name, algorithm in ALGORITHMS.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    order = list(ready)
    for number in track(range(setting.ROUNDS + 1), f"{len(runs)} runs", console=console, transient=True):
        for name in order:
            milliseconds = measure(ready[name])
            if number:  # the first round warms up
                times[name].append(milliseconds)
        order = [*order[1:], order[0]]
    return times, {name: memory_bytes(each) for name, each in ready.items()}


def ratio(times: Times, of: str, to: str) -> Spread:
    """Quotients within rounds."""
    return Spread.of([a / b for a, b in zip(times[of], times[to], strict=True)])


def show(found: Mapping[int, tuple[Times, Mapping[str, int]]], console: Console) -> None:
    table = Table(title=f"{STORED} stored gradients, batch {setting.BATCH}", show_lines=True)
    for column in ("runs", "", "ms / step", "steps of sgd", "fastest", "MB / run"):
        table.add_column(column, justify="right", no_wrap=True)
    for runs, (times, memory) in found.items():
        for name in ALGORITHMS:
            spread, quotient = Spread.of(times[name]), ratio(times, name, "sgd")
            fastest = min(times[name]) / min(times["sgd"])
            colour = "green" if quotient.middle <= GOAL else "red"
            judged = name in ("ogd", "ogd-gtl")
            shown = f"[{colour}]{quotient.middle:.2f} (≤ {GOAL:g})[/]" if judged else f"{quotient.middle:.2f}"
            table.add_row(
                str(runs),
                name,
                f"{spread.middle:.4f}\n[dim]{spread.low:.4f}–{spread.high:.4f}[/]",
                f"{shown}\n[dim]{quotient.low:.2f}–{quotient.high:.2f}[/]",
                f"{fastest:.2f}",
                f"{memory[name] / 1e6:.1f}",
            )
    console.print(table)
    console.print(
        f"Times per model-step; medians over {setting.ROUNDS} rounds; dim: quartiles; 'fastest': the fastest round in "
        "fastest rounds of sgd. One run's memory."
    )


def write(found: Mapping[int, tuple[Times, Mapping[str, int]]]) -> Path:
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"torch": torch.__version__, "glocal": __version__},
        "threads": torch.get_num_threads(),
        "widths": setting.WIDTHS,
        "batch": setting.BATCH,
        "stored": STORED,
        "runs": {
            str(runs): {
                name: {
                    "ms": asdict(Spread.of(times[name])),
                    "fastest_ms": min(times[name]),
                    "steps_of_sgd": asdict(ratio(times, name, "sgd")),
                    "memory_bytes": memory[name],
                    "rounds_ms": times[name],
                }
                for name in ALGORITHMS
            }
            for runs, (times, memory) in found.items()
        },
    }
    file = Path(__file__).parent / "results" / "ogd-cpu.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")
    return file


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    torch.set_num_threads(setting.THREADS)
    console = Console()
    one = [(setting.SEEDS[0], setting.LEARNING_RATE)]
    many = list(product(setting.SEEDS, setting.LEARNING_RATES))
    found = {len(runs): benchmark(runs, console) for runs in (one, many)}
    file = write(found)
    show(found, console)
    console.print(f"All rounds: {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")


if __name__ == "__main__":
    main()
