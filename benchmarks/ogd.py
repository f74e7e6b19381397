"""Cost of OGD on a CPU: a step of ogd compared with a step of sgd and with a projection by a dense basis.

    python -m benchmarks.ogd        writes results/ogd-cpu.json; `benchmarks.gpu` measures OGD on a GPU

All train the MLP 784-100-100-10 with the executor that the engine chooses, one run and a cohort of 25, with 500 stored
gradients. As in `benchmarks.step`, they alternate and ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import setting
from benchmarks.common import RESULTS, Quartiles, save
from benchmarks.step_glocal import ALL_RUNS, ONE_RUN, PreparedCohort, measure, prepare_mlp
from glocal import challenges, tree
from glocal.algorithms import OGD, OGDGTL, SGD
from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.challenges import Challenge
from glocal.networks.model import Model
from glocal.tree import Params

NUM_GRADIENTS = 500
GOAL = 3.5
"""The time of a step of ogd or ogd-gtl that is aimed at, in steps of sgd."""


@dataclass(frozen=True)
class DenseProjection(Algorithm):
    """g − Bᵀ B g with a dense basis B, one row per gradient; its values are random and do not affect the time."""

    name: ClassVar[str] = "dense"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        size = sum(p.numel() for p in params.values())
        return {"basis": torch.randn(NUM_GRADIENTS, size, device=example.y.device) / size**0.5}

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        g = torch.cat([g.reshape(-1) for g in grads.values()])
        g = g - memory["basis"].mT @ (memory["basis"] @ g)
        parts = g.split([p.numel() for p in params.values()])
        return {k: part.view_as(params[k]) for k, part in zip(grads, parts, strict=True)}


ALGORITHMS: dict[str, Algorithm] = {
    "sgd": SGD(),
    "ogd-gtl": OGDGTL(slots=NUM_GRADIENTS * setting.NUM_TASKS),
    "ogd": OGD(slots=NUM_GRADIENTS * setting.NUM_TASKS),
    "dense": DenseProjection(),
}


@dataclass(frozen=True)
class Results:
    """Milliseconds per model-step of every round, and the memory of one run, by algorithm."""

    milliseconds: Mapping[str, list[float]]
    memory_bytes: Mapping[str, int]

    def relative_to_sgd(self, name: str) -> Quartiles:
        return Quartiles.of_ratios(self.milliseconds[name], self.milliseconds["sgd"])


def benchmark(runs: list[tuple[int, float]], console: Console) -> Results:
    with console.status(f"{len(runs)} runs: storing {NUM_GRADIENTS} gradients each"):
        cohorts = {name: prepare_algorithm(algorithm, runs) for name, algorithm in ALGORITHMS.items()}
    times: dict[str, list[float]] = {name: [] for name in cohorts}
    order = list(cohorts)
    for number in track(range(setting.NUM_ROUNDS + 1), f"{len(runs)} runs", console=console, transient=True):
        for name in order:
            state = cohorts[name].state
            # The memory does not change within a task and is too large to copy.
            params = tree.map_tree(torch.clone, state.params)
            milliseconds = measure(cohorts[name], replace(state, params=params))
            if number:  # the first round warms up
                times[name].append(milliseconds)
        order = [*order[1:], order[0]]
    memory = {name: tree.nbytes(cohort.state.memory) // len(runs) for name, cohort in cohorts.items()}
    return Results(times, memory)


def prepare_algorithm(algorithm: Algorithm, runs: list[tuple[int, float]]) -> PreparedCohort:
    """Prepare a cohort that has stored the first task's gradients."""
    challenge = challenges.make(setting.CHALLENGE, tasks=setting.NUM_TASKS)
    if isinstance(algorithm, DenseProjection):
        challenge = shorten(challenge, setting.BATCH_SIZE)  # one step of a cohort takes seconds
    return prepare_mlp(algorithm, runs, challenge)


def shorten(challenge: Challenge, examples: int) -> Challenge:
    """Return the challenge with the first training examples of every task."""
    tasks = [challenge.task(t, setting.SEEDS[0]) for t in range(challenge.tasks)]
    parts = [((t.train.x[:examples], t.train.y[:examples]), (t.test.x, t.test.y)) for t in tasks]
    return challenges.from_tasks("short", parts, setting=challenge.setting)


def show(results: Mapping[int, Results], console: Console) -> None:
    table = Table(title=f"{NUM_GRADIENTS} stored gradients, batch size {setting.BATCH_SIZE}", show_lines=True)
    for column in ("runs", "", "ms / step", "relative to sgd", "fastest", "MB / run"):
        table.add_column(column, justify="right", no_wrap=True)
    for runs, result in results.items():
        for name, times in result.milliseconds.items():
            time, ratio = Quartiles.of(times), result.relative_to_sgd(name)
            fastest = min(times) / min(result.milliseconds["sgd"])
            color = "green" if ratio.median <= GOAL else "red"
            has_goal = name in ("ogd", "ogd-gtl")
            middle = f"[{color}]{ratio.median:.2f} (≤ {GOAL:g})[/]" if has_goal else f"{ratio.median:.2f}"
            table.add_row(
                str(runs),
                name,
                f"{time.median:.4f}\n[dim]{time.q1:.4f}–{time.q3:.4f}[/]",
                f"{middle}\n[dim]{ratio.q1:.2f}–{ratio.q3:.2f}[/]",
                f"{fastest:.2f}",
                f"{result.memory_bytes[name] / 1e6:.1f}",
            )
    console.print(table)
    console.print(
        f"Times per model-step: medians over {setting.NUM_ROUNDS} rounds; dim: quartiles. 'fastest' compares the "
        "fastest rounds. Memory is that of one run."
    )


def write(results: Mapping[int, Results]) -> None:
    content = {
        "threads": torch.get_num_threads(),
        "widths": setting.WIDTHS,
        "batch": setting.BATCH_SIZE,
        "gradients": NUM_GRADIENTS,
        "runs": {
            str(runs): {
                name: {
                    "ms": asdict(Quartiles.of(times)),
                    "fastest_ms": min(times),
                    "relative_to_sgd": asdict(result.relative_to_sgd(name)),
                    "memory_bytes": result.memory_bytes[name],
                    "rounds_ms": times,
                }
                for name, times in result.milliseconds.items()
            }
            for runs, result in results.items()
        },
    }
    save(RESULTS / "ogd-cpu.json", content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(setting.THREADS)
    console = Console()
    results = {len(runs): benchmark(runs, console) for runs in (ONE_RUN, ALL_RUNS)}
    show(results, console)
    write(results)


if __name__ == "__main__":
    main()
